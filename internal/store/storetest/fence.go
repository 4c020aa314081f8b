package storetest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// started returns a running session with a sandbox.
func started(t *testing.T, s Store, boot string) session.Session {
	t.Helper()
	at := Created(t, s)
	next := at
	next.State, next.Generation, next.Boot = session.Running, at.Generation+1, boot
	stored, _, err := s.Transition(t.Context(), at.Fence(), next, Entry(audit.SessionRunning))
	if err != nil {
		t.Fatal(err)
	}
	return stored
}

// conflict checks that err names what the writer should have known.
func conflict(t *testing.T, what string, err error, want session.Fence) {
	t.Helper()
	wantKind(t, what, err, kind.Conflict)
	if text := fmt.Sprintf("is on node %s at generation %d", want.Node, want.Generation); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: got %v, want a message with %q", what, err, text)
	}
}

// staleWrites tries every way to write to a session under a wrong fence.
func staleWrites(t *testing.T, s Store, at session.Session, stale session.Fence) {
	t.Helper()
	_, err := s.Append(t.Context(), at.ID, stale, Entry(audit.StepDone))
	conflict(t, "append", err, at.Fence())
	next := at
	next.State = session.Running
	_, _, err = s.Transition(t.Context(), stale, next, Entry(audit.StepDone))
	conflict(t, "transition", err, at.Fence())
	next.State, next.Reason = session.Ended, session.Requested
	sign := func(audit.Head, audit.Heads) (audit.Seal, error) {
		t.Error("sign was called for a stale writer")
		return audit.Seal{}, errStop
	}
	_, err = s.Seal(t.Context(), stale, next, sign, Entry(audit.SessionEnded))
	conflict(t, "seal", err, at.Fence())
}

// testFence: a writer that is wrong about the node or the generation writes
// nothing.
func testFence(t *testing.T, s Store) {
	at := started(t, s, "boot-1")
	before := actions(t, s, at.ID)
	for _, stale := range []session.Fence{
		{Node: at.Node, Generation: 0},
		{Node: at.Node, Generation: 2},
		{Node: "node-2", Generation: 1},
		{},
	} {
		staleWrites(t, s, at, stale)
	}
	same(t, "record", before, actions(t, s, at.ID))
	same(t, "session", at, get(t, s, at.ID))

	ended, key := Sealed(t, s, at)
	_, err := s.AppendAddenda(t.Context(), ended.ID, session.Fence{Node: "node-2", Generation: 1}, signAddenda(audit.GenerateSigner()), Entry(audit.StepDone))
	conflict(t, "addenda", err, ended.Fence())
	if r := Verify(t, s, ended.ID, key); r.Addenda != 0 {
		t.Errorf("%d addenda", r.Addenda)
	}
}

// testFenceMoves: a transition may change node and generation; its events are
// written under the fence before.
func testFenceMoves(t *testing.T, s Store) {
	at := started(t, s, "boot-1")
	old := at.Fence()
	next := at
	next.Node, next.Generation, next.Boot = "node-2", 2, "boot-2"
	moved, first, err := s.Transition(t.Context(), old, next, Entry(audit.StepDone))
	if err != nil {
		t.Fatal(err)
	}
	staleWrites(t, s, moved, old)
	if _, err := s.Append(t.Context(), at.ID, moved.Fence(), Entry(audit.StepFailed)); err != nil {
		t.Fatal(err)
	}
	var got []session.Fence
	if err := s.Events(t.Context(), at.ID, first-1, 0, func(e audit.Stored) error {
		got = append(got, session.Fence{Node: e.Event.Node, Generation: e.Event.Generation})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	same(t, "fences of the events", []session.Fence{old, moved.Fence()}, got)

	past := moved
	past.Generation = 1
	_, _, err = s.Transition(t.Context(), moved.Fence(), past, Entry(audit.StepDone))
	wantKind(t, "an earlier generation", err, kind.Invalid)
	same(t, "session", moved, get(t, s, at.ID))
	_, key := Sealed(t, s, moved)
	Verify(t, s, at.ID, key)
}

// testSequence: every write returns the number of its first event.
func testSequence(t *testing.T, s Store) {
	at := Created(t, s)
	want := uint64(2)
	for n := 1; n <= 4; n++ {
		var entries []audit.Entry
		for range n {
			entries = append(entries, Entry(audit.StepDone))
		}
		first, err := s.Append(t.Context(), at.ID, at.Fence(), entries...)
		if err != nil || first != want {
			t.Errorf("first event %d, %v; want %d", first, err, want)
		}
		want += uint64(n)
	}
	at.State = session.Running
	_, first, err := s.Transition(t.Context(), at.Fence(), at, Entry(audit.SessionRunning))
	if err != nil || first != want {
		t.Errorf("first event of a transition %d, %v; want %d", first, err, want)
	}
}

// testConcludes: an outcome concludes an open intent, once, also when the
// intent has an action that the store does not know.
func testConcludes(t *testing.T, s Store) {
	at := Created(t, s)
	seq, err := s.Append(t.Context(), at.ID, at.Fence(), Entry("egress.connect.intent"), Entry(audit.StepDone))
	if err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []uint64{1, seq + 1, seq + 2, 1 << 40} {
		wantKind(t, fmt.Sprint("concludes ", wrong), Append(t.Context(), s, at, Concluding("egress.connected", wrong)), kind.Invalid)
	}
	intent := Entry(audit.StepIntent)
	intent.Concludes = seq
	wantKind(t, "an intent that concludes", Append(t.Context(), s, at, intent), kind.Invalid)
	if err := Append(t.Context(), s, at, Concluding("egress.connected", seq)); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "concluded twice", Append(t.Context(), s, at, Concluding("egress.connected", seq)), kind.Invalid)
	if r := Verify(t, s, at.ID); len(r.Open) != 0 || r.Events != 4 {
		t.Errorf("open %v, %d events", r.Open, r.Events)
	}
}

// testBoot: the boot id belongs to the incarnation.
func testBoot(t *testing.T, s Store) {
	at := started(t, s, "boot-1")
	if at.Boot != "boot-1" {
		t.Errorf("boot %q", at.Boot)
	}
	check := func(want session.Session) {
		t.Helper()
		same(t, "Get", want, get(t, s, want.ID))
		live, err := s.Live(t.Context(), Node)
		if err != nil {
			t.Fatal(err)
		}
		page, _, err := s.List(t.Context(), session.Filter{}, "", 10)
		if err != nil {
			t.Fatal(err)
		}
		if want.State != session.Ended {
			same(t, "Live", []session.Session{want}, live)
		}
		same(t, "List", []session.Session{want}, page)
	}
	check(at)
	next := at
	next.Generation, next.Boot = 2, ""
	at2, _, err := s.Transition(t.Context(), at.Fence(), next, Entry(audit.StepDone))
	if err != nil {
		t.Fatal(err)
	}
	if at2.Boot != "" {
		t.Errorf("the next incarnation has boot %q of the one before", at2.Boot)
	}
	check(at2)
	at2.Boot = "boot-2"
	at3, err := Transition(t.Context(), s, at2, Entry(audit.StepDone))
	if err != nil {
		t.Fatal(err)
	}
	check(at3)
	ended, _ := Sealed(t, s, at3)
	check(ended)

	none := New()
	none.Boot = "boot-3"
	_, _, err = s.Create(t.Context(), none, session.IdempotencyKey{}, Entry(audit.SessionCreated))
	wantKind(t, "a boot id without a sandbox", err, kind.Invalid)
}

func testLivePerNode(t *testing.T, s Store) {
	one := Created(t, s)
	other := New()
	other.Node = "node-2"
	two, _, err := s.Create(t.Context(), other, session.IdempotencyKey{}, Entry(audit.SessionCreated))
	if err != nil {
		t.Fatal(err)
	}
	check := func(node session.NodeID, want ...session.ID) {
		t.Helper()
		live, err := s.Live(t.Context(), node)
		if err != nil {
			t.Fatal(err)
		}
		var got []session.ID
		for _, l := range live {
			got = append(got, l.ID)
		}
		same(t, "live on "+string(node), want, got)
	}
	check(Node, one.ID)
	check("node-2", two.ID)
	check("node-3")
	next := one
	next.Node = "node-2"
	if _, _, err := s.Transition(t.Context(), one.Fence(), next, Entry(audit.StepDone)); err != nil {
		t.Fatal(err)
	}
	check(Node)
	check("node-2", two.ID, one.ID)
}

// testTwoHandles: what one process writes, another builds on.
func testTwoHandles(t *testing.T, a, b Store) {
	at := Created(t, a)
	for i := range 6 {
		s := []Store{a, b}[i%2]
		seq, err := s.Append(t.Context(), at.ID, at.Fence(), Entry(audit.CommandIntent))
		if err != nil {
			t.Fatal(err)
		}
		if err := Append(t.Context(), []Store{b, a}[i%2], at, Concluding(audit.CommandEnded, seq)); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := a.AppendSystem(t.Context(), Node, Entry("server.started")); err != nil {
		t.Fatal(err)
	}
	if segment, first, err := b.AppendSystem(t.Context(), Node, Entry("server.started")); err != nil || segment != 1 || first != 3 {
		t.Errorf("segment %d, event %d, %v; want 1 and 3", segment, first, err)
	}
	at = Moved(t, b, at, session.Running)
	same(t, "session", at, get(t, a, at.ID))
	ended, key := Sealed(t, a, at)
	wantKind(t, "append to what the other sealed", Append(t.Context(), b, ended, Entry(audit.StepDone)), kind.Conflict)
	for _, s := range []Store{a, b} {
		if r := Verify(t, s, at.ID, key); r.Events != 16 {
			t.Errorf("%d events, want 16", r.Events)
		}
	}
}

// testStaleWriter: a process that does not know of a move is refused by what
// the database says, not by what it remembers.
func testStaleWriter(t *testing.T, a, b Store) {
	at := started(t, a, "boot-1")
	if err := Append(t.Context(), a, at, Entry(audit.StepDone)); err != nil { // a remembers the record
		t.Fatal(err)
	}
	next := at
	next.Node, next.Generation, next.Boot = "node-2", 2, "boot-2"
	moved, _, err := b.Transition(t.Context(), at.Fence(), next, Entry(audit.StepDone))
	if err != nil {
		t.Fatal(err)
	}
	before := actions(t, b, at.ID)
	staleWrites(t, a, moved, at.Fence())
	same(t, "record", before, actions(t, b, at.ID))
	same(t, "session", moved, get(t, b, at.ID))
	if err := Append(t.Context(), a, moved, Entry(audit.StepDone)); err != nil {
		t.Errorf("with the right fence: %v", err)
	}
	Verify(t, b, at.ID)
}

// testFollow: a reader sees by Revision that another process wrote, and reads
// what it wrote.
func testFollow(t *testing.T, a, b Store) {
	at := Created(t, a)
	revision := func() int64 {
		t.Helper()
		n, err := b.Revision(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	last := revision()
	if revision() != last {
		t.Error("the revision changes without a write")
	}
	for _, write := range []struct {
		what string
		by   Store
	}{{"the other process", a}, {"this process", b}} {
		for range 3 {
			seen := uint64(len(actions(t, b, at.ID)))
			if err := Append(t.Context(), write.by, at, Entry(audit.StepDone)); err != nil {
				t.Fatal(err)
			}
			now := revision()
			if now == last {
				t.Errorf("the revision is the same after a write of %s", write.what)
			}
			last = now
			got := 0
			if err := b.Events(t.Context(), at.ID, seen, 0, func(audit.Stored) error { got++; return nil }); err != nil || got != 1 {
				t.Errorf("%d new events of %s, %v; want 1", got, write.what, err)
			}
		}
	}
	if _, err := b.Revision(canceled()); !kind.Is(err, kind.Unavailable) {
		t.Errorf("with a canceled context: %v", err)
	}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// testTwoHandlesParallel: two processes that append at once keep one chain.
func testTwoHandlesParallel(t *testing.T, a, b Store) {
	at := Created(t, a)
	const writers, each = 8, 20
	for i, err := range parallel(writers, func(i int) error {
		s := []Store{a, b}[i%2]
		for range each {
			seq, err := s.Append(context.Background(), at.ID, at.Fence(), Entry(audit.CommandIntent))
			if err == nil {
				err = Append(context.Background(), s, at, Concluding(audit.CommandEnded, seq))
			}
			if err != nil {
				return err
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("writer %d: %v", i, err)
		}
	}
	if r := Verify(t, a, at.ID); r.Events != 1+2*writers*each || len(r.Open) != 0 {
		t.Errorf("%d events, open %v", r.Events, r.Open)
	}
	_, key := Sealed(t, b, at)
	if r := Verify(t, a, at.ID, key); r.SealedAt.After(time.Now()) {
		t.Errorf("sealed at %s", r.SealedAt)
	}
}
