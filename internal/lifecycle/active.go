package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// errEnding is why work in progress is cut when a session ends.
var errEnding = errors.New("the session is ending")

// active is what this process holds of a session that has not ended.
//
// Lock order: active.mu, then Manager.mu or command.mu. None is held across a call to
// the store or the node.
type active struct {
	id      session.ID
	sandbox session.SandboxID

	// row is held while the session's row is read and changed, and for no
	// longer than that.
	row chan struct{}

	// created closes, by createOver, when no create of the session is in
	// progress any more.
	created    chan struct{}
	createOver func()

	// ctx ends when the gates shut: what works inside the session works on it.
	ctx context.Context
	cut context.CancelCauseFunc

	mu           sync.Mutex
	open         bool                    // operations are let in
	fenced       bool                    // and never will be again
	ending       *ending                 // not nil once the end was asked for
	stopCreate   context.CancelCauseFunc // of the create in progress, or nil
	died         *death                  // the sandbox stopped before the create was over
	inside       int                     // operations let in and not out yet
	idle         chan struct{}           // closes when inside is 0 and fenced
	owing        map[string]*debt        // intents in the record whose outcome is not
	doubt        bool                    // a write failed: look in the record before paying
	carried      []audit.Entry           // entries for the next commit of the end
	commands     map[string]*command
	commandsBusy int
	oomKills     int64 // told in the record
	oomTelling   int64 // being told
	lateDeadline bool  // the node has not got the session's deadline
}

// death is what is known of a sandbox that stopped.
type death struct {
	end   EndRequest
	facts []audit.Entry
}

func (d *death) err() error {
	return kind.Errorf(kind.Unavailable, "%s while it was being started", d.end.Detail)
}

// debt is an intent whose outcome is owed to the record.
type debt struct {
	ref     string
	outcome []audit.Entry // known but not yet written
	lost    audit.Entry   // what to write when it is never known
	written chan struct{} // not nil while somebody writes outcome; closes after
}

// adopt returns the active entry of a session, making it when there is none.
// A fresh one lets nothing in.
func (m *Manager) adopt(id session.ID, sandbox session.SandboxID) *active {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a := m.active[id]; a != nil {
		return a
	}
	a := &active{
		id: id, sandbox: sandbox, row: make(chan struct{}, 1), created: make(chan struct{}),
		idle: make(chan struct{}), owing: map[string]*debt{}, commands: map[string]*command{},
	}
	a.createOver = sync.OnceFunc(func() { close(a.created) })
	a.ctx, a.cut = context.WithCancelCause(m.live)
	m.active[id] = a
	return a
}

// find returns the active entry of a session, or nil.
func (m *Manager) find(id session.ID) *active {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.active[id]
}

// drop forgets a session that has ended.
func (m *Manager) drop(a *active) {
	a.cut(errEnding)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active[a.id] == a {
		delete(m.active, a.id)
	}
}

// lock takes the session's row.
func (a *active) lock(ctx context.Context) error {
	select {
	case a.row <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (a *active) unlock() { <-a.row }

// enter lets an operation into a running session; leave must be called when
// it is over. The end of a session waits for those inside, after cutting
// them off, and so does Run: what they owe to the record is written by then.
func (m *Manager) enter(ctx context.Context, id session.ID) (a *active, leave func(), err error) {
	if err := m.available(); err != nil {
		return nil, nil, err
	}
	if a = m.find(id); a == nil {
		s, err := m.o.Store.Get(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, m.refusal(s)
	}
	a.mu.Lock()
	if !a.open {
		a.mu.Unlock()
		s, err := m.o.Store.Get(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, m.refusal(s)
	}
	if !m.track() {
		a.mu.Unlock()
		return nil, nil, stoppingError()
	}
	a.inside++
	a.mu.Unlock()
	return a, sync.OnceFunc(func() { a.leave(); m.work.Done() }), nil
}

func (a *active) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.inside--; a.inside == 0 && a.fenced {
		close(a.idle)
	}
}

// fenceLocked lets nothing in any more; what is inside goes on until the cut.
func (a *active) fenceLocked() {
	if a.fenced {
		return
	}
	a.open, a.fenced = false, true
	if a.inside == 0 {
		close(a.idle)
	}
}

// letIn opens the gates of a session that runs, unless its end was asked for
// or its sandbox has stopped already.
func (a *active) letIn() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopCreate = nil
	switch {
	case a.fenced:
		return kind.Wrap(kind.Conflict, errEnding)
	case a.died != nil:
		return a.died.err()
	}
	a.open = true
	return nil
}

// refusal is the error for work in a session that is not running.
func (m *Manager) refusal(s session.Session) error {
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

func because(s session.Session) string {
	if s.Detail == "" {
		return string(s.Reason)
	}
	return string(s.Reason) + " (" + s.Detail + ")"
}

// owe makes an intent durable and notes that its outcome is owed. lost is
// what the record will say if that outcome is never known.
func (m *Manager) owe(ctx context.Context, a *active, intent, lost audit.Entry) (*debt, error) {
	intent.Outcome, intent.Sandbox = audit.Pending, a.sandbox
	lost.Outcome, lost.Ref, lost.Sandbox, lost.Actor = audit.Failed, intent.Ref, a.sandbox, intent.Actor
	d := &debt{ref: intent.Ref, lost: lost}
	a.mu.Lock()
	if !a.open {
		a.mu.Unlock()
		return nil, kind.Wrap(kind.Conflict, errEnding)
	}
	a.owing[d.ref] = d
	a.mu.Unlock()
	err := m.append(ctx, a.id, intent)
	if err == nil {
		return d, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.owing, d.ref)
	a.doubt = true
	return nil, fmt.Errorf("session %s: refused, because it cannot be recorded: %w", a.id, err)
}

// note records what is about to be done and owes no outcome; when it cannot,
// it must not be done.
func (m *Manager) note(ctx context.Context, a *active, e audit.Entry) error {
	e.Outcome, e.Sandbox = audit.OK, a.sandbox
	if err := m.append(ctx, a.id, e); err != nil {
		return fmt.Errorf("session %s: refused, because it cannot be recorded: %w", a.id, err)
	}
	return nil
}

// settle writes the outcome of an intent, on a context of its own: the effect
// has been, whether or not anybody still waits. When it cannot be written the
// debt stands and is paid by the sweep or the end.
func (m *Manager) settle(a *active, d *debt, entries ...audit.Entry) error {
	for i := range entries {
		entries[i].Ref, entries[i].Sandbox, entries[i].Actor = d.ref, a.sandbox, d.lost.Actor
	}
	a.mu.Lock()
	if a.owing[d.ref] != d || d.written != nil {
		a.mu.Unlock()
		return kind.Errorf(kind.Conflict, "session %s ended before the outcome of %s was known", a.id, d.ref)
	}
	written := make(chan struct{})
	d.outcome, d.written = entries, written
	a.mu.Unlock()
	ctx, cancel := context.WithTimeout(m.ends, m.b.Settle)
	defer cancel()
	err := m.append(ctx, a.id, entries...)
	a.mu.Lock()
	defer a.mu.Unlock()
	d.written = nil
	close(written)
	if err != nil {
		a.doubt = true
		return fmt.Errorf("session %s: outcome of %s: %w", a.id, d.ref, err)
	}
	delete(a.owing, d.ref)
	return nil
}

// payOverdue writes the outcomes that could not be written when they were
// known.
func (m *Manager) payOverdue(ctx context.Context, a *active) error {
	a.mu.Lock()
	var due []*debt
	for _, d := range a.owing {
		if d.outcome != nil && d.written == nil {
			due = append(due, d)
		}
	}
	doubt := a.doubt
	a.mu.Unlock()
	if len(due) == 0 {
		return nil
	}
	var open map[string]audit.Intent
	if doubt {
		past, err := m.past(ctx, a.id)
		if err != nil {
			return err
		}
		open = past.unpaid()
	}
	var errs []error
	for _, d := range due {
		if _, ok := open[d.ref]; doubt && !ok {
			a.paid(d) // it was written after all
			continue
		}
		errs = append(errs, m.settle(a, d, d.outcome...))
	}
	return errors.Join(errs...)
}

// paid forgets a debt whose outcome is in the record.
func (a *active) paid(d *debt) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.owing[d.ref] == d && d.written == nil {
		delete(a.owing, d.ref)
	}
}

// claim takes over every debt and returns the entries that pay it. It waits
// for writes in progress, which are bounded.
func (m *Manager) claim(ctx context.Context, a *active) ([]audit.Entry, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		var busy chan struct{}
		for _, d := range a.owing {
			if d.written != nil {
				busy = d.written
			}
		}
		if busy == nil {
			break
		}
		a.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
		a.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	owing, doubt := a.owing, a.doubt
	a.owing = map[string]*debt{}
	var open map[string]audit.Intent
	if doubt {
		a.mu.Unlock()
		past, err := m.past(ctx, a.id)
		a.mu.Lock()
		if err != nil {
			a.owing = owing
			return nil, err
		}
		open = past.unpaid()
		a.doubt = false
	}
	var entries []audit.Entry
	for _, ref := range slices.Sorted(maps.Keys(owing)) {
		d := owing[ref]
		if _, ok := open[ref]; doubt && !ok {
			continue // it was written after all
		}
		delete(open, ref)
		if d.outcome != nil {
			entries = append(entries, d.outcome...)
		} else {
			entries = append(entries, d.lost)
		}
	}
	for _, ref := range slices.Sorted(maps.Keys(open)) {
		e := open[ref].Lost(system)
		e.Sandbox = a.sandbox
		entries = append(entries, e)
	}
	return entries, nil
}
