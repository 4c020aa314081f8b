package lifecycle

import (
	"context"
	"fmt"
	"time"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// handleNotice reacts to a notice about a sandbox.
func (m *Manager) handleNotice(n sandbox.Notice) {
	id, _, err := n.ID.Split()
	if err != nil {
		return
	}
	e := m.find(id)
	if e == nil {
		return // it has ended, or it is an orphan, which the sweep removes
	}
	i := e.incarnation()
	if i == nil || i.ID() != n.ID {
		return
	}
	if n.OOMKills > 0 {
		i.RecordOOM(n.OOMKills)
	}
	switch {
	case n.Stopped:
		req := endRequest{actor: journal.System, reason: session.Crashed, detail: stoppedDetail(n)}
		switch {
		case n.Exit.OOM:
			req.reason, req.detail = session.OOM, "the sandbox reached its memory limit and stopped"
		case n.Exit.PIDs:
			req.reason, req.detail = session.ResourceOut, "the sandbox reached its limit of threads on the host and stopped"
		}
		fact := audit.Entry{
			Action: audit.SandboxExited, Outcome: audit.Failed, Actor: journal.System, Object: sandboxObject(n.ID),
			Payload: exitedPayload{Code: n.Exit.Code, Signal: n.Exit.Signal, OOM: n.Exit.OOM, PIDs: n.Exit.PIDs},
		}
		if e.diedCreating(&death{end: req, facts: []audit.Entry{fact}}) {
			return // the create fails and ends the session
		}
		m.beginEnd(e, req, fact)
	case n.Deadline:
		m.beginEnd(e, endRequest{actor: journal.System, reason: session.Deadline, detail: "its time was up"})
	}
}

// diedCreating stops a create whose sandbox has stopped; false means that no
// create is in progress.
func (e *managed) diedCreating(d *death) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopCreate == nil || e.ending != nil {
		return false
	}
	e.died = d
	e.stopCreate(d.err())
	return true
}

func stoppedDetail(n sandbox.Notice) string {
	switch {
	case n.Exit.Signal != 0:
		return fmt.Sprintf("the sandbox was stopped by signal %d", n.Exit.Signal)
	case n.Exit.Code < 0:
		return "the sandbox stopped"
	}
	return fmt.Sprintf("the sandbox's first process exited with code %d", n.Exit.Code)
}

// recordJump notes in the record of the node and in every live record that the
// wall clock was moved: times before and after do not compare, deadlines are
// not affected.
func (m *Manager) recordJump(by time.Duration) {
	m.log.Warn("the clock was moved", "by", by)
	m.mu.Lock()
	all := make([]*managed, 0, len(m.sessions))
	for _, e := range m.sessions {
		all = append(all, e)
	}
	m.mu.Unlock()
	m.work.Go(func() {
		entry := audit.Entry{Action: audit.ClockJumped, Outcome: audit.OK, Actor: journal.System, Payload: jumpPayload{Millis: by.Milliseconds()}}
		ctx, cancel := context.WithTimeout(m.work.Late(), m.b.Workload.Settle)
		defer cancel()
		if err := m.o.System.Record(ctx, entry); err != nil {
			m.log.Error("recording that the clock was moved", "error", err)
		}
		for _, e := range all {
			if err := e.log.Append(entry); err != nil && !kind.Is(err, kind.Conflict) && !kind.Is(err, kind.NotFound) {
				m.log.Error("recording that the clock was moved", "session", e.id, "error", err)
			}
		}
	})
}

// jumpThreshold is how far the wall clock may drift from the machine's
// between two looks before it counts as moved.
const jumpThreshold = 2 * time.Second

// clockWatch notices that the wall clock was moved, by comparing it with one
// that only runs. Sleep of the machine counts as a move: nothing here ran
// meanwhile.
type clockWatch struct {
	wall       func() time.Time
	runs       func() time.Duration
	lastWall   time.Time
	lastPassed time.Duration
}

func newClockWatch(wall func() time.Time) *clockWatch {
	start := time.Now()
	c := &clockWatch{wall: wall, runs: func() time.Duration { return time.Since(start) }}
	c.jumped()
	return c
}

// jumped returns by how much the wall clock moved beyond the time that passed
// since the last call.
func (c *clockWatch) jumped() (time.Duration, bool) {
	wall, passed := c.wall().Round(0), c.runs() // Round strips the monotonic reading
	by := wall.Sub(c.lastWall) - (passed - c.lastPassed)
	c.lastWall, c.lastPassed = wall, passed
	return by, by > jumpThreshold || by < -jumpThreshold
}
