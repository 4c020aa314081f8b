package node

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"bivy/internal/driver/fake"
	"bivy/internal/guest/guestclient"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

// world is a machine, a daemon's directory on it and a clock that jumps.
type world struct {
	dir  string
	host *fake.Host
	jump atomic.Int64 // of the wall clock, nanoseconds
	boot string
	born time.Time
}

func newWorld(t *testing.T) *world {
	return &world{dir: t.TempDir(), host: &fake.Host{Dir: t.TempDir()}, boot: "boot-1", born: time.Now()}
}

func (w *world) node(t *testing.T) (*Node, *fake.Driver) {
	t.Helper()
	d := &fake.Driver{Host: w.host}
	n, err := New(Options{
		Dir: w.dir, Driver: d, BootID: w.boot,
		Uptime: func() time.Duration { return time.Since(w.born) },
		Now:    func() time.Time { return time.Now().Add(time.Duration(w.jump.Load())) },
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, d
}

// run runs the node until stop is called.
func run(t *testing.T, n *Node) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	var stopped atomic.Bool
	stop = func() {
		if stopped.Swap(true) {
			return
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

func want(deadline time.Time) lifecycle.SandboxSpec {
	return lifecycle.SandboxSpec{
		ID:       session.NewID().Sandbox(1),
		Spec:     session.Spec{Env: map[string]string{"COLOUR": "blue"}, Hostname: "bivy"},
		Template: lifecycle.Template{Env: map[string]string{"COLOUR": "red", "SHAPE": "round"}, Agent: []string{"/agent"}},
		Deadline: deadline,
	}
}

func mustStart(t *testing.T, n *Node, w lifecycle.SandboxSpec) session.SandboxID {
	t.Helper()
	if err := n.Start(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if err := n.Bind(t.Context(), w.ID); err != nil {
		t.Fatal(err)
	}
	return w.ID
}

func sh(t *testing.T, n *Node, id session.SandboxID, line string) string {
	t.Helper()
	c, err := n.Guest(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Exec(t.Context(), guestclient.Command{Argv: []string{"sh", "-c", line}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var out strings.Builder
	for {
		ev, err := p.Next()
		if err != nil {
			t.Fatal(err)
		}
		out.Write(ev.Data)
		if ev.Kind == guestclient.End {
			return strings.TrimSpace(out.String())
		}
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, handlesDir))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestStartBindRestart(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	stop := run(t, n)
	id := mustStart(t, n, want(time.Now().Add(time.Hour)))
	if got := sh(t, n, id, "echo $COLOUR $SHAPE; echo kept > note"); got != "blue round" {
		t.Errorf("environment: %q; the spec's wins over the template's", got)
	}
	if err := n.Start(t.Context(), lifecycle.SandboxSpec{ID: id}); !kind.Is(err, kind.Conflict) {
		t.Errorf("second Start: %v", err)
	}
	for _, f := range files(t, w.dir) {
		st, err := os.Stat(filepath.Join(w.dir, handlesDir, f))
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", f, st.Mode(), err)
		}
		b, err := os.ReadFile(filepath.Join(w.dir, handlesDir, f))
		if err != nil || strings.Contains(string(b), n.token(id)) {
			t.Errorf("%s holds the agent's token (%v)", f, err)
		}
	}

	// Whoever lacks the token gets nothing.
	c := guestclient.New(guestclient.Config{Dial: n.guestDial(id)})
	defer c.Close()
	if _, err := c.Processes(t.Context()); !kind.Is(err, kind.Unauthentic) {
		t.Errorf("a client without the token: %v", err)
	}

	stop()
	n2, _ := w.node(t)
	run(t, n2)
	got, err := n2.Recover(t.Context())
	if err != nil || len(got) != 1 || got[0] != (lifecycle.Recovered{ID: id, Running: true}) {
		t.Fatalf("Recover: %+v, %v", got, err)
	}
	if got := sh(t, n2, id, "cat note"); got != "kept" {
		t.Errorf("after a restart: %q", got)
	}
	if err := n2.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if left := files(t, w.dir); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
	if err := n2.Destroy(t.Context(), id); err != nil {
		t.Errorf("Destroy once more: %v", err)
	}
}

func TestFileIsThereBeforeTheSandbox(t *testing.T) {
	w := newWorld(t)
	n, d := w.node(t)
	hit, until := make(chan struct{}, 1), make(chan struct{})
	d.Script(fake.Fault{Method: "Start", Mode: fake.Stall, Until: until, Hit: hit})
	spec := want(time.Now().Add(time.Hour))
	done := make(chan error, 1)
	go func() { done <- n.Start(t.Context(), spec) }()
	<-hit
	b, err := os.ReadFile(n.path(spec.ID))
	var rec record
	if err != nil || json.Unmarshal(b, &rec) != nil || rec.Sandbox != spec.ID || rec.Handle != nil {
		t.Errorf("while the driver starts: %s, %v", b, err)
	}
	close(until)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b, err = os.ReadFile(n.path(spec.ID))
	rec = record{}
	if err != nil || json.Unmarshal(b, &rec) != nil || rec.Handle == nil {
		t.Errorf("once started: %s, %v", b, err)
	}
	if err := n.Destroy(t.Context(), spec.ID); err != nil {
		t.Error(err)
	}
	n.quit()
}

func TestStartFailureLeavesNothing(t *testing.T) {
	for name, mode := range map[string]fake.Mode{"before": fake.FailBefore, "lost reply": fake.FailAfter, "stall": fake.Stall} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			n, d := w.node(t)
			defer n.quit()
			d.Script(fake.Fault{Method: "Start", Mode: mode})
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := n.Start(ctx, want(time.Time{})); err == nil {
				t.Error("Start succeeded")
			}
			found, err := n.List(t.Context())
			if err != nil || len(found) != 0 || len(files(t, w.dir)) != 0 {
				t.Errorf("left: %v, files %v (%v)", found, files(t, w.dir), err)
			}
		})
	}
}

func TestStartFailureThatCannotBeUndoneIsRemembered(t *testing.T) {
	w := newWorld(t)
	n, d := w.node(t)
	defer n.quit()
	d.Script(fake.Fault{Method: "Start", Mode: fake.FailAfter}, fake.Fault{Method: "Destroy", Mode: fake.FailBefore})
	spec := want(time.Time{})
	if err := n.Start(t.Context(), spec); err == nil {
		t.Error("Start succeeded")
	}
	if got := files(t, w.dir); len(got) != 1 {
		t.Errorf("files: %v; want the one of the sandbox that is still there", got)
	}
	n2, _ := w.node(t)
	defer n2.quit()
	got, err := n2.Recover(t.Context())
	if err != nil || len(got) != 1 || got[0] != (lifecycle.Recovered{ID: spec.ID}) {
		t.Errorf("Recover: %+v, %v; want leftovers", got, err)
	}
	if err := n2.Destroy(t.Context(), spec.ID); err != nil || len(files(t, w.dir)) != 0 {
		t.Errorf("Destroy: %v, files %v", err, files(t, w.dir))
	}
}

func TestRecoverOddities(t *testing.T) {
	w := newWorld(t)
	n, d := w.node(t)
	gone := mustStart(t, n, want(time.Time{}))
	torn := mustStart(t, n, want(time.Time{}))
	newer := mustStart(t, n, want(time.Time{}))
	unclear := mustStart(t, n, want(time.Time{}))
	n.quit()
	if err := d.Destroy(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(w.dir, handlesDir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(string(torn)+".json", `{"version":1,"sand`)
	write(string(newer)+".json", `{"version":99,"sandbox":"`+string(newer)+`"}`)
	intent := session.NewID().Sandbox(1)
	write(string(intent)+".json", `{"version":1,"sandbox":"`+string(intent)+`"}`)
	write(".tmp-123", "half")
	write("README", "not a handle")

	n2, d2 := w.node(t)
	defer n2.quit()
	d2.Script(fake.Fault{Method: "Recover", Sandbox: unclear, Mode: fake.FailBefore})
	got, err := n2.Recover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leftovers := map[session.SandboxID]bool{}
	for _, r := range got {
		leftovers[r.ID] = true
		if r.Running {
			t.Errorf("%s was taken back", r.ID)
		}
	}
	if len(got) != 3 || !leftovers[torn] || !leftovers[newer] || !leftovers[unclear] {
		t.Errorf("Recover: %+v; want %s, %s and %s as leftovers", got, torn, newer, unclear)
	}
	for id := range leftovers {
		if err := n2.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if left := files(t, w.dir); len(left) != 1 || left[0] != "README" {
		t.Errorf("files left: %v", left)
	}
}

func TestShutCutsAndStaysShut(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	run(t, n)
	id := mustStart(t, n, want(time.Time{}))
	raw, err := n.guestDial(id)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c, err := n.Guest(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Exec(t.Context(), guestclient.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for range 2 {
		if err := n.Shut(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := raw.Read(make([]byte, 1)); err == nil {
		t.Error("an open connection outlived the gate")
	}
	if _, err := p.Next(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a stream outlived the gate: %v", err)
	}
	if _, err := n.guestDial(id)(t.Context()); !kind.Is(err, kind.Conflict) {
		t.Errorf("dial: %v", err)
	}
	if _, err := n.Guest(t.Context(), id); !kind.Is(err, kind.Conflict) {
		t.Errorf("Guest: %v", err)
	}
	if err := n.Freeze(t.Context(), id); err != nil {
		t.Error(err)
	}
	if err := n.Changes(t.Context(), id, io.Discard); err != nil {
		t.Error(err)
	}
	if err := n.Destroy(t.Context(), id); err != nil {
		t.Error(err)
	}
	if err := n.Shut(t.Context(), id); !kind.Is(err, kind.NotFound) {
		t.Errorf("Shut of a destroyed sandbox: %v", err)
	}
}

func TestNewsOfStopsAndKills(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	n.o.Tick = time.Millisecond
	run(t, n)
	id := mustStart(t, n, want(time.Time{}))
	w.host.OOM(id, 2, false)
	if x := <-n.Exits(); x.ID != id || x.Stopped || x.OOMKills != 2 {
		t.Errorf("after two kills: %+v", x)
	}
	w.host.Kill(id, 3, 0)
	x := <-n.Exits()
	if x.ID != id || !x.Stopped || x.Exit.Code != 3 || !x.Exit.OOM {
		t.Errorf("after the stop: %+v", x)
	}
	if _, err := n.Guest(t.Context(), id); !kind.Is(err, kind.Unavailable) {
		t.Errorf("Guest of a stopped sandbox: %v", err)
	}
	if err := n.Destroy(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestNewsMerges(t *testing.T) {
	w := newNews()
	w.tell(lifecycle.Exited{ID: "a", OOMKills: 2})
	w.tell(lifecycle.Exited{ID: "a", Stopped: true})
	w.tell(lifecycle.Exited{ID: "a", Deadline: true})
	x, ok := w.take()
	if !ok || !x.Stopped || !x.Deadline || x.OOMKills != 2 {
		t.Errorf("merged: %+v", x)
	}
	if x, ok := w.take(); ok {
		t.Errorf("told twice: %+v", x)
	}
}

// The wall clock jumps; deadlines do not.
func TestDeadlineIgnoresTheWallClock(t *testing.T) {
	for name, jump := range map[string]time.Duration{"none": 0, "forward": 48 * time.Hour, "backward": -48 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				n, _ := w.node(t)
				stop := run(t, n)
				start := time.Now()
				id := mustStart(t, n, want(start.Add(time.Minute)))
				w.jump.Store(int64(jump))
				x := <-n.Exits()
				if took := time.Since(start); !x.Deadline || x.Stopped || took < time.Minute || took > time.Minute+time.Second {
					t.Errorf("%+v after %s", x, took)
				}
				// Nobody acts, so the node does, a while later.
				for n.has(id) {
					<-n.Exits()
				}
				if took := time.Since(start); took < 90*time.Second || took > 92*time.Second {
					t.Errorf("destroyed after %s", took)
				}
				stop()
			})
		})
	}
}

func TestDeadlineSurvivesARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		n, _ := w.node(t)
		stop := run(t, n)
		start := time.Now()
		wall := start.Add(time.Minute)
		id := mustStart(t, n, want(wall))
		stop()
		time.Sleep(20 * time.Second) // the daemon is down; the bubble's clock, not ours
		w.jump.Store(int64(-24 * time.Hour))

		n2, _ := w.node(t)
		stop2 := run(t, n2)
		if got, err := n2.Recover(t.Context()); err != nil || len(got) != 1 || !got[0].Running {
			t.Fatalf("Recover: %+v, %v", got, err)
		}
		// What the session says is the same date, which is no change.
		if err := n2.SetDeadline(id, wall); err != nil {
			t.Fatal(err)
		}
		x := <-n2.Exits()
		if took := time.Since(start); !x.Deadline || took < time.Minute || took > 61*time.Second {
			t.Errorf("%+v after %s", x, took)
		}
		// Extended, it is not destroyed.
		if err := n2.SetDeadline(id, n2.o.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if !n2.has(id) {
			t.Error("destroyed although its deadline was moved")
		}
		if err := n2.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
		stop2()
	})
}

func TestDeadlineAfterAReboot(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	defer n.quit()
	at := time.Now().Add(time.Minute)
	d := n.due(at)
	d.Boot = "boot-0"
	if left, ok := n.left(d); !ok || left < 59*time.Second || left > time.Minute {
		t.Errorf("left %s, %v; want about a minute, by the date", left, ok)
	}
	if _, ok := n.left(n.due(time.Time{})); ok {
		t.Error("no deadline became one")
	}
}

func TestKeyMustBePrivate(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	n.quit()
	if err := os.Chmod(filepath.Join(w.dir, keyFile), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Dir: w.dir, Driver: &fake.Driver{}}); err == nil {
		t.Error("a key that everybody can read was taken")
	}
}
