package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/hostclock"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/workgroup"
	"bivy/internal/workload"
)

// Options are what a Manager is made of. Store, Journal, Work, Node,
// Templates, System, Signer, Access and NodeID are required.
type Options struct {
	Store     Store
	Journal   *journal.Journal // over the same Store and Work
	Work      *workgroup.Group // stopped by Run when it ends
	Node      Node
	Templates Templates
	System    SystemRecord
	Signer    Signer
	Access    access.Decider
	NodeID    session.NodeID
	Now       func() time.Time // wall clock; nil: time.Now
	Log       *slog.Logger     // nil: discard
	// CreateLimit bounds how many sessions are created at the same time;
	// others queue, taking turns by owner. 0: one per CPU.
	CreateLimit int
	// BootID is this boot of this machine; empty: read from the kernel. A
	// session whose sandbox was started in another boot has lost it.
	BootID string
	// Versions of bivy and what it is made of, for the seal; may be nil.
	Versions map[string]string
	// Bounds on waiting; zero fields have working values.
	Bounds Bounds
	// FailPoint is a fail point: it is called at the named points of every
	// flow, and tests stop the process in it. Nil in production.
	FailPoint func(point string)
}

// Signer signs what became of sessions. audit.Signer is one.
type Signer interface {
	// Seal signs that the record with this head is complete and that c is what
	// became of the session. before is the state of the node's other records.
	Seal(h audit.Head, before audit.Heads, c audit.Closeout) (audit.Seal, error)
	// SealAddenda signs that the addenda of a session reach as far as h.
	SealAddenda(h audit.Head, at time.Time) (audit.Seal, error)
	// Rotations are the statements by which earlier keys vouch for this one.
	Rotations() []audit.Seal
}

// Bounds are how long the manager waits.
type Bounds struct {
	Create   time.Duration // one create, once admitted; 0: 2 min
	Undo     time.Duration // undoing a failed create; 0: 30 s
	Kill     time.Duration // one attempt to kill and remove a sandbox; 0: 20 s
	Drain    time.Duration // running commands and file operations after the cut; 0: 3 s
	Sweep    time.Duration // between reconciliations; 0: 30 s
	RetryMin time.Duration // first wait before ending again; 0: 200 ms
	RetryMax time.Duration // longest wait before ending again; 0: 30 s
	Stop     time.Duration // work in progress when Run is told to stop; 0: 10 s

	Workload workload.Bounds
}

func (b Bounds) withDefaults() Bounds {
	set := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	set(&b.Create, 2*time.Minute)
	set(&b.Undo, 30*time.Second)
	set(&b.Kill, 20*time.Second)
	set(&b.Drain, 3*time.Second)
	set(&b.Sweep, 30*time.Second)
	set(&b.RetryMin, 200*time.Millisecond)
	set(&b.RetryMax, 30*time.Second)
	set(&b.Stop, 10*time.Second)
	set(&b.Workload.Settle, 10*time.Second)
	return b
}

// Manager runs the lives of the sessions of one node. Its methods may be
// called from any goroutine. What works on sandboxes answers Unavailable before
// Ready and once Run has ended; reading sessions and records needs neither.
type Manager struct {
	o        Options
	b        Bounds
	log      *slog.Logger
	work     *workgroup.Group
	journal  *journal.Journal
	workload *workload.Service
	creates  *fairSemaphore
	ready    chan struct{}

	mu       sync.Mutex
	running  bool
	sessions map[session.ID]*managed // every session of this node that has not ended

	unreleased map[session.ID]bool // ended, and their template's lease is not given back
}

// New checks the options. The manager does nothing before Run.
func New(o Options) (*Manager, error) {
	switch {
	case o.Store == nil || o.Journal == nil || o.Work == nil || o.Node == nil || o.Templates == nil || o.System == nil || o.Signer == nil || o.Access == nil:
		return nil, errors.New("lifecycle: store, journal, work group, node, templates, system record, signer and access are required")
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
		o: o, b: o.Bounds.withDefaults(), log: o.Log, work: o.Work, journal: o.Journal,
		creates: newFairSemaphore(o.CreateLimit), ready: make(chan struct{}),
		sessions: map[session.ID]*managed{}, unreleased: map[session.ID]bool{},
	}
	m.workload = workload.New(workload.Options{
		Sessions: m, Node: o.Node, Journal: m.journal, Access: o.Access, Work: m.work,
		Now: o.Now, Log: o.Log, Bounds: m.b.Workload, FailPoint: o.FailPoint,
	})
	return m, nil
}

// Workload returns what runs commands and moves files in the sessions.
func (m *Manager) Workload() *workload.Service { return m.workload }

// Ready is closed once what an earlier process left has been sorted out.
func (m *Manager) Ready() <-chan struct{} { return m.ready }

// Run sorts out what an earlier process left, then keeps sessions as they
// should be until ctx ends: it reacts to sandboxes that stop, to deadlines,
// and compares what should be with what is, both ways, again and again. It
// returns when everything it started is over or its time to stop is up;
// sessions live on. It is called once.
func (m *Manager) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.running || m.work.Stopping() {
		m.mu.Unlock()
		return kind.Errorf(kind.Conflict, "lifecycle: Run is called once")
	}
	m.running = true
	m.mu.Unlock()
	defer m.work.Stop(m.b.Stop)

	if err := m.reconcile(ctx); err != nil {
		return fmt.Errorf("sorting out sessions of an earlier process: %w", err)
	}
	close(m.ready)
	m.work.Go(func() { m.journal.Run(m.work.Live()) })

	clock := newClockWatch(m.o.Now)
	tick := time.NewTicker(m.b.Sweep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case n := <-m.o.Node.Notices():
			m.handleNotice(n)
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

func (m *Manager) failPoint(point string) {
	if m.o.FailPoint != nil {
		m.o.FailPoint(point)
	}
}

// available fails unless the manager is ready and not stopping.
func (m *Manager) available() error {
	if m.work.Stopping() {
		return workgroup.StoppingError()
	}
	select {
	case <-m.ready:
		return nil
	default:
		return kind.Errorf(kind.Unavailable, "bivy is starting and still sorting out its sessions").WithHint("try again in a moment")
	}
}

// decide asks whether who may use an action on a session.
func (m *Manager) decide(ctx context.Context, who access.Caller, a access.Action, s session.Session) (audit.Decision, error) {
	return m.o.Access.Decide(ctx, access.Request{Caller: who, Action: a, Resource: access.Of(s)})
}

// transition calls Store.Transition and notifies followers.
func (m *Manager) transition(ctx context.Context, at session.Fence, s session.Session, entries ...audit.Entry) (session.Session, uint64, error) {
	out, first, err := m.o.Store.Transition(ctx, at, s, journal.Traced(ctx, entries)...)
	if err == nil {
		m.journal.Grown(s.ID)
	}
	return out, first, err
}
