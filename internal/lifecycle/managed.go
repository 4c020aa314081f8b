package lifecycle

import (
	"context"
	"sync"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// managed is what this process holds of a session that has not ended.
//
// Lock order: managed.mu, then Manager.mu. Neither is held across a call to
// the store or the node.
type managed struct {
	id  session.ID
	log *journal.Log // of the current incarnation, or of the end of a session without one

	// row is held while the session's row is read and changed, and for no
	// longer than that.
	row chan struct{}
	// endingSent: the change to Ending was sent to the store, with what was
	// carried then. Guarded by row.
	endingSent bool

	// created closes, by createOver, when no create of the session is in
	// progress any more.
	created    chan struct{}
	createOver func()

	mu           sync.Mutex
	current      *workload.Incarnation   // nil: the session has no running sandbox
	ending       *ending                 // not nil once the end was asked for
	stopCreate   context.CancelCauseFunc // of the create in progress, or nil
	died         *death                  // the sandbox stopped before the create was over
	carried      []audit.Entry           // events for the next commit of the end
	lateDeadline bool                    // the node has not got the session's deadline
}

// death is what is known of a sandbox that stopped.
type death struct {
	end   endRequest
	facts []audit.Entry
}

func (d *death) err() error {
	return kind.Errorf(kind.Unavailable, "%s while it was being started", d.end.detail)
}

// manage takes up a session that has not ended. It has no incarnation yet.
func (m *Manager) manage(s session.Session) *managed {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.sessions[s.ID]; e != nil {
		return e
	}
	e := &managed{
		id: s.ID, log: m.journal.NewLog(s.ID, s.Fence()),
		row: make(chan struct{}, 1), created: make(chan struct{}),
	}
	e.createOver = sync.OnceFunc(func() { close(e.created) })
	m.sessions[s.ID] = e
	return e
}

// incarnate gives the session its incarnation, closed. earlier is what the
// record tells of it; nil for a new one.
func (m *Manager) incarnate(e *managed, s session.Session, earlier *workload.History) *workload.Incarnation {
	i := m.workload.NewIncarnation(s, e.log, earlier)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.current = i
	return i
}

// find returns the managed entry of a session, or nil.
func (m *Manager) find(id session.ID) *managed {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sessions[id]
}

// drop forgets a session that has ended.
func (m *Manager) drop(e *managed) {
	if i := e.incarnation(); i != nil {
		i.Close()
		i.Cut()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sessions[e.id] == e {
		delete(m.sessions, e.id)
	}
}

func (e *managed) incarnation() *workload.Incarnation {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current
}

// lock takes the session's row.
func (e *managed) lock(ctx context.Context) error {
	select {
	case e.row <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *managed) unlock() { <-e.row }

// admit opens the incarnation of a session that runs, unless its end was asked
// for or its sandbox has stopped already.
func (e *managed) admit() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopCreate = nil
	switch {
	case e.ending != nil:
		return kind.Wrap(kind.Conflict, workload.ErrEnding)
	case e.died != nil:
		return e.died.err()
	}
	return e.current.Open()
}

// take empties the events that wait for the next commit of the end.
func (e *managed) take() []audit.Entry {
	e.mu.Lock()
	defer e.mu.Unlock()
	carried := e.carried
	e.carried = nil
	return carried
}

// carry puts events in front of those that wait for the next commit of the
// end.
func (e *managed) carry(entries ...audit.Entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.carried = append(entries, e.carried...)
}

// Current implements workload.Sessions.
func (m *Manager) Current(ctx context.Context, id session.ID) (owner session.Principal, current *workload.Incarnation, closed, err error) {
	if err := m.available(); err != nil {
		return session.Principal{}, nil, nil, err
	}
	if e := m.find(id); e != nil {
		e.mu.Lock()
		current = e.current
		e.mu.Unlock()
		if current != nil && current.Admits() {
			return current.Owner(), current, nil, nil
		}
	}
	s, err := m.o.Store.Get(ctx, id)
	if err != nil {
		return session.Principal{}, nil, nil, err
	}
	return s.Owner, nil, notRunning(s), nil
}

// notRunning is the error for work in a session that admits none.
func notRunning(s session.Session) error {
	switch s.State {
	case session.Creating:
		return kind.Errorf(kind.Unavailable, "session %s is still being created", s.ID).WithHint("try again when it is running")
	case session.Ending:
		return kind.Errorf(kind.Conflict, "session %s is ending: %s", s.ID, s.Reason)
	case session.Ended:
		return kind.Errorf(kind.Conflict, "session %s ended at %s: %s", s.ID, s.EndedAt.UTC().Format("2006-01-02 15:04:05Z"), because(s)).
			WithHint("create a new session")
	case session.Running:
		return kind.Errorf(kind.Unavailable, "session %s is about to end", s.ID)
	case session.Pausing, session.Standby, session.Resuming, session.Quarantined:
		return kind.Errorf(kind.Conflict, "session %s is %s", s.ID, s.State)
	}
	return kind.Errorf(kind.Conflict, "session %s is %s", s.ID, s.State)
}

// because gives the reason of a session's end, with its detail.
func because(s session.Session) string {
	if s.Detail == "" {
		return string(s.Reason)
	}
	return string(s.Reason) + " (" + s.Detail + ")"
}
