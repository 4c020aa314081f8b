package journal_test

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/sqlite"
)

var admin = access.Caller{Principal: session.Principal{Subject: "key:admin"}, Role: access.Admin}

// system is the record of a node on a real store.
type system struct {
	*journal.SystemRecord
	t       *testing.T
	store   *sqlite.Store
	signing *journal.Signing
	dir     string
}

func newSystem(t *testing.T, change func(*journal.SystemOptions)) *system {
	t.Helper()
	dir := t.TempDir()
	store, err := sqlite.Open(t.Context(), filepath.Join(dir, "store"), sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	signer, err := audit.LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	s := &system{t: t, store: store, signing: journal.NewSigning(dir, signer), dir: dir}
	o := journal.SystemOptions{Store: store, Node: "here", Signing: s.signing, Access: access.Roles{}}
	if change != nil {
		change(&o)
	}
	s.SystemRecord = journal.NewSystemRecord(o)
	return s
}

// run runs the record until the function returns.
func (s *system) run(during func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		s.Run(ctx)
	}()
	during()
	cancel()
	<-over
}

// until polls what nothing announces.
func (s *system) until(what string, ok func() bool) {
	s.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			s.t.Fatalf("%s: it does not come", what)
		}
	}
}

func (s *system) segments() []audit.Segment {
	s.t.Helper()
	all, err := s.store.Segments(s.t.Context(), "here")
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

func (s *system) events() []audit.Stored {
	s.t.Helper()
	var all []audit.Stored
	for _, segment := range s.segments() {
		err := s.store.SegmentEvents(s.t.Context(), "here", segment.Number, 0, 0, func(e audit.Stored) error {
			all = append(all, e)
			return nil
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	return all
}

func (s *system) verify() audit.SystemReport {
	s.t.Helper()
	var b bytes.Buffer
	if err := s.Export(s.t.Context(), admin, &b); err != nil {
		s.t.Fatal(err)
	}
	report, err := audit.VerifySystem(&b, []audit.PublicKey{s.signing.Signer().Public()}, audit.VerifyOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return report
}

func fact(n int) audit.Entry {
	return audit.Entry{Action: "test.fact", Outcome: audit.OK, Payload: map[string]any{"n": n}}
}

func TestSegmentsAreSealedBySize(t *testing.T) {
	s := newSystem(t, func(o *journal.SystemOptions) { o.MaxEvents, o.RefusedEvery = 5, 2*time.Millisecond })
	s.run(func() {
		for n := range 12 {
			if err := s.Record(t.Context(), fact(n)); err != nil {
				t.Fatal(err)
			}
		}
		s.until("a sealed segment", func() bool { return !s.segments()[0].Sealed.IsZero() })
		if err := s.Record(t.Context(), fact(12)); err != nil {
			t.Fatal(err)
		}
	})
	if n := len(s.segments()); n < 2 {
		t.Errorf("%d segments", n)
	}
	s.verify()
}

func TestSegmentsAreSealedByAge(t *testing.T) {
	s := newSystem(t, func(o *journal.SystemOptions) { o.MaxAge = 2 * time.Millisecond })
	s.run(func() {
		if err := s.Record(t.Context(), fact(0)); err != nil {
			t.Fatal(err)
		}
		s.until("a sealed segment", func() bool { return !s.segments()[0].Sealed.IsZero() })
	})
	s.verify()
}

// An outcome concludes an intent of its own segment, so that a segment with an
// open intent is not sealed.
func TestOpenIntentKeepsTheSegmentOpen(t *testing.T) {
	s := newSystem(t, func(o *journal.SystemOptions) { o.MaxEvents, o.RefusedEvery = 2, time.Millisecond })
	s.run(func() {
		conclude, err := s.Begin(t.Context(), audit.Entry{Action: "test.intent", Ref: "r"})
		if err != nil {
			t.Fatal(err)
		}
		s.CountRefused(audit.LoginRefused, "unknown key", "127.0.0.1", audit.Decision{})
		s.until("a look at the segment", func() bool { return len(s.events()) > 3 || countRefused(s) > 0 })
		if all := s.segments(); len(all) != 1 || !all[0].Sealed.IsZero() {
			t.Errorf("segments with an open intent: %+v", all)
		}
		if err := conclude(audit.Entry{Action: "test.done", Outcome: audit.OK}); err != nil {
			t.Fatal(err)
		}
		s.until("a sealed segment", func() bool { return !s.segments()[0].Sealed.IsZero() })
	})
	for _, e := range s.events() {
		if e.Event.Action == audit.IntentLost {
			t.Error("an intent with an outcome is told to be lost")
		}
	}
	s.verify()
}

func countRefused(s *system) int {
	n := 0
	for _, e := range s.events() {
		if e.Event.Action == audit.LoginRefused {
			n++
		}
	}
	return n
}

// A caller who tries without end makes one event a period, with the count.
func TestRefusalsAreCountedAndBounded(t *testing.T) {
	s := newSystem(t, nil)
	for range 10_000 {
		s.CountRefused(audit.LoginRefused, "unknown key", "127.0.0.1", audit.Decision{})
	}
	for n := range 1000 {
		s.CountRefused(audit.LoginRefused, "unknown key", strings.Repeat("x", n), audit.Decision{})
	}
	s.run(func() {}) // the last look records what was counted
	if n := countRefused(s); n < 2 || n > 66 {
		t.Errorf("%d events of 11,000 refusals", n)
	}
	found := false
	for _, e := range s.events() {
		found = found || strings.Contains(string(e.Payload), `"count":10000`)
	}
	if !found {
		t.Error("the refusals are not counted")
	}
	s.verify()
}

func TestHeadsAreSignedWhenSomethingWasWritten(t *testing.T) {
	s := newSystem(t, func(o *journal.SystemOptions) { o.HeadsEvery = 2 * time.Millisecond })
	signed := func() int {
		n := 0
		for _, e := range s.events() {
			if e.Event.Action == audit.HeadsSigned {
				n++
			}
		}
		return n
	}
	s.run(func() {
		if err := s.Record(t.Context(), fact(0)); err != nil {
			t.Fatal(err)
		}
		s.until("signed heads", func() bool { return signed() > 0 })
		// The record of the node counts as much as those of sessions.
		before := signed()
		if err := s.Record(t.Context(), fact(1)); err != nil {
			t.Fatal(err)
		}
		s.until("signed heads of what only the node wrote", func() bool { return signed() > before })
		before = signed()
		over := time.Now().Add(20 * time.Millisecond)
		s.until("ten periods in which nobody writes", func() bool { return time.Now().After(over) })
		if n := signed(); n > before+1 { // one more when the fact came while heads were being signed
			t.Errorf("%d statements about nothing new", n-before)
		}
	})
	statement, err := s.Head(t.Context(), admin)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Head(t.Context(), access.Caller{Principal: session.Principal{Subject: "key:d"}, Role: access.Developer}); !kind.Is(err, kind.Denied) {
		t.Errorf("a head for a developer: %v", err)
	}
	if statement.PayloadType == "" {
		t.Error("the statement is empty")
	}
}

// A key that was replaced is vouched for by the one before: who pinned the
// first key still verifies what the second one signs.
func TestRotateKey(t *testing.T) {
	s := newSystem(t, func(o *journal.SystemOptions) { o.MaxEvents, o.RefusedEvery = 2, time.Millisecond })
	first := s.signing.Signer().Public()
	if err := s.RotateKey(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	if s.signing.Signer().Public().Fingerprint() == first.Fingerprint() {
		t.Fatal("the key is the same")
	}
	s.run(func() {
		if err := s.Record(t.Context(), fact(1)); err != nil {
			t.Fatal(err)
		}
		s.until("a sealed segment", func() bool { return !s.segments()[0].Sealed.IsZero() })
	})
	var b bytes.Buffer
	if err := s.Export(t.Context(), admin, &b); err != nil {
		t.Fatal(err)
	}
	if _, err := audit.VerifySystem(bytes.NewReader(b.Bytes()), []audit.PublicKey{first}, audit.VerifyOptions{}); err != nil {
		t.Errorf("with the first key pinned: %v", err)
	}
	other := audit.GenerateSigner().Public()
	if _, err := audit.VerifySystem(bytes.NewReader(b.Bytes()), []audit.PublicKey{other}, audit.VerifyOptions{}); err == nil {
		t.Error("it verifies with a stranger's key")
	}
}
