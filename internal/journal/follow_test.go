package journal_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/sqlite"
	"bivy/internal/trace"
	"bivy/internal/workgroup"
)

var someone = session.Principal{Subject: "key:someone"}

// records is a journal over a real store that has one session.
type records struct {
	*journal.Journal
	t     *testing.T
	store *sqlite.Store
	work  *workgroup.Group
	s     session.Session
}

func newRecords(t *testing.T) *records {
	t.Helper()
	store, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "store"), sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	spec := session.Spec{}.WithDefaults()
	digest, err := spec.Digest()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	s, _, err := store.Create(t.Context(), session.Session{
		ID: session.NewID(), State: session.Creating, Spec: spec, SpecDigest: digest, Owner: someone,
		Node: "here", Generation: 1, Boot: "boot", CreatedAt: now, Deadline: now.Add(time.Hour),
	}, session.IdempotencyKey{}, audit.Entry{Action: audit.SessionCreated, Outcome: audit.OK, Actor: someone})
	if err != nil {
		t.Fatal(err)
	}
	work := workgroup.New()
	t.Cleanup(func() { work.Stop(time.Second) })
	return &records{
		Journal: journal.New(journal.Options{Store: store, Work: work, Poll: 2 * time.Millisecond}),
		t:       t, store: store, work: work, s: s,
	}
}

func (r *records) actions() []string {
	r.t.Helper()
	var all []string
	err := r.store.Events(r.t.Context(), r.s.ID, 0, 0, func(e audit.Stored) error {
		all = append(all, string(e.Event.Action))
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

func event(a audit.Action) audit.Entry {
	return audit.Entry{Action: a, Outcome: audit.OK, Actor: someone}
}

// A follower sees what was written without this journal, as another process
// does, and what was written through it.
func TestFollowerSeesOtherProcesses(t *testing.T) {
	r := newRecords(t)
	r.work.Go(func() { r.Run(r.work.Live()) })
	seen := make(chan audit.Action)
	stop := errors.New("stop")
	over := make(chan error, 1)
	go func() {
		over <- r.Follow(t.Context(), r.s.ID, 0, func(context.Context) (bool, error) { return false, nil }, func(e audit.Stored) error {
			seen <- e.Event.Action
			if e.Event.Action == "test.last" {
				return stop
			}
			return nil
		})
	}()
	want := func(a audit.Action) {
		t.Helper()
		select {
		case got := <-seen:
			if got != a {
				t.Fatalf("got %s, want %s", got, a)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s does not come", a)
		}
	}
	want(audit.SessionCreated)
	if _, err := r.store.Append(t.Context(), r.s.ID, r.s.Fence(), event("test.other")); err != nil {
		t.Fatal(err)
	}
	want("test.other")
	if _, err := r.Append(t.Context(), r.s.ID, r.s.Fence(), event("test.last")); err != nil {
		t.Fatal(err)
	}
	want("test.last")
	if err := <-over; !errors.Is(err, stop) {
		t.Errorf("the follower ended with %v", err)
	}
}

func TestFollowEndsWithItsContextAndItsProcess(t *testing.T) {
	r := newRecords(t)
	never := func(context.Context) (bool, error) { return false, nil }
	ctx, cancel := context.WithCancel(t.Context())
	err := r.Follow(ctx, r.s.ID, 0, never, func(audit.Stored) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("with its context: %v", err)
	}
	err = r.Follow(t.Context(), r.s.ID, 0, never, func(audit.Stored) error {
		go r.work.Stop(time.Second)
		return nil
	})
	if !kind.Is(err, kind.Unavailable) {
		t.Errorf("when the process stops: %v", err)
	}
}

// An outcome names its intent, carries its trace and is written also when its
// caller has gone.
func TestIntentAndOutcome(t *testing.T) {
	r := newRecords(t)
	log := r.NewLog(r.s.ID, r.s.Fence())
	id := trace.New()
	ctx, cancel := context.WithCancel(trace.NewContext(t.Context(), id))
	p, err := log.Begin(ctx, audit.Entry{Action: "test.intent", Ref: "work", Actor: someone}, audit.Entry{Action: "test.lost"})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if log.PendingCount() != 1 {
		t.Errorf("%d pending", log.PendingCount())
	}
	if err := log.Conclude(p, event("test.fact"), event("test.done")); err != nil {
		t.Fatal(err)
	}
	if log.PendingCount() != 0 {
		t.Errorf("%d pending after the outcome", log.PendingCount())
	}
	if err := log.Conclude(p, event("test.again")); !kind.Is(err, kind.Conflict) {
		t.Errorf("a second outcome: %v", err)
	}
	var got []audit.Event
	err = r.store.Events(t.Context(), r.s.ID, 1, 0, func(e audit.Stored) error {
		got = append(got, e.Event)
		return nil
	})
	if err != nil || len(got) != 3 {
		t.Fatalf("%d events, %v", len(got), err)
	}
	if got[0].Outcome != audit.Pending || got[1].Concludes != 0 || got[2].Concludes != got[0].Seq {
		t.Errorf("intent %+v, fact %+v, outcome %+v", got[0], got[1], got[2])
	}
	for _, e := range got {
		if e.Trace != id || e.Ref != "work" || e.Actor != someone {
			t.Errorf("%s: trace %q, ref %q, actor %v", e.Action, e.Trace, e.Ref, e.Actor)
		}
	}
}

// Whoever ends a session concludes what is open, and nothing new begins.
func TestTakeOver(t *testing.T) {
	r := newRecords(t)
	log := r.NewLog(r.s.ID, r.s.Fence())
	if _, err := log.Begin(t.Context(), audit.Entry{Action: "test.intent", Ref: "work", Actor: someone}, audit.Entry{Action: "test.lost"}); err != nil {
		t.Fatal(err)
	}
	left, err := log.TakeOver(t.Context(), "end")
	if err != nil || len(left) != 1 || left[0].Action != "test.lost" || left[0].Concludes != 2 {
		t.Fatalf("left: %+v, %v", left, err)
	}
	if _, err := log.Begin(t.Context(), audit.Entry{Action: "test.intent", Ref: "more", Actor: someone}, audit.Entry{Action: "test.lost"}); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("an intent after the take-over: %v", err)
	}
	if _, err := r.Append(t.Context(), r.s.ID, r.s.Fence(), left...); err != nil {
		t.Fatal(err)
	}
	if got, want := r.actions(), []string{"session.created", "test.intent", "test.lost"}; !slices.Equal(got, want) {
		t.Errorf("the record: %v, want %v", got, want)
	}
}

// A stale writer writes nothing, and learns what it should have known.
func TestStaleLogWritesNothing(t *testing.T) {
	r := newRecords(t)
	stale := r.s.Fence()
	next := r.s
	next.Generation++
	if _, _, err := r.store.Transition(t.Context(), stale, next, event("session.moved")); err != nil {
		t.Fatal(err)
	}
	before := len(r.actions())
	log := r.NewLog(r.s.ID, stale)
	_, err := log.Begin(t.Context(), audit.Entry{Action: "test.intent", Ref: "work", Actor: someone}, audit.Entry{Action: "test.lost"})
	if !kind.Is(err, kind.Conflict) {
		t.Errorf("an intent under a stale fence: %v", err)
	}
	if err := log.Note(t.Context(), event("test.note")); !kind.Is(err, kind.Conflict) {
		t.Errorf("a note under a stale fence: %v", err)
	}
	if err := log.Append(event("test.fact")); !kind.Is(err, kind.Conflict) {
		t.Errorf("a fact under a stale fence: %v", err)
	}
	if after := len(r.actions()); after != before {
		t.Errorf("%d events were written", after-before)
	}
}
