// Package lifecycle owns the life of a session: it creates, runs, follows and
// ends it, in steps that are recorded before and after, and it puts right
// what a crash left half done.
//
// A Manager is the only writer of sessions on its node. Everything it does to
// a session goes through a Store, so no change and no effect is without its
// event; everything it does to the machine goes through a Node.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/guest/guestclient"
	"bivy/internal/hostclock"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Manager runs the lives of the sessions of one node. Its methods may be
// called from any goroutine. What works on sandboxes answers Unavailable before
// Ready and once Run has ended; reading sessions and records needs neither.
type Manager struct {
	o     Options
	b     Bounds
	log   *slog.Logger
	admit *turns
	news  *newsroom
	ready chan struct{}

	// live carries what follows sandboxes (command supervisors, file
	// operations, creates); it ends as soon as Run is told to stop, and the
	// next process takes over. ends carries the ending of sessions and the
	// writing of outcomes; it ends a while later, when Run gives up waiting.
	live, ends         context.Context
	stopLive, stopEnds context.CancelFunc

	work sync.WaitGroup // what Run waits for; grows only under mu while !stopping

	mu       sync.Mutex
	running  bool
	stopping bool
	active   map[session.ID]*active // every session that is not ended

	unreleased map[session.ID]bool // ended, and their template's lease is not given back
}

// New checks the options. The manager does nothing before Run.
func New(o Options) (*Manager, error) {
	switch {
	case o.Store == nil || o.Node == nil || o.Templates == nil || o.Signer == nil:
		return nil, errors.New("lifecycle: store, node, templates and signer are required")
	case o.NodeID == "":
		return nil, errors.New("lifecycle: a node id is required")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.CreateLimit <= 0 {
		o.CreateLimit = runtime.NumCPU()
	}
	if o.BootID == "" {
		var err error
		if o.BootID, err = hostclock.BootID(); err != nil {
			return nil, fmt.Errorf("lifecycle: %w", err)
		}
	}
	m := &Manager{
		o: o, b: o.Bounds.withDefaults(), log: o.Log,
		admit: newTurns(o.CreateLimit), news: newNewsroom(), ready: make(chan struct{}),
		active: map[session.ID]*active{}, unreleased: map[session.ID]bool{},
	}
	m.live, m.stopLive = context.WithCancel(context.Background())
	m.ends, m.stopEnds = context.WithCancel(context.Background())
	return m, nil
}

// Ready is closed once what an earlier process left has been sorted out.
func (m *Manager) Ready() <-chan struct{} { return m.ready }

// Run sorts out what an earlier process left, then keeps sessions as they
// should be until ctx ends: it reacts to sandboxes that stop, to deadlines,
// and compares what should be with what is, both ways, again and again. It
// returns when everything it started is over or its time to stop is up;
// sessions live on. It is called once.
func (m *Manager) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.running || m.stopping {
		m.mu.Unlock()
		return kind.Errorf(kind.Conflict, "lifecycle: Run is called once")
	}
	m.running = true
	m.mu.Unlock()
	defer m.shutdown()

	if err := m.reconcile(ctx); err != nil {
		return fmt.Errorf("sorting out sessions of an earlier process: %w", err)
	}
	close(m.ready)

	clock := newClockWatch(m.o.Now)
	tick := time.NewTicker(m.b.Sweep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case x := <-m.o.Node.Exits():
			m.heard(x)
		case <-tick.C:
			if jump, ok := clock.jumped(); ok {
				m.recordJump(jump)
			}
			if err := m.sweep(ctx); err != nil && ctx.Err() == nil {
				// The next sweep looks again; nothing is decided on half a view.
				m.log.Error("comparing sessions with sandboxes", "error", err)
			}
		}
	}
}

// shutdown stops taking work, lets what must not be cut off finish for a
// while, then cuts it off.
func (m *Manager) shutdown() {
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	m.stopLive()
	over := make(chan struct{})
	go func() { // ends with the work group, which the end of m.ends makes finite
		m.work.Wait()
		close(over)
	}()
	timer := time.NewTimer(m.b.Stop)
	defer timer.Stop()
	select {
	case <-over:
	case <-timer.C:
	}
	m.stopEnds()
	<-over
}

// track registers a piece of work that Run waits for; false means that the
// manager is stopping and the work must not begin.
func (m *Manager) track() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopping {
		return false
	}
	m.work.Add(1)
	return true
}

// spawn runs f in a goroutine that Run waits for.
func (m *Manager) spawn(f func()) bool {
	if !m.track() {
		return false
	}
	go func() {
		defer m.work.Done()
		f()
	}()
	return true
}

func (m *Manager) hook(point string) {
	if m.o.Hook != nil {
		m.o.Hook(point)
	}
}

// available fails unless the manager is ready and not stopping.
func (m *Manager) available() error {
	m.mu.Lock()
	stopping := m.stopping
	m.mu.Unlock()
	if stopping {
		return stoppingError()
	}
	select {
	case <-m.ready:
		return nil
	default:
		return kind.Errorf(kind.Unavailable, "bivy is starting and still sorting out its sessions").WithHint("try again in a moment")
	}
}

func stoppingError() error {
	return kind.Errorf(kind.Unavailable, "bivy is stopping").WithHint("try again when it has been started again")
}

// Get returns one session, ended ones too.
func (m *Manager) Get(ctx context.Context, id session.ID) (session.Session, error) {
	return m.o.Store.Get(ctx, id)
}

// List returns a page of sessions, newest first, and the cursor of the next
// page, empty when there is none.
func (m *Manager) List(ctx context.Context, f Filter, cursor string, limit int) ([]session.Session, string, error) {
	return m.o.Store.List(ctx, f, cursor, limit)
}

// SetTimeout makes the session end seconds from now.
func (m *Manager) SetTimeout(ctx context.Context, id session.ID, actor session.Principal, seconds session.Seconds) (session.Session, error) {
	if seconds < 1 || seconds > session.MaxTimeout {
		return session.Session{}, kind.Errorf(kind.Invalid, "%d seconds is outside 1 to %d", seconds, session.MaxTimeout).WithField("timeout_seconds")
	}
	a, leave, err := m.enter(ctx, id)
	if err != nil {
		return session.Session{}, err
	}
	defer leave()
	if err := a.lock(ctx); err != nil {
		return session.Session{}, err
	}
	defer a.unlock()
	s, err := m.o.Store.Get(ctx, id)
	if err != nil {
		return session.Session{}, err
	}
	if s.State != session.Running {
		return s, m.refusal(s)
	}
	// The record first: should the node's timer not follow, the caller learns
	// of it, and the sweep sets it from the session.
	at := m.o.Now().Add(seconds.Duration())
	s.Deadline = at
	s, err = m.transition(ctx, s, audit.Entry{
		Action: audit.SessionTimeoutSet, Outcome: audit.OK, Actor: actor, Sandbox: a.sandbox,
		Payload: map[string]any{"timeout_seconds": seconds, "deadline": at.UTC()},
	})
	if err != nil {
		return session.Session{}, err
	}
	return s, m.putDeadline(a, s)
}

// putDeadline gives the node the deadline of a session whose row is held.
func (m *Manager) putDeadline(a *active, s session.Session) error {
	err := m.o.Node.SetDeadline(a.sandbox, s.Deadline)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lateDeadline = err != nil
	if err != nil {
		return fmt.Errorf("session %s: deadline on the node: %w", a.id, err)
	}
	return nil
}

// setLateDeadline gives the node a deadline that it did not take when it was
// set.
func (m *Manager) setLateDeadline(ctx context.Context, a *active) error {
	a.mu.Lock()
	late := a.lateDeadline
	a.mu.Unlock()
	if !late {
		return nil
	}
	if err := a.lock(ctx); err != nil {
		return err
	}
	defer a.unlock()
	s, err := m.o.Store.Get(ctx, a.id)
	if err != nil || s.State != session.Running {
		return err
	}
	return m.putDeadline(a, s)
}

// Stats measures the session's sandbox from the host's side.
func (m *Manager) Stats(ctx context.Context, id session.ID) (driver.Stats, error) {
	a, leave, err := m.enter(ctx, id)
	if err != nil {
		return driver.Stats{}, err
	}
	defer leave()
	ctx, cancel := a.within(ctx)
	defer cancel()
	return m.o.Node.Stats(ctx, a.sandbox)
}

// Events calls fn for each event of the session's record with Seq > after, at
// most limit of them (0: all).
func (m *Manager) Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error {
	return m.o.Store.Events(ctx, id, after, limit, fn)
}

// Export writes the session's record, with its seal once it has ended, in
// the export format of package audit.
func (m *Manager) Export(ctx context.Context, id session.ID, w io.Writer) error {
	// The seal is asked for first: a record that is sealed meanwhile is then
	// exported whole but unsealed, never sealed but cut.
	var seal *audit.Seal
	switch s, err := m.o.Store.SealOf(ctx, id); {
	case err == nil:
		seal = &s
	case !kind.Is(err, kind.NotFound):
		return err
	}
	if _, err := m.o.Store.Get(ctx, id); err != nil {
		return err
	}
	return audit.Export(w, id, func(yield func(audit.Stored) error) error {
		return m.o.Store.Events(ctx, id, 0, 0, yield)
	}, seal)
}

// Watch calls fn for each event with Seq > after, those that are written
// later too, until the session has ended and all were given, fn fails, or ctx
// ends.
func (m *Manager) Watch(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error {
	for {
		changed, forget := m.news.wait(id)
		s, err := m.o.Store.Get(ctx, id)
		if err == nil {
			err = m.o.Store.Events(ctx, id, after, 0, func(e audit.Stored) error {
				if err := fn(e); err != nil {
					return err
				}
				after = e.Event.Seq
				return nil
			})
		}
		if err != nil || s.State.Terminal() {
			forget()
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			forget()
			return ctx.Err()
		case <-m.live.Done():
			forget()
			return stoppingError()
		}
		forget()
	}
}

// append, transition and seal are the store's, and tell watchers.

func (m *Manager) append(ctx context.Context, id session.ID, entries ...audit.Entry) error {
	err := m.o.Store.Append(ctx, id, entries...)
	if err == nil {
		m.news.tell(id)
	}
	return err
}

func (m *Manager) transition(ctx context.Context, s session.Session, entries ...audit.Entry) (session.Session, error) {
	out, err := m.o.Store.Transition(ctx, s, entries...)
	if err == nil {
		m.news.tell(s.ID)
	}
	return out, err
}

func (m *Manager) seal(ctx context.Context, s session.Session, entries ...audit.Entry) (session.Session, error) {
	out, err := m.o.Store.Seal(ctx, s, func(h audit.Head) (audit.Seal, error) {
		return m.o.Signer.Seal(h, audit.Closeout{
			Session: s.ID, Owner: s.Owner, CreatedAt: s.CreatedAt, StartedAt: s.StartedAt, EndedAt: s.EndedAt, SealedAt: m.o.Now(),
			Reason: s.Reason, Residuals: s.Residuals, SpecDigest: s.SpecDigest, Template: s.Template, Versions: m.o.Versions,
		})
	}, entries...)
	if err == nil {
		m.news.tell(s.ID)
	}
	return out, err
}

// guest returns the client of the agent inside a session that was entered.
func (m *Manager) guest(ctx context.Context, a *active) (*guestclient.Client, error) {
	c, err := m.o.Node.Guest(ctx, a.sandbox)
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", a.id, err)
	}
	return c, nil
}

// newsroom tells watchers that a record has grown.
type newsroom struct {
	mu sync.Mutex
	// desks has an entry for every session that somebody waits for.
	desks map[session.ID]*desk
}

type desk struct {
	changed chan struct{}
	readers int
}

func newNewsroom() *newsroom { return &newsroom{desks: map[session.ID]*desk{}} }

// wait returns a channel that closes at the next change, and how to stop
// waiting, which must be called.
func (n *newsroom) wait(id session.ID) (changed <-chan struct{}, forget func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.desks[id]
	if d == nil {
		d = &desk{changed: make(chan struct{})}
		n.desks[id] = d
	}
	d.readers++
	return d.changed, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if d.readers--; d.readers == 0 && n.desks[id] == d {
			delete(n.desks, id)
		}
	}
}

func (n *newsroom) tell(id session.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d := n.desks[id]; d != nil {
		close(d.changed)
		delete(n.desks, id) // who waits again gets a new desk
	}
}
