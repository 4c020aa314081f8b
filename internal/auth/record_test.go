package auth

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/access"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/trace"
)

// TestChangesAreRecorded: every change of the keys has its intent before it
// and its outcome after it, with who made it.
func TestChangesAreRecorded(t *testing.T) {
	m, e := &memory{}, &events{}
	r := open(t, m, e)
	if _, err := r.EnsureAdmin(t.Context(), t.TempDir()); err != nil {
		t.Fatal(err)
	}
	first := m.keys[0].ID
	_, k, err := r.Create(t.Context(), root, access.Developer, "ci")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second changes nothing
		if err := r.Revoke(t.Context(), root, k.ID); err != nil {
			t.Fatal(err)
		}
	}
	m.setFail(errors.New("disk full"))
	if _, _, err := r.Create(t.Context(), root, access.Developer, ""); err == nil {
		t.Fatal("no error")
	}
	got := e.list()
	failed := strings.Fields(got[len(got)-1])[1]
	want := []string{
		"key.create.intent key/" + first + " local:first-run", "key.created key/" + first + " local:first-run",
		"key.create.intent key/" + k.ID + " local:root", "key.created key/" + k.ID + " local:root",
		"key.revoke.intent key/" + k.ID + " local:root", "key.revoked key/" + k.ID + " local:root",
		"key.create.intent " + failed + " local:root", "key.failed " + failed + " local:root",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	for _, x := range e.all {
		if strings.HasSuffix(string(x.Action), ".intent") && (x.Ref == "" || x.Actor == root.Principal && x.Decision.Verdict != "allow") {
			t.Errorf("%s: ref %q, decision %+v", x.Action, x.Ref, x.Decision)
		}
	}
}

// TestNoRecordNoChange: what cannot be recorded is not done.
func TestNoRecordNoChange(t *testing.T) {
	m, e := &memory{}, &events{}
	r := open(t, m, e)
	_, k, err := r.Create(t.Context(), root, access.Developer, "")
	if err != nil {
		t.Fatal(err)
	}
	e.fail = errors.New("disk full")
	if _, _, err := r.Create(t.Context(), root, access.Developer, ""); err == nil {
		t.Error("a key was made without a record")
	}
	if err := r.Revoke(t.Context(), root, k.ID); err == nil {
		t.Error("a key was revoked without a record")
	}
	if len(m.keys) != 1 || !m.keys[0].RevokedAt.IsZero() {
		t.Errorf("keys %+v", m.keys)
	}
}

func TestOnlyAdminsManageKeys(t *testing.T) {
	m, e := &memory{}, &events{}
	r := open(t, m, e)
	_, k, err := r.Create(t.Context(), root, access.Developer, "")
	if err != nil {
		t.Fatal(err)
	}
	before := len(e.list())
	for _, who := range []access.Caller{
		{}, {Principal: session.Principal{Subject: "key:x"}, Role: access.Developer}, {Principal: session.Principal{Subject: "key:x"}, Role: access.Auditor},
	} {
		if _, _, err := r.Create(t.Context(), who, access.Admin, ""); !kind.Is(err, kind.Denied) {
			t.Errorf("%+v creates a key: %v", who, err)
		}
		if _, err := r.List(t.Context(), who); !kind.Is(err, kind.Denied) {
			t.Errorf("%+v lists keys: %v", who, err)
		}
		for _, id := range []string{k.ID, "00000000"} { // which of them exists is not told
			if err := r.Revoke(t.Context(), who, id); !kind.Is(err, kind.Denied) {
				t.Errorf("%+v revokes %s: %v", who, id, err)
			}
		}
	}
	if len(m.keys) != 1 || !m.keys[0].RevokedAt.IsZero() || len(e.list()) != before {
		t.Errorf("keys %+v, events %v", m.keys, e.list())
	}
}

func TestRefusedLoginsAreCounted(t *testing.T) {
	e := &events{}
	r := open(t, &memory{}, e)
	token, k, err := r.Create(t.Context(), root, access.Developer, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Revoke(t.Context(), root, k.ID); err != nil {
		t.Fatal(err)
	}
	for _, sent := range []string{"", "nonsense", TokenPrefix + strings.Repeat("0", 40), token.Reveal()} {
		if _, err := r.Authenticate(t.Context(), sent, here); err == nil {
			t.Errorf("%q is good", sent)
		}
	}
	want := []string{
		"login.refused missing " + here, "login.refused malformed " + here, "login.refused unknown key " + here,
		"login.refused revoked key key:" + k.ID,
	}
	if d := cmp.Diff(want, e.refused); d != "" {
		t.Errorf("counted (-want +got):\n%s", d)
	}
}

// uses counts the events about first uses.
func (e *events) uses() int {
	return len(slices.DeleteFunc(e.list(), func(s string) bool { return !strings.HasPrefix(s, "key.used ") }))
}

// TestFirstUse: the first use of a key is recorded once, by whatever process
// sees it, with the request's time and trace, and marked after that.
func TestFirstUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, e := &memory{}, &events{}
		token, k, err := open(t, m, e).Create(t.Context(), root, access.Developer, "")
		if err != nil {
			t.Fatal(err)
		}
		use := func(r *Keyring) {
			t.Helper()
			ctx := trace.NewContext(t.Context(), "4bf92f3577b34da6a3ce929d0e0e4736")
			for range 3 {
				if _, err := r.Authenticate(ctx, token.Reveal(), here); err != nil {
					t.Fatal(err)
				}
			}
		}
		run := func(r *Keyring) (stop func()) {
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan struct{})
			go func() { defer close(over); r.Run(ctx) }()
			return func() { cancel(); <-over }
		}

		// A process that dies before it could record leaves no mark: the use is
		// not lost for the next one.
		use(open(t, m, e))
		if e.uses() != 0 || !m.keys[0].FirstUsedAt.IsZero() {
			t.Fatalf("without Run: %v, %v", e.list(), m.keys[0].FirstUsedAt)
		}
		// A record that fails is tried again, and nothing is marked meanwhile.
		r := open(t, m, e)
		e.fail = errors.New("disk full")
		stop := run(r)
		at := time.Now()
		use(r)
		synctest.Wait()
		if !m.keys[0].FirstUsedAt.IsZero() {
			t.Error("a use is marked that is not recorded")
		}
		e.mu.Lock()
		e.fail = nil
		e.mu.Unlock()
		m.setFail(errors.New("disk full")) // and so is a mark, without a second event
		time.Sleep(useRetry)
		synctest.Wait()
		if e.uses() != 1 {
			t.Errorf("events %v", e.list())
		}
		m.setFail(nil)
		time.Sleep(useRetry)
		synctest.Wait()
		if got := m.keys[0].FirstUsedAt; got.IsZero() || !got.Equal(at.UTC().Truncate(time.Microsecond)) {
			t.Errorf("marked %v, used %v", got, at)
		}
		use(r)
		stop()
		// Nor does another process record it again.
		r = open(t, m, e)
		stop = run(r)
		use(r)
		stop()
		if got := e.list(); e.uses() != 1 || got[len(got)-1] != "key.used key/"+k.ID+" key:"+k.ID {
			t.Errorf("events %v", got)
		}
		last := e.all[len(e.all)-1]
		if last.Trace != "4bf92f3577b34da6a3ce929d0e0e4736" || !last.Time.Equal(at) {
			t.Errorf("recorded with trace %q and time %v", last.Trace, last.Time)
		}
	})
}

// TestUseBeforeTheEnd: a use in the last moment is recorded when Run ends.
func TestUseBeforeTheEnd(t *testing.T) {
	m, e := &memory{}, &events{}
	r := open(t, m, e)
	token, _, err := r.Create(t.Context(), root, access.Developer, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Authenticate(t.Context(), token.Reveal(), here); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Run(ctx)
	if e.uses() != 1 || m.keys[0].FirstUsedAt.IsZero() {
		t.Errorf("%v, %+v", e.list(), m.keys)
	}
}
