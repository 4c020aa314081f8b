package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// get returns a session that who may use the action on.
func (m *Manager) get(ctx context.Context, who access.Caller, a access.Action, id session.ID) (session.Session, audit.Decision, error) {
	s, err := m.o.Store.Get(ctx, id)
	if err != nil {
		return session.Session{}, audit.Decision{}, err
	}
	decision, err := m.decide(ctx, who, a, s)
	if err != nil {
		return session.Session{}, audit.Decision{}, err
	}
	return s, decision, nil
}

// Get returns one session, ended ones too.
func (m *Manager) Get(ctx context.Context, who access.Caller, id session.ID) (session.Session, error) {
	s, _, err := m.get(ctx, who, access.SessionRead, id)
	return s, err
}

// List returns a page of sessions, newest first, and the cursor of the next
// page, empty when there is none. It lists what who may read.
func (m *Manager) List(ctx context.Context, who access.Caller, f session.Filter, cursor string, limit int) ([]session.Session, string, error) {
	owner, err := m.o.Access.Scope(ctx, who, access.SessionRead)
	if err != nil {
		return nil, "", err
	}
	if owner != "" {
		if f.Owner != "" && f.Owner != owner {
			return nil, "", nil // there is nothing of theirs to see
		}
		f.Owner = owner
	}
	return m.o.Store.List(ctx, f, cursor, limit)
}

// SetTimeout makes the session end seconds from now.
func (m *Manager) SetTimeout(ctx context.Context, who access.Caller, id session.ID, seconds session.Seconds) (session.Session, error) {
	if seconds < 1 || seconds > session.MaxTimeout {
		return session.Session{}, kind.Errorf(kind.Invalid, "%d seconds is outside 1 to %d", seconds, session.MaxTimeout).WithField("timeout_seconds")
	}
	if err := m.available(); err != nil {
		return session.Session{}, err
	}
	s, decision, err := m.get(ctx, who, access.SessionExtend, id)
	if err != nil {
		return session.Session{}, err
	}
	e := m.find(id)
	if e == nil {
		return session.Session{}, notRunning(s)
	}
	if err := e.lock(ctx); err != nil {
		return session.Session{}, err
	}
	defer e.unlock()
	if s, err = m.o.Store.Get(ctx, id); err != nil {
		return session.Session{}, err
	}
	if s.State != session.Running {
		return s, notRunning(s)
	}
	// The record first: should the node's timer not follow, the caller learns
	// of it, and the sweep sets it from the session.
	at := m.o.Now().Add(seconds.Duration())
	s.Deadline = at
	s, _, err = m.transition(ctx, s.Fence(), s, audit.Entry{
		Action: audit.SessionTimeoutSet, Outcome: audit.OK, Actor: who.Principal, Decision: decision, Object: "session",
		Payload: timeoutPayload{Seconds: seconds, Deadline: at.UTC()},
	})
	if err != nil {
		return session.Session{}, err
	}
	return s, m.putDeadline(e, s)
}

// putDeadline gives the node the deadline of a session whose row is held.
func (m *Manager) putDeadline(e *managed, s session.Session) error {
	err := m.o.Node.SetDeadline(s.SandboxID(), s.Deadline)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lateDeadline = err != nil
	if err != nil {
		return fmt.Errorf("session %s: deadline on the node: %w", e.id, err)
	}
	return nil
}

// setLateDeadline gives the node a deadline that it did not take when it was
// set.
func (m *Manager) setLateDeadline(ctx context.Context, e *managed) error {
	e.mu.Lock()
	late := e.lateDeadline
	e.mu.Unlock()
	if !late {
		return nil
	}
	if err := e.lock(ctx); err != nil {
		return err
	}
	defer e.unlock()
	s, err := m.o.Store.Get(ctx, e.id)
	if err != nil || s.State != session.Running {
		return err
	}
	return m.putDeadline(e, s)
}

// Events calls fn for each event of the session's record with a sequence
// number above after, at most limit of them (0: all).
func (m *Manager) Events(ctx context.Context, who access.Caller, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error {
	if _, _, err := m.get(ctx, who, access.AuditRead, id); err != nil {
		return err
	}
	return m.o.Store.Events(ctx, id, after, limit, fn)
}

// Follow calls fn for each event with a sequence number above after, those
// that are written later too, until the session has ended and all were given,
// fn fails, or ctx ends.
func (m *Manager) Follow(ctx context.Context, who access.Caller, id session.ID, after uint64, fn func(audit.Stored) error) error {
	if _, _, err := m.get(ctx, who, access.AuditRead, id); err != nil {
		return err
	}
	return m.journal.Follow(ctx, id, after, func(ctx context.Context) (bool, error) {
		s, err := m.o.Store.Get(ctx, id)
		return s.State.Terminal(), err
	}, fn)
}

// Export writes the session's record, with its seal and its addenda once it
// has ended, in the export format of package audit.
func (m *Manager) Export(ctx context.Context, who access.Caller, id session.ID, w io.Writer) error {
	if _, _, err := m.get(ctx, who, access.AuditRead, id); err != nil {
		return err
	}
	return m.export(ctx, id, w)
}

// export writes a record without asking for a decision.
func (m *Manager) export(ctx context.Context, id session.ID, w io.Writer) error {
	x := audit.SessionExport{Session: id, Rotations: m.o.Signer.Rotations()}
	// The seals are asked for first: a record that grows meanwhile is then
	// exported whole but with an older seal, never sealed but cut.
	seal, err := m.o.Store.SealOf(ctx, id)
	switch {
	case err == nil:
		x.Seal = &seal
	case !kind.Is(err, kind.NotFound):
		return err
	}
	addenda, err := m.o.Store.AddendaSeal(ctx, id)
	switch {
	case err == nil:
		head, err := addenda.AddendaHead()
		if err != nil {
			return err
		}
		x.AddendaSeal = &addenda
		x.Addenda = func(yield func(audit.Stored) error) error { return m.addenda(ctx, id, head.Count, yield) }
	case !kind.Is(err, kind.NotFound):
		return err
	}
	x.Events = func(yield func(audit.Stored) error) error { return m.o.Store.Events(ctx, id, 0, 0, yield) }
	return audit.Export(w, x)
}

// errEnough stops the reading of addenda.
var errEnough = errors.New("enough addenda")

// addenda calls yield for the first count addenda.
func (m *Manager) addenda(ctx context.Context, id session.ID, count uint64, yield func(audit.Stored) error) error {
	if count == 0 {
		return nil
	}
	err := m.o.Store.Addenda(ctx, id, 0, func(e audit.Stored) error {
		if err := yield(e); err != nil {
			return err
		}
		if e.Event.Seq == count {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

// addFact records a fact about a session that may have ended: after the seal it
// is an addendum, before it an event of the record like any other.
func (m *Manager) addFact(ctx context.Context, id session.ID, e audit.Entry) error {
	s, err := m.o.Store.Get(ctx, id)
	if err != nil {
		return err
	}
	if !s.State.Terminal() {
		_, err := m.journal.Append(ctx, id, s.Fence(), e)
		return err
	}
	_, err = m.o.Store.AppendAddenda(ctx, id, s.Fence(), func(h audit.Head) (audit.Seal, error) {
		return m.o.Signer.SealAddenda(h, m.o.Now())
	}, journal.Traced(ctx, []audit.Entry{e})...)
	return err
}
