package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/guest/guestclient"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// world is a machine, a daemon's directory on it and a clock that jumps.
type world struct {
	log   *recordLog
	dir   string
	host  *fake.Host
	jump  atomic.Int64 // of the wall clock, nanoseconds
	boot  string
	start time.Time
}

func newWorld(t *testing.T) *world {
	return &world{log: &recordLog{}, dir: t.TempDir(), host: &fake.Host{Dir: t.TempDir()}, boot: "boot-1", start: time.Now()}
}

func (w *world) node(t *testing.T) (*Node, *fake.Driver) {
	t.Helper()
	d := &fake.Driver{Host: w.host}
	n, err := New(Options{
		Dir: w.dir, Driver: d, BootID: w.boot, Recorder: w.log,
		Uptime: func() time.Duration { return time.Since(w.start) },
		Now:    func() time.Time { return time.Now().Add(time.Duration(w.jump.Load())) },
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, d
}

// recordLog is a Recorder in memory.
type recordLog struct {
	mu      sync.Mutex
	fail    error // of Record
	entries []audit.Entry
}

func (l *recordLog) Record(_ context.Context, _ session.SandboxID, e audit.Entry) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return 0, l.fail
	}
	l.entries = append(l.entries, e)
	return uint64(len(l.entries)), nil
}

func (l *recordLog) set(fail error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = fail
}

// said lists what was recorded of a sandbox, one line each.
func (l *recordLog) said(id session.SandboxID) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for i, e := range l.entries {
		if e.Object != "sandbox/"+string(id) {
			continue
		}
		if e.Actor.Subject != "system:node" || (e.Concludes != 0) == (e.Outcome == audit.Pending) || int(e.Concludes) > i {
			all = append(all, fmt.Sprintf("malformed: %+v", e))
			continue
		}
		p := e.Payload.(destruction)
		all = append(all, fmt.Sprintf("%s %s: %s", e.Action, e.Outcome, p.Why))
	}
	return all
}

func (w *world) wantRecord(t *testing.T, id session.SandboxID, want ...string) {
	t.Helper()
	if got := w.log.said(id); !cmp.Equal(got, want) {
		t.Errorf("recorded of %s: %s", id, cmp.Diff(want, got))
	}
}

// destroy is Destroy of a sandbox without a look at what it found.
func destroy(t *testing.T, n *Node, id session.SandboxID) error {
	t.Helper()
	_, err := n.Destroy(t.Context(), id)
	return err
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

// owner is whose the sandboxes of most tests are.
var owner = driver.Owner{Kind: driver.OwnedBySession, ID: "a session"}

func want(deadline time.Time) sandbox.Spec {
	return sandbox.Spec{
		ID:       session.NewID().Sandbox(1),
		Owner:    owner,
		Session:  session.Spec{Env: map[string]string{"COLOUR": "blue"}, Hostname: "bivy"},
		Template: sandbox.Template{Env: map[string]string{"COLOUR": "red", "SHAPE": "round"}, Agent: []string{"/agent"}},
		Deadline: deadline,
	}
}

func mustStart(t *testing.T, n *Node, w sandbox.Spec) session.SandboxID {
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
	if err := n.Start(t.Context(), sandbox.Spec{ID: id}); !kind.Is(err, kind.Conflict) {
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

	// Without the token nothing is answered.
	c := guestclient.New(guestclient.Config{Dial: n.guestDial(id)})
	defer c.Close()
	if _, err := c.Processes(t.Context()); !kind.Is(err, kind.Unauthentic) {
		t.Errorf("a client without the token: %v", err)
	}

	stop()
	n2, _ := w.node(t)
	run(t, n2)
	got, err := n2.Recover(t.Context())
	if err != nil || len(got) != 1 || got[0] != (sandbox.Recovered{ID: id, Owner: owner, Running: true}) {
		t.Fatalf("Recover: %+v, %v", got, err)
	}
	if got := sh(t, n2, id, "cat note"); got != "kept" {
		t.Errorf("after a restart: %q", got)
	}
	if err := destroy(t, n2, id); err != nil {
		t.Fatal(err)
	}
	if left := files(t, w.dir); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
	if err := destroy(t, n2, id); err != nil {
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
	var file saved
	if err != nil || json.Unmarshal(b, &file) != nil || file.Sandbox != spec.ID || file.Handle != nil {
		t.Errorf("while the driver starts: %s, %v", b, err)
	}
	close(until)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b, err = os.ReadFile(n.path(spec.ID))
	file = saved{}
	if err != nil || json.Unmarshal(b, &file) != nil || file.Handle == nil {
		t.Errorf("once started: %s, %v", b, err)
	}
	if err := destroy(t, n, spec.ID); err != nil {
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
	if err != nil || len(got) != 1 || got[0] != (sandbox.Recovered{ID: spec.ID, Owner: owner}) {
		t.Errorf("Recover: %+v, %v; want leftovers", got, err)
	}
	if err := destroy(t, n2, spec.ID); err != nil || len(files(t, w.dir)) != 0 {
		t.Errorf("Destroy: %v, files %v", err, files(t, w.dir))
	}
}

func TestRecoverOddities(t *testing.T) {
	w := newWorld(t)
	n, d := w.node(t)
	gone := mustStart(t, n, want(time.Time{}))
	torn := mustStart(t, n, want(time.Time{}))
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
	intent := session.NewID().Sandbox(1)
	write(string(intent)+".json", `{"version":1,"sandbox":"`+string(intent)+`"}`)
	write(".durable-123", "half")
	write("README", "not a handle")

	n2, d2 := w.node(t)
	defer n2.quit()
	d2.Script(fake.Fault{Method: "Recover", Sandbox: unclear, Mode: fake.FailBefore})
	got, err := n2.Recover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0] != (sandbox.Recovered{ID: unclear, Owner: owner}) {
		t.Errorf("Recover: %+v; want %s as a leftover", got, unclear)
	}
	if err := destroy(t, n2, unclear); err != nil {
		t.Error(err)
	}
	// What the node destroyed by itself is recorded, and reported to a caller that asks.
	for id, why := range map[session.SandboxID]string{torn: "unexpected end of JSON input"} {
		why = "its handle file does not read: " + why
		w.wantRecord(t, id, "sandbox.destroy.intent pending: "+why, "sandbox.destroyed ok: "+why)
		if got, err := n2.Destroy(t.Context(), id); err != nil || got != (sandbox.Removal{Earlier: "node: " + why}) {
			t.Errorf("Destroy of %s: %+v, %v", id, got, err)
		}
	}
	w.wantRecord(t, unclear)
	if found, err := n2.List(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("still there: %+v, %v", found, err)
	}
	if left := files(t, w.dir); len(left) != 1 || left[0] != "README" {
		t.Errorf("files left: %v", left)
	}
}

// TestRecoverRefusesNewerHandles: an older build does not touch the sandboxes
// of a newer one.
func TestRecoverRefusesNewerHandles(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	id := mustStart(t, n, want(time.Time{}))
	n.quit()
	text := `{"version":99,"sandbox":"` + string(id) + `","more":true}`
	if err := os.WriteFile(n.path(id), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	n, _ = w.node(t)
	defer n.quit()
	_, err := n.Recover(t.Context())
	if !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "version 99") || !strings.Contains(err.Error(), "up to 1") {
		t.Errorf("Recover: %v", err)
	}
	if found, err := n.List(t.Context()); err != nil || len(found) != 1 {
		t.Errorf("List: %+v, %v", found, err)
	}
	if now, err := os.ReadFile(n.path(id)); err != nil || string(now) != text {
		t.Errorf("the handle file is %s now, %v", now, err)
	}
}

// TestRecoverOfStoppedRetries: where the destroy fails, its intent stays open
// until a later one concludes it.
func TestRecoverOfStoppedRetries(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	id := mustStart(t, n, want(time.Time{}))
	n.quit()
	w.host.Kill(id, 1, 0)
	n, d := w.node(t)
	defer n.quit()
	d.Script(fake.Fault{Method: "Destroy", Sandbox: id, Mode: fake.FailBefore})
	if got, err := n.Recover(t.Context()); err != nil || len(got) != 1 {
		t.Errorf("Recover: %+v, %v; want a leftover", got, err)
	}
	if _, err := n.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	const why = "it stopped while no server ran"
	w.wantRecord(t, id, "sandbox.destroy.intent pending: "+why, "sandbox.destroyed failed: "+why)
}

// TestRecoverOfStopped: a sandbox that stopped while no server ran is recorded
// and destroyed; where it cannot be recorded it is reported and left.
func TestRecoverOfStopped(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	id := mustStart(t, n, want(time.Time{}))
	n.quit()
	w.host.Kill(id, 1, 0)
	w.log.set(errors.New("the database is closed"))
	n, _ = w.node(t)
	defer n.quit()
	if got, err := n.Recover(t.Context()); err != nil || len(got) != 1 || got[0] != (sandbox.Recovered{ID: id, Owner: owner}) {
		t.Errorf("Recover without a record: %+v, %v; want leftovers", got, err)
	}
	if found, err := n.List(t.Context()); err != nil || len(found) != 1 {
		t.Errorf("List: %+v, %v; nothing may be destroyed that is not recorded", found, err)
	}
	w.log.set(nil)
	n, _ = w.node(t)
	defer n.quit()
	if got, err := n.Recover(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("Recover: %+v, %v", got, err)
	}
	const why = "it stopped while no server ran"
	w.wantRecord(t, id, "sandbox.destroy.intent pending: "+why, "sandbox.destroyed ok: "+why)
	if found, err := n.List(t.Context()); err != nil || len(found) != 0 || len(files(t, w.dir)) != 0 {
		t.Errorf("left: %+v, %v, files %v", found, err, files(t, w.dir))
	}
}

// TestPoolSandboxes are recovered with their owner, and destroyed when the
// caller asks only: not for a deadline, a handle that does not read, or
// because they stopped.
func TestPoolSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		n, _ := w.node(t)
		pool := driver.Owner{Kind: driver.OwnedByPool, ID: "base"}
		spec := func() sandbox.Spec {
			s := want(time.Now().Add(time.Minute))
			s.Owner = pool
			return s
		}
		alive, torn, dead := mustStart(t, n, spec()), mustStart(t, n, spec()), mustStart(t, n, spec())
		n.quit()
		if err := os.WriteFile(n.path(torn), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.host.Kill(dead, 1, 0)
		n, _ = w.node(t)
		stop := run(t, n)
		defer stop()
		got, err := n.Recover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		running := map[session.SandboxID]bool{}
		for _, r := range got {
			running[r.ID] = r.Running
			if r.Owner != pool {
				t.Errorf("%s has owner %+v", r.ID, r.Owner)
			}
		}
		if want := map[session.SandboxID]bool{alive: true, torn: false, dead: false}; !maps.Equal(running, want) {
			t.Errorf("recovered: %v, want %v", running, want)
		}
		time.Sleep(3 * time.Minute) // the clock of the bubble
		all, err := n.List(t.Context())
		if err != nil || len(all) != 3 {
			t.Errorf("List: %+v, %v; want all three", all, err)
		}
		for _, f := range all {
			if f.Owner != pool {
				t.Errorf("%s is listed with owner %+v", f.ID, f.Owner)
			}
			if got, err := n.Destroy(t.Context(), f.ID); err != nil || !got.Found {
				t.Errorf("Destroy: %+v, %v", got, err)
			}
			w.wantRecord(t, f.ID)
		}
	})
}

// TestDestroyTellsWhatItFound: one that removed a sandbox, one that came after
// it, and one of a sandbox that never was.
func TestDestroyTellsWhatItFound(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	defer n.quit()
	id := mustStart(t, n, want(time.Time{}))
	for _, want := range []sandbox.Removal{{Found: true}, {}} {
		if got, err := n.Destroy(t.Context(), id); err != nil || got != want {
			t.Errorf("Destroy: %+v, %v; want %+v", got, err, want)
		}
	}
	if got, err := n.Destroy(t.Context(), session.NewID().Sandbox(1)); err != nil || got != (sandbox.Removal{}) {
		t.Errorf("Destroy of what never was: %+v, %v", got, err)
	}
	// Leftovers of an earlier process, which the node has no entry of.
	left := mustStart(t, n, want(time.Time{}))
	n2, _ := w.node(t)
	defer n2.quit()
	if got, err := n2.Destroy(t.Context(), left); err != nil || !got.Found {
		t.Errorf("Destroy of leftovers: %+v, %v", got, err)
	}
	w.wantRecord(t, id)
}

// TestDeadlineIsRecordedFirst: without a record nothing is destroyed; a
// destroy that fails is tried again under the same intent; a caller's destroy
// meanwhile concludes it.
func TestDeadlineIsRecordedFirst(t *testing.T) {
	const why = "deadline passed and nothing ended it within 30s"
	intent := "sandbox.destroy.intent pending: " + why
	t.Run("record fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			n, _ := w.node(t)
			stop := run(t, n)
			defer stop()
			w.log.set(errors.New("the database is closed"))
			id := mustStart(t, n, want(time.Now().Add(time.Minute)))
			time.Sleep(5 * time.Minute)
			if !n.has(id) {
				t.Error("destroyed without a record")
			}
			w.log.set(nil)
			for n.has(id) {
				<-n.Notices()
			}
			w.wantRecord(t, id, intent, "sandbox.destroyed ok: "+why)
			if got, err := n.Destroy(t.Context(), id); err != nil || got != (sandbox.Removal{Earlier: "node: " + why}) {
				t.Errorf("Destroy: %+v, %v", got, err)
			}
		})
	})
	t.Run("destroy fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			n, d := w.node(t)
			stop := run(t, n)
			defer stop()
			id := mustStart(t, n, want(time.Now().Add(time.Minute)))
			d.Script(fake.Fault{Method: "Destroy", Mode: fake.FailBefore, Times: 3})
			for n.has(id) {
				<-n.Notices()
			}
			w.wantRecord(t, id, intent, "sandbox.destroyed ok: "+why)
		})
	})
	t.Run("a caller destroys it", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			n, d := w.node(t)
			stop := run(t, n)
			defer stop()
			id := mustStart(t, n, want(time.Now().Add(time.Minute)))
			hit := make(chan struct{}, 1)
			d.Script(fake.Fault{Method: "Destroy", Mode: fake.FailBefore, Hit: hit})
			<-hit
			synctest.Wait()
			if got, err := n.Destroy(t.Context(), id); err != nil || got != (sandbox.Removal{Found: true}) {
				t.Errorf("Destroy: %+v, %v", got, err)
			}
			w.wantRecord(t, id, intent, "sandbox.destroyed failed: "+why)
		})
	})
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
		t.Error("an open connection outlived Shut")
	}
	if _, err := p.Next(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a stream outlived Shut: %v", err)
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
	if _, err := n.Changes(t.Context(), id, io.Discard); err != nil {
		t.Error(err)
	}
	if err := destroy(t, n, id); err != nil {
		t.Error(err)
	}
	if err := n.Shut(t.Context(), id); !kind.Is(err, kind.NotFound) {
		t.Errorf("Shut of a destroyed sandbox: %v", err)
	}
}

func TestNoticesOfStopsAndKills(t *testing.T) {
	w := newWorld(t)
	n, _ := w.node(t)
	n.o.Tick = time.Millisecond
	run(t, n)
	id := mustStart(t, n, want(time.Time{}))
	w.host.OOM(id, 2, false)
	if x := <-n.Notices(); x.ID != id || x.Stopped || x.OOMKills != 2 {
		t.Errorf("after two kills: %+v", x)
	}
	w.host.Kill(id, 3, 0)
	x := <-n.Notices()
	if x.ID != id || !x.Stopped || x.Exit.Code != 3 || !x.Exit.OOM {
		t.Errorf("after the stop: %+v", x)
	}
	if _, err := n.Guest(t.Context(), id); !kind.Is(err, kind.Unavailable) {
		t.Errorf("Guest of a stopped sandbox: %v", err)
	}
	if err := destroy(t, n, id); err != nil {
		t.Error(err)
	}
}

func TestNoticesMerge(t *testing.T) {
	w := newNotifier()
	w.send(sandbox.Notice{ID: "a", OOMKills: 2})
	w.send(sandbox.Notice{ID: "a", Stopped: true})
	w.send(sandbox.Notice{ID: "a", Deadline: true})
	x, ok := w.take()
	if !ok || !x.Stopped || !x.Deadline || x.OOMKills != 2 {
		t.Errorf("merged: %+v", x)
	}
	if x, ok := w.take(); ok {
		t.Errorf("sent twice: %+v", x)
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
				x := <-n.Notices()
				if took := time.Since(start); !x.Deadline || x.Stopped || took < time.Minute || took > time.Minute+time.Second {
					t.Errorf("%+v after %s", x, took)
				}
				// No caller acts, so the node does, a while later.
				for n.has(id) {
					<-n.Notices()
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
		x := <-n2.Notices()
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
		if err := destroy(t, n2, id); err != nil {
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
	if _, err := New(Options{Dir: w.dir, Driver: &fake.Driver{}, Recorder: w.log}); err == nil {
		t.Error("a key that everybody can read was taken")
	}
}
