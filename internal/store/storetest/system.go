package storetest

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func signAddenda(signer *audit.Signer) func(audit.Head) (audit.Seal, error) {
	return func(h audit.Head) (audit.Seal, error) { return signer.SealAddenda(h, time.Now()) }
}

// SignSegment returns the sign function of a segment.
func SignSegment(signer *audit.Signer) func(audit.Head, audit.Heads) (audit.Seal, error) {
	return func(h audit.Head, before audit.Heads) (audit.Seal, error) {
		return signer.SealSegment(h, before, audit.SegmentCloseout{SealedAt: time.Now()})
	}
}

// AddTo adds addenda to a session that Sealed ended and signs them with signer.
func AddTo(t testing.TB, store Store, ended session.Session, signer *audit.Signer, entries ...audit.Entry) uint64 {
	t.Helper()
	first, err := store.AppendAddenda(t.Context(), ended.ID, ended.Fence(), signAddenda(signer), entries...)
	if err != nil {
		t.Fatal(err)
	}
	return first
}

func testAddenda(t *testing.T, s Store) {
	ended, key := Sealed(t, s, started(t, s, "boot-1"))
	sealed := Export(t, s, ended.ID)
	signer := audit.GenerateSigner()
	if first := AddTo(t, s, ended, signer, Entry(audit.StepIntent), Entry("credential.revoked")); first != 1 {
		t.Errorf("first addendum %d", first)
	}
	if first := AddTo(t, s, ended, signer, Concluding(audit.StepDone, 1)); first != 3 {
		t.Errorf("first addendum of the second write %d", first)
	}
	r := Verify(t, s, ended.ID, key, signer.Public())
	if r.Addenda != 3 || len(r.OpenAddenda) != 0 || r.AddendaKey != signer.Public().Fingerprint() {
		t.Errorf("report %+v", r)
	}
	if got := Export(t, s, ended.ID); !bytes.HasPrefix(got, sealed) {
		t.Error("addenda changed what was sealed")
	}
	same(t, "session", ended, get(t, s, ended.ID))
	var got []audit.Action
	if err := s.Addenda(t.Context(), ended.ID, 1, func(e audit.Stored) error {
		got = append(got, e.Event.Action)
		if e.Event.SandboxID() != ended.SandboxID() {
			t.Errorf("addendum %d is of sandbox %s", e.Event.Seq, e.Event.SandboxID())
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	same(t, "addenda after the first", []audit.Action{"credential.revoked", audit.StepDone}, got)
}

func testAddendaRefuses(t *testing.T, s Store) {
	live := Created(t, s)
	sign := signAddenda(audit.GenerateSigner())
	_, err := s.AppendAddenda(t.Context(), live.ID, live.Fence(), sign, Entry(audit.StepDone))
	wantKind(t, "before the seal", err, kind.Conflict)
	unknown := New()
	_, err = s.AppendAddenda(t.Context(), unknown.ID, unknown.Fence(), sign, Entry(audit.StepDone))
	wantKind(t, "an unknown session", err, kind.NotFound)
	_, err = s.AddendaSeal(t.Context(), unknown.ID)
	wantKind(t, "head of an unknown session", err, kind.NotFound)
	wantKind(t, "addenda of an unknown session", s.Addenda(t.Context(), unknown.ID, 0, func(audit.Stored) error { return nil }), kind.NotFound)

	ended, key := Sealed(t, s, live)
	_, err = s.AddendaSeal(t.Context(), ended.ID)
	wantKind(t, "head without addenda", err, kind.NotFound)
	if err := s.Addenda(t.Context(), ended.ID, 0, func(audit.Stored) error { return errStop }); err != nil {
		t.Errorf("no addenda: %v", err)
	}
	_, err = s.AppendAddenda(t.Context(), ended.ID, ended.Fence(), sign)
	wantKind(t, "nothing", err, kind.Invalid)
	_, err = s.AppendAddenda(t.Context(), ended.ID, ended.Fence(), sign, Concluding(audit.StepDone, 1))
	wantKind(t, "an outcome without intent", err, kind.Invalid)
	_, err = s.AppendAddenda(t.Context(), ended.ID, ended.Fence(), func(audit.Head) (audit.Seal, error) { return audit.Seal{}, errStop }, Entry(audit.StepDone))
	if !errors.Is(err, errStop) {
		t.Errorf("without a signature: %v", err)
	}
	if r := Verify(t, s, ended.ID, key); r.Addenda != 0 {
		t.Errorf("refused writes left %d addenda", r.Addenda)
	}
}

func testSystem(t *testing.T, s Store) {
	signer := audit.GenerateSigner()
	if segments, err := s.Segments(t.Context(), Node); err != nil || len(segments) != 0 {
		t.Errorf("%v, %v; want none", segments, err)
	}
	for n := uint64(1); n <= 3; n++ {
		segment, first, err := s.AppendSystem(t.Context(), Node, Entry("server.started"), Entry("key.created"))
		if err != nil || segment != n || first != 2 {
			t.Fatalf("segment %d, event %d, %v; want %d and 2", segment, first, err, n)
		}
		if segment, first, err = s.AppendSystem(t.Context(), Node, Entry("server.stopped")); err != nil || segment != n || first != 4 {
			t.Fatalf("segment %d, event %d, %v; want %d and 4", segment, first, err, n)
		}
		if n == 3 {
			break
		}
		if err := s.SealSegment(t.Context(), Node, SignSegment(signer), Entry(audit.SegmentClosed)); err != nil {
			t.Fatal(err)
		}
	}
	segments, err := s.Segments(t.Context(), Node)
	if err != nil || len(segments) != 3 {
		t.Fatalf("%v, %v; want 3", segments, err)
	}
	for i, g := range segments {
		open := i == 2
		want := uint64(5)
		if open {
			want = 4
		}
		if g.Number != uint64(i+1) || g.Events != want || g.Bytes < 500 || g.Opened.IsZero() || g.Sealed.IsZero() != open {
			t.Errorf("segment %+v", g)
		}
		seal, err := s.SegmentSeal(t.Context(), Node, g.Number)
		if open {
			wantKind(t, "seal of the open segment", err, kind.NotFound)
		} else if c, cerr := seal.SegmentCloseout(); err != nil || cerr != nil || c.Segment != g.Number {
			t.Errorf("seal of segment %d: %v, %v", g.Number, err, cerr)
		}
	}
	r, err := audit.VerifySystem(bytes.NewReader(ExportSystem(t, s, Node)), []audit.PublicKey{signer.Public()}, audit.VerifyOptions{Node: Node})
	if err != nil || r.Segments != 3 || r.Sealed != 2 || r.Events != 14 || r.Unsealed != 4 {
		t.Errorf("%+v, %v", r, err)
	}
	count := 0
	if err := s.SegmentEvents(t.Context(), Node, 1, 2, 2, func(e audit.Stored) error {
		count++
		if want := uint64(count + 2); e.Event.Seq != want || e.Event.Node != Node || e.Event.SandboxID() != "" {
			t.Errorf("event %+v, want number %d", e.Event, want)
		}
		return nil
	}); err != nil || count != 2 {
		t.Errorf("%d events, %v; want 2", count, err)
	}
}

func testSystemRefuses(t *testing.T, s Store) {
	sign := SignSegment(audit.GenerateSigner())
	wantKind(t, "seal of nothing", s.SealSegment(t.Context(), Node, sign, Entry(audit.SegmentClosed)), kind.Conflict)
	_, _, err := s.AppendSystem(t.Context(), Node)
	wantKind(t, "nothing", err, kind.Invalid)
	for _, a := range []audit.Action{audit.SegmentClosed} {
		_, _, err = s.AppendSystem(t.Context(), Node, Entry(a))
		wantKind(t, string(a), err, kind.Invalid)
	}
	_, _, err = s.AppendSystem(t.Context(), Node, Entry(audit.SegmentOpened))
	wantKind(t, "a second beginning", err, kind.Conflict)
	_, _, err = s.AppendSystem(t.Context(), "a/b", Entry("server.started"))
	wantKind(t, "a node that is none", err, kind.Invalid)
	if segments, err := s.Segments(t.Context(), Node); err != nil || len(segments) != 0 {
		t.Errorf("refused writes left %v, %v", segments, err)
	}
	if _, _, err = s.AppendSystem(t.Context(), Node, Entry("server.started")); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "another last event", s.SealSegment(t.Context(), Node, sign, Entry("server.stopped")), kind.Invalid)
	wantKind(t, "no event", s.SealSegment(t.Context(), Node, sign), kind.Invalid)
	if err := s.SealSegment(t.Context(), Node, func(audit.Head, audit.Heads) (audit.Seal, error) { return audit.Seal{}, errStop }, Entry(audit.SegmentClosed)); !errors.Is(err, errStop) {
		t.Errorf("without a signature: %v", err)
	}
	_, err = s.SegmentSeal(t.Context(), Node, 2)
	wantKind(t, "seal of an unknown segment", err, kind.NotFound)
	wantKind(t, "events of an unknown segment", s.SegmentEvents(t.Context(), Node, 2, 0, 0, func(audit.Stored) error { return nil }), kind.NotFound)
	if segments, err := s.Segments(t.Context(), Node); err != nil || len(segments) != 1 || segments[0].Events != 2 || !segments[0].Sealed.IsZero() {
		t.Errorf("segments %v, %v", segments, err)
	}
}

func testSystemLostIntents(t *testing.T, s Store) {
	signer := audit.GenerateSigner()
	_, seq, err := s.AppendSystem(t.Context(), Node, Entry("template.build.intent"), Entry("template.build.intent"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SealSegment(t.Context(), Node, SignSegment(signer), Concluding("template.built", seq), Entry(audit.SegmentClosed)); err != nil {
		t.Fatal(err)
	}
	r, err := audit.VerifySystem(bytes.NewReader(ExportSystem(t, s, Node)), []audit.PublicKey{signer.Public()}, audit.VerifyOptions{})
	if err != nil || r.Counts[audit.IntentLost] != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// listing returns a function for audit.VerifyHeads.
func listing(t *testing.T, s Store, node session.NodeID) func(func(audit.ListedRecord) error) error {
	return func(fn func(audit.ListedRecord) error) error { return s.Listing(t.Context(), node, fn) }
}

// testHeads: each statement of heads agrees with every later listing, and with
// no earlier one.
func testHeads(t *testing.T, s Store) {
	if has, err := s.HasSeals(t.Context()); err != nil || has {
		t.Errorf("seals in an empty store: %v, %v", has, err)
	}
	signer := audit.GenerateSigner()
	var held []audit.Heads
	take := func() audit.Heads {
		t.Helper()
		h, err := s.Heads(t.Context(), Node)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, h)
		return h
	}
	var first []audit.ListedRecord // a listing of an earlier moment
	take()
	open := Created(t, s)
	if _, _, err := s.AppendSystem(t.Context(), Node, Entry("server.started")); err != nil {
		t.Fatal(err)
	}
	for i := range 9 {
		at := Created(t, s)
		take()
		ended, _ := Sealed(t, s, at)
		seal, err := s.SealOf(t.Context(), ended.ID)
		if err != nil {
			t.Fatal(err)
		}
		c, err := seal.Closeout()
		if err != nil {
			t.Fatal(err)
		}
		before, ok, err := c.Heads()
		if err != nil || !ok || before.Sealed != held[len(held)-1].Sealed || before.OpenCount != 1 || before.Node != Node || before.System.Record == "" {
			t.Fatalf("heads in the seal: %+v, %v, %v", before, ok, err)
		}
		held = append(held, before)
		if i%3 == 0 {
			AddTo(t, s, ended, signer, Entry(audit.StepDone))
			AddTo(t, s, ended, signer, Entry(audit.StepDone))
		}
		if i == 4 {
			if err := s.SealSegment(t.Context(), Node, SignSegment(signer), Entry(audit.SegmentClosed)); err != nil {
				t.Fatal(err)
			}
			take()
			if _, _, err := s.AppendSystem(t.Context(), Node, Entry("server.started")); err != nil {
				t.Fatal(err)
			}
			if err := listing(t, s, Node)(func(r audit.ListedRecord) error { first = append(first, r); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		if err := Append(t.Context(), s, open, Entry(audit.StepDone)); err != nil {
			t.Fatal(err)
		}
	}
	last := take()
	if want := uint64(9 + 6 + 1); last.Sealed != want || last.OpenCount != 1 || len(last.Open) != 1 || last.System.Seq != 2 {
		t.Errorf("last heads %+v, want %d seals", last, want)
	}
	for i, h := range held {
		r, err := audit.VerifyHeads(h, listing(t, s, Node))
		if err != nil {
			t.Errorf("statement %d of %d seals: %v", i, h.Sealed, err)
			continue
		}
		for _, c := range r.Continued {
			id, ok := c.Record.Session()
			if !ok {
				continue
			}
			rep, err := audit.Verify(bytes.NewReader(Export(t, s, id)), nil, audit.VerifyOptions{AllowOpen: true, Contains: r.Continued})
			if id == open.ID && (err != nil || rep.Contained != 1) {
				t.Errorf("statement %d: open record: %d heads in it, %v", i, rep.Contained, err)
			}
		}
	}
	// An older copy of the database is what the listing of then shows.
	_, err := audit.VerifyHeads(last, func(fn func(audit.ListedRecord) error) error {
		for _, r := range first {
			if err := fn(r); err != nil {
				return err
			}
		}
		return nil
	})
	wantKind(t, "an older copy", err, kind.Invalid)
	if has, err := s.HasSeals(t.Context()); err != nil || !has {
		t.Errorf("seals: %v, %v", has, err)
	}
}

// testHeadsOfNodes: each node has a tree of its own.
func testHeadsOfNodes(t *testing.T, s Store) {
	Sealed(t, s, Created(t, s))
	other := New()
	other.Node = "node-2"
	made, _, err := s.Create(t.Context(), other, session.IdempotencyKey{}, Entry(audit.SessionCreated))
	if err != nil {
		t.Fatal(err)
	}
	Sealed(t, s, made)
	for _, node := range []session.NodeID{Node, "node-2"} {
		h, err := s.Heads(t.Context(), node)
		if err != nil || h.Sealed != 1 || h.Node != node || h.OpenCount != 0 {
			t.Errorf("heads of %s: %+v, %v", node, h, err)
		}
		var got []audit.ListedRecord
		if err := s.Listing(t.Context(), node, func(r audit.ListedRecord) error { got = append(got, r); return nil }); err != nil || len(got) != 1 || !got[0].Sealed {
			t.Errorf("listing of %s: %v, %v", node, got, err)
		}
	}
}
