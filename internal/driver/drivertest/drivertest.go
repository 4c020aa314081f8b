// Package drivertest is the contract of driver.Driver as tests. Every driver
// runs them: what is promised in the comments of package driver is checked
// here, from outside, with nothing but the interface and a way to run a
// command inside.
package drivertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Harness is how the tests reach one driver.
type Harness struct {
	// New returns the driver as a fresh process on this machine has it. Each
	// test calls it with a root of its own; calling it again with the same
	// root is a restart. The first one is closed before the second is made.
	New func(t *testing.T, root string) driver.Driver

	// Request describes a small sandbox whose first process is the agent that
	// Exec talks to.
	Request func(t *testing.T, id session.SandboxID) driver.StartRequest

	// NewOutbound is New with a handler of what guests connect to. nil: not
	// tried.
	NewOutbound func(t *testing.T, root string, o driver.Outbound) driver.Driver

	// Talk is a command inside that connects to an address and port, sends a
	// text, prints the answer until the connection ends, and fails when it is
	// refused.
	Talk func(addr string, port uint16, text string) []string

	// Port is where that agent listens.
	Port uint16

	// Exec runs a command inside, in a writable directory that is the same
	// for every call, and returns its standard output and exit code. The agent
	// may still be starting: Exec waits for it.
	Exec func(ctx context.Context, d driver.Driver, id session.SandboxID, argv ...string) (out string, exit int, err error)

	// Existing is a file of the image that may be deleted, as Exec names it,
	// and Changeable another that may be overwritten. Empty: not tried.
	Existing, Changeable string

	// Stop makes the first process of a running sandbox stop by itself. nil:
	// not tried.
	Stop func(t *testing.T, d driver.Driver, id session.SandboxID)

	// Bad returns a request that can never work. nil: not tried.
	Bad func(t *testing.T, id session.SandboxID) driver.StartRequest

	// Leftovers lists what is on the host of the sandboxes of root:
	// processes, cgroups, mounts, sockets, files. Nothing may be left when
	// all are destroyed. nil: only List is asked.
	Leftovers func(t *testing.T, root string) []string

	// KeepsProcesses: a restored sandbox has the processes of its snapshot.
	KeepsProcesses bool

	// Timeout bounds each test; 0: one minute.
	Timeout time.Duration
}

// Run runs every test. It must not be run in parallel with others that make
// sandboxes in the same place.
func Run(t *testing.T, h Harness) {
	if h.Timeout == 0 {
		h.Timeout = time.Minute
	}
	for _, c := range []struct {
		name string
		test func(*env)
	}{
		{"StartAndExec", startAndExec},
		{"StartTwiceConflicts", startTwice},
		{"StartBadRequest", startBad},
		{"StartCancelledLeavesNothing", startCancelled},
		{"StartManyAtOnce", startMany},
		{"StartSameIDAtOnce", startSame},
		{"DialErrors", dialErrors},
		{"WaitForDestroy", waitForDestroy},
		{"WaitForExit", waitForExit},
		{"WaitErrors", waitErrors},
		{"DestroyIsRepeatable", destroyRepeatable},
		{"DestroyWhileInUse", destroyInUse},
		{"ListSeesAll", listAll},
		{"Owners", owners},
		{"RecoverAfterRestart", recoverRestart},
		{"RecoverGone", recoverGone},
		{"RestartWithoutHandle", restartWithoutHandle},
		{"Pause", pause},
		{"CheckpointAndRestore", checkpoint},
		{"CheckpointAndStop", checkpointStop},
		{"CheckpointOfPaused", checkpointPaused},
		{"CheckpointRefusals", checkpointRefusals},
		{"SetLimits", setLimits},
		{"Outbound", outbound},
		{"ExportChanges", exportChanges},
		{"Stats", stats},
		{"Inspect", inspect},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(newEnv(t, h)) })
	}
}

// env is one test's driver and what it started.
type env struct {
	*testing.T
	h    Harness
	root string
	d    driver.Driver
	ctx  context.Context

	mu  sync.Mutex
	ids []session.SandboxID
}

func newEnv(t *testing.T, h Harness) *env {
	ctx, cancel := context.WithTimeout(t.Context(), h.Timeout)
	e := &env{T: t, h: h, root: t.TempDir(), ctx: ctx}
	e.d = h.New(t, e.root)
	t.Cleanup(func() {
		defer cancel()
		e.cleanUp()
	})
	return e
}

// cleanUp destroys everything and checks that nothing is left, whatever the
// test did.
func (e *env) cleanUp() {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.h.Timeout)
	defer cancel()
	for _, id := range e.ids {
		if err := e.d.Destroy(ctx, id); err != nil {
			e.Errorf("Destroy(%s) at the end: %v", id, err)
		}
	}
	e.nothingLeft(ctx)
	if err := e.d.Close(); err != nil {
		e.Errorf("Close: %v", err)
	}
}

func (e *env) nothingLeft(ctx context.Context) {
	e.Helper()
	found, err := e.d.List(ctx)
	if err != nil {
		e.Errorf("List: %v", err)
	}
	for _, f := range found {
		if slices.Contains(e.ids, f.ID) {
			e.Errorf("List still has %s (running: %v)", f.ID, f.Running)
		}
	}
	if e.h.Leftovers != nil {
		for _, what := range e.h.Leftovers(e.T, e.root) {
			e.Errorf("left on the host: %s", what)
		}
	}
}

func (e *env) newID() session.SandboxID {
	id := session.NewID().Sandbox(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ids = append(e.ids, id)
	return id
}

// start makes a sandbox whose agent answers.
func (e *env) start() (session.SandboxID, driver.Handle) {
	e.Helper()
	id := e.newID()
	handle, err := e.d.Start(e.ctx, e.h.Request(e.T, id))
	if err != nil {
		e.Fatalf("Start(%s): %v", id, err)
	}
	if handle.Sandbox != id || handle.Driver != e.d.Name() || handle.Owner != e.h.Request(e.T, id).Owner {
		e.Errorf("Start(%s) returned a handle of sandbox %q, driver %q, owner %+v", id, handle.Sandbox, handle.Driver, handle.Owner)
	}
	return id, handle
}

// sh runs a line of shell that must succeed and returns its output.
func (e *env) sh(id session.SandboxID, line string) string {
	e.Helper()
	out, exit, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", line)
	if err != nil || exit != 0 {
		e.Fatalf("in %s, %q: exit %d, error %v, output %q", id, line, exit, err, out)
	}
	return strings.TrimSpace(out)
}

// restart is what a restart of the daemon does to the driver.
func (e *env) restart() {
	e.Helper()
	if err := e.d.Close(); err != nil {
		e.Fatalf("Close: %v", err)
	}
	e.d = e.h.New(e.T, e.root)
}

func (e *env) destroy(id session.SandboxID) {
	e.Helper()
	if err := e.d.Destroy(e.ctx, id); err != nil {
		e.Fatalf("Destroy(%s): %v", id, err)
	}
}

// found returns what List says of one sandbox.
func (e *env) found(id session.SandboxID) (running, ok bool) {
	e.Helper()
	all, err := e.d.List(e.ctx)
	if err != nil {
		e.Fatalf("List: %v", err)
	}
	n := 0
	for _, f := range all {
		if f.ID == id {
			running, ok = f.Running, true
			n++
		}
	}
	if n > 1 {
		e.Errorf("List has %s %d times", id, n)
	}
	return running, ok
}

func (e *env) wantKind(what string, err error, want ...kind.Kind) {
	e.Helper()
	if err == nil || !slices.Contains(want, kind.Of(err)) {
		e.Errorf("%s: error %v of kind %v, want %v", what, err, kind.Of(err), want)
	}
}

// optional returns the driver's optional interface or skips the test, saying
// why.
func optional[I any](e *env, name string, capable bool) I {
	e.Helper()
	i, ok := e.d.(I)
	if !ok {
		if capable {
			e.Errorf("driver %s claims the capability but is no %s", e.d.Name(), name)
		}
		e.Skipf("driver %s is no %s", e.d.Name(), name)
	}
	if !capable {
		e.Skipf("driver %s is a %s but its capabilities on this host do not claim it", e.d.Name(), name)
	}
	return i
}

func startAndExec(e *env) {
	if c := e.d.Capabilities(); c.Isolation == "" {
		e.Error("Capabilities: Isolation is empty; a driver without isolation says \"none\"")
	}
	id, _ := e.start()
	if got := e.sh(id, "echo hello"); got != "hello" {
		e.Errorf("echo hello: %q", got)
	}
	e.sh(id, "echo kept > note")
	if got := e.sh(id, "cat note"); got != "kept" {
		e.Errorf("a file is not there in the next command: %q", got)
	}
	if _, exit, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "exit 7"); err != nil || exit != 7 {
		e.Errorf("exit 7: exit %d, error %v", exit, err)
	}
	other, _ := e.start()
	if _, exit, err := e.h.Exec(e.ctx, e.d, other, "sh", "-c", "test -e note"); err != nil || exit == 0 {
		e.Errorf("a file of one sandbox is in another (error %v)", err)
	}
}

func startTwice(e *env) {
	id, _ := e.start()
	_, err := e.d.Start(e.ctx, e.h.Request(e.T, id))
	e.wantKind("second Start", err, kind.Conflict)
	if got := e.sh(id, "echo still"); got != "still" {
		e.Errorf("the refused Start harmed the sandbox: %q", got)
	}
}

func startBad(e *env) {
	if e.h.Bad == nil {
		e.Skip("the harness has no bad request")
	}
	id := e.newID()
	_, err := e.d.Start(e.ctx, e.h.Bad(e.T, id))
	e.wantKind("Start of a bad request", err, kind.Invalid, kind.NotFound)
	if _, ok := e.found(id); ok {
		e.Error("List has a sandbox whose Start failed")
	}
	e.nothingLeft(e.ctx)
}

func startCancelled(e *env) {
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond} {
		id := e.newID()
		ctx, cancel := context.WithTimeout(e.ctx, after)
		_, err := e.d.Start(ctx, e.h.Request(e.T, id))
		cancel()
		running, ok := e.found(id)
		switch {
		case err == nil && !running:
			e.Errorf("cancelled after %s: Start succeeded but the sandbox does not run", after)
		case err != nil && ok:
			e.Errorf("cancelled after %s: Start failed (%v) and left the sandbox behind (running: %v)", after, err, running)
		case err != nil:
			if _, err := e.d.Start(e.ctx, e.h.Request(e.T, id)); err != nil {
				e.Errorf("cancelled after %s: the same id cannot be started again: %v", after, err)
			}
		}
		e.destroy(id)
	}
	e.nothingLeft(e.ctx)
}

func startMany(e *env) {
	const n = 4
	var wg sync.WaitGroup
	for i := range n {
		id := e.newID()
		wg.Go(func() {
			if _, err := e.d.Start(e.ctx, e.h.Request(e.T, id)); err != nil {
				e.Errorf("Start: %v", err)
				return
			}
			want := fmt.Sprint("number ", i)
			out, exit, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "echo "+want)
			if err != nil || exit != 0 || strings.TrimSpace(out) != want {
				e.Errorf("exec: %q, exit %d, error %v", out, exit, err)
			}
			if err := e.d.Destroy(e.ctx, id); err != nil {
				e.Errorf("Destroy: %v", err)
			}
		})
	}
	wg.Wait()
}

func startSame(e *env) {
	id := e.newID()
	const n = 4
	errs := make(chan error, n)
	for range n {
		go func() {
			_, err := e.d.Start(e.ctx, e.h.Request(e.T, id))
			errs <- err
		}()
	}
	won := 0
	for range n {
		if err := <-errs; err == nil {
			won++
		} else {
			e.wantKind("Start beside another", err, kind.Conflict, kind.Unavailable)
		}
	}
	if won != 1 {
		e.Fatalf("%d of %d Starts of one id succeeded, want 1", won, n)
	}
	if got := e.sh(id, "echo one"); got != "one" {
		e.Errorf("echo one: %q", got)
	}
}

func dialErrors(e *env) {
	_, err := e.d.Dial(e.ctx, e.newID(), e.h.Port)
	e.wantKind("Dial of an unknown sandbox", err, kind.NotFound)
	id, _ := e.start()
	e.sh(id, "true")
	_, err = e.d.Dial(e.ctx, id, 9)
	e.wantKind("Dial of a port without a listener", err, kind.Unavailable)
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := e.d.Dial(ctx, id, e.h.Port); !errors.Is(err, context.Canceled) {
		e.Errorf("Dial with a context that has ended: %v", err)
	}
	e.destroy(id)
	_, err = e.d.Dial(e.ctx, id, e.h.Port)
	e.wantKind("Dial of a destroyed sandbox", err, kind.NotFound)
}

func waitForDestroy(e *env) {
	id, _ := e.start()
	const n = 3
	type result struct {
		exit driver.Exit
		err  error
	}
	results := make(chan result, n)
	for range n {
		go func() {
			x, err := e.d.Wait(e.ctx, id)
			results <- result{x, err}
		}()
	}
	e.sh(id, "true")
	select {
	case r := <-results:
		e.Fatalf("Wait returned while the sandbox runs: %+v, %v", r.exit, r.err)
	default:
	}
	e.destroy(id)
	for range n {
		select {
		case r := <-results:
			// A Wait that only begins after the Destroy finds nothing.
			if r.err != nil && !kind.Is(r.err, kind.NotFound) {
				e.Errorf("Wait: %v", r.err)
			}
		case <-e.ctx.Done():
			e.Fatal("Wait does not return after Destroy")
		}
	}
}

func waitForExit(e *env) {
	if e.h.Stop == nil {
		e.Skip("the harness cannot make a sandbox stop by itself")
	}
	id, handle := e.start()
	e.sh(id, "true")
	before := time.Now().Add(-time.Second)
	e.h.Stop(e.T, e.d, id)
	x, err := e.d.Wait(e.ctx, id)
	if err != nil {
		e.Fatalf("Wait: %v", err)
	}
	if x.At.Before(before) || x.OOM {
		e.Errorf("Wait: %+v", x)
	}
	if x, err := e.d.Wait(e.ctx, id); err != nil {
		e.Errorf("Wait once more: %+v, %v", x, err)
	}
	if running, ok := e.found(id); running || !ok {
		e.Errorf("List says running %v, there %v; want leftovers only", running, ok)
	}
	_, err = e.d.Dial(e.ctx, id, e.h.Port)
	e.wantKind("Dial of a stopped sandbox", err, kind.Unavailable, kind.NotFound)
	e.restart()
	for range 2 {
		_, err = e.d.Recover(e.ctx, handle)
		e.wantKind("Recover of a stopped sandbox", err, kind.NotFound)
		if running, ok := e.found(id); running || !ok {
			e.Errorf("after Recover List says running %v, there %v; want leftovers, which only Destroy removes", running, ok)
		}
	}
	_, err = e.d.Start(e.ctx, e.h.Request(e.T, id))
	e.wantKind("Start of an id that has leftovers", err, kind.Conflict)
	e.destroy(id)
	e.nothingLeft(e.ctx)
}

// owners are kept with the sandbox and shown by List, in the process that
// started it and by the next one.
func owners(e *env) {
	want := map[session.SandboxID]driver.Owner{}
	for _, o := range []driver.Owner{{Kind: driver.OwnedBySession, ID: "s"}, {Kind: driver.OwnedByPool, ID: "p"}, {Kind: driver.OwnedByTemplate, ID: "t"}} {
		id := e.newID()
		req := e.h.Request(e.T, id)
		req.Owner = o
		h, err := e.d.Start(e.ctx, req)
		if err != nil {
			e.Fatalf("Start: %v", err)
		}
		if h.Owner != o {
			e.Errorf("the handle has owner %+v, want %+v", h.Owner, o)
		}
		want[id] = o
	}
	for range 2 {
		all, err := e.d.List(e.ctx)
		if err != nil {
			e.Fatalf("List: %v", err)
		}
		got := map[session.SandboxID]driver.Owner{}
		for _, f := range all {
			got[f.ID] = f.Owner
		}
		if !maps.Equal(got, want) {
			e.Errorf("List has owners %v, want %v", got, want)
		}
		e.restart()
	}
	for id := range want {
		e.destroy(id)
	}
}

func waitErrors(e *env) {
	_, err := e.d.Wait(e.ctx, e.newID())
	e.wantKind("Wait of an unknown sandbox", err, kind.NotFound)
	id, _ := e.start()
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := e.d.Wait(ctx, id); !errors.Is(err, context.Canceled) {
		e.Errorf("Wait with a context that has ended: %v", err)
	}
}

func destroyRepeatable(e *env) {
	e.destroy(e.newID())
	id, _ := e.start()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := e.d.Destroy(e.ctx, id); err != nil {
				e.Errorf("Destroy beside another: %v", err)
			}
		})
	}
	wg.Wait()
	e.destroy(id)
	e.nothingLeft(e.ctx)
}

func destroyInUse(e *env) {
	id, _ := e.start()
	e.sh(id, "true")
	done := make(chan error, 1)
	go func() {
		_, _, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "echo begun > begun; sleep 1000")
		done <- err
	}()
	// The command is known to run when its file is there.
	for {
		if _, exit, err := e.h.Exec(e.ctx, e.d, id, "sh", "-c", "test -e begun"); err != nil {
			e.Fatalf("exec: %v", err)
		} else if exit == 0 {
			break
		}
	}
	e.destroy(id)
	select {
	case err := <-done:
		if err == nil {
			e.Error("a command in a destroyed sandbox succeeded")
		}
	case <-e.ctx.Done():
		e.Fatal("a command in a destroyed sandbox still hangs")
	}
	e.nothingLeft(e.ctx)
}

func listAll(e *env) {
	a, _ := e.start()
	b, _ := e.start()
	for _, id := range []session.SandboxID{a, b} {
		if running, ok := e.found(id); !ok || !running {
			e.Errorf("List: %s there %v, running %v", id, ok, running)
		}
	}
	e.destroy(a)
	if _, ok := e.found(a); ok {
		e.Errorf("List has the destroyed %s", a)
	}
	if running, _ := e.found(b); !running {
		e.Errorf("destroying one harmed the other")
	}
}

func recoverRestart(e *env) {
	id, handle := e.start()
	e.sh(id, "echo before > note")
	e.restart()
	if running, ok := e.found(id); !ok || !running {
		e.Fatalf("after a restart List says: there %v, running %v", ok, running)
	}
	if _, err := e.d.Recover(e.ctx, handle); err != nil {
		e.Fatalf("Recover: %v", err)
	}
	if r, err := e.d.Recover(e.ctx, handle); err != nil || r.Relinked {
		e.Errorf("Recover once more: %+v, %v", r, err)
	}
	if got := e.sh(id, "cat note"); got != "before" {
		e.Errorf("the file of before the restart: %q", got)
	}
	_, err := e.d.Start(e.ctx, e.h.Request(e.T, id))
	e.wantKind("Start of a recovered id", err, kind.Conflict)
	waited := make(chan error, 1)
	go func() {
		_, err := e.d.Wait(e.ctx, id)
		waited <- err
	}()
	e.destroy(id)
	if err := <-waited; err != nil && !kind.Is(err, kind.NotFound) {
		e.Errorf("Wait for a recovered sandbox: %v", err)
	}
}

func recoverGone(e *env) {
	id, handle := e.start()
	e.destroy(id)
	e.restart()
	_, err := e.d.Recover(e.ctx, handle)
	e.wantKind("Recover of a destroyed sandbox", err, kind.NotFound)
	if _, ok := e.found(id); ok {
		e.Error("Recover of a destroyed sandbox brought something back")
	}
	handle.Version++
	if _, err := e.d.Recover(e.ctx, handle); err == nil {
		e.Error("Recover takes a handle of a version that does not exist")
	}
}

func restartWithoutHandle(e *env) {
	// The caller died during Start: the handle is lost.
	id, _ := e.start()
	e.restart()
	if _, ok := e.found(id); !ok {
		e.Fatal("List does not see a sandbox without a handle")
	}
	e.destroy(id)
	e.nothingLeft(e.ctx)
}
