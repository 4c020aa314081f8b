package lifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/guest/guestclient"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/node"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/store/sqlite"
	"bivy/internal/workgroup"
	"bivy/internal/workload"
)

// world is a machine with its disks: what survives when the daemon dies.
type world struct {
	t         testing.TB
	dir       string
	host      *fake.Host
	store     *sqlite.Store
	templates *templates
	signer    *audit.Signer
	boot      string
	wrap      func(lifecycle.Node) lifecycle.Node // nil: the node as it is
	grace     time.Duration                       // of the node, after a deadline; 0: the node's default
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), host: &fake.Host{Dir: t.TempDir()}, templates: &templates{leases: map[string]string{}}, signer: audit.GenerateSigner(), boot: "boot-1"}
	store, err := sqlite.Open(t.Context(), filepath.Join(w.dir, "store"), sqlite.Options{Moment: func() audit.Moment {
		return audit.Moment{Now: time.Now(), Boot: w.boot, Uptime: time.Hour}
	}})
	if err != nil {
		t.Fatal(err)
	}
	w.store = store
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// templates is a template store of one image.
type templates struct {
	mu     sync.Mutex
	leases map[string]string
}

func (s *templates) Resolve(_ context.Context, name string, _ func(int64, int64, string)) (sandbox.Template, error) {
	if name != "base" {
		return sandbox.Template{}, kind.Errorf(kind.NotFound, "there is no template %q; there is: base", name).WithField("template")
	}
	return sandbox.Template{Digest: "sha256:" + strings.Repeat("0", 64), ImageDigest: "sha256:" + strings.Repeat("1", 64), Image: "/nonexistent", Agent: []string{"/agent"}}, nil
}

func (s *templates) Lease(_ context.Context, digest, holder string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[holder] = digest
	return nil
}

func (s *templates) Release(_ context.Context, holder string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, holder)
	return nil
}

// faults is what goes wrong between the manager and its ports.
type faults struct {
	mu    sync.Mutex
	rules []*rule
	dead  bool // the power is out: nothing gets through any more
	seen  []string
}

type rule struct {
	call  string
	after bool   // the effect happens and the reply is lost
	twice bool   // the effect happens twice
	times int    // calls affected
	then  func() // called at the moment of the fault
	pass  bool   // then is all: the call goes through
}

var errInjected = kind.Errorf(kind.Unavailable, "injected")

func (f *faults) add(r rule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.times == 0 {
		r.times = 1
	}
	f.rules = append(f.rules, &r)
}

func (f *faults) next(call string) *rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen = append(f.seen, call)
	for _, r := range f.rules {
		if r.call == call && r.times > 0 {
			r.times--
			return r
		}
	}
	return nil
}

func (f *faults) isDead() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

func (f *faults) do(call string, effect func() error) error {
	if f.isDead() {
		return errors.New("the power is out")
	}
	r := f.next(call)
	if r == nil {
		return effect()
	}
	if r.then != nil {
		r.then()
	}
	switch {
	case r.pass:
		return effect()
	case r.twice:
		first := effect()
		if second := effect(); first == nil && second != nil {
			return second
		}
		return first
	case r.after:
		if err := effect(); err != nil {
			return err
		}
	}
	return errInjected
}

type faultyStore struct {
	lifecycle.Store
	f *faults
}

func (s faultyStore) Create(ctx context.Context, in session.Session, key session.IdempotencyKey, e ...audit.Entry) (out session.Session, existed bool, err error) {
	err = s.f.do("Store.Create", func() (err error) { out, existed, err = s.Store.Create(ctx, in, key, e...); return err })
	return out, existed, err
}

func (s faultyStore) Transition(ctx context.Context, at session.Fence, in session.Session, e ...audit.Entry) (out session.Session, first uint64, err error) {
	err = s.f.do("Store.Transition."+string(in.State), func() (err error) { out, first, err = s.Store.Transition(ctx, at, in, e...); return err })
	return out, first, err
}

func (s faultyStore) Append(ctx context.Context, id session.ID, at session.Fence, e ...audit.Entry) (first uint64, err error) {
	err = s.f.do("Store.Append."+string(e[len(e)-1].Action), func() (err error) { first, err = s.Store.Append(ctx, id, at, e...); return err })
	return first, err
}

func (s faultyStore) Seal(ctx context.Context, at session.Fence, in session.Session, sign func(audit.Head, audit.Heads) (audit.Seal, error), e ...audit.Entry) (out session.Session, err error) {
	err = s.f.do("Store.Seal", func() (err error) { out, err = s.Store.Seal(ctx, at, in, sign, e...); return err })
	return out, err
}

func (s faultyStore) Get(ctx context.Context, id session.ID) (out session.Session, err error) {
	err = s.f.do("Store.Get", func() (err error) { out, err = s.Store.Get(ctx, id); return err })
	return out, err
}

type faultyNode struct {
	*node.Node
	f *faults
}

func (n faultyNode) Start(ctx context.Context, want sandbox.Spec) error {
	return n.f.do("Node.Start", func() error { return n.Node.Start(ctx, want) })
}

func (n faultyNode) Bind(ctx context.Context, id session.SandboxID) error {
	return n.f.do("Node.Bind", func() error { return n.Node.Bind(ctx, id) })
}

func (n faultyNode) Inspect(ctx context.Context, id session.SandboxID) (p driver.Posture, err error) {
	err = n.f.do("Node.Inspect", func() (err error) { p, err = n.Node.Inspect(ctx, id); return err })
	return p, err
}

func (n faultyNode) Guest(ctx context.Context, id session.SandboxID) (c *guestclient.Client, err error) {
	err = n.f.do("Node.Guest", func() (err error) { c, err = n.Node.Guest(ctx, id); return err })
	return c, err
}

func (n faultyNode) SetDeadline(id session.SandboxID, at time.Time) error {
	return n.f.do("Node.SetDeadline", func() error { return n.Node.SetDeadline(id, at) })
}

func (n faultyNode) Shut(ctx context.Context, id session.SandboxID) error {
	return n.f.do("Node.Shut", func() error { return n.Node.Shut(ctx, id) })
}

func (n faultyNode) Freeze(ctx context.Context, id session.SandboxID) error {
	return n.f.do("Node.Freeze", func() error { return n.Node.Freeze(ctx, id) })
}

func (n faultyNode) Stats(ctx context.Context, id session.SandboxID) (st driver.Stats, err error) {
	err = n.f.do("Node.Stats", func() (err error) { st, err = n.Node.Stats(ctx, id); return err })
	return st, err
}

func (n faultyNode) Changes(ctx context.Context, id session.SandboxID, w io.Writer) (r driver.ChangeReport, err error) {
	err = n.f.do("Node.Changes", func() (err error) { r, err = n.Node.Changes(ctx, id, w); return err })
	return r, err
}

func (n faultyNode) Destroy(ctx context.Context, id session.SandboxID) (r sandbox.Removal, err error) {
	err = n.f.do("Node.Destroy", func() (err error) { r, err = n.Node.Destroy(ctx, id); return err })
	return r, err
}

func (n faultyNode) List(ctx context.Context) (found []driver.Found, err error) {
	err = n.f.do("Node.List", func() (err error) { found, err = n.Node.List(ctx); return err })
	return found, err
}

type faultyTemplates struct {
	lifecycle.Templates
	f *faults
}

func (s faultyTemplates) Lease(ctx context.Context, digest, holder string) error {
	return s.f.do("Templates.Lease", func() error { return s.Templates.Lease(ctx, digest, holder) })
}

func (s faultyTemplates) Release(ctx context.Context, holder string) error {
	return s.f.do("Templates.Release", func() error { return s.Templates.Release(ctx, holder) })
}

// daemon is one life of the process.
type daemon struct {
	*lifecycle.Manager
	*workload.Service
	t      testing.TB
	w      *world
	f      *faults
	driver *fake.Driver
	stop   func()
}

// start starts a daemon on the machine and waits until it is ready.
func (w *world) start(change ...func(*lifecycle.Options)) *daemon {
	w.t.Helper()
	d := w.launch(change...)
	select {
	case <-d.Ready():
	case <-time.After(30 * time.Second):
		w.t.Fatal("the manager does not get ready")
	}
	return d
}

func (w *world) launch(change ...func(*lifecycle.Options)) *daemon {
	w.t.Helper()
	return w.launchWith(&faults{}, change...)
}

func (w *world) launchWith(f *faults, change ...func(*lifecycle.Options)) *daemon {
	w.t.Helper()
	drv := &fake.Driver{Host: w.host}
	log := slog.New(slog.NewTextHandler(w.t.Output(), nil))
	signing := journal.NewSigning(w.dir, w.signer)
	system := journal.NewSystemRecord(journal.SystemOptions{Store: w.store, Node: "here", Signing: signing, Access: access.Roles{}, Log: log})
	o := lifecycle.Options{
		Store: faultyStore{w.store, f}, Work: workgroup.New(), Templates: faultyTemplates{w.templates, f}, System: system,
		Signer: signing, Access: access.Roles{}, NodeID: "here", BootID: w.boot, Log: log,
		Bounds: lifecycle.Bounds{RetryMin: time.Millisecond, RetryMax: 20 * time.Millisecond, Sweep: time.Hour, Stop: 5 * time.Second, Workload: workload.Bounds{List: 5 * time.Second}},
	}
	for _, c := range change {
		c(&o)
	}
	o.Journal = journal.New(journal.Options{Store: o.Store, Work: o.Work, Log: log, FailPoint: o.FailPoint})
	n, err := node.New(node.Options{
		Dir: filepath.Join(w.dir, "node"), Driver: drv, Recorder: journal.NewRecorder(o.Journal, system, "here"),
		BootID: w.boot, Tick: 5 * time.Millisecond, Grace: w.grace, Log: log,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	o.Node = faultyNode{n, f}
	if w.wrap != nil {
		o.Node = w.wrap(o.Node)
	}
	m, err := lifecycle.New(o)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := n.Run(ctx); err != nil {
			w.t.Errorf("node: %v", err)
		}
	})
	wg.Go(func() {
		if err := m.Run(ctx); err != nil && !f.isDead() {
			w.t.Errorf("manager: %v", err)
		}
	})
	d := &daemon{Manager: m, Service: m.Workload(), t: w.t, w: w, f: f, driver: drv, stop: sync.OnceFunc(func() { cancel(); wg.Wait() })}
	w.t.Cleanup(d.stop)
	return d
}

var alice = access.Caller{Principal: session.Principal{Subject: "key:alice"}, Role: access.Developer}

func (d *daemon) create() session.Session {
	d.t.Helper()
	s, _, err := d.Create(d.t.Context(), lifecycle.CreateRequest{Caller: alice})
	if err != nil {
		d.t.Fatalf("create: %v", err)
	}
	return s
}

func (d *daemon) end(id session.ID) session.Session {
	d.t.Helper()
	for {
		s, err := d.End(d.t.Context(), lifecycle.EndRequest{Caller: alice, ID: id})
		if err == nil {
			return s
		}
		if !kind.Is(err, kind.Unavailable) {
			d.t.Fatalf("end of %s: %v", id, err)
		}
	}
}

// awaitState waits until the record has led the session into a state.
func (d *daemon) awaitState(id session.ID, want session.State) session.Session {
	d.t.Helper()
	var s session.Session
	d.awaitEvent(id, func(audit.Stored) bool {
		var err error
		if s, err = d.w.store.Get(d.t.Context(), id); err != nil {
			d.t.Fatal(err)
		}
		return s.State == want
	})
	return s
}

// awaitEvent waits for an event that match accepts.
func (d *daemon) awaitEvent(id session.ID, match func(audit.Stored) bool) audit.Stored {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), 20*time.Second)
	defer cancel()
	var got audit.Stored
	stop := errors.New("stop")
	err := d.Follow(ctx, alice, id, 0, func(e audit.Stored) error {
		if match(e) {
			got = e
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) {
		d.t.Fatalf("session %s: the event did not come: %v\n%s", id, err, d.w.story(id))
	}
	return got
}

func (d *daemon) awaitAction(id session.ID, a audit.Action) audit.Stored {
	d.t.Helper()
	return d.awaitEvent(id, func(e audit.Stored) bool { return e.Event.Action == a })
}

// run runs a line of shell to its end and returns what it put out.
func (d *daemon) run(id session.ID, line string) (string, workload.Exit) {
	d.t.Helper()
	p, err := d.Start(d.t.Context(), alice, id, workload.Command{Argv: []string{"sh", "-c", line}})
	if err != nil {
		d.t.Fatalf("start %q: %v", line, err)
	}
	defer p.Detach()
	return collect(d.t, p)
}

func collect(t testing.TB, p *workload.Process) (string, workload.Exit) {
	t.Helper()
	var out strings.Builder
	for {
		ev, err := p.Next(t.Context())
		if err != nil {
			t.Fatalf("next: %v", err)
		}
		if ev.Kind == workload.End {
			return out.String(), ev.Exit
		}
		out.Write(ev.Data)
	}
}

// story is a record as text, for messages and comparisons.
func (w *world) story(id session.ID) string {
	var b strings.Builder
	err := w.store.Events(context.Background(), id, 0, 0, func(e audit.Stored) error {
		fmt.Fprintf(&b, "%3d %-20s %-8s %-16s %.160s\n", e.Event.Seq, e.Event.Action, e.Event.Outcome, e.Event.Ref, e.Payload)
		return nil
	})
	if err != nil {
		fmt.Fprintln(&b, err)
	}
	return b.String()
}

func (w *world) count(id session.ID, a audit.Action) int {
	n := 0
	err := w.store.Events(context.Background(), id, 0, 0, func(e audit.Stored) error {
		if e.Event.Action == a {
			n++
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// checkEnded checks an ended session: its reason, and that its record
// verifies with nothing left open.
func (w *world) checkEnded(d *daemon, id session.ID, reasons ...session.Reason) session.Session {
	w.t.Helper()
	s, err := w.store.Get(context.Background(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	if s.State != session.Ended || s.Reason == "" || s.EndedAt.IsZero() || (len(reasons) > 0 && !slices.Contains(reasons, s.Reason)) {
		w.t.Errorf("session %s is %s, reason %q (%s), want ended for %v\n%s", id, s.State, s.Reason, s.Detail, reasons, w.story(id))
		return s
	}
	var export bytes.Buffer
	if err := d.Export(context.Background(), alice, id, &export); err != nil {
		w.t.Fatal(err)
	}
	report, err := audit.Verify(&export, []audit.PublicKey{w.signer.Public()}, audit.VerifyOptions{})
	if err != nil {
		w.t.Errorf("the record of %s does not verify: %v\n%s", id, err, w.story(id))
	}
	_ = report
	return s
}

// checkNothingLeft checks that of ended sessions nothing is on the machine.
func (w *world) checkNothingLeft() {
	w.t.Helper()
	found, err := (&fake.Driver{Host: w.host}).List(context.Background())
	if err != nil || len(found) != 0 {
		w.t.Errorf("sandboxes left: %+v (%v)", found, err)
	}
	handles, err := os.ReadDir(filepath.Join(w.dir, "node", "handles"))
	if err != nil || len(handles) != 0 {
		w.t.Errorf("handles left: %v (%v)", handles, err)
	}
	w.templates.mu.Lock()
	defer w.templates.mu.Unlock()
	if len(w.templates.leases) != 0 {
		w.t.Errorf("template leases left: %v", w.templates.leases)
	}
}
