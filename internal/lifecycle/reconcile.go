package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// reconcile compares, once at start, the sessions in the store with the
// sandboxes on the host: each session runs on or ends with a reason, and each
// sandbox belongs to a session or goes.
func (m *Manager) reconcile(ctx context.Context) error {
	found, err := m.o.Node.Recover(ctx)
	if err != nil {
		return fmt.Errorf("sandboxes on this host: %w", err)
	}
	live, err := m.o.Store.Live(ctx)
	if err != nil {
		return err
	}
	here := map[session.SandboxID]Recovered{}
	for _, r := range found {
		here[r.ID] = r
	}
	for _, s := range live {
		if s.Node != m.o.NodeID {
			continue
		}
		r, ok := here[s.SandboxID()]
		delete(here, s.SandboxID())
		if err := m.takeBack(ctx, s, r, ok && r.Running); err != nil {
			return fmt.Errorf("session %s: %w", s.ID, err)
		}
	}
	for id := range here {
		m.log.Warn("removing a sandbox that belongs to no session", "sandbox", id)
		m.removeOrphan(id)
	}
	return nil
}

// takeBack decides what becomes of one session of an earlier process.
func (m *Manager) takeBack(ctx context.Context, s session.Session, r Recovered, running bool) error {
	p, err := m.past(ctx, s.ID)
	if err != nil {
		return err
	}
	a := m.adopt(s.ID, s.SandboxID())
	a.createOver()
	a.mu.Lock()
	a.oomKills = p.oomKills
	a.mu.Unlock()

	end := EndRequest{ID: s.ID, Actor: system, Reason: s.Reason, Detail: s.Detail}
	switch s.State {
	case session.Creating:
		end.Reason, end.Detail = session.CreateFailed, "bivy stopped while the session was being created"
	case session.Ending, session.Ended: // goes on for the reason it has
	case session.Running, session.Pausing, session.Standby, session.Resuming, session.Quarantined:
		if running {
			return m.carryOn(ctx, a, s, r, p)
		}
		end.Reason, end.Detail = session.Crashed, "its sandbox had stopped, or could not be taken back, when bivy started"
		if p.boot != "" && p.boot != m.o.BootID {
			end.Reason, end.Detail = session.NodeLost, "the machine was restarted"
		}
	}
	m.beginEnd(a, end, m.lost(a, p, true)...)
	return nil
}

// system is who acts when nobody asked.
var system = session.Principal{Subject: "system:lifecycle"}

// lost returns the outcomes of what an earlier process had begun and whose
// outcome nobody knows any more; with commands, those too.
func (m *Manager) lost(a *active, p *past, commands bool) []audit.Entry {
	var entries []audit.Entry
	unpaid := p.unpaid()
	for _, ref := range slices.Sorted(maps.Keys(unpaid)) {
		i := unpaid[ref]
		e := i.Lost(system)
		if c := p.commands[ref]; c != nil && i.Action == audit.CommandIntent {
			if !commands {
				continue
			}
			e = audit.Entry{Action: audit.CommandEnded, Outcome: audit.Failed, Ref: ref, Actor: c.actor,
				Payload: commandEndedPayload{Command: ref, Exit: -1, Error: lostText, Recovered: true}}
		}
		e.Sandbox = a.sandbox
		entries = append(entries, e)
	}
	return entries
}

// lostText is why nothing is known of a command.
const lostText = "lost: bivy was restarted and the command is gone"

// carryOn takes a running session back: it says so in the record, follows its
// commands again and lets callers in.
func (m *Manager) carryOn(ctx context.Context, a *active, s session.Session, r Recovered, p *past) error {
	entries := []audit.Entry{{
		Action: audit.SandboxRecovered, Outcome: audit.OK, Actor: system, Sandbox: a.sandbox,
		Payload: map[string]any{"relinked": r.Relinked},
	}}
	if r.Relinked {
		entries = append(entries, audit.Entry{
			Action: audit.SandboxRelinked, Outcome: audit.OK, Actor: system, Sandbox: a.sandbox,
			Payload: map[string]any{"cause": "connections into the sandbox ended with the earlier process"},
		})
	}
	entries = append(entries, m.lost(a, p, false)...)
	if err := m.append(ctx, s.ID, entries...); err != nil {
		return err
	}
	if err := m.o.Node.SetDeadline(a.sandbox, s.Deadline); err != nil && !kind.Is(err, kind.NotFound) {
		return err
	}
	if err := a.letIn(); err != nil {
		return nil // it stopped meanwhile, and its end has begun
	}
	for id, c := range p.commands {
		m.follow(a, id, c)
	}
	return nil
}

// removeOrphan destroys a sandbox that no session owns. What cannot be
// destroyed now is found again by the next sweep.
func (m *Manager) removeOrphan(id session.SandboxID) {
	m.spawn(func() {
		ctx, cancel := context.WithTimeout(m.ends, m.b.Kill)
		defer cancel()
		err := m.o.Node.Destroy(ctx, id)
		if owner, _, bad := id.Split(); bad == nil {
			err = errors.Join(err, m.o.Templates.Release(ctx, string(owner)))
		}
		if err != nil {
			m.log.Error("removing a sandbox that belongs to no session", "sandbox", id, "error", err)
		}
	})
}

// sweep compares again, both ways. The sandboxes are listed first: a session
// is recorded before its sandbox is made, so one that has no session now
// never had, or has lost it.
func (m *Manager) sweep(ctx context.Context) error {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		return err
	}
	live, err := m.o.Store.Live(ctx)
	if err != nil {
		return err
	}
	running := map[session.SandboxID]bool{}
	for _, f := range found {
		running[f.ID] = f.Running
	}
	errs := []error{m.releaseOverdue(ctx)}
	for _, s := range live {
		if s.Node != m.o.NodeID {
			continue
		}
		up, ok := running[s.SandboxID()]
		delete(running, s.SandboxID())
		a := m.find(s.ID)
		if a == nil {
			continue // it ended between the two looks
		}
		switch s.State {
		case session.Creating: // its create holds it, and ends it if need be
		case session.Ending:
			m.beginEnd(a, EndRequest{ID: s.ID, Actor: system, Reason: s.Reason, Detail: s.Detail})
		case session.Running, session.Pausing, session.Standby, session.Resuming, session.Quarantined:
			errs = append(errs, m.payOverdue(ctx, a), m.setLateDeadline(ctx, a))
			if !ok || !up {
				m.crashed(ctx, a)
			}
		case session.Ended:
		}
	}
	for id := range running {
		if owner, _, err := id.Split(); err == nil && m.find(owner) != nil && m.find(owner).sandbox == id {
			continue // ending at this moment
		}
		m.log.Warn("removing a sandbox that belongs to no session", "sandbox", id)
		m.removeOrphan(id)
	}
	return errors.Join(errs...)
}

// crashed ends a session whose sandbox is not there although nothing told so.
// The list may have been read before the session's sandbox was made or while
// it was ending, so it is looked at again.
func (m *Manager) crashed(ctx context.Context, a *active) {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		m.log.Error("looking for a sandbox again", "sandbox", a.sandbox, "error", err)
		return
	}
	for _, f := range found {
		if f.ID == a.sandbox && f.Running {
			return
		}
	}
	m.beginEnd(a, EndRequest{ID: a.id, Actor: system, Reason: session.Crashed, Detail: "its sandbox is gone"})
}

// heard reacts to news of a sandbox.
func (m *Manager) heard(x Exited) {
	id, _, err := x.ID.Split()
	if err != nil {
		return
	}
	a := m.find(id)
	if a == nil || a.sandbox != x.ID {
		return // ended already, or an orphan: the sweep's business
	}
	if x.OOMKills > 0 {
		m.recordOOM(a, x.OOMKills)
	}
	switch {
	case x.Stopped:
		req := EndRequest{ID: id, Actor: system, Reason: session.Crashed, Detail: stoppedDetail(x)}
		switch {
		case x.Exit.OOM:
			req.Reason, req.Detail = session.OOM, "the sandbox reached its memory limit and stopped"
		case x.Exit.PIDs:
			req.Reason, req.Detail = session.ResourceOut, "the sandbox reached its limit of threads on the host and stopped"
		}
		fact := audit.Entry{
			Action: audit.SandboxExited, Outcome: audit.Failed, Actor: system, Sandbox: a.sandbox,
			Payload: exitedPayload{Code: x.Exit.Code, Signal: x.Exit.Signal, OOM: x.Exit.OOM, PIDs: x.Exit.PIDs},
		}
		if a.diedCreating(&death{end: req, facts: []audit.Entry{fact}}) {
			return // the create fails and ends the session
		}
		m.beginEnd(a, req, fact)
	case x.Deadline:
		m.beginEnd(a, EndRequest{ID: id, Actor: system, Reason: session.Deadline, Detail: "its time was up"})
	}
}

// diedCreating stops a create whose sandbox has stopped; false means that no
// create is in progress.
func (a *active) diedCreating(d *death) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopCreate == nil || a.ending != nil {
		return false
	}
	a.died = d
	a.stopCreate(d.err())
	return true
}

func stoppedDetail(x Exited) string {
	switch {
	case x.Exit.Signal != 0:
		return fmt.Sprintf("the sandbox was stopped by signal %d", x.Exit.Signal)
	case x.Exit.Code < 0:
		return "the sandbox stopped"
	}
	return fmt.Sprintf("the sandbox's first process exited with code %d", x.Exit.Code)
}

// recordOOM notes that the memory limit killed processes of a session that
// lives on.
func (m *Manager) recordOOM(a *active, kills int64) {
	a.mu.Lock()
	news := kills > a.killsLocked() && a.ending == nil
	if news {
		a.oomTelling = kills
	}
	a.mu.Unlock()
	if !news {
		return
	}
	m.spawn(func() {
		ctx, cancel := context.WithTimeout(m.ends, m.b.Settle)
		defer cancel()
		err := m.append(ctx, a.id, audit.Entry{
			Action: audit.OutOfMemory, Outcome: audit.Failed, Actor: system, Sandbox: a.sandbox, Payload: oomPayload{Kills: kills},
		})
		if err != nil {
			m.log.Error("recording that the memory limit was hit", "session", a.id, "error", err)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if err == nil {
			a.oomKills = max(a.oomKills, kills)
		} else if a.oomTelling == kills {
			a.oomTelling = 0 // the node tells it again
		}
	})
}

// killsLocked is how many kills of the memory limit are in the record, or on
// their way there.
func (a *active) killsLocked() int64 { return max(a.oomKills, a.oomTelling) }

// recordJump notes in every live record that the wall clock was moved: times
// before and after do not compare, deadlines are not affected.
func (m *Manager) recordJump(by time.Duration) {
	m.log.Warn("the clock was moved", "by", by)
	m.mu.Lock()
	var all []*active
	for _, a := range m.active {
		all = append(all, a)
	}
	m.mu.Unlock()
	m.spawn(func() {
		for _, a := range all {
			ctx, cancel := context.WithTimeout(m.ends, m.b.Settle)
			err := m.append(ctx, a.id, audit.Entry{
				Action: audit.ClockJumped, Outcome: audit.OK, Actor: system, Sandbox: a.sandbox, Payload: map[string]any{"ms": by.Milliseconds()},
			})
			cancel()
			if err != nil && !kind.Is(err, kind.Conflict) && !kind.Is(err, kind.NotFound) {
				m.log.Error("recording that the clock was moved", "session", a.id, "error", err)
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
