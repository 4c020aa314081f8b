package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Run holds a store to the contract. start is called once for each subtest with
// an empty place for data; each call of the function that it returns opens a
// further handle on the same data, closed by t.Cleanup.
func Run(t *testing.T, start func(t *testing.T) (open func() Store)) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Store)
	}{
		{"Create", testCreate},
		{"CreateRefuses", testCreateRefuses},
		{"Transition", testTransition},
		{"TransitionRule", testTransitionRule},
		{"TransitionCompareAndSwap", testCompareAndSwap},
		{"TransitionOneWinner", testOneWinner},
		{"TransitionKeepsWhatIsFixed", testFixed},
		{"AppendContiguous", testContiguous},
		{"AppendRefuses", testAppendRefuses},
		{"FailureWritesNothing", testFailureWritesNothing},
		{"FailureIsAlone", testFailureIsAlone},
		{"Events", testEvents},
		{"EventsStop", testEventsStop},
		{"Idempotency", testIdempotency},
		{"IdempotencyParallel", testIdempotencyParallel},
		{"ListPages", testListPages},
		{"ListFilters", testListFilters},
		{"ListRefuses", testListRefuses},
		{"Live", testLive},
		{"Seal", testSeal},
		{"SealWithoutSignature", testSealWithoutSignature},
		{"SealIsFinal", testSealIsFinal},
		{"SealAgainstAppend", testSealAgainstAppend},
		{"SealNamesLostIntents", testSealNamesLostIntents},
		{"SealRefuses", testSealRefuses},
		{"HostileText", testHostileText},
		{"Unknown", testUnknown},
		{"CanceledContext", testCanceled},
		{"Fence", testFence},
		{"FenceMoves", testFenceMoves},
		{"Sequence", testSequence},
		{"Concludes", testConcludes},
		{"Boot", testBoot},
		{"LivePerNode", testLivePerNode},
		{"Addenda", testAddenda},
		{"AddendaRefuses", testAddendaRefuses},
		{"System", testSystem},
		{"SystemRefuses", testSystemRefuses},
		{"SystemNamesLostIntents", testSystemLostIntents},
		{"Heads", testHeads},
		{"HeadsOfNodes", testHeadsOfNodes},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, start(t)()) })
	}
	for _, c := range []struct {
		name string
		test func(t *testing.T, a, b Store)
	}{
		{"TwoHandles", testTwoHandles},
		{"TwoHandlesStaleWriter", testStaleWriter},
		{"TwoHandlesFollow", testFollow},
		{"TwoHandlesParallel", testTwoHandlesParallel},
	} {
		t.Run(c.name, func(t *testing.T) {
			open := start(t)
			c.test(t, open(), open())
		})
	}
}

// Node is the node of the sessions that New returns.
const Node session.NodeID = "node-1"

// New returns a session as a create would make it.
func New() session.Session {
	spec := session.Spec{Labels: map[string]string{"team": "red"}}.WithDefaults()
	digest, err := spec.Digest()
	if err != nil {
		panic(err) // a spec of strings and numbers always encodes
	}
	now := time.Now()
	return session.Session{
		ID:         session.NewID(),
		State:      session.Creating,
		Spec:       spec,
		SpecDigest: digest,
		Owner:      session.Principal{Subject: "key:0badcafe"},
		Node:       Node,
		CreatedAt:  now,
		Deadline:   now.Add(5 * time.Minute),
	}
}

// Entry returns a valid entry.
func Entry(a audit.Action) audit.Entry {
	e := audit.Entry{Action: a, Outcome: audit.OK, Actor: session.Principal{Subject: "system:test"}, Ref: "r", Payload: map[string]any{"a": 1}}
	if a.Intent() {
		e.Outcome = audit.Pending
	}
	return e
}

// Created returns a new session that is in the store.
func Created(t testing.TB, s Store) session.Session {
	t.Helper()
	made, existed, err := s.Create(t.Context(), New(), session.IdempotencyKey{}, Entry(audit.SessionCreated))
	if err != nil || existed {
		t.Fatalf("create: existed=%v err=%v", existed, err)
	}
	return made
}

// Moved returns s after a transition to state.
func Moved(t testing.TB, store Store, s session.Session, state session.State) session.Session {
	t.Helper()
	s.State = state
	action := audit.SessionRunning
	if state == session.Ending {
		s.Reason, action = session.Requested, audit.SessionEnding
	}
	moved, err := Transition(t.Context(), store, s, Entry(action))
	if err != nil {
		t.Fatalf("to %s: %v", state, err)
	}
	return moved
}

// Sealed ends s, from any state that can end, and returns it and what verifies
// its record.
func Sealed(t testing.TB, store Store, s session.Session) (session.Session, audit.PublicKey) {
	t.Helper()
	if s.State != session.Ending {
		s = Moved(t, store, s, session.Ending)
	}
	signer := audit.GenerateSigner()
	s.State, s.EndedAt = session.Ended, time.Now()
	ended, err := store.Seal(t.Context(), s.Fence(), s, SignWith(signer, s), Entry(audit.SessionEnded))
	if err != nil {
		t.Fatalf("seal: %v", err)
	}
	return ended, signer.Public()
}

// Append appends to the record of a session, under the fence of at.
func Append(ctx context.Context, store Store, at session.Session, entries ...audit.Entry) error {
	_, err := store.Append(ctx, at.ID, at.Fence(), entries...)
	return err
}

// Transition replaces the session by next, under the fence of next.
func Transition(ctx context.Context, store Store, next session.Session, entries ...audit.Entry) (session.Session, error) {
	stored, _, err := store.Transition(ctx, next.Fence(), next, entries...)
	return stored, err
}

// Concluding returns the entry that concludes intent seq.
func Concluding(a audit.Action, seq uint64) audit.Entry {
	e := Entry(a)
	e.Concludes = seq
	return e
}

// SignWith returns the sign function of a closeout of s.
func SignWith(signer *audit.Signer, s session.Session) func(audit.Head, audit.Heads) (audit.Seal, error) {
	return func(h audit.Head, before audit.Heads) (audit.Seal, error) {
		return signer.Seal(h, before, audit.Closeout{
			Session: s.ID, Owner: s.Owner, Reason: s.Reason, CreatedAt: s.CreatedAt, EndedAt: s.EndedAt,
			SealedAt: time.Now(), Residuals: s.Residuals,
		})
	}
}

// Verify exports the record of id with its addenda and verifies it; without
// keys as one that is still open.
func Verify(t testing.TB, store Store, id session.ID, keys ...audit.PublicKey) audit.Report {
	t.Helper()
	report, err := audit.Verify(bytes.NewReader(Export(t, store, id)), keys, audit.VerifyOptions{Session: id, AllowOpen: len(keys) == 0})
	if err != nil {
		t.Fatalf("verify %s: %v", id, err)
	}
	return report
}

// Export exports all that the store has of a session's record.
func Export(t testing.TB, store Store, id session.ID) []byte {
	t.Helper()
	x := audit.SessionExport{Session: id, Events: func(yield func(audit.Stored) error) error {
		return store.Events(t.Context(), id, 0, 0, yield)
	}}
	seal, err := store.SealOf(t.Context(), id)
	if err == nil {
		x.Seal = &seal
	} else if !kind.Is(err, kind.NotFound) {
		t.Fatalf("seal of %s: %v", id, err)
	}
	head, err := store.AddendaSeal(t.Context(), id)
	if err == nil {
		x.AddendaSeal = &head
		x.Addenda = func(yield func(audit.Stored) error) error { return store.Addenda(t.Context(), id, 0, yield) }
	} else if !kind.Is(err, kind.NotFound) {
		t.Fatalf("head of the addenda of %s: %v", id, err)
	}
	var out bytes.Buffer
	if err := audit.Export(&out, x); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// ExportSystem exports all that the store has of the system record of a node.
func ExportSystem(t testing.TB, store Store, node session.NodeID) []byte {
	t.Helper()
	segments, err := store.Segments(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	x := audit.SystemExport{Node: node}
	for _, g := range segments {
		one := audit.SegmentExport{Events: func(yield func(audit.Stored) error) error {
			return store.SegmentEvents(t.Context(), node, g.Number, 0, 0, yield)
		}}
		if !g.Sealed.IsZero() {
			seal, err := store.SegmentSeal(t.Context(), node, g.Number)
			if err != nil {
				t.Fatal(err)
			}
			one.Seal = &seal
		}
		x.Segments = append(x.Segments, one)
	}
	var out bytes.Buffer
	if err := audit.ExportSystem(&out, x); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func get(t testing.TB, s Store, id session.ID) session.Session {
	t.Helper()
	got, err := s.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func actions(t testing.TB, s Store, id session.ID) []audit.Action {
	t.Helper()
	var all []audit.Action
	err := s.Events(t.Context(), id, 0, 0, func(e audit.Stored) error {
		all = append(all, e.Event.Action)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func wantKind(t testing.TB, what string, err error, want kind.Kind) {
	t.Helper()
	if !kind.Is(err, want) {
		t.Errorf("%s: got error %v (%s), want kind %s", what, err, kind.Of(err), want)
	}
}

func same(t testing.TB, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// parallel runs f n times at once and returns the errors.
func parallel(n int, f func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			errs[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	return errs
}

func testCreate(t *testing.T, s Store) {
	want := New()
	made, existed, err := s.Create(t.Context(), want, session.IdempotencyKey{}, Entry(audit.SessionCreated), Entry(audit.StepIntent))
	if err != nil || existed {
		t.Fatalf("existed=%v err=%v", existed, err)
	}
	if made.Version != 1 {
		t.Errorf("version %d, want 1", made.Version)
	}
	if made.CreatedAt.Sub(want.CreatedAt).Abs() > time.Microsecond || made.CreatedAt.Location() != time.UTC {
		t.Errorf("created at %v, want %v in UTC", made.CreatedAt, want.CreatedAt)
	}
	same(t, "Get against Create", made, get(t, s, made.ID))
	same(t, "record", []audit.Action{audit.SessionCreated, audit.StepIntent}, actions(t, s, made.ID))
	if _, err := s.SealOf(t.Context(), made.ID); true {
		wantKind(t, "seal of a session that has not ended", err, kind.NotFound)
	}
}

func testCreateRefuses(t *testing.T, s Store) {
	there := Created(t, s)
	for _, c := range []struct {
		what    string
		change  func(*session.Session)
		key     session.IdempotencyKey
		entries []audit.Entry
		want    kind.Kind
	}{
		{what: "the same id", change: func(n *session.Session) { n.ID = there.ID }, entries: []audit.Entry{Entry(audit.SessionCreated)}, want: kind.Conflict},
		{what: "a wrong id", change: func(n *session.Session) { n.ID = "short" }, entries: []audit.Entry{Entry(audit.SessionCreated)}, want: kind.Invalid},
		{what: "no owner", change: func(n *session.Session) { n.Owner = session.Principal{} }, entries: []audit.Entry{Entry(audit.SessionCreated)}, want: kind.Invalid},
		{what: "another first state", change: func(n *session.Session) { n.State = session.Running }, entries: []audit.Entry{Entry(audit.SessionCreated)}, want: kind.Invalid},
		{what: "no event", want: kind.Invalid},
		{what: "another first event", entries: []audit.Entry{Entry(audit.SessionRunning)}, want: kind.Conflict},
		{what: "a record opened twice", entries: []audit.Entry{Entry(audit.SessionCreated), Entry(audit.SessionCreated)}, want: kind.Conflict},
		{what: "a long idempotency key", key: session.IdempotencyKey{Key: string(make([]byte, 256))}, entries: []audit.Entry{Entry(audit.SessionCreated)}, want: kind.Invalid},
	} {
		n := New()
		if c.change != nil {
			c.change(&n)
		}
		_, _, err := s.Create(t.Context(), n, c.key, c.entries...)
		wantKind(t, c.what, err, c.want)
		if n.ID != there.ID {
			_, err = s.Get(t.Context(), n.ID)
			wantKind(t, "after "+c.what, err, kind.NotFound)
		}
	}
	same(t, "the one that was there", there, get(t, s, there.ID))
	if got := len(actions(t, s, there.ID)); got != 1 {
		t.Errorf("its record has %d events, want 1", got)
	}
}

func testTransition(t *testing.T, s Store) {
	made := Created(t, s)
	want := made
	want.State, want.StartedAt, want.Generation, want.Template = session.Running, time.Now(), 1, "sha256:abc"
	got, first, err := s.Transition(t.Context(), made.Fence(), want, Entry(audit.SessionRunning), Entry(audit.StepIntent))
	if err != nil || first != 2 {
		t.Fatalf("first event %d, %v; want 2", first, err)
	}
	if got.Version != 2 || got.State != session.Running || got.Template != "sha256:abc" {
		t.Errorf("got %+v", got)
	}
	same(t, "Get against Transition", got, get(t, s, made.ID))

	// A state may become itself: a fact beside it changed.
	got.Deadline = got.Deadline.Add(time.Hour)
	again, err := Transition(t.Context(), s, got, Concluding(audit.StepDone, 3))
	if err != nil {
		t.Fatal(err)
	}
	if again.Version != 3 || !again.Deadline.Equal(got.Deadline) {
		t.Errorf("got %+v", again)
	}
	same(t, "record", []audit.Action{audit.SessionCreated, audit.SessionRunning, audit.StepIntent, audit.StepDone}, actions(t, s, made.ID))
	if r := Verify(t, s, made.ID); len(r.Open) != 0 {
		t.Errorf("open intents %v", r.Open)
	}
}

// paths leads to each state from creating.
func paths() map[session.State][]session.State {
	return map[session.State][]session.State{
		session.Creating:    {},
		session.Running:     {session.Running},
		session.Pausing:     {session.Running, session.Pausing},
		session.Standby:     {session.Running, session.Pausing, session.Standby},
		session.Resuming:    {session.Running, session.Pausing, session.Standby, session.Resuming},
		session.Quarantined: {session.Running, session.Quarantined},
		session.Ending:      {session.Ending},
	}
}

func testTransitionRule(t *testing.T, s Store) {
	for from, path := range paths() {
		for _, to := range session.States() {
			at := Created(t, s)
			for _, step := range path {
				at = Moved(t, s, at, step)
			}
			next := at
			next.State, next.Reason = to, session.Requested
			got, err := Transition(t.Context(), s, next, Entry(audit.StepDone))
			if to == session.Ended || !from.CanBecome(to) {
				wantKind(t, fmt.Sprintf("%s to %s", from, to), err, kind.Conflict)
				same(t, "after a refusal", at, get(t, s, at.ID))
				continue
			}
			if err != nil || got.State != to {
				t.Errorf("%s to %s: got %s, %v", from, to, got.State, err)
			}
		}
	}
	// An end has a reason.
	at := Created(t, s)
	at.State = session.Ending
	_, err := Transition(t.Context(), s, at, Entry(audit.SessionEnding))
	wantKind(t, "ending without a reason", err, kind.Invalid)
	at.State = "strange"
	_, err = Transition(t.Context(), s, at, Entry(audit.SessionEnding))
	wantKind(t, "a state that is none", err, kind.Invalid)
	at.State = session.Running
	_, err = Transition(t.Context(), s, at)
	wantKind(t, "a transition without an event", err, kind.Invalid)
}

func testCompareAndSwap(t *testing.T, s Store) {
	old := Created(t, s)
	now := Moved(t, s, old, session.Running)
	for _, version := range []int64{old.Version, 0, -1, now.Version + 1} {
		stale := now
		stale.Version = version
		_, err := Transition(t.Context(), s, stale, Entry(audit.StepDone))
		wantKind(t, fmt.Sprintf("version %d", version), err, kind.Conflict)
	}
	same(t, "after refusals", now, get(t, s, now.ID))
	if got := len(actions(t, s, now.ID)); got != 2 {
		t.Errorf("%d events, want 2", got)
	}
}

func testOneWinner(t *testing.T, s Store) {
	at := Moved(t, s, Created(t, s), session.Running)
	for round := range 10 {
		won := 0
		for i, err := range parallel(20, func(i int) error {
			next := at
			next.Detail = fmt.Sprintf("writer %d of round %d", i, round)
			_, err := Transition(context.Background(), s, next, Entry(audit.StepDone))
			return err
		}) {
			if err == nil {
				won++
				continue
			}
			wantKind(t, fmt.Sprintf("writer %d", i), err, kind.Conflict)
		}
		if won != 1 {
			t.Fatalf("round %d: %d writers won, want 1", round, won)
		}
		before := at.Version
		if at = get(t, s, at.ID); at.Version != before+1 {
			t.Fatalf("round %d: version %d after %d", round, at.Version, before)
		}
	}
	if r := Verify(t, s, at.ID); r.Events != 12 {
		t.Errorf("%d events, want 12", r.Events)
	}
}

func testFixed(t *testing.T, s Store) {
	at := Created(t, s)
	for what, change := range map[string]func(*session.Session){
		"spec":        func(n *session.Session) { n.Spec.Hostname = "other" },
		"labels":      func(n *session.Session) { n.Spec.Labels = map[string]string{"team": "blue"} },
		"spec digest": func(n *session.Session) { n.SpecDigest = "sha256:0" },
		"owner":       func(n *session.Session) { n.Owner.Subject = "key:mallory" },
		"trigger":     func(n *session.Session) { n.Owner.Trigger = "x" },
		"created at":  func(n *session.Session) { n.CreatedAt = n.CreatedAt.Add(time.Second) },
	} {
		next := at
		change(&next)
		next.State = session.Running
		_, err := Transition(t.Context(), s, next, Entry(audit.SessionRunning))
		wantKind(t, "another "+what, err, kind.Invalid)
	}
	same(t, "after refusals", at, get(t, s, at.ID))
}

func testContiguous(t *testing.T, s Store) {
	const writers, each = 50, 20
	all := []session.Session{Created(t, s), Created(t, s), Created(t, s)}
	for i, err := range parallel(writers, func(w int) error {
		for i := range each {
			e := Entry(audit.CommandStarted)
			e.Payload = map[string]any{"writer": w, "i": i}
			if err := Append(context.Background(), s, all[w%len(all)], e, Entry(audit.CommandEnded)); err != nil {
				return err
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("writer %d: %v", i, err)
		}
	}
	var total uint64
	for _, one := range all {
		id := one.ID
		total += Verify(t, s, id).Events
		// The events of one Append stand together.
		for i, a := range actions(t, s, id)[1:] {
			if want := []audit.Action{audit.CommandStarted, audit.CommandEnded}[i%2]; a != want {
				t.Fatalf("event %d of %s is %s, want %s", i+2, id, a, want)
			}
		}
	}
	if want := uint64(writers*each*2 + len(all)); total != want {
		t.Errorf("%d events, want %d", total, want)
	}
}

func testAppendRefuses(t *testing.T, s Store) {
	at := Created(t, s)
	for what, c := range map[string]struct {
		entries []audit.Entry
		want    kind.Kind
	}{
		"nothing":                   {nil, kind.Invalid},
		"a second beginning":        {[]audit.Entry{Entry(audit.SessionCreated)}, kind.Conflict},
		"an end without a seal":     {[]audit.Entry{Entry(audit.SessionEnded)}, kind.Invalid},
		"no action":                 {[]audit.Entry{{Outcome: audit.OK, Actor: at.Owner}}, kind.Invalid},
		"no outcome":                {[]audit.Entry{{Action: audit.StepDone, Actor: at.Owner}}, kind.Invalid},
		"no actor":                  {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK}}, kind.Invalid},
		"an intent without ref":     {[]audit.Entry{{Action: audit.StepIntent, Outcome: audit.Pending, Actor: at.Owner}}, kind.Invalid},
		"an intent that is done":    {[]audit.Entry{{Action: audit.StepIntent, Outcome: audit.OK, Actor: at.Owner, Ref: "x"}}, kind.Invalid},
		"an object with a newline":  {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK, Actor: at.Owner, Object: "a\nb"}}, kind.Invalid},
		"a long object":             {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK, Actor: at.Owner, Object: strings.Repeat("x", 129)}}, kind.Invalid},
		"no trace id":               {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK, Actor: at.Owner, Trace: "x"}}, kind.Invalid},
		"no verdict":                {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK, Actor: at.Owner, Decision: audit.Decision{Verdict: "perhaps"}}}, kind.Invalid},
		"the end of nothing":        {[]audit.Entry{Concluding(audit.StepDone, 9)}, kind.Invalid},
		"a payload that is no JSON": {[]audit.Entry{{Action: audit.StepDone, Outcome: audit.OK, Actor: at.Owner, Payload: make(chan int)}}, kind.Invalid},
		"a bad one after a good":    {[]audit.Entry{Entry(audit.StepDone), {Action: "x"}}, kind.Invalid},
	} {
		wantKind(t, what, Append(t.Context(), s, at, c.entries...), c.want)
	}
	same(t, "record", []audit.Action{audit.SessionCreated}, actions(t, s, at.ID))
	same(t, "session", at, get(t, s, at.ID))
}

func testFailureWritesNothing(t *testing.T, s Store) {
	at := Created(t, s)
	next := at
	next.State = session.Running
	bad := Concluding(audit.StepDone, 99) // refused only when it is chained
	_, err := Transition(t.Context(), s, next, Entry(audit.SessionRunning), bad)
	wantKind(t, "transition", err, kind.Invalid)
	same(t, "session", at, get(t, s, at.ID))
	same(t, "record", []audit.Action{audit.SessionCreated}, actions(t, s, at.ID))

	fresh := New()
	_, _, err = s.Create(t.Context(), fresh, session.IdempotencyKey{Key: "k", Digest: "d"}, Entry(audit.SessionCreated), bad)
	wantKind(t, "create", err, kind.Invalid)
	_, err = s.Get(t.Context(), fresh.ID)
	wantKind(t, "after create", err, kind.NotFound)
	if _, existed, err := s.Create(t.Context(), fresh, session.IdempotencyKey{Key: "k", Digest: "other"}, Entry(audit.SessionCreated)); err != nil || existed {
		t.Errorf("the key of a failed create: existed=%v err=%v", existed, err)
	}
	// The next one follows on what is there, not on what failed.
	Moved(t, s, at, session.Running)
	Verify(t, s, at.ID)
}

// testFailureIsAlone: requests that are written together fail one by one.
func testFailureIsAlone(t *testing.T, s Store) {
	at := Created(t, s)
	bad := Concluding(audit.StepDone, 99)
	for i, err := range parallel(64, func(i int) error {
		if i%2 == 0 {
			return Append(context.Background(), s, at, Entry(audit.CommandStarted), bad)
		}
		return Append(context.Background(), s, at, Entry(audit.StepDone))
	}) {
		if i%2 == 0 {
			wantKind(t, "the bad one", err, kind.Invalid)
		} else if err != nil {
			t.Errorf("a good one: %v", err)
		}
	}
	r := Verify(t, s, at.ID)
	same(t, "counts", map[audit.Action]uint64{audit.SessionCreated: 1, audit.StepDone: 32}, r.Counts)
}

var errStop = errors.New("enough")

func testEvents(t *testing.T, s Store) {
	at := Created(t, s)
	const n = 200 // more than any store reads at once
	for i := range n {
		e := Entry(audit.FileRead)
		e.Payload = map[string]any{"i": i}
		if err := Append(t.Context(), s, at, e); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ after, limit, first, count uint64 }{
		{0, 0, 1, n + 1}, {0, 1, 1, 1}, {0, 64, 1, 64}, {0, 65, 1, 65}, {100, 0, 101, n - 99}, {100, 7, 101, 7},
		{n, 0, n + 1, 1}, {n + 1, 0, 0, 0}, {n + 100, 5, 0, 0}, {0, 10000, 1, n + 1}, {1 << 62, 0, 0, 0}, {1<<64 - 1, 0, 0, 0},
	} {
		want := c.first
		var count uint64
		err := s.Events(t.Context(), at.ID, c.after, int(c.limit), func(e audit.Stored) error {
			if e.Event.Seq != want || e.Event.Record != audit.SessionRecord(at.ID) {
				t.Errorf("after %d: event %d of %s, want %d", c.after, e.Event.Seq, e.Event.Record, want)
			}
			want++
			count++
			return nil
		})
		if err != nil || count != c.count {
			t.Errorf("after %d limit %d: %d events, %v; want %d", c.after, c.limit, count, err, c.count)
		}
	}
}

func testEventsStop(t *testing.T, s Store) {
	at := Created(t, s)
	for range 3 {
		if err := Append(t.Context(), s, at, Entry(audit.StepDone)); err != nil {
			t.Fatal(err)
		}
	}
	calls := 0
	err := s.Events(t.Context(), at.ID, 0, 0, func(audit.Stored) error {
		if calls++; calls == 2 {
			return errStop
		}
		// The reader may write meanwhile: it holds nothing that a writer needs.
		return Append(t.Context(), s, at, Entry(audit.StepDone))
	})
	if !errors.Is(err, errStop) || calls != 2 {
		t.Errorf("got %v after %d calls", err, calls)
	}
}

func testIdempotency(t *testing.T, s Store) {
	key := session.IdempotencyKey{Scope: "0badcafe", Key: "first", Digest: "sha256:1"}
	create := func(key session.IdempotencyKey) (session.Session, bool, error) {
		return s.Create(t.Context(), New(), key, Entry(audit.SessionCreated))
	}
	first, existed, err := create(key)
	if err != nil || existed {
		t.Fatalf("existed=%v err=%v", existed, err)
	}
	again, existed, err := create(key)
	if err != nil || !existed || again.ID != first.ID {
		t.Errorf("again: %s existed=%v err=%v", again.ID, existed, err)
	}
	moved := Moved(t, s, first, session.Running)
	again, existed, err = create(key)
	if err != nil || !existed {
		t.Errorf("after it moved on: existed=%v err=%v", existed, err)
	}
	same(t, "what a repeated create returns is how it is now", moved, again)

	other := key
	other.Digest = "sha256:2"
	_, _, err = create(other)
	wantKind(t, "another request with the key", err, kind.Conflict)
	other = key
	other.Scope = "someone else"
	if second, existed, err := create(other); err != nil || existed || second.ID == first.ID {
		t.Errorf("the key in another scope: existed=%v err=%v", existed, err)
	}
	for range 2 {
		if _, existed, err := create(session.IdempotencyKey{Scope: "0badcafe", Digest: "sha256:1"}); err != nil || existed {
			t.Errorf("no key: existed=%v err=%v", existed, err)
		}
	}
	if r := Verify(t, s, first.ID); r.Events != 2 {
		t.Errorf("repeats left %d events, want 2", r.Events)
	}
}

func testIdempotencyParallel(t *testing.T, s Store) {
	var mu sync.Mutex
	ids := map[session.ID]int{}
	made := 0
	for _, err := range parallel(50, func(int) error {
		got, existed, err := s.Create(context.Background(), New(), session.IdempotencyKey{Scope: "a", Key: "k", Digest: "d"}, Entry(audit.SessionCreated))
		mu.Lock()
		defer mu.Unlock()
		ids[got.ID]++
		if !existed {
			made++
		}
		return err
	}) {
		if err != nil {
			t.Error(err)
		}
	}
	if len(ids) != 1 || made != 1 {
		t.Errorf("%d sessions and %d creates that made one, want 1 and 1", len(ids), made)
	}
	live, err := s.Live(t.Context(), Node)
	if err != nil || len(live) != 1 {
		t.Errorf("%d live sessions, %v", len(live), err)
	}
}
