package lifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/audit"
	"bivy/internal/driver/fake"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/workload"
)

func TestALife(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s, timing, err := d.Create(t.Context(), lifecycle.CreateRequest{
		Caller: alice, Spec: session.Spec{Env: map[string]string{"GREETING": "hello"}, Labels: map[string]string{"a": "b"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.State != session.Running || s.Reason != "" || s.StartedAt.IsZero() || s.Generation != 1 || s.Owner != alice.Principal {
		t.Errorf("created: %+v", s)
	}
	var phases []string
	for _, p := range timing {
		phases = append(phases, p.Name)
	}
	if want := []string{"resolve", "queue", "record", "lease", "start", "bind", "posture", "record"}; !slices.Equal(phases, want) {
		t.Errorf("phases: %v, want %v", phases, want)
	}
	if got := strings.Join(w.entries(s.ID, "create.start"), "\n"); !strings.Contains(got, `"from":"image"`) {
		t.Errorf("what the sandbox was made of: %s", got)
	}
	out, exit := d.run(s.ID, "echo $GREETING; echo oops >&2; exit 3")
	if !strings.Contains(out, "hello\n") || !strings.Contains(out, "oops\n") || exit.Code != 3 {
		t.Errorf("out %q, exit %+v", out, exit)
	}
	info, err := d.WriteFile(t.Context(), alice, s.ID, "/work/in.txt", "", strings.NewReader("input"), -1)
	if err != nil || info.Size != 5 || info.SHA256 == "" || info.Path != "/work/in.txt" {
		t.Errorf("write: %+v, %v", info, err)
	}
	d.run(s.ID, "tr a-z A-Z < work/in.txt > work/out.txt")
	r, _, err := d.ReadFile(t.Context(), alice, s.ID, "/work/out.txt", "")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil || string(b) != "INPUT" {
		t.Errorf("read: %q, %v", b, err)
	}
	ended := d.end(s.ID)
	if again := d.end(s.ID); again.EndedAt != ended.EndedAt {
		t.Errorf("a second end: %+v", again)
	}
	w.checkEnded(d, s.ID, session.Requested)
	if len(ended.Residuals) != 0 {
		t.Errorf("residuals: %v", ended.Residuals)
	}
	w.checkNothingLeft()

	var got []string
	err = w.store.Events(t.Context(), s.ID, 0, 0, func(e audit.Stored) error {
		line := string(e.Event.Action)
		if strings.HasPrefix(line, "step.") {
			line += " " + e.Event.Ref
		}
		got = append(got, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"session.created",
		"step.intent create.lease", "step.intent create.start", "step.intent create.bind", "step.intent create.posture",
		"step.done create.lease", "step.done create.start", "step.done create.bind", "step.done create.posture",
		"session.running",
		"command.intent", "command.started", "command.ended",
		"file.write.intent", "file.written",
		"command.intent", "command.started", "command.ended",
		"file.intent", "file.read",
		"session.ending",
		"step.intent end.shut", "step.intent end.freeze", "step.intent end.measure", "step.intent end.digest",
		"step.done end.shut", "step.done end.freeze", "step.done end.measure", "file.changed", "file.changed", "file.changed", "step.done end.digest",
		"step.intent end.kill", "step.intent end.dispose", "step.intent end.release",
		"step.done end.kill", "step.done end.dispose", "step.done end.release",
		"session.ended",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the record (-want +got):\n%s", diff)
	}
}

func TestCommandErrors(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	for name, c := range map[string]struct {
		cmd   workload.Command
		field string
		code  int
	}{
		"empty":          {workload.Command{}, "argv", 0},
		"no such":        {workload.Command{Argv: []string{"no-such-command"}}, "argv", 127},
		"not executable": {workload.Command{Argv: []string{"/etc/passwd"}}, "argv", 126},
		"nul":            {workload.Command{Argv: []string{"echo", "a\x00b"}}, "argv", 0},
		"cwd":            {workload.Command{Argv: []string{"true"}, Cwd: "/no/such/dir"}, "cwd", 0},
		"user":           {workload.Command{Argv: []string{"true"}, User: "nobody-knows"}, "user", 0},
		"env":            {workload.Command{Argv: []string{"true"}, Env: map[string]string{"A=B": "c"}}, "env", 0},
		"big env":        {workload.Command{Argv: []string{"true"}, Env: map[string]string{"A": strings.Repeat("x", 10<<20)}}, "env", 0},
		"timeout":        {workload.Command{Argv: []string{"true"}, Timeout: -1}, "timeout", 0},
	} {
		_, err := d.Start(t.Context(), alice, s.ID, c.cmd)
		if !kind.Is(err, kind.Invalid) || kind.Field(err) != c.field || workload.ExitCodeOf(err) != c.code {
			t.Errorf("%s: %v: kind %v, field %q, exit %d", name, err, kind.Of(err), kind.Field(err), workload.ExitCodeOf(err))
		}
	}
	if got := w.count(s.ID, audit.CommandIntent); got != 4 || w.count(s.ID, audit.CommandRefused) != got {
		t.Errorf("%d intents, %d refusals; want 4 of each\n%s", got, w.count(s.ID, audit.CommandRefused), w.story(s.ID))
	}
	if _, err := d.Start(t.Context(), alice, session.NewID(), workload.Command{Argv: []string{"true"}}); !kind.Is(err, kind.NotFound) {
		t.Errorf("in an unknown session: %v", err)
	}
	d.end(s.ID)
	_, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"true"}})
	if !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "requested") {
		t.Errorf("in an ended session: %v", err)
	}
	w.checkEnded(d, s.ID)
}

func TestNoIntentNoCommand(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.f.add(rule{call: "Store.Append.command.intent"})
	if _, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"touch", "made"}}); err == nil {
		t.Error("a command ran without a record")
	}
	d.f.add(rule{call: "Store.Append.file.write.intent"})
	if _, err := d.WriteFile(t.Context(), alice, s.ID, "/made", "", strings.NewReader("x"), 1); err == nil {
		t.Error("a file was written without a record")
	}
	if _, err := d.Stat(t.Context(), alice, s.ID, "/made", ""); !kind.Is(err, kind.NotFound) {
		t.Errorf("the effect happened: %v", err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
}

func TestCallerGoneCommandGoesOn(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "read line; yes x | head -c 300000; echo $line > got; exit 4"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	infos, err := d.Commands(t.Context(), alice, s.ID)
	if err != nil || len(infos) != 1 || infos[0].ID != p.ID || infos[0].Exit != nil {
		t.Errorf("commands: %+v, %v", infos, err)
	}
	if err := p.Write(t.Context(), []byte("go\n")); err != nil {
		t.Fatal(err)
	}
	p.Detach()
	p.Detach()
	e := d.awaitAction(s.ID, audit.CommandEnded)
	for _, want := range []string{`"exit":4`, `"stdin_bytes":3`, `"stdout_bytes":300000`} {
		if !strings.Contains(string(e.Payload), want) {
			t.Errorf("ended: %s, want %s in it", e.Payload, want)
		}
	}
	q, err := d.Attach(t.Context(), alice, s.ID, p.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Detach()
	if _, exit := collect(t, q); exit.Code != 4 {
		t.Errorf("attached after the end: %+v", exit)
	}
	if _, err := q.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := d.Attach(t.Context(), alice, s.ID, "nonesuch"); !kind.Is(err, kind.NotFound) {
		t.Errorf("attach to nothing: %v", err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
}

func TestSlowReaderHoldsTheCommandUp(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	// The marker file is written only after more output than fits anywhere.
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "yes x | head -c 8000000; touch done"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	if _, err := p.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 20 { // each look is a round trip during which nothing may pile up
		if _, err := d.Stat(t.Context(), alice, s.ID, "/done", ""); !kind.Is(err, kind.NotFound) {
			t.Fatalf("the command went on although nobody reads: %v", err)
		}
	}
	total := 0
	for {
		ev, err := p.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if ev.Kind == workload.End {
			break
		}
		total += len(ev.Data)
	}
	if total < 7_900_000 {
		t.Errorf("%d bytes came through", total)
	}
	d.end(s.ID)
}

func TestTerminalSignalAndTimeout(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "stty size; read a; stty size"}, PTY: &workload.Size{Cols: 90, Rows: 30}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	var seen bytes.Buffer
	for !strings.Contains(seen.String(), "30 90") {
		ev, err := p.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		seen.Write(ev.Data)
	}
	if err := p.Resize(t.Context(), workload.Size{Cols: 100, Rows: 40}); err != nil {
		t.Fatal(err)
	}
	if err := p.Write(t.Context(), []byte("\n")); err != nil {
		t.Fatal(err)
	}
	if out, exit := collect(t, p); !strings.Contains(out, "40 100") || exit.Code != 0 {
		t.Errorf("after the resize: %q, %+v", out, exit)
	}

	q, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Detach()
	if err := q.Signal(t.Context(), 15); err != nil {
		t.Fatal(err)
	}
	if _, exit := collect(t, q); exit.Signal != 15 {
		t.Errorf("after SIGTERM: %+v", exit)
	}
	if err := q.Signal(t.Context(), 15); !kind.Is(err, kind.Conflict) {
		t.Errorf("a signal after the end: %v", err)
	}

	r, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}, Timeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Detach()
	if _, exit := collect(t, r); exit.Signal != 9 || exit.Error == "" || exit.OOM {
		t.Errorf("at its time limit: %+v", exit)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
}

func TestTooManyCommands(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Workload.Commands = 2 })
	s := d.create()
	for range 2 {
		p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Detach()
	}
	if _, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"true"}}); !kind.Is(err, kind.Exhausted) {
		t.Errorf("the third: %v", err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
	w.checkNothingLeft()
}

func TestFileErrors(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	if _, _, err := d.ReadFile(t.Context(), alice, s.ID, "/missing", ""); !kind.Is(err, kind.NotFound) {
		t.Errorf("reading what is not there: %v", err)
	}
	if _, _, err := d.ReadFile(t.Context(), alice, s.ID, "a\x00b", ""); !kind.Is(err, kind.Invalid) || kind.Field(err) != "path" {
		t.Errorf("a path with NUL: %v", err)
	}
	broken := errors.New("the caller's disk is broken")
	if _, err := d.WriteFile(t.Context(), alice, s.ID, "/f", "", io.MultiReader(strings.NewReader("begin"), errReader{broken}), -1); err == nil {
		t.Error("a write of half a file succeeded")
	}
	if _, err := d.WriteFile(t.Context(), alice, s.ID, "/g", "", strings.NewReader("whole"), 5); err != nil {
		t.Fatal(err)
	}
	r, _, err := d.ReadFile(t.Context(), alice, s.ID, "/g", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if e := d.awaitAction(s.ID, audit.FileRead); !strings.Contains(string(e.Payload), `"partial":true`) {
		t.Errorf("closed early: %s", e.Payload)
	}
	for _, err := range []error{
		second(d.MakeDir(t.Context(), alice, s.ID, "/dir/sub", "")),
		second(d.Move(t.Context(), alice, s.ID, "/g", "/dir/h", "")),
		d.Remove(t.Context(), alice, s.ID, "/dir/sub", ""),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	infos, err := d.ListDir(t.Context(), alice, s.ID, "/", "", 2)
	var names []string
	for _, i := range infos {
		names = append(names, i.Path+" "+string(i.Type))
	}
	if err != nil || !slices.Contains(names, "/dir dir") || !slices.Contains(names, "/dir/h file") || slices.Contains(names, "/dir/sub dir") {
		t.Errorf("list: %v, %v", names, err)
	}
	if _, err := d.MakeDir(t.Context(), alice, s.ID, "/dir", ""); !kind.Is(err, kind.Conflict) {
		t.Errorf("making what is there: %v", err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
}

func TestUnreadFileDoesNotHoldUpTheEnd(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Drain = time.Hour })
	s := d.create()
	d.run(s.ID, "head -c 3000000 /dev/zero > big")
	r, _, err := d.ReadFile(t.Context(), alice, s.ID, "/big", "")
	if err != nil {
		t.Fatal(err)
	}
	d.end(s.ID)
	if _, err := io.Copy(io.Discard, r); err == nil {
		t.Error("the file was read to its end after the end of its session")
	}
	if err := r.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	w.checkEnded(d, s.ID)
	if w.count(s.ID, audit.FileFailed) != 1 || w.count(s.ID, audit.FileRead) != 0 {
		t.Errorf("the record:\n%s", w.story(s.ID))
	}
}

func second[T any](_ T, err error) error { return err }

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestIdempotentCreate(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	key := session.IdempotencyKey{Scope: "alice", Key: "k", Digest: "d"}
	var wg sync.WaitGroup
	ids := make([]session.ID, 5)
	for i := range ids {
		wg.Go(func() {
			s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Key: key})
			if err != nil || s.State != session.Running {
				t.Errorf("create: %s, %v", s.State, err)
			}
			ids[i] = s.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("one key made several sessions: %v", ids)
		}
	}
	if _, timing, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Key: key}); err != nil || len(timing) != 0 {
		t.Errorf("a repeated create: phases %v, %v", timing, err)
	}
	key.Digest = "other"
	if _, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Key: key}); !kind.Is(err, kind.Conflict) {
		t.Errorf("the key for another request: %v", err)
	}
	d.end(ids[0])
	w.checkNothingLeft()
}

func TestCreateRefusals(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	for field, spec := range map[string]session.Spec{
		"resources.memory_mib": {Resources: session.Resources{MemoryMiB: 1}},
		"template":             {Template: "nonesuch"},
	} {
		if _, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Spec: spec}); kind.Field(err) != field {
			t.Errorf("want field %s: %v", field, err)
		}
	}
	all, _, err := d.List(t.Context(), alice, session.Filter{}, "", 100)
	if err != nil || len(all) != 0 {
		t.Errorf("refused creates left sessions: %v, %v", all, err)
	}
}

func TestNotReadyAndStopping(t *testing.T) {
	w := newWorld(t)
	d := w.launch(func(o *lifecycle.Options) {
		o.FailPoint = func(string) {}
	})
	<-d.Ready()
	s := d.create()
	d.stop()
	for name, err := range map[string]error{
		"create": third(d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})),
		"end":    second(d.End(t.Context(), lifecycle.EndRequest{ID: s.ID})),
		"start":  second(d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"true"}})),
	} {
		if !kind.Is(err, kind.Unavailable) {
			t.Errorf("%s after the stop: %v", name, err)
		}
	}
	d2 := w.start()
	if got, _ := d2.run(s.ID, "echo on"); got != "on\n" {
		t.Errorf("the session does not run on: %q", got)
	}
	d2.end(s.ID)
	w.checkEnded(d2, s.ID)
	if n := w.count(s.ID, audit.SandboxRecovered); n != 1 {
		t.Errorf("%d recoveries recorded", n)
	}
}

func third[A, B any](_ A, _ B, err error) error { return err }

func TestEndWhileCreating(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	hit := make(chan struct{}, 1)
	d.driver.Script(fake.Fault{Method: "Start", Mode: fake.Stall, Hit: hit})
	created := make(chan error, 1)
	go func() {
		_, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
		created <- err
	}()
	<-hit
	all, _, err := d.List(t.Context(), alice, session.Filter{}, "", 10)
	if err != nil || len(all) != 1 || all[0].State != session.Creating {
		t.Fatalf("list: %+v, %v", all, err)
	}
	s, err := d.End(t.Context(), lifecycle.EndRequest{Caller: alice, ID: all[0].ID, Reason: session.ResourceOut, Detail: "no"})
	if err != nil || s.State != session.Ended || s.Reason != session.ResourceOut {
		t.Errorf("end: %+v, %v", s, err)
	}
	if err := <-created; !kind.Is(err, kind.Conflict) {
		t.Errorf("create: %v", err)
	}
	w.checkEnded(d, all[0].ID, session.ResourceOut)
	w.checkNothingLeft()
}

func TestEndWithCallerGone(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	ctx, cancel := context.WithCancel(t.Context())
	d.f.add(rule{call: "Node.Freeze", then: cancel, pass: true})
	if _, err := d.End(ctx, lifecycle.EndRequest{Caller: alice, ID: s.ID}); !errors.Is(err, context.Canceled) {
		t.Errorf("end: %v", err)
	}
	d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
}

func TestManyEndAtOnce(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if s, err := d.End(t.Context(), lifecycle.EndRequest{Caller: alice, ID: s.ID}); err != nil || s.State != session.Ended {
				t.Errorf("end: %s, %v", s.State, err)
			}
		})
		wg.Go(func() {
			p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
			if err == nil {
				p.Detach()
			} else if !kind.Is(err, kind.Conflict) && !kind.Is(err, kind.Unavailable) {
				t.Errorf("start: %v", err)
			}
		})
	}
	wg.Wait()
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
	if n := w.count(s.ID, audit.SessionEnding); n != 1 {
		t.Errorf("ended %d times", n)
	}
}

func TestSandboxStops(t *testing.T) {
	for name, c := range map[string]struct {
		stop func(*world, session.SandboxID)
		want session.Reason
	}{
		"crash": {func(w *world, id session.SandboxID) { w.host.Kill(id, 1, 0) }, session.Crashed},
		"oom":   {func(w *world, id session.SandboxID) { w.host.OOM(id, 1, true) }, session.OOM},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.start()
			s := d.create()
			p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Detach()
			c.stop(w, s.SandboxID())
			s = d.awaitState(s.ID, session.Ended)
			w.checkEnded(d, s.ID, c.want)
			w.checkNothingLeft()
			if len(s.Residuals) == 0 {
				t.Error("what changed is not known, and no residual says so")
			}
			if w.count(s.ID, audit.SandboxExited) != 1 {
				t.Errorf("the exit is not recorded\n%s", w.story(s.ID))
			}
			if _, exit := collect(t, p); exit.Error == "" {
				t.Errorf("the command: %+v", exit)
			}
		})
	}
}

func TestOOMOfAProcess(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	w.host.OOM(s.SandboxID(), 1, false)
	if err := p.Signal(t.Context(), 9); err != nil {
		t.Fatal(err)
	}
	if _, exit := collect(t, p); !exit.OOM || exit.Signal != 9 {
		t.Errorf("exit: %+v", exit)
	}
	d.awaitAction(s.ID, audit.OutOfMemory)
	if got, _ := d.run(s.ID, "echo alive"); got != "alive\n" {
		t.Errorf("the session: %q", got)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID, session.Requested)
	if n := w.count(s.ID, audit.OutOfMemory); n != 1 {
		t.Errorf("told %d times", n)
	}
}

func TestOutboundIsTold(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	w.host.Refuse(s.SandboxID(), 17)
	d.end(s.ID)
	if e := d.awaitAction(s.ID, audit.OutboundRefused); !strings.Contains(string(e.Payload), `"packets":17`) {
		t.Errorf("refused: %s", e.Payload)
	}
	w.checkEnded(d, s.ID)
}

func TestDeadline(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice, Spec: session.Spec{Timeout: 300}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetTimeout(t.Context(), alice, s.ID, 0); !kind.Is(err, kind.Invalid) {
		t.Errorf("no time at all: %v", err)
	}
	moved, err := d.SetTimeout(t.Context(), alice, s.ID, 1)
	if err != nil || !moved.Deadline.Before(s.Deadline) {
		t.Errorf("moved from %s to %s, %v", s.Deadline, moved.Deadline, err)
	}
	d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Deadline)
	w.checkNothingLeft()
	if s, err := d.SetTimeout(t.Context(), alice, s.ID, 5); !kind.Is(err, kind.Conflict) {
		t.Errorf("after the end: %v, %v", s, err)
	}
}

func TestUnkillableStaysEndingAndIsRetried(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.driver.Script(fake.Fault{Method: "Destroy", Mode: fake.FailBefore, Times: 5, Err: errors.New("process 4711 is in D state")})
	got, err := d.End(t.Context(), lifecycle.EndRequest{Caller: alice, ID: s.ID})
	if !kind.Is(err, kind.Unavailable) || got.State != session.Ending {
		t.Fatalf("end: %s, %v", got.State, err)
	}
	if len(got.Residuals) != 1 || !strings.Contains(got.Residuals[0], "4711") {
		t.Errorf("what keeps it is not shown: %v", got.Residuals)
	}
	s = d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
	if len(s.Residuals) != 0 {
		t.Errorf("residuals in the end: %v", s.Residuals)
	}
	if n := w.count(s.ID, audit.StepFailed); n != 3 { // tries 1, 2 and 4 of 5
		t.Errorf("%d failures recorded\n%s", n, w.story(s.ID))
	}
}

func TestHungDigestIsBounded(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Workload.List = 30 * time.Millisecond })
	s := d.create()
	free := make(chan struct{})
	d.driver.Script(fake.Fault{Method: "ExportChanges", Mode: fake.Stall, Until: free, Deaf: true})
	s = d.end(s.ID)
	close(free)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
	if len(s.Residuals) != 1 || w.count(s.ID, audit.FileChangesCut) != 1 {
		t.Errorf("residuals: %v\n%s", s.Residuals, w.story(s.ID))
	}
}

func TestDigestIsBounded(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Workload.ListFiles, o.Bounds.Workload.ListBytes = 10, 100 })
	s := d.create()
	d.run(s.ID, "i=0; while [ $i -lt 30 ]; do echo $i > f$i; i=$((i+1)); done; head -c 1000 /dev/zero > a-big")
	s = d.end(s.ID)
	w.checkEnded(d, s.ID)
	if n := w.count(s.ID, audit.FileChanged); n != 10 {
		t.Errorf("%d files listed", n)
	}
	e := d.awaitAction(s.ID, audit.FileChangesCut)
	if p := string(e.Payload); !strings.Contains(p, `"unlisted":21`) || !strings.Contains(p, `"unhashed":1`) {
		t.Errorf("cut: %s", p)
	}
	if len(s.Residuals) != 1 {
		t.Errorf("residuals: %v", s.Residuals)
	}
}

func TestOrphansGo(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	kept := d.create()
	d.stop()
	stray := session.NewID().Sandbox(1)
	if _, err := d.driver.Start(t.Context(), fakeRequest(stray)); err != nil {
		t.Fatal(err)
	}
	old := kept.ID.Sandbox(7) // of a session that lives, but not its sandbox
	if _, err := d.driver.Start(t.Context(), fakeRequest(old)); err != nil {
		t.Fatal(err)
	}
	d2 := w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond })
	waitFor(t, func() bool {
		found, err := d2.driver.List(t.Context())
		return err == nil && len(found) == 1 && found[0].ID == kept.SandboxID()
	})
	// Later ones are found by the sweep.
	if _, err := d2.driver.Start(t.Context(), fakeRequest(stray)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		found, err := d2.driver.List(t.Context())
		return err == nil && len(found) == 1
	})
	// And a sandbox that vanishes without a word ends its session.
	if err := d2.driver.Destroy(t.Context(), kept.SandboxID()); err != nil {
		t.Fatal(err)
	}
	d2.awaitState(kept.ID, session.Ended)
	w.checkEnded(d2, kept.ID, session.Crashed)
}

func TestAfterAReboot(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.stop()
	w.host.Reboot()
	w.boot = "boot-2"
	d2 := w.start()
	d2.awaitState(s.ID, session.Ended)
	w.checkEnded(d2, s.ID, session.NodeLost)
	w.checkNothingLeft()
}

func TestCommandsOverARestart(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sh", "-c", "read x; exit 5"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	d.awaitAction(s.ID, audit.CommandStarted)
	d.stop()
	if _, err := p.Next(t.Context()); !kind.Is(err, kind.Unavailable) {
		t.Errorf("next after the stop: %v", err)
	}
	p.Detach()
	d2 := w.start()
	q, err := d2.Attach(t.Context(), alice, s.ID, p.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Detach()
	if q.PID == 0 || q.PID != p.PID {
		t.Errorf("pid %d, before %d", q.PID, p.PID)
	}
	if err := q.Write(t.Context(), []byte("x\n")); err != nil {
		t.Fatal(err)
	}
	if _, exit := collect(t, q); exit.Code != 5 {
		t.Errorf("exit: %+v", exit)
	}
	// One that vanished meanwhile is told to be lost.
	p2, err := d2.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	p2.Detach()
	d2.stop()
	w.host.Forget(s.SandboxID())
	d3 := w.start()
	e := d3.awaitEvent(s.ID, func(e audit.Stored) bool {
		return e.Event.Action == audit.CommandEnded && e.Event.Ref == p2.ID
	})
	if !strings.Contains(string(e.Payload), "lost") || e.Event.Outcome != audit.Failed {
		t.Errorf("the lost command: %s", e.Payload)
	}
	d3.end(s.ID)
	w.checkEnded(d3, s.ID)
}
