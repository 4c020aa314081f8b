package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func testListPages(t *testing.T, s Store) {
	var want []session.ID // newest first
	for range 25 {
		want = append([]session.ID{Created(t, s).ID}, want...)
	}
	for _, limit := range []int{1, 7, 24, 25, 26, 1000} {
		var got []session.ID
		cursor, pages := "", 0
		for {
			page, next, err := s.List(t.Context(), session.Filter{}, cursor, limit)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) > limit || len(page) < limit && next != "" {
				t.Errorf("limit %d: page of %d with next %q", limit, len(page), next)
			}
			for _, one := range page {
				got = append(got, one.ID)
			}
			pages++
			if cursor = next; cursor == "" {
				break
			}
			if pages == 1 {
				Created(t, s) // a newer one must not shift the pages
			}
		}
		same(t, fmt.Sprintf("limit %d", limit), want, got)
		all, _, err := s.List(t.Context(), session.Filter{}, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		want = want[:0]
		for _, one := range all {
			want = append(want, one.ID)
		}
	}
}

func testListFilters(t *testing.T, s Store) {
	make := func(owner string, labels map[string]string, state session.State) session.ID {
		n := New()
		n.Owner.Subject, n.Spec.Labels = owner, labels
		made, _, err := s.Create(t.Context(), n, session.IdempotencyKey{}, Entry(audit.SessionCreated))
		if err != nil {
			t.Fatal(err)
		}
		switch state {
		case session.Creating:
		case session.Ended:
			Sealed(t, s, made)
		default:
			Moved(t, s, made, state)
		}
		return made.ID
	}
	odd := map[string]string{`a"b.c`: `v'%_\`, "team": "red"}
	a := make("key:a", map[string]string{"team": "red"}, session.Creating)
	b := make("key:a", map[string]string{"team": "blue", "env": "ci"}, session.Running)
	c := make("key:b", odd, session.Running)
	d := make("key:b", nil, session.Ended)
	for _, c := range []struct {
		name string
		f    session.Filter
		want []session.ID
	}{
		{"everything", session.Filter{}, []session.ID{d, c, b, a}},
		{"owner", session.Filter{Owner: "key:a"}, []session.ID{b, a}},
		{"another owner", session.Filter{Owner: "key:"}, nil},
		{"state", session.Filter{States: []session.State{session.Running}}, []session.ID{c, b}},
		{"states", session.Filter{States: []session.State{session.Creating, session.Ended}}, []session.ID{d, a}},
		{"label", session.Filter{Labels: map[string]string{"team": "red"}}, []session.ID{c, a}},
		{"labels", session.Filter{Labels: map[string]string{"team": "blue", "env": "ci"}}, []session.ID{b}},
		{"odd label", session.Filter{Labels: map[string]string{`a"b.c`: `v'%_\`}}, []session.ID{c}},
		{"label of another value", session.Filter{Labels: map[string]string{"env": "red"}}, nil},
		{"all of it", session.Filter{Owner: "key:b", States: []session.State{session.Running}, Labels: map[string]string{"team": "red"}}, []session.ID{c}},
	} {
		for _, limit := range []int{1, 100} {
			var got []session.ID
			cursor := ""
			for {
				page, next, err := s.List(t.Context(), c.f, cursor, limit)
				if err != nil {
					t.Fatal(err)
				}
				for _, one := range page {
					got = append(got, one.ID)
				}
				if cursor = next; cursor == "" {
					break
				}
			}
			same(t, fmt.Sprintf("%s by %d", c.name, limit), c.want, got)
		}
	}
}

func testListRefuses(t *testing.T, s Store) {
	Created(t, s)
	for _, c := range []struct {
		what   string
		f      session.Filter
		cursor string
		limit  int
		field  string
	}{
		{what: "limit 0", limit: 0, field: "limit"},
		{what: "limit -1", limit: -1, field: "limit"},
		{what: "limit 1001", limit: 1001, field: "limit"},
		{what: "a cursor that no list gave", cursor: "x' OR 1 --", limit: 10, field: "cursor"},
		{what: "a state that is none", f: session.Filter{States: []session.State{"gone"}}, limit: 10, field: "state"},
	} {
		_, _, err := s.List(t.Context(), c.f, c.cursor, c.limit)
		wantKind(t, c.what, err, kind.Invalid)
		if kind.Field(err) != c.field {
			t.Errorf("%s: field %q, want %q", c.what, kind.Field(err), c.field)
		}
	}
}

func testLive(t *testing.T, s Store) {
	want := map[session.ID]session.State{}
	for state, path := range paths() {
		at := Created(t, s)
		for _, step := range path {
			at = Moved(t, s, at, step)
		}
		want[at.ID] = state
	}
	Sealed(t, s, Created(t, s))
	live, err := s.Live(t.Context(), Node)
	if err != nil {
		t.Fatal(err)
	}
	got := map[session.ID]session.State{}
	for _, one := range live {
		got[one.ID] = one.State
		same(t, "Live against Get", get(t, s, one.ID), one)
	}
	same(t, "live sessions", want, got)
}

func testSeal(t *testing.T, s Store) {
	for _, path := range paths() {
		at := Created(t, s)
		for _, step := range path {
			at = Moved(t, s, at, step)
		}
		if at.State != session.Ending {
			at = Moved(t, s, at, session.Ending)
		}
		at.Residuals = []string{"the export still retries"}
		ended, key := Sealed(t, s, at)
		if ended.State != session.Ended || ended.Version != at.Version+1 {
			t.Errorf("got %+v", ended)
		}
		same(t, "Get against Seal", ended, get(t, s, at.ID))
		r := Verify(t, s, at.ID, key)
		if !r.Sealed || r.Closeout.Result != audit.ClosedWithResiduals || r.Closeout.Log.Count != r.Events {
			t.Errorf("report %+v", r)
		}
		same(t, "counts in the seal", r.Counts, r.Closeout.Log.Counts)
	}
}

func testSealWithoutSignature(t *testing.T, s Store) {
	at := Moved(t, s, Created(t, s), session.Ending)
	end := at
	end.State = session.Ended
	_, err := s.Seal(t.Context(), end.Fence(), end, func(audit.Head, audit.Heads) (audit.Seal, error) { return audit.Seal{}, errStop }, Entry(audit.SessionEnded))
	if !errors.Is(err, errStop) {
		t.Errorf("got %v", err)
	}
	same(t, "session", at, get(t, s, at.ID))
	if got := len(actions(t, s, at.ID)); got != 2 {
		t.Errorf("%d events, want 2", got)
	}
	_, key := Sealed(t, s, at)
	Verify(t, s, at.ID, key)
}

func testSealIsFinal(t *testing.T, s Store) {
	ended, key := Sealed(t, s, Created(t, s))
	before := actions(t, s, ended.ID)
	wantKind(t, "append", Append(t.Context(), s, ended, Entry(audit.StepDone)), kind.Conflict)
	for _, state := range session.States() {
		next := ended
		next.State = state
		_, err := Transition(t.Context(), s, next, Entry(audit.StepDone))
		wantKind(t, "transition to "+string(state), err, kind.Conflict)
	}
	_, err := s.Seal(t.Context(), ended.Fence(), ended, SignWith(audit.GenerateSigner(), ended), Entry(audit.SessionEnded))
	wantKind(t, "a second seal", err, kind.Conflict)
	_, _, err = s.Create(t.Context(), ended, session.IdempotencyKey{}, Entry(audit.SessionCreated))
	wantKind(t, "create as ended", err, kind.Invalid)
	again := New()
	again.ID = ended.ID
	_, _, err = s.Create(t.Context(), again, session.IdempotencyKey{}, Entry(audit.SessionCreated))
	wantKind(t, "its id again", err, kind.Conflict)
	same(t, "record", before, actions(t, s, ended.ID))
	same(t, "session", ended, get(t, s, ended.ID))
	Verify(t, s, ended.ID, key)
}

// testSealAgainstAppend: whatever an appender is told is true, although the
// record is being sealed meanwhile.
func testSealAgainstAppend(t *testing.T, s Store) {
	for range 10 {
		at := Moved(t, s, Created(t, s), session.Ending)
		signer := audit.GenerateSigner()
		end := at
		end.State, end.EndedAt = session.Ended, time.Now()
		errs := parallel(20, func(i int) error {
			if i == 7 {
				_, err := s.Seal(context.Background(), end.Fence(), end, SignWith(signer, end), Entry(audit.SessionEnded))
				return err
			}
			return Append(context.Background(), s, at, Entry(audit.StepDone))
		})
		acknowledged := uint64(0)
		for i, err := range errs {
			switch {
			case i == 7 && err != nil:
				t.Errorf("seal: %v", err)
			case err == nil && i != 7:
				acknowledged++
			case err != nil:
				wantKind(t, "append", err, kind.Conflict)
			}
		}
		if r := Verify(t, s, at.ID, signer.Public()); r.Counts[audit.StepDone] != acknowledged {
			t.Errorf("%d appends in the record, %d were acknowledged", r.Counts[audit.StepDone], acknowledged)
		}
	}
}

func testSealNamesLostIntents(t *testing.T, s Store) {
	at := Moved(t, s, Created(t, s), session.Running)
	// Events 3 to 9.
	err := Append(t.Context(), s, at,
		Entry(audit.CommandIntent), Entry(audit.CommandStarted), Concluding(audit.CommandEnded, 3),
		Entry(audit.CommandIntent), Entry(audit.CommandStarted),
		Entry(audit.FileWriteIntent),
		Entry(audit.StepIntent))
	if err != nil {
		t.Fatal(err)
	}
	at = Moved(t, s, at, session.Ending)
	signer := audit.GenerateSigner()
	at.State, at.EndedAt = session.Ended, time.Now()
	if _, err := s.Seal(t.Context(), at.Fence(), at, SignWith(signer, at), Concluding(audit.StepDone, 9), Entry(audit.SessionEnded)); err != nil {
		t.Fatal(err)
	}
	r := Verify(t, s, at.ID, signer.Public())
	if r.Counts[audit.IntentLost] != 2 {
		t.Errorf("%d intents recorded as lost, want 2", r.Counts[audit.IntentLost])
	}
	var concluded []uint64
	if err := s.Events(t.Context(), at.ID, 9, 0, func(e audit.Stored) error {
		concluded = append(concluded, e.Event.Concludes)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	same(t, "what the last events conclude", []uint64{0, 9, 6, 8, 0}, concluded)
	all := actions(t, s, at.ID)
	same(t, "the end of the record", []audit.Action{audit.StepDone, audit.IntentLost, audit.IntentLost, audit.SessionEnded}, all[len(all)-4:])
}

func testSealRefuses(t *testing.T, s Store) {
	running := Moved(t, s, Created(t, s), session.Running)
	ending := Moved(t, s, Created(t, s), session.Ending)
	for _, c := range []struct {
		what    string
		at      session.Session
		change  func(*session.Session)
		entries []audit.Entry
		want    kind.Kind
	}{
		{"a session that is running", running, func(n *session.Session) { n.Reason = session.Requested }, []audit.Entry{Entry(audit.SessionEnded)}, kind.Conflict},
		{"an old version", ending, func(n *session.Session) { n.Version-- }, []audit.Entry{Entry(audit.SessionEnded)}, kind.Conflict},
		{"another state", ending, func(n *session.Session) { n.State = session.Ending }, []audit.Entry{Entry(audit.SessionEnded)}, kind.Invalid},
		{"no reason", ending, func(n *session.Session) { n.Reason = "" }, []audit.Entry{Entry(audit.SessionEnded)}, kind.Invalid},
		{"no event", ending, nil, nil, kind.Invalid},
		{"another last event", ending, nil, []audit.Entry{Entry(audit.StepDone)}, kind.Invalid},
		{"two ends", ending, nil, []audit.Entry{Entry(audit.SessionEnded), Entry(audit.SessionEnded)}, kind.Invalid},
		{"an unknown session", New(), func(n *session.Session) { n.Reason = session.Requested }, []audit.Entry{Entry(audit.SessionEnded)}, kind.NotFound},
	} {
		n := c.at
		n.State = session.Ended
		if c.change != nil {
			c.change(&n)
		}
		_, err := s.Seal(t.Context(), n.Fence(), n, SignWith(audit.GenerateSigner(), n), c.entries...)
		wantKind(t, c.what, err, c.want)
	}
	same(t, "running", running, get(t, s, running.ID))
	same(t, "ending", ending, get(t, s, ending.ID))
	Verify(t, s, ending.ID)
}

func testHostileText(t *testing.T, s Store) {
	at := Created(t, s)
	long := strings.Repeat("A", 10<<20)
	texts := []string{long, "a\x00b", "\xff\xfe broken", "two\nlines\r\n", "\x1b[31mred\x1b[0m\x07", "\u202eevil\u2066", "\u009b2J", `"}{"v":1}`, "'; DROP TABLE event; --"}
	for _, text := range texts {
		e := audit.Entry{
			Action: audit.CommandIntent, Outcome: audit.Pending, Ref: "c",
			Actor:   session.Principal{Subject: text, OnBehalfOf: text, Trigger: text},
			Payload: map[string]any{"argv": []string{text, "x"}},
		}
		if err := Append(t.Context(), s, at, e); err != nil {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	count := 0
	err := s.Events(t.Context(), at.ID, 1, 0, func(e audit.Stored) error {
		count++
		if len(e.Raw) > 8<<10 || len(e.Payload) > audit.MaxPayload {
			t.Errorf("event %d: skeleton of %d bytes, payload of %d", e.Event.Seq, len(e.Raw), len(e.Payload))
		}
		return nil
	})
	if err != nil || count != len(texts) {
		t.Errorf("%d events, %v; want %d", count, err, len(texts))
	}
	_, key := Sealed(t, s, at)
	Verify(t, s, at.ID, key)
}

func testUnknown(t *testing.T, s Store) {
	n := New()
	_, err := s.Get(t.Context(), n.ID)
	wantKind(t, "Get", err, kind.NotFound)
	_, err = s.SealOf(t.Context(), n.ID)
	wantKind(t, "SealOf", err, kind.NotFound)
	wantKind(t, "Events", s.Events(t.Context(), n.ID, 0, 0, func(audit.Stored) error { return nil }), kind.NotFound)
	wantKind(t, "Append", Append(t.Context(), s, n, Entry(audit.StepDone)), kind.NotFound)
	n.Version = 1
	_, err = Transition(t.Context(), s, n, Entry(audit.StepDone))
	wantKind(t, "Transition", err, kind.NotFound)
}

func testCanceled(t *testing.T, s Store) {
	at := Created(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// Written or not, the answer is true.
	before := Verify(t, s, at.ID).Events
	for range 20 {
		if err := Append(ctx, s, at, Entry(audit.StepDone)); err == nil {
			before++
		} else {
			wantKind(t, "append", err, kind.Unavailable)
		}
	}
	if got := Verify(t, s, at.ID).Events; got != before {
		t.Errorf("%d events, %d were acknowledged", got, before)
	}
}
