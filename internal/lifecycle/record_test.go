package lifecycle_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// entries are the events of a record whose ref is ref, as "action payload".
func (w *world) entries(id session.ID, ref string) []string {
	w.t.Helper()
	var out []string
	err := w.store.Events(w.t.Context(), id, 0, 0, func(e audit.Stored) error {
		if e.Event.Ref == ref {
			out = append(out, string(e.Event.Action)+" "+e.Event.Actor.Subject+" "+string(e.Payload))
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// A sandbox that stops between the change to running and the moment callers
// are let in has run: the session ends step by step, for what happened to it.
func TestDiesAsItBeginsToRun(t *testing.T) {
	w := newWorld(t)
	var d *daemon
	d = w.start(func(o *lifecycle.Options) {
		o.FailPoint = func(point string) {
			if point != "create.running.done" {
				return
			}
			all, err := w.store.Live(t.Context(), "here")
			if err != nil || len(all) != 1 {
				t.Errorf("sessions: %d, %v", len(all), err)
				return
			}
			w.host.Kill(all[0].SandboxID(), 1, 0)
			waitFor(t, func() bool { return d.Died(all[0].ID) })
		}
	})
	s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
	if !kind.Is(err, kind.Unavailable) {
		t.Errorf("create: %v", err)
	}
	s = w.checkEnded(d, s.ID, session.Crashed)
	w.checkNothingLeft()
	if n := w.count(s.ID, audit.SandboxExited); n != 1 {
		t.Errorf("%d exits recorded\n%s", n, w.story(s.ID))
	}
	if got := w.entries(s.ID, "undo-create.start"); len(got) != 0 {
		t.Errorf("a session that ran was undone: %v", got)
	}
}

// What a failed create takes back is announced first, and not done when that
// cannot be: the end does it.
func TestUndoIsAnnounced(t *testing.T) {
	for _, recorded := range []bool{true, false} {
		w := newWorld(t)
		d := w.start()
		d.f.add(rule{call: "Node.Bind"})
		if !recorded {
			d.f.add(rule{call: "Store.Append.step.intent"})
		}
		s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
		if err == nil {
			t.Fatal("the create succeeded although a step failed")
		}
		s = d.awaitState(s.ID, session.Ended)
		w.checkEnded(d, s.ID, session.CreateFailed)
		w.checkNothingLeft()
		var actions []string
		for _, e := range w.entries(s.ID, "undo-create.start") {
			action, _, _ := strings.Cut(e, " ")
			actions = append(actions, action)
		}
		var want []string
		if recorded {
			want = []string{"step.intent", "step.done"}
		}
		if !slices.Equal(actions, want) {
			t.Errorf("recorded %t: %v, want %v\n%s", recorded, actions, want, w.story(s.ID))
		}
	}
}

func TestSignalsAndHoldsAreRecorded(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	bob := access.Caller{Principal: session.Principal{Subject: "key:bob"}, Role: access.Admin}

	d.f.add(rule{call: "Store.Append.command.attached"})
	if _, err := d.Attach(t.Context(), bob, s.ID, p.ID); err == nil {
		t.Error("taken hold of without a record")
	}
	for range 2 {
		q, err := d.Attach(t.Context(), bob, s.ID, p.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer q.Detach()
		d.f.add(rule{call: "Store.Append.command.signalled"})
		if err := q.Signal(t.Context(), 9); err == nil {
			t.Error("signalled without a record")
		}
		if err := q.Signal(t.Context(), 0x13); err != nil { // SIGSTOP: it lives
			t.Error(err)
		}
	}
	if err := p.Signal(t.Context(), 9); err != nil {
		t.Fatal(err)
	}
	if _, exit := collect(t, p); exit.Signal != 9 {
		t.Errorf("exit: %+v", exit)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID)
	var got []string
	for _, e := range w.entries(s.ID, p.ID) {
		if strings.HasPrefix(e, "command.signalled") || strings.HasPrefix(e, "command.attached") {
			got = append(got, e)
		}
	}
	of := `{"command":"` + p.ID + `"`
	want := []string{
		"command.attached key:bob " + of + "}",
		"command.signalled key:bob " + of + `,"signal":19}`,
		"command.signalled key:bob " + of + `,"signal":19}`,
		"command.signalled key:alice " + of + `,"signal":9}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("recorded:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestWhatRanIsNamed(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	e := d.awaitAction(s.ID, audit.SessionRunning)
	if p := string(e.Payload); !strings.Contains(p, `"template":"`+s.Template+`"`) || !strings.Contains(p, `"image":"sha256:1111`) {
		t.Errorf("running: %s", p)
	}
	d.end(s.ID)
}

func TestNamesInTheDigestAreBounded(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Workload.ListNames = 500 })
	s := d.create()
	d.run(s.ID, "i=10; while [ $i -lt 30 ]; do echo $i > $(printf %0100d $i); i=$((i+1)); done")
	s = d.end(s.ID)
	w.checkEnded(d, s.ID)
	if n := w.count(s.ID, audit.FileChanged); n != 4 {
		t.Errorf("%d files listed", n)
	}
	if p := string(d.awaitAction(s.ID, audit.FileChangesCut).Payload); !strings.Contains(p, `"unlisted":16`) || !strings.Contains(p, "500 bytes of names") {
		t.Errorf("cut: %s", p)
	}
}

// A seal cannot be erased: what a guest or the host's errors said is not in it.
func TestResidualsAreOurOwnWords(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Workload.ListFiles = 1 })
	s := d.create()
	d.run(s.ID, "touch one two")
	d.f.add(rule{call: "Node.Freeze"}) // fails with "injected"
	s = d.end(s.ID)
	w.checkEnded(d, s.ID)
	if len(s.Residuals) != 2 {
		t.Errorf("residuals: %q", s.Residuals)
	}
	for _, r := range s.Residuals {
		if strings.Contains(r, "injected") || strings.Contains(r, "more than") {
			t.Errorf("residual: %q", r)
		}
	}
	if got := strings.Join(w.entries(s.ID, "end.freeze"), "\n"); !strings.Contains(got, "injected") {
		t.Errorf("the reason is not in the record: %s", got)
	}
}

// A deadline that the node did not take is given to it again.
func TestLateDeadline(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 10 * time.Millisecond })
	s := d.create()
	d.f.add(rule{call: "Node.SetDeadline"})
	if _, err := d.SetTimeout(t.Context(), alice, s.ID, 1); err == nil {
		t.Error("the node has not got the deadline, and nobody is told")
	}
	d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Deadline)
}

// Kills that could not be recorded are recorded when the node tells of them again.
func TestUnrecordedOOMIsToldAgain(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	failed := make(chan struct{})
	d.f.add(rule{call: "Store.Append.sandbox.oom", then: sync.OnceFunc(func() { close(failed) })})
	w.host.OOM(s.SandboxID(), 1, false)
	<-failed
	p, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	w.host.OOM(s.SandboxID(), 1, false)
	d.awaitAction(s.ID, audit.OutOfMemory)
	d.end(s.ID)
	w.checkEnded(d, s.ID)
}

// Stopping waits for file operations to have told how they went.
func TestStopWaitsForFiles(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.run(s.ID, "head -c 3000000 /dev/zero > big")
	if _, _, err := d.ReadFile(t.Context(), alice, s.ID, "/big", ""); err != nil {
		t.Fatal(err)
	}
	d.stop()
	if n := w.count(s.ID, audit.FileFailed); n != 1 {
		t.Errorf("%d outcomes\n%s", n, w.story(s.ID))
	}
}

// A write whose answer was lost is not paid for twice.
func TestOverdueIsPaidOnce(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 10 * time.Millisecond })
	s := d.create()
	d.f.add(rule{call: "Store.Append.file.written", after: true})
	if _, err := d.WriteFile(t.Context(), alice, s.ID, "/made", "", strings.NewReader("x"), 1); err == nil {
		t.Error("the outcome could not be recorded, and nobody is told")
	}
	waitFor(t, func() bool { return d.PendingOutcomes(s.ID) == 0 })
	d.end(s.ID)
	w.checkEnded(d, s.ID)
	if n := w.count(s.ID, audit.FileWritten); n != 1 {
		t.Errorf("told %d times\n%s", n, w.story(s.ID))
	}
}
