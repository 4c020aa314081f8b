package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// reconcile compares, once at start, the rows of this node with the sandboxes
// on it: each session goes on or ends with a reason, and each sandbox belongs
// to a session, or to a pool, or is removed.
func (m *Manager) reconcile(ctx context.Context) error {
	found, err := m.o.Node.Recover(ctx)
	if err != nil {
		return fmt.Errorf("sandboxes on this host: %w", err)
	}
	live, err := m.o.Store.Live(ctx, m.o.NodeID)
	if err != nil {
		return err
	}
	here := map[session.SandboxID]sandbox.Recovered{}
	for _, r := range found {
		here[r.ID] = r
	}
	for _, s := range live {
		r := here[s.SandboxID()]
		if err := m.recover(ctx, s, r); err != nil {
			return fmt.Errorf("session %s: %w", s.ID, err)
		}
		delete(here, s.SandboxID())
	}
	for id, r := range here {
		if r.Owner.Kind == driver.OwnedBySession || r.Owner.Kind == "" {
			m.removeOrphan(id, "it belongs to no session of this node")
		}
	}
	return nil
}

// recover decides what becomes of one session of an earlier process. r is its
// sandbox as it was found, or zero.
func (m *Manager) recover(ctx context.Context, s session.Session, r sandbox.Recovered) error {
	e := m.manage(s)
	e.createOver()
	switch s.State {
	case session.Creating:
		return m.endRecovered(ctx, e, endRequest{actor: journal.System, reason: session.CreateFailed, detail: "bivy stopped while the session was being created"})
	case session.Running:
		if r.Running {
			return m.takeBack(ctx, e, s, r)
		}
		return m.endRecovered(ctx, e, m.lostSandbox(s))
	case session.Pausing, session.Resuming:
		// Between two states: with its sandbox it runs on, without it is lost.
		if r.Running {
			return m.takeBack(ctx, e, s, r)
		}
		return m.endRecovered(ctx, e, m.lostSandbox(s))
	case session.Standby, session.Quarantined:
		// It admits no work, and what it has is kept, also past its deadline.
		if !r.Running {
			return nil
		}
		err := m.o.Node.SetDeadline(s.SandboxID(), time.Time{})
		if kind.Is(err, kind.NotFound) {
			err = nil // it stopped meanwhile
		}
		return err
	case session.Ending: // goes on for the reason that it has
		return m.endRecovered(ctx, e, endRequest{actor: journal.System, reason: s.Reason, detail: s.Detail})
	case session.Ended:
		return nil // the store does not list it
	}
	return kind.Errorf(kind.Internal, "state %q is not known", s.State)
}

// lostSandbox is the end of a session whose sandbox is gone.
func (m *Manager) lostSandbox(s session.Session) endRequest {
	if s.Boot != "" && s.Boot != m.o.BootID {
		return endRequest{actor: journal.System, reason: session.NodeLost, detail: "the machine was restarted"}
	}
	return endRequest{actor: journal.System, reason: session.Crashed, detail: "its sandbox had stopped, or could not be taken back, when bivy started"}
}

// endRecovered ends a session of an earlier process, and concludes what that
// process had begun.
func (m *Manager) endRecovered(ctx context.Context, e *managed, req endRequest) error {
	var (
		h journal.History
		w workload.History
	)
	if err := m.journal.Read(ctx, e.id, h.Add, w.Add); err != nil {
		return err
	}
	m.beginEnd(e, req, w.Lost(h.OpenExcept("end"), true)...)
	return nil
}

// takeBack goes on with a session whose sandbox runs: it says so in the
// record, admits callers and follows its commands again. An earlier process
// may have been moving it between running and standby; with its sandbox it is
// running.
func (m *Manager) takeBack(ctx context.Context, e *managed, s session.Session, r sandbox.Recovered) error {
	var (
		h journal.History
		w workload.History
	)
	if err := m.journal.Read(ctx, s.ID, h.Add, w.Add); err != nil {
		return err
	}
	entries := []audit.Entry{{
		Action: audit.SandboxRecovered, Outcome: audit.OK, Actor: journal.System, Object: sandboxObject(s.SandboxID()),
		Payload: recoveredPayload{Relinked: r.Relinked},
	}}
	if r.Relinked {
		entries = append(entries, audit.Entry{
			Action: audit.SandboxRelinked, Outcome: audit.OK, Actor: journal.System, Object: sandboxObject(s.SandboxID()),
			Payload: relinkedPayload{Cause: "connections into the sandbox ended with the earlier process"},
		})
	}
	entries = append(entries, w.Lost(h.OpenExcept(""), false)...)
	var err error
	if s.State == session.Running {
		_, err = m.journal.Append(ctx, s.ID, s.Fence(), entries...)
	} else {
		next := s
		next.State = session.Running
		s, _, err = m.transition(ctx, s.Fence(), next, entries...)
	}
	if err != nil {
		return err
	}
	if err := m.o.Node.SetDeadline(s.SandboxID(), s.Deadline); err != nil && !kind.Is(err, kind.NotFound) {
		return err
	}
	i := m.incarnate(e, s, &w)
	if err := e.admit(); err != nil {
		return nil // it stopped meanwhile, and its end has begun
	}
	i.Resume(&w)
	return nil
}

// removeOrphan destroys a sandbox that no session owns. What cannot be
// destroyed now is found again by the next sweep.
func (m *Manager) removeOrphan(id session.SandboxID, why string) {
	m.log.Warn("removing a sandbox that belongs to no session", "sandbox", id)
	m.work.Go(func() {
		ctx, cancel := context.WithTimeout(m.work.Late(), m.b.Kill)
		defer cancel()
		if err := m.destroyOrphan(ctx, id, why); err != nil {
			m.log.Error("removing a sandbox that belongs to no session", "sandbox", id, "error", err)
		}
	})
}

// destroyOrphan records what it is about to do in the record of the node, for
// there is no session whose record it could be in.
func (m *Manager) destroyOrphan(ctx context.Context, id session.SandboxID, why string) error {
	conclude, err := m.o.System.Begin(ctx, audit.Entry{
		Action: audit.SandboxDestroyIntent, Actor: journal.System, Object: sandboxObject(id), Ref: string(id),
		Payload: map[string]any{"by": "lifecycle", "why": why},
	})
	if err != nil {
		return err
	}
	removal, err := m.o.Node.Destroy(ctx, id)
	if owner, _, bad := id.Split(); bad == nil {
		err = errors.Join(err, m.o.Templates.Release(ctx, string(owner)))
	}
	outcome := audit.Entry{Action: audit.SandboxDestroyed, Outcome: audit.OK, Payload: map[string]any{"found": removal.Found}}
	if err != nil {
		outcome.Outcome, outcome.Payload = audit.Failed, map[string]any{"error": err.Error()}
	}
	return errors.Join(err, conclude(outcome))
}

// sweep compares again, both ways. The sandboxes are listed first: a session
// is recorded before its sandbox is made, so a
// listed sandbox without a session is an orphan.
func (m *Manager) sweep(ctx context.Context) error {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		return err
	}
	live, err := m.o.Store.Live(ctx, m.o.NodeID)
	if err != nil {
		return err
	}
	here := map[session.SandboxID]driver.Found{}
	for _, f := range found {
		here[f.ID] = f
	}
	errs := []error{m.releaseOverdue(ctx)}
	for _, s := range live {
		f := here[s.SandboxID()]
		delete(here, s.SandboxID())
		if e := m.find(s.ID); e != nil { // else it ended between the two looks
			errs = append(errs, m.sweepSession(ctx, e, s, f))
		}
	}
	for id, f := range here {
		if f.Owner.Kind != driver.OwnedBySession && f.Owner.Kind != "" {
			continue // a pool's or a template's
		}
		if owner, generation, err := id.Split(); err == nil {
			if e := m.find(owner); e != nil && e.log.Fence().Generation == generation {
				continue // ending at this moment
			}
		}
		m.removeOrphan(id, "it belongs to no session of this node")
	}
	return errors.Join(errs...)
}

// sweepSession looks after one session. f is its sandbox as it was found, or
// zero.
func (m *Manager) sweepSession(ctx context.Context, e *managed, s session.Session, f driver.Found) error {
	switch s.State {
	case session.Creating:
		return nil // the create in progress ends it if it fails
	case session.Running:
		err := errors.Join(e.log.WritePending(ctx), m.setLateDeadline(ctx, e))
		if !f.Running {
			m.crashed(ctx, e, s.SandboxID())
		}
		return err
	case session.Pausing, session.Resuming:
		return e.log.WritePending(ctx) // the change in progress decides
	case session.Standby:
		return nil // it has no sandbox, and needs none
	case session.Quarantined:
		return e.log.WritePending(ctx) // nothing of it is destroyed
	case session.Ending:
		m.beginEnd(e, endRequest{actor: journal.System, reason: s.Reason, detail: s.Detail})
		return nil
	case session.Ended:
		return nil
	}
	return kind.Errorf(kind.Internal, "session %s: state %q is not known", s.ID, s.State)
}

// crashed ends a session whose sandbox is gone although no notice said so.
// The list may have been read before the session's sandbox was made or while
// it was ending, so it is looked at again.
func (m *Manager) crashed(ctx context.Context, e *managed, id session.SandboxID) {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		m.log.Error("looking for a sandbox again", "sandbox", id, "error", err)
		return
	}
	for _, f := range found {
		if f.ID == id && f.Running {
			return
		}
	}
	m.beginEnd(e, endRequest{actor: journal.System, reason: session.Crashed, detail: "its sandbox is gone"})
}
