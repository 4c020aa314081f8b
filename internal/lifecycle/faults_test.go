package lifecycle_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver/fake"
	"bivy/internal/kind"
	"bivy/internal/leakcheck"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// createCalls and endCalls are what a create and an end ask of their ports.
// TestMatrixIsComplete checks that nothing is missing.
var (
	createCalls = []string{"Store.Create", "Templates.Lease", "Node.Start", "Node.Bind", "Node.Inspect", "Store.Transition.running"}
	endCalls    = []string{
		"Store.Transition.ending", "Node.Shut", "Node.Freeze", "Node.Stats", "Node.Changes", "Store.Append.step.intent",
		"Node.Destroy", "Node.List", "Templates.Release", "Store.Seal",
	}
)

// ways are the ways in which each call goes wrong.
func ways(cancel func()) map[string]rule {
	return map[string]rule{
		"before":      {},
		"after":       {after: true},
		"caller gone": {then: cancel, pass: true},
		"twice":       {twice: true},
	}
}

func TestMatrixIsComplete(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.end(s.ID)
	known := append(append([]string{"Store.Get"}, createCalls...), endCalls...)
	for _, call := range d.f.seen {
		if !slices.Contains(known, call) {
			t.Errorf("%s is not in the matrix", call)
		}
	}
	for _, call := range known {
		if !slices.Contains(d.f.seen, call) {
			t.Errorf("%s is in the matrix and never called", call)
		}
	}
}

// Whatever goes wrong in a create, the session runs, or it has ended for a
// reason and left nothing.
func TestCreateMatrix(t *testing.T) {
	for _, call := range createCalls {
		for way := range ways(nil) {
			t.Run(call+"/"+way, func(t *testing.T) {
				w := newWorld(t)
				d := w.start()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				r := ways(cancel)[way]
				r.call = call
				d.f.add(r)
				s, _, err := d.Create(ctx, lifecycle.CreateRequest{Caller: alice})
				all, _, listErr := d.List(t.Context(), alice, session.Filter{}, "", 10)
				if listErr != nil || len(all) > 1 {
					t.Fatalf("list: %+v, %v", all, listErr)
				}
				switch {
				case err == nil:
					if s.State != session.Running {
						t.Errorf("created: %s", s.State)
					}
					if got, _ := d.run(s.ID, "echo works"); got != "works\n" {
						t.Errorf("in the session: %q", got)
					}
					d.end(s.ID)
					w.checkEnded(d, s.ID, session.Requested)
				case len(all) == 0:
					if call != "Store.Create" {
						t.Errorf("a session was begun and has no record: %v", err)
					}
				default:
					d.awaitState(all[0].ID, session.Ended)
					w.checkEnded(d, all[0].ID, session.CreateFailed)
				}
				if (way == "before" || way == "after") && err == nil {
					t.Error("the create succeeded although a step failed")
				}
				w.checkNothingLeft()
			})
		}
	}
}

// Whatever goes wrong in an end, the session ends for the reason it was given
// and leaves nothing; what could not be proved is a residual.
func TestEndMatrix(t *testing.T) {
	for _, call := range endCalls {
		for way := range ways(nil) {
			t.Run(call+"/"+way, func(t *testing.T) {
				w := newWorld(t)
				d := w.start()
				s := d.create()
				p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "echo left > behind; exec sleep 1000"}})
				if err != nil {
					t.Fatal(err)
				}
				defer p.Detach()
				d.awaitAction(s.ID, audit.CommandStarted)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				r := ways(cancel)[way]
				r.call = call
				d.f.add(r)
				if _, err := d.End(ctx, lifecycle.EndRequest{Caller: alice, ID: s.ID, Reason: session.ResourceOut}); err != nil && way == "twice" && !strings.HasPrefix(call, "Store.") {
					t.Errorf("end: %v", err)
				}
				s = d.awaitState(s.ID, session.Ended)
				w.checkEnded(d, s.ID, session.ResourceOut)
				w.checkNothingLeft()
				if n := w.count(s.ID, audit.CommandEnded); n != 1 {
					t.Errorf("the command ended %d times\n%s", n, w.story(s.ID))
				}
				// A reply that was lost is no reason to tell a thing twice, or to
				// call lost what was done.
				if n := w.count(s.ID, audit.IntentLost); n != 0 {
					t.Errorf("%d intents are told to be lost\n%s", n, w.story(s.ID))
				}
				for _, step := range []string{"shut", "kill", "dispose", "release"} {
					done := 0
					for _, e := range w.entries(s.ID, "end."+step) {
						if strings.HasPrefix(e, "step.done") {
							done++
						}
					}
					if done != 1 && (step != "shut" || call != "Node.Shut") {
						t.Errorf("step %s is told %d times to be done\n%s", step, done, w.story(s.ID))
					}
				}
				failing := (way == "before" || way == "after") && slices.Contains([]string{"Node.Shut", "Node.Freeze", "Node.Changes"}, call)
				if failing != (len(s.Residuals) > 0) {
					t.Errorf("residuals: %v\n%s", s.Residuals, w.story(s.ID))
				}
			})
		}
	}
}

// killer cuts the power at the n-th time a point is passed.
type killer struct {
	mu     sync.Mutex
	point  string
	f      *faults
	points []string // passed
	cut    chan struct{}
	free   chan struct{}
}

func newKiller(point string) *killer {
	return &killer{point: point, f: &faults{}, cut: make(chan struct{}), free: make(chan struct{})}
}

func (k *killer) launch(w *world) *daemon {
	return w.launchWith(k.f, func(o *lifecycle.Options) { o.FailPoint, o.Bounds.Stop = k.hook, 50*time.Millisecond })
}

// hook is Options.Hook. At the point, nothing of this process reaches the
// machine any more, and the goroutine that came by never goes on.
func (k *killer) hook(point string) {
	k.mu.Lock()
	k.points = append(k.points, point)
	dies := point == k.point
	if dies {
		k.point = ""
		k.f.mu.Lock()
		k.f.dead = true
		k.f.mu.Unlock()
		close(k.cut)
	}
	k.mu.Unlock()
	if dies {
		<-k.free
	}
}

// life is what every kind of work looks like once: it returns when it is done
// or when the power is cut.
func (w *world) life(k *killer) (d *daemon, over chan struct{}) {
	d = k.launch(w)
	over = make(chan struct{})
	go func() {
		defer close(over)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() {
			select {
			case <-k.cut:
				cancel()
			case <-ctx.Done():
			}
		}()
		select {
		case <-d.Ready():
		case <-ctx.Done():
			return
		}
		s, _, err := d.Create(ctx, lifecycle.CreateRequest{Caller: alice, Key: session.IdempotencyKey{Scope: "a", Key: "k", Digest: "d"}})
		if err != nil {
			return
		}
		// Errors end the life: only a cut makes them, and the check is what is
		// on the machine afterwards.
		if _, err := d.WriteFile(ctx, alice, s.ID, "/in", "", strings.NewReader("input"), 5); err != nil {
			return
		}
		p, err := d.Start(ctx, alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "cat in > out"}})
		if err != nil {
			return
		}
		defer p.Detach()
		for {
			ev, err := p.Next(ctx)
			if err != nil {
				return
			}
			if ev.Kind == workload.End {
				break
			}
		}
		r, _, err := d.ReadFile(ctx, alice, s.ID, "/out", "")
		if err != nil {
			return
		}
		var b bytes.Buffer
		if _, err := b.ReadFrom(r); err != nil {
			return
		}
		if err := r.Close(); err != nil {
			return
		}
		if _, err := d.End(ctx, lifecycle.EndRequest{Caller: alice, ID: s.ID}); err != nil {
			return
		}
	}()
	return d, over
}

// The process is killed at every point of a life, then started again: every
// session runs or has ended with a reason, no sandbox is without a session,
// nothing is left, and every record verifies.
func TestKilledAtEveryPoint(t *testing.T) {
	w := newWorld(t)
	dry := newKiller("")
	d, over := w.life(dry)
	<-over
	d.stop()
	var points []string
	for _, p := range dry.points {
		if !slices.Contains(points, p) {
			points = append(points, p)
		}
	}
	t.Logf("%d points", len(points))
	if len(points) < 30 {
		t.Fatalf("only %d points: %v", len(points), points)
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) { killedAt(t, point) })
	}
}

// Killed again while the next process sorts out what the first one left.
func TestKilledAgainWhileRecovering(t *testing.T) {
	for _, point := range []string{"create.start.do", "create.running.done", "exec.done", "end.digest.do", "end.kill.done"} {
		for _, again := range []string{"end.shut.intent", "end.shut.do", "end.kill.intent", "end.kill.do", "end.kill.done", "end.seal.do", "end.seal.done"} {
			t.Run(point+"/"+again, func(t *testing.T) { killedAt(t, point, again) })
		}
	}
}

func killedAt(t *testing.T, point string, again ...string) {
	w := newWorld(t)
	k := newKiller(point)
	dead, over := w.life(k)
	defer dead.stop()
	defer func() { close(k.free); <-over }()
	select {
	case <-k.cut:
	case <-time.After(30 * time.Second):
		t.Fatal("the point was not reached")
	}
	for _, p := range again {
		k2 := newKiller(p)
		dead2 := k2.launch(w)
		defer dead2.stop()
		defer close(k2.free)
		<-dead2.Ready()
		// Where nothing was left to end, the point is not passed by itself.
		all, err := w.store.Live(t.Context(), "here")
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			go dead2.End(t.Context(), lifecycle.EndRequest{Caller: alice, ID: s.ID}) //nolint:errcheck // it is killed meanwhile
		}
		if len(all) > 0 {
			select {
			case <-k2.cut:
			case <-time.After(10 * time.Second):
				// It was past that point when it was killed first.
			}
		}
	}

	d := w.start()
	all, _, err := d.List(t.Context(), alice, session.Filter{}, "", 10)
	if err != nil || len(all) > 1 {
		t.Fatalf("sessions: %+v, %v", all, err)
	}
	for _, s := range all {
		if s.State == session.Running {
			if got, exit := d.run(s.ID, "echo alive"); got != "alive\n" {
				t.Errorf("a session that runs does not: %q, %+v", got, exit)
			}
			waitFor(t, func() bool { return len(open(t, w, s.ID)) == 0 })
			d.end(s.ID)
		}
		s = d.awaitState(s.ID, session.Ended)
		want := []session.Reason{session.Requested}
		if strings.HasPrefix(point, "create.") {
			want = append(want, session.CreateFailed)
		}
		s = w.checkEnded(d, s.ID, want...)
		for _, a := range []audit.Action{audit.SessionEnding, audit.SessionEnded, audit.SessionCreated} {
			if n := w.count(s.ID, a); n != 1 {
				t.Errorf("%d times %s\n%s", n, a, w.story(s.ID))
			}
		}
		seen := map[string]int{}
		err := w.store.Events(t.Context(), s.ID, 0, 0, func(e audit.Stored) error {
			if e.Event.Action == audit.FileChanged {
				seen[string(e.Payload)]++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for what, n := range seen {
			if n > 1 {
				t.Errorf("a change is listed %d times: %s", n, what)
			}
		}
	}
	w.checkNothingLeft()
	// The caller comes back with its key and finds its session.
	s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Key: session.IdempotencyKey{Scope: "a", Key: "k", Digest: "d"}})
	if err != nil || (len(all) == 1 && s.ID != all[0].ID) {
		t.Errorf("the same key again: %s, %v; want the session of before", s.ID, err)
	}
	d.end(s.ID)
	w.checkNothingLeft()
}

// open returns the intents of a record without an outcome.
func open(t *testing.T, w *world, id session.ID) []string {
	t.Helper()
	var i audit.Intents
	err := w.store.Events(t.Context(), id, 0, 0, func(e audit.Stored) error {
		return i.Add(e.Event.Seq, e.Event.Action, e.Event.Ref, e.Event.Concludes)
	})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, o := range i.Open() {
		out = append(out, fmt.Sprint(o.Action, " ", o.Ref))
	}
	return out
}

// A sandbox that dies while its session is created makes the create fail.
func TestDiesWhileCreating(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	d.driver.Script(fake.Fault{Method: "Start", Mode: fake.Die})
	s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
	if !kind.Is(err, kind.Unavailable) {
		t.Errorf("create: %v", err)
	}
	if s.State != session.Ended {
		s = d.awaitState(s.ID, session.Ended)
	}
	w.checkEnded(d, s.ID, session.CreateFailed)
	w.checkNothingLeft()
}

// Many lives leave nothing: no file, descriptor, process or goroutine.
func TestManyLivesLeaveNothing(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	life := func() {
		s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
		if err != nil {
			t.Errorf("create: %v", err)
			return
		}
		if got, exit := d.run(s.ID, "echo $$ > f; echo out"); got != "out\n" || exit.Code != 0 {
			t.Errorf("run: %q, %+v", got, exit)
		}
		if _, err := d.WriteFile(t.Context(), alice, s.ID, "/g", "", strings.NewReader("x"), 1); err != nil {
			t.Errorf("write: %v", err)
		}
		p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
		if err != nil {
			t.Errorf("start: %v", err)
		} else {
			p.Detach()
		}
		d.end(s.ID)
	}
	life() // what is made once is made
	where := leakcheck.Where{
		Dirs: []string{filepath.Join(w.dir, "node"), w.host.Dir},
		// The store's readers are a pool that fills up to its limit.
		Ignore: func(k leakcheck.Kind, name string) bool {
			return k == leakcheck.FD && strings.Contains(name, "/store/bivy.db")
		},
	}
	before, err := leakcheck.Take(where)
	if err != nil {
		t.Fatal(err)
	}
	lives := 40
	if testing.Short() {
		lives = 8
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range lives / 4 {
				life()
			}
		})
	}
	wg.Wait()
	grown, err := leakcheck.Settle(t.Context(), where, before, 10*time.Second)
	if err != nil || len(grown) != 0 {
		t.Errorf("left behind: %v\n%s", err, grown)
	}
	w.checkNothingLeft()
}
