package lifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/trace"
	"bivy/internal/workload"
)

// move changes the state of a session as a flow would that does not exist yet.
func (w *world) move(s session.Session, next ...session.State) session.Session {
	w.t.Helper()
	for _, state := range next {
		s.State = state
		var err error
		s, _, err = w.store.Transition(w.t.Context(), s.Fence(), s, audit.Entry{
			Action: "session.moved", Outcome: audit.OK, Actor: alice.Principal,
		})
		if err != nil {
			w.t.Fatal(err)
		}
	}
	return s
}

// systemEvents are the events of the record of the node.
func (w *world) systemEvents() []audit.Stored {
	w.t.Helper()
	segments, err := w.store.Segments(w.t.Context(), "here")
	if err != nil {
		w.t.Fatal(err)
	}
	var all []audit.Stored
	for _, s := range segments {
		err := w.store.SegmentEvents(w.t.Context(), "here", s.Number, 0, 0, func(e audit.Stored) error {
			all = append(all, e)
			return nil
		})
		if err != nil {
			w.t.Fatal(err)
		}
	}
	return all
}

// counted waits for n more calls that the manager makes of its ports.
func (d *daemon) counted(call string, n int) {
	d.t.Helper()
	count := func() int {
		d.f.mu.Lock()
		defer d.f.mu.Unlock()
		total := 0
		for _, seen := range d.f.seen {
			if seen == call {
				total++
			}
		}
		return total
	}
	before := count()
	waitFor(d.t, func() bool { return count() >= before+n })
}

// A session on standby has no sandbox, and that is as it should be: it is
// neither crashed nor ended by a sweep or a restart, and can be ended without
// a resume.
func TestStandbySurvivesSweepsAndRestart(t *testing.T) {
	w := newWorld(t)
	sweeping := func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond }
	d := w.start()
	s := d.create()
	d.stop()
	if err := d.driver.Destroy(t.Context(), s.SandboxID()); err != nil {
		t.Fatal(err)
	}
	w.move(s, session.Pausing, session.Standby)
	for range 2 { // a start, and a restart
		d = w.start(sweeping)
		d.counted("Node.List", 3) // so that at least two sweeps are complete
		got, err := d.Get(t.Context(), alice, s.ID)
		if err != nil || got.State != session.Standby {
			t.Fatalf("the session is %s (%s %s), %v; want standby\n%s", got.State, got.Reason, got.Detail, err, w.story(s.ID))
		}
		if _, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"true"}}); !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "standby") {
			t.Errorf("a command in a session on standby: %v", err)
		}
		d.stop()
	}
	d = w.start()
	d.end(s.ID)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
}

// A sandbox found for a session on standby is the session's own: it is kept.
func TestFrozenSandboxOfStandbyIsKept(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.stop()
	w.move(s, session.Pausing, session.Standby)
	d = w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond })
	d.counted("Node.List", 3)
	found, err := d.driver.List(t.Context())
	if err != nil || len(found) != 1 || found[0].ID != s.SandboxID() {
		t.Errorf("sandboxes: %+v, %v", found, err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
}

// Every state that a session can be in when the process dies has its case.
func TestEveryStateAtARestart(t *testing.T) {
	for _, c := range []struct {
		path    []session.State
		sandbox bool // it is still there
		want    session.State
		reason  session.Reason
	}{
		{path: []session.State{session.Pausing}, sandbox: true, want: session.Running},
		{path: []session.State{session.Pausing}, want: session.Ended, reason: session.Crashed},
		{path: []session.State{session.Pausing, session.Standby, session.Resuming}, sandbox: true, want: session.Running},
		{path: []session.State{session.Pausing, session.Standby, session.Resuming}, want: session.Ended, reason: session.Crashed},
		{path: []session.State{session.Quarantined}, sandbox: true, want: session.Quarantined},
		{path: []session.State{session.Quarantined}, want: session.Quarantined},
	} {
		name := strings.Trim(strings.ReplaceAll(strings.Join(func() (n []string) {
			for _, s := range c.path {
				n = append(n, string(s))
			}
			return n
		}(), "-"), " ", ""), "-")
		if c.sandbox {
			name += "-with-sandbox"
		}
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.grace = 5 * time.Millisecond
			d := w.start()
			s := d.create()
			d.stop()
			if !c.sandbox {
				if err := d.driver.Destroy(t.Context(), s.SandboxID()); err != nil {
					t.Fatal(err)
				}
			}
			w.move(s, c.path...)
			d = w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond })
			s = d.awaitState(s.ID, c.want)
			if s.Reason != c.reason {
				t.Errorf("reason %q, want %q", s.Reason, c.reason)
			}
			d.counted("Node.List", 3)
			if now, err := d.Get(t.Context(), alice, s.ID); err != nil || now.State != c.want {
				t.Errorf("after two sweeps: %s, %v; want %s", now.State, err, c.want)
			}
			if n := w.count(s.ID, audit.SandboxRecovered); c.want == session.Running && n != 1 {
				t.Errorf("the record tells %d recoveries, not one", n)
			}
			if c.want == session.Running {
				if got, _ := d.run(s.ID, "echo on"); got != "on\n" {
					t.Errorf("in the session: %q", got)
				}
			}
			if c.want != session.Ended {
				d.end(s.ID)
			}
			w.checkEnded(d, s.ID)
			w.checkNothingLeft()
		})
	}
}

// A session in quarantine keeps its sandbox past its deadline.
func TestQuarantineOutlivesTheDeadline(t *testing.T) {
	w := newWorld(t)
	w.grace = time.Millisecond
	d := w.start()
	s := d.create()
	if _, err := d.SetTimeout(t.Context(), alice, s.ID, 1); err != nil {
		t.Fatal(err)
	}
	s, err := d.Get(t.Context(), alice, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	w.move(s, session.Quarantined)
	d = w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 50 * time.Millisecond })
	past := s.Deadline.Add(10 * w.grace) // the node would have destroyed it
	waitFor(t, func() bool { return time.Now().After(past) })
	d.counted("Node.List", 3)
	if found, err := d.driver.List(t.Context()); err != nil || len(found) != 1 {
		t.Errorf("sandboxes: %+v, %v; want the one in quarantine", found, err)
	}
	d.end(s.ID)
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
}

// A sandbox that belongs to a pool is no orphan: neither the start nor a sweep
// removes it.
func TestPoolSandboxIsNotSwept(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	member := session.NewID().Sandbox(1)
	req := fakeRequest(member)
	req.Owner = driver.Owner{Kind: driver.OwnedByPool, ID: "base"}
	if _, err := d.driver.Start(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	d.stop()
	d = w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond })
	d.counted("Node.List", 3)
	found, err := d.driver.List(t.Context())
	if err != nil || len(found) != 1 || found[0].ID != member || found[0].Owner != req.Owner {
		t.Errorf("sandboxes: %+v, %v; want the member of the pool", found, err)
	}
	if err := d.driver.Destroy(t.Context(), member); err != nil {
		t.Fatal(err)
	}
}

// What the node destroys by itself is in its record and in the session's, and
// the end of the session does not claim to have done it.
func TestNodeDestroysByItself(t *testing.T) {
	w := newWorld(t)
	w.grace = 20 * time.Millisecond
	d := w.start()
	s := d.create()
	// The manager does not get to end the session at its deadline: the store
	// takes no change of state until the node has acted.
	d.f.add(rule{call: "Store.Transition.ending", times: 1 << 20})
	if _, err := d.SetTimeout(t.Context(), alice, s.ID, 1); err != nil {
		t.Fatal(err)
	}
	d.awaitAction(s.ID, audit.SandboxDestroyed)
	d.f.mu.Lock()
	d.f.rules = nil
	d.f.mu.Unlock()
	d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Deadline)
	w.checkNothingLeft()
	if got := strings.Join(w.entries(s.ID, "end.kill"), "\n"); !strings.Contains(got, `"found":false`) || !strings.Contains(got, "node") {
		t.Errorf("the end's own kill: %s", got)
	}
	var told []string
	for _, e := range w.systemEvents() {
		if e.Event.Object == "sandbox/"+string(s.SandboxID()) {
			told = append(told, string(e.Event.Action))
		}
	}
	if want := []string{"sandbox.destroy.intent", "sandbox.destroyed"}; !slices.Equal(told, want) {
		t.Errorf("the record of the node tells %v, want %v", told, want)
	}
}

// An orphan is removed only after the record of the node has said so.
func TestOrphanIsRecordedFirst(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	stray := session.NewID().Sandbox(1)
	if _, err := d.driver.Start(t.Context(), fakeRequest(stray)); err != nil {
		t.Fatal(err)
	}
	d.stop()
	d = w.start()
	waitFor(t, func() bool {
		found, err := d.driver.List(t.Context())
		return err == nil && len(found) == 0
	})
	waitFor(t, func() bool {
		var told []string
		for _, e := range w.systemEvents() {
			if e.Event.Object == "sandbox/"+string(stray) {
				told = append(told, string(e.Event.Action))
			}
		}
		return slices.Equal(told, []string{"sandbox.destroy.intent", "sandbox.destroyed"})
	})
}

// What becomes known after the seal is added beside the record, which stays as
// it is; both verify, and an addendum that was changed does not.
func TestAddenda(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.end(s.ID)
	before := w.export(d, s.ID)
	for _, what := range []string{"first", "second"} {
		err := d.AddFact(t.Context(), s.ID, audit.Entry{
			Action: "credential.revoked", Outcome: audit.OK, Actor: journal.System, Payload: map[string]any{"lease": what},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	after := w.export(d, s.ID)
	if !strings.HasPrefix(after, before) {
		t.Error("the sealed record was changed by an addendum")
	}
	report, err := audit.Verify(strings.NewReader(after), []audit.PublicKey{w.signer.Public()}, audit.VerifyOptions{Session: s.ID})
	if err != nil || report.Addenda != 2 {
		t.Errorf("verified %d addenda, %v; want 2", report.Addenda, err)
	}
	forged := strings.Replace(after, `lease\":\"second`, `lease\":\"other`, 1)
	if forged == after {
		t.Fatal("nothing was forged")
	}
	if _, err := audit.Verify(strings.NewReader(forged), []audit.PublicKey{w.signer.Public()}, audit.VerifyOptions{}); err == nil {
		t.Error("a forged addendum verifies")
	}
	if _, err := w.store.Append(t.Context(), s.ID, s.Fence(), audit.Entry{Action: "a.b", Outcome: audit.OK, Actor: alice.Principal}); !kind.Is(err, kind.Conflict) {
		t.Errorf("an event after the seal: %v", err)
	}
}

// A lease that the end could not give back is a residual in the seal, and an
// addendum once it is given back.
func TestLateReleaseIsAnAddendum(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Sweep = 5 * time.Millisecond })
	s := d.create()
	d.f.add(rule{call: "Templates.Release", times: 4}) // the end tries three times
	s = d.end(s.ID)
	if len(s.Residuals) != 1 {
		t.Errorf("residuals: %v", s.Residuals)
	}
	waitFor(t, func() bool {
		n := 0
		err := w.store.Addenda(t.Context(), s.ID, 0, func(e audit.Stored) error {
			if e.Event.Action == audit.LeaseReleased {
				n++
			}
			return nil
		})
		return err == nil && n == 1
	})
	w.checkEnded(d, s.ID, session.Requested)
	w.checkNothingLeft()
}

func (w *world) export(d *daemon, id session.ID) string {
	w.t.Helper()
	var b bytes.Buffer
	if err := d.Export(context.Background(), alice, id, &b); err != nil {
		w.t.Fatal(err)
	}
	return b.String()
}

// The decision and the trace of a request are in its events.
func TestDecisionAndTraceAreRecorded(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	id := trace.New()
	ctx := trace.NewContext(t.Context(), id)
	s, _, err := d.Create(ctx, lifecycle.CreateRequest{Caller: alice})
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.Start(ctx, alice, s.ID, workload.Command{Argv: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	collect(t, p)
	p.Detach()
	if _, err := d.End(ctx, lifecycle.EndRequest{Caller: alice, ID: s.ID}); err != nil {
		t.Fatal(err)
	}
	decided := map[audit.Action]bool{audit.SessionCreated: true, audit.CommandIntent: true, audit.SessionEnding: true}
	err = w.store.Events(t.Context(), s.ID, 0, 0, func(e audit.Stored) error {
		ev := e.Event
		if decided[ev.Action] && (ev.Decision.Verdict != audit.Allow || !strings.HasPrefix(ev.Decision.Policy, "sha256:")) {
			t.Errorf("%s: decision %+v", ev.Action, ev.Decision)
		}
		if ev.Trace != id {
			t.Errorf("%s: trace %q, want %q", ev.Action, ev.Trace, id)
		}
		if ev.Node != "here" || ev.Generation != 1 {
			t.Errorf("%s: node %q, generation %d", ev.Action, ev.Node, ev.Generation)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What a caller may not do leaves no trace in a session, and to those who may
// not see a session it does not exist, whatever state it is in.
func TestOthersSessionsDoNotExist(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	mallory := access.Caller{Principal: session.Principal{Subject: "key:mallory"}, Role: access.Developer}
	auditor := access.Caller{Principal: session.Principal{Subject: "key:auditor"}, Role: access.Auditor}
	s := d.create()
	try := func(who access.Caller, want kind.Kind) {
		t.Helper()
		for name, err := range map[string]error{
			"start":   second(d.Start(t.Context(), who, s.ID, workload.Command{Argv: []string{"true"}})),
			"attach":  second(d.Attach(t.Context(), who, s.ID, "nothing")),
			"write":   second(d.WriteFile(t.Context(), who, s.ID, "/f", "", strings.NewReader("x"), 1)),
			"read":    third(d.ReadFile(t.Context(), who, s.ID, "/etc/passwd", "")),
			"stat":    second(d.Stat(t.Context(), who, s.ID, "/", "")),
			"list":    second(d.ListDir(t.Context(), who, s.ID, "/", "", 1)),
			"mkdir":   second(d.MakeDir(t.Context(), who, s.ID, "/d", "")),
			"move":    second(d.Move(t.Context(), who, s.ID, "/f", "/g", "")),
			"remove":  d.Remove(t.Context(), who, s.ID, "/f", ""),
			"timeout": second(d.SetTimeout(t.Context(), who, s.ID, 60)),
			"end":     second(d.End(t.Context(), lifecycle.EndRequest{Caller: who, ID: s.ID})),
		} {
			if !kind.Is(err, want) {
				t.Errorf("%s by %s: %v, want kind %s", name, who.Principal.Subject, err, want)
			}
		}
	}
	events := w.count(s.ID, "") + len(w.story(s.ID))
	try(mallory, kind.NotFound)
	try(auditor, kind.Denied)
	try(access.Caller{}, kind.Denied)
	if _, err := d.Get(t.Context(), mallory, s.ID); !kind.Is(err, kind.NotFound) {
		t.Errorf("get: %v", err)
	}
	if got, _, err := d.List(t.Context(), mallory, session.Filter{}, "", 10); err != nil || len(got) != 0 {
		t.Errorf("list: %+v, %v", got, err)
	}
	if err := d.Events(t.Context(), mallory, s.ID, 0, 0, func(audit.Stored) error { return errors.New("an event") }); !kind.Is(err, kind.NotFound) {
		t.Errorf("events: %v", err)
	}
	if after := w.count(s.ID, "") + len(w.story(s.ID)); after != events {
		t.Errorf("what was refused is in the session's record\n%s", w.story(s.ID))
	}
	d.end(s.ID)
	try(mallory, kind.NotFound)
}

// Another process that has taken the session over fences this one off: what it
// writes is refused, and it cannot end what is not its own any more.
func TestStaleManagerWritesNothing(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	// A resume elsewhere gives the session another sandbox.
	moved := s
	moved.Generation++
	if _, _, err := w.store.Transition(t.Context(), s.Fence(), moved, audit.Entry{Action: "session.moved", Outcome: audit.OK, Actor: alice.Principal}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), alice, s.ID, workload.Command{Argv: []string{"touch", "made"}}); !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "2") {
		t.Errorf("a command by the stale manager: %v; want a conflict that names generation 2", err)
	}
	if n := w.count(s.ID, audit.CommandIntent); n != 0 {
		t.Errorf("%d intents of the stale manager", n)
	}
	d.stop()
	if err := (&fake.Driver{Host: w.host}).Destroy(t.Context(), s.SandboxID()); err != nil {
		t.Fatal(err)
	}
}
