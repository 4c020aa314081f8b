// Package node keeps the sandboxes of one machine: it starts and binds them,
// finds them again after the daemon was restarted, carries traffic into them,
// holds their deadlines and destroys them.
//
// It knows sandboxes, not sessions, and cannot reach the database. What it
// must remember it writes to one private file per sandbox, before the driver
// is asked, so that a sandbox is known from the moment any part of it exists.
//
// Deadlines count the time this machine is up, sleep included (the kernel's
// CLOCK_BOOTTIME, tied to the boot id): moving the wall clock neither ends a
// sandbox early nor keeps it alive.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"bivy/internal/driver"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/hostclock"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

// Options are what a Node is made of. Dir and Driver are required.
type Options struct {
	Dir       string // private to this node; made when missing
	Driver    driver.Driver
	Log       *slog.Logger // nil: discard
	AgentPort uint16       // where the agent listens inside; 0: wire.Port

	BootID string               // of this boot; empty: the kernel's
	Uptime func() time.Duration // since boot, sleep included; nil: the kernel's
	Now    func() time.Time     // wall clock; nil: time.Now

	// Grace is how long after a deadline the node waits for somebody to end
	// the sandbox in good order before it destroys it; 0: 30 s.
	Grace time.Duration
	// Tick is the longest time between two looks at deadlines and memory
	// kills; 0: 2 s.
	Tick time.Duration
}

// Node keeps sandboxes. It implements lifecycle.Node.
type Node struct {
	o    Options
	log  *slog.Logger
	key  []byte // derives the agents' tokens
	news *news
	poke chan struct{} // a deadline changed

	// base carries the watchers; it ends when Run does.
	base context.Context
	stop context.CancelFunc
	work sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	table    map[session.SandboxID]*entry
}

var _ lifecycle.Node = (*Node)(nil)

// entry is one sandbox. Its lock is below Node.mu in order, and is not held
// across calls to the driver.
type entry struct {
	id session.SandboxID

	// busy serialises Start and Destroy, whose file has to agree with what the
	// driver has.
	busy chan struct{}

	mu     sync.Mutex
	rec    record
	up     bool // the driver has it running
	going  bool // it is being destroyed: its exit is no news
	shut   bool
	forced bool // a Destroy for the deadline is under way
	conns  map[*conn]struct{}
	client *guestclient.Client
	kills  int64
}

// New opens the node's directory. It starts nothing.
func New(o Options) (*Node, error) {
	if o.Dir == "" || o.Driver == nil {
		return nil, errors.New("node: a directory and a driver are required")
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
		o: o, log: o.Log, key: key, news: newNews(), poke: make(chan struct{}, 1), table: map[session.SandboxID]*entry{},
	}
	n.base, n.stop = context.WithCancel(context.Background())
	return n, nil
}

// Run keeps deadlines and tells news until ctx ends. Sandboxes live on. It is
// called once.
func (n *Node) Run(ctx context.Context) error {
	defer n.quit()
	n.work.Go(func() { n.news.deliver(n.base) })
	n.work.Go(func() { n.countKills(n.base) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.poke:
		case <-timer.C:
		}
		timer.Reset(n.look())
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
func (n *Node) Start(ctx context.Context, want lifecycle.SandboxSpec) error {
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
	rec := n.newRecord(want)
	e.mu.Lock()
	e.rec = rec
	e.mu.Unlock()
	if err := n.write(rec, true); err != nil {
		n.forget(e)
		return fmt.Errorf("sandbox %s: %w", want.ID, err)
	}
	handle, err := n.o.Driver.Start(ctx, request(want))
	if err == nil {
		rec.Handle = &handle
		err = n.write(rec, false)
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
	e.rec, e.up = rec, true
	e.mu.Unlock()
	n.watch(e)
	n.nudge()
	return nil
}

// undoTime bounds the clearing away after a Start that failed.
const undoTime = 20 * time.Second

// discard makes the driver destroy a sandbox and forgets it. The caller holds
// the entry.
func (n *Node) discard(ctx context.Context, e *entry) error {
	if err := n.o.Driver.Destroy(ctx, e.id); err != nil {
		return err
	}
	if err := n.erase(e.id); err != nil {
		return err
	}
	n.forget(e)
	return nil
}

// request translates what is wanted for the driver.
func request(want lifecycle.SandboxSpec) driver.StartRequest {
	r := want.Spec.Resources
	return driver.StartRequest{
		ID: want.ID, Image: want.Template.Image, Snapshot: want.Snapshot(),
		Args: want.Template.Agent, Env: []string{"PATH=" + AgentSearchPath}, Hostname: want.Spec.Hostname,
		Limits: driver.Limits{CPUMillis: r.CPUMillis, MemoryBytes: r.MemoryMiB << 20, DiskBytes: r.DiskMiB << 20, PIDs: r.PIDs},
	}
}

// AgentSearchPath is the agent's PATH, which its commands start from.
const AgentSearchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

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
	init := e.rec.Init
	e.mu.Unlock()
	owner, _, err := id.Split()
	if err != nil {
		return err
	}
	env := map[string]string{"BIVY_SESSION_ID": string(owner)}
	for k, v := range init.Env {
		env[k] = v
	}
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
	for wait := firstTry; ; wait = min(2*wait, lastTry) {
		try, cancel := context.WithTimeout(ctx, tryTime)
		err := c.Health(try)
		cancel()
		if err == nil {
			return nil
		}
		e.mu.Lock()
		up := e.up
		e.mu.Unlock()
		if !up {
			return kind.Errorf(kind.Unavailable, "the sandbox stopped: %w", err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return kind.Errorf(kind.Unavailable, "%w; last: %w", ctx.Err(), err)
		}
	}
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

// Guest returns the client of the agent inside.
func (n *Node) Guest(_ context.Context, id session.SandboxID) (*guestclient.Client, error) {
	e, err := n.entry(id)
	if err != nil {
		return nil, err
	}
	return n.guest(e)
}

func (n *Node) guest(e *entry) (*guestclient.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.openLocked(); err != nil {
		return nil, err
	}
	if e.client == nil {
		e.client = guestclient.New(guestclient.Config{
			Dial:  func(ctx context.Context) (net.Conn, error) { return n.dial(ctx, e, n.o.AgentPort) },
			Token: n.token(e.id),
		})
	}
	return e.client, nil
}

func (e *entry) openLocked() error {
	switch {
	case e.shut, e.going:
		return kind.Errorf(kind.Conflict, "sandbox %s is shut", e.id)
	case !e.up:
		return kind.Errorf(kind.Unavailable, "sandbox %s does not run", e.id)
	}
	return nil
}

// dial connects to a TCP port inside.
func (n *Node) dial(ctx context.Context, e *entry, port uint16) (net.Conn, error) {
	e.mu.Lock()
	err := e.openLocked()
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	raw, err := n.o.Driver.Dial(ctx, e.id, port)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, e: e}
	e.mu.Lock()
	defer e.mu.Unlock()
	// The gate may have shut while the driver was dialling.
	if err := e.openLocked(); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	e.conns[c] = struct{}{}
	return c, nil
}

// conn is an open connection into a sandbox.
type conn struct {
	net.Conn
	e *entry
}

// Close closes the connection and lets the gate forget it.
func (c *conn) Close() error {
	c.e.mu.Lock()
	delete(c.e.conns, c)
	c.e.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite ends the sending half where the wire can.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return kind.Errorf(kind.Invalid, "this connection has no half to close")
}

// cut closes every connection into the sandbox; with shut it stays so.
func (e *entry) cut(shut bool) {
	e.mu.Lock()
	e.shut = e.shut || shut
	client := e.client
	e.client = nil
	open := make([]net.Conn, 0, len(e.conns))
	for c := range e.conns {
		open = append(open, c.Conn)
	}
	clear(e.conns)
	e.mu.Unlock()
	for _, c := range open {
		// Closing is what matters; an error means that the other end did.
		_ = c.Close()
	}
	if client != nil {
		_ = client.Close() // always nil
	}
}

// Shut refuses new work for the sandbox and cuts open connections into it.
func (n *Node) Shut(_ context.Context, id session.SandboxID) error {
	e, err := n.entry(id)
	if err != nil {
		return err
	}
	e.cut(true)
	return nil
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
func (n *Node) Changes(ctx context.Context, id session.SandboxID, w io.Writer) error {
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
	x, ok := n.o.Driver.(driver.Exporter)
	if !ok || !n.o.Driver.Capabilities().Export {
		return kind.Errorf(kind.Unavailable, "driver %s cannot tell what a sandbox changed", n.o.Driver.Name())
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

// Destroy kills the sandbox, proves its death and removes all of it. It may
// be repeated, also for a sandbox that the node does not know.
func (n *Node) Destroy(ctx context.Context, id session.SandboxID) error {
	if _, _, err := id.Split(); err != nil {
		return err
	}
	e, _ := n.claim(id)
	e.mu.Lock()
	e.going = true
	e.mu.Unlock()
	e.cut(true)
	if err := e.hold(ctx); err != nil {
		return fmt.Errorf("sandbox %s: waiting for a start or another destroy: %w", id, err)
	}
	defer e.release()
	if err := n.discard(ctx, e); err != nil {
		return fmt.Errorf("sandbox %s: destroy: %w", id, err)
	}
	return nil
}

// List is what is on the host now.
func (n *Node) List(ctx context.Context) ([]driver.Found, error) { return n.o.Driver.List(ctx) }

// Exits tells of sandboxes that stopped, are past their deadline or lost
// processes to their memory limit. Nothing waits for who reads it.
func (n *Node) Exits() <-chan lifecycle.Exited { return n.news.out }
