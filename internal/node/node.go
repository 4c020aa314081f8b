package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"sync"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/hostclock"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// Recorder writes down what the node does by itself.
type Recorder interface {
	// Record makes e durable in the record of the node and, unless that is
	// sealed, in the record of the sandbox's session. For an intent it returns
	// a number, not 0, that the outcome names in Concludes; for other events 0.
	// The number is valid in this process only. When Record fails the node does
	// not do what e announces. An intent is concluded once; a second outcome
	// fails with Invalid.
	Record(ctx context.Context, id session.SandboxID, e audit.Entry) (number uint64, err error)
}

// Options are what a Node is made of. Dir, Driver and Recorder are required.
type Options struct {
	Dir       string // private to this node; made when missing
	Driver    driver.Driver
	Recorder  Recorder
	Log       *slog.Logger // nil: discard
	AgentPort uint16       // where the agent listens inside; 0: wire.Port

	// HostCPUs is how many processors a guest may see at most, as in
	// sandbox.ShapeOf; 0: those of this machine.
	HostCPUs int

	BootID string               // of this boot; empty: the kernel's
	Uptime func() time.Duration // since boot, sleep included; nil: the kernel's
	Now    func() time.Time     // wall clock; nil: time.Now

	// Grace is how long after a deadline the node waits for its caller to end
	// the sandbox in good order before it destroys it; 0: 30 s.
	Grace time.Duration
	// Tick is the longest time between two looks at deadlines and memory
	// kills; 0: 2 s.
	Tick time.Duration
}

// Node keeps sandboxes.
type Node struct {
	o       Options
	log     *slog.Logger
	key     []byte // derives the agents' tokens
	notices *notifier
	wake    chan struct{} // a deadline changed

	// base carries the watchers; it ends when Run does.
	base context.Context
	stop context.CancelFunc
	work sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	table    map[session.SandboxID]*entry
	removals removals // what the node destroyed by itself
}

// entry is one sandbox. Its lock is below Node.mu in order, and is not held
// across calls to the driver.
type entry struct {
	id session.SandboxID

	// busy serialises Start and Destroy, whose file has to agree with what the
	// driver has.
	busy chan struct{}

	mu         sync.Mutex
	saved      saved // as in its handle file
	up         bool  // the driver has it running
	destroying bool  // its exit needs no notice
	shut       bool
	forced     bool // the node is destroying it for its deadline
	conns      map[*conn]struct{}
	client     *guestclient.Client
	kills      int64

	// intent is the Recorder's number of the recorded intent to destroy it by
	// the node's own decision, 0 while there is none. It stays open while a
	// destroy that failed is tried again.
	intent uint64
	why    string // of the intent
}

// New opens the node's directory. It starts nothing.
func New(o Options) (*Node, error) {
	if o.Dir == "" || o.Driver == nil || o.Recorder == nil {
		return nil, errors.New("node: a directory, a driver and a recorder are required")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.AgentPort == 0 {
		o.AgentPort = wire.Port
	}
	if o.Uptime == nil {
		o.Uptime = hostclock.Uptime
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Grace == 0 {
		o.Grace = 30 * time.Second
	}
	if o.Tick == 0 {
		o.Tick = 2 * time.Second
	}
	if o.BootID == "" {
		var err error
		if o.BootID, err = hostclock.BootID(); err != nil {
			return nil, fmt.Errorf("node: %w", err)
		}
	}
	key, err := openDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	n := &Node{
		o: o, log: o.Log, key: key, notices: newNotifier(), wake: make(chan struct{}, 1), table: map[session.SandboxID]*entry{},
	}
	n.base, n.stop = context.WithCancel(context.Background())
	return n, nil
}

// Run keeps deadlines and sends notices until ctx ends. Sandboxes live on. It is
// called once.
func (n *Node) Run(ctx context.Context) error {
	defer n.quit()
	n.work.Go(func() { n.notices.deliver(n.base) })
	n.work.Go(func() { n.countKills(n.base) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.wake:
		case <-timer.C:
		}
		timer.Reset(n.checkDeadlines())
	}
}

// quit ends the watchers and drops connections into sandboxes.
func (n *Node) quit() {
	n.mu.Lock()
	n.stopping = true
	all := n.entriesLocked()
	n.mu.Unlock()
	n.stop()
	for _, e := range all {
		e.cut(false)
	}
	n.work.Wait()
}

// goTracked runs f in a goroutine that Run waits for, unless the node stops.
func (n *Node) goTracked(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopping {
		return false
	}
	n.work.Go(f)
	return true
}

func (n *Node) entriesLocked() []*entry {
	all := make([]*entry, 0, len(n.table))
	for _, e := range n.table {
		all = append(all, e)
	}
	return all
}

// entry returns the entry of a sandbox.
func (n *Node) entry(id session.SandboxID) (*entry, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.table[id]; e != nil {
		return e, nil
	}
	return nil, kind.Errorf(kind.NotFound, "sandbox %s is not on this node", id)
}

// claim returns the entry of a sandbox, making one when there is none.
func (n *Node) claim(id session.SandboxID) (e *entry, fresh bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.table[id]; e != nil {
		return e, false
	}
	e = newEntry(id)
	n.table[id] = e
	return e, true
}

func newEntry(id session.SandboxID) *entry {
	return &entry{id: id, busy: make(chan struct{}, 1), conns: map[*conn]struct{}{}}
}

func (n *Node) forget(e *entry) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.table[e.id] == e {
		delete(n.table, e.id)
	}
}

func (e *entry) hold(ctx context.Context) error {
	select {
	case e.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *entry) release() { <-e.busy }

// Start makes a sandbox. Its file is written first, so that Recover knows it
// whatever happens from here on.
func (n *Node) Start(ctx context.Context, want sandbox.Spec) error {
	if _, _, err := want.ID.Split(); err != nil {
		return err
	}
	e, fresh := n.claim(want.ID)
	if !fresh {
		return kind.Errorf(kind.Conflict, "sandbox %s is on this node already", want.ID)
	}
	if err := e.hold(ctx); err != nil {
		n.forget(e)
		return err
	}
	defer e.release()
	file := n.newSaved(want)
	e.mu.Lock()
	e.saved = file
	e.mu.Unlock()
	if err := n.write(file, true); err != nil {
		n.forget(e)
		return fmt.Errorf("sandbox %s: %w", want.ID, err)
	}
	handle, err := n.o.Driver.Start(ctx, want.StartRequest(n.o.HostCPUs))
	if err == nil {
		file.Handle = &handle
		err = n.write(file, false)
	}
	if err != nil {
		// The driver leaves nothing when it fails, but its reply may be what
		// was lost. The file stays until the driver has said that all is gone.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		if gone := n.discard(undo, e); gone != nil {
			err = errors.Join(err, gone)
		}
		return fmt.Errorf("sandbox %s: start: %w", want.ID, err)
	}
	e.mu.Lock()
	e.saved, e.up = file, true
	e.mu.Unlock()
	n.watch(e)
	n.checkSoon()
	return nil
}

// StartsFrom says what Start makes a sandbox of: "snapshot" or "image".
func (n *Node) StartsFrom(want sandbox.Spec) string {
	if want.StartRequest(n.o.HostCPUs).Snapshot != nil {
		return "snapshot"
	}
	return "image"
}

// undoTime bounds the clearing away after a Start that failed.
const undoTime = 20 * time.Second

// Bind waits for the agent and gives it its identity. It may be repeated.
func (n *Node) Bind(ctx context.Context, id session.SandboxID) error {
	e, err := n.entry(id)
	if err != nil {
		return err
	}
	c, err := n.guest(e)
	if err != nil {
		return err
	}
	if err := n.awaitAgent(ctx, e, c); err != nil {
		return fmt.Errorf("sandbox %s: waiting for the agent inside: %w", id, err)
	}
	e.mu.Lock()
	init := e.saved.Init
	e.mu.Unlock()
	name, _, err := id.Split()
	if err != nil {
		return err
	}
	env := map[string]string{"BIVY_SESSION_ID": string(name)}
	maps.Copy(env, init.Env)
	_, err = c.Init(ctx, wire.InitRequest{
		AccessToken: n.token(id), EnvVars: env, Timestamp: n.o.Now(), Hostname: init.Hostname,
		DefaultUser: init.User, DefaultWorkdir: init.Workdir, LifecycleID: string(id),
	})
	if wire.ReasonOf(err) == wire.ReasonUser {
		return kind.Errorf(kind.Invalid, "%.64q is no user of the template", init.User).WithField("user")
	}
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	return nil
}

const (
	// Tries to reach an agent that is starting come at growing distances.
	firstTry = time.Millisecond
	lastTry  = 20 * time.Millisecond
	// tryTime bounds one of them: a connection made while the guest boots may
	// never be answered.
	tryTime = 2 * time.Second
)

func (n *Node) awaitAgent(ctx context.Context, e *entry, c *guestclient.Client) error {
	err := poll.Until(ctx, poll.Delays{First: firstTry, Max: lastTry}, func() (done bool, err error) {
		try, cancel := context.WithTimeout(ctx, tryTime)
		err = c.Health(try)
		cancel()
		if err == nil {
			return true, nil
		}
		e.mu.Lock()
		up := e.up
		e.mu.Unlock()
		if !up {
			return true, fmt.Errorf("the sandbox stopped: %w", err)
		}
		return false, err
	})
	if err != nil {
		return kind.Errorf(kind.Unavailable, "%w", err)
	}
	return nil
}

// Inspect is the posture check from outside.
func (n *Node) Inspect(ctx context.Context, id session.SandboxID) (driver.Posture, error) {
	if i, ok := n.o.Driver.(driver.Inspector); ok {
		return i.Inspect(ctx, id)
	}
	if _, err := n.entry(id); err != nil {
		return driver.Posture{}, err
	}
	got := n.o.Driver.Capabilities().Isolation
	return driver.Posture{Checks: []driver.Check{{
		Name: "isolation", Want: "checked from outside, or none claimed", Got: got + ", not checked", OK: got == "none",
	}}}, nil
}

// Freeze pauses the sandbox where the driver can.
func (n *Node) Freeze(ctx context.Context, id session.SandboxID) error {
	e, err := n.entry(id)
	if err != nil {
		return err
	}
	e.mu.Lock()
	up := e.up
	e.mu.Unlock()
	if !up {
		return kind.Errorf(kind.NotFound, "sandbox %s does not run", id)
	}
	p, ok := n.o.Driver.(driver.Pauser)
	if !ok || !n.o.Driver.Capabilities().Pause {
		return nil
	}
	return p.Pause(ctx, id)
}

// Changes writes what the sandbox changed in its file system as a tar.
func (n *Node) Changes(ctx context.Context, id session.SandboxID, w io.Writer) (driver.ChangeReport, error) {
	e, err := n.entry(id)
	if err != nil {
		return driver.ChangeReport{}, err
	}
	e.mu.Lock()
	up := e.up
	e.mu.Unlock()
	if !up {
		return driver.ChangeReport{}, kind.Errorf(kind.NotFound, "sandbox %s does not run", id)
	}
	x, ok := n.o.Driver.(driver.Exporter)
	if !ok || !n.o.Driver.Capabilities().Export {
		return driver.ChangeReport{}, kind.Errorf(kind.Unavailable, "driver %s cannot tell what a sandbox changed", n.o.Driver.Name())
	}
	return x.ExportChanges(ctx, id, w)
}

// Stats measures a sandbox from the host's side.
func (n *Node) Stats(ctx context.Context, id session.SandboxID) (driver.Stats, error) {
	s, ok := n.o.Driver.(driver.Statter)
	if !ok {
		return driver.Stats{}, kind.Errorf(kind.Unavailable, "driver %s cannot measure a sandbox", n.o.Driver.Name())
	}
	return s.Stats(ctx, id)
}

// List is what is on the host now.
func (n *Node) List(ctx context.Context) ([]driver.Found, error) { return n.o.Driver.List(ctx) }

// Notices is where the node reports sandboxes that stopped, are past their deadline or lost
// processes to their memory limit. The node never waits for its reader:
// notices of one sandbox that were not read yet are merged.
func (n *Node) Notices() <-chan sandbox.Notice { return n.notices.out }
