package auth

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// memory is a Store in memory; fail makes its writes fail.
type memory struct {
	mu   sync.Mutex
	keys []Key
	fail error
}

func (m *memory) PutKey(_ context.Context, k Key) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	if slices.ContainsFunc(m.keys, func(o Key) bool { return o.ID == k.ID || o.Hash == k.Hash }) {
		return kind.Errorf(kind.Conflict, "taken")
	}
	m.keys = append(m.keys, k)
	return nil
}

func (m *memory) Keys(context.Context) ([]Key, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.keys), nil
}

func (m *memory) RevokeKey(_ context.Context, id string, at time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.keys {
		if m.keys[i].ID == id {
			if m.keys[i].RevokedAt.IsZero() {
				m.keys[i].RevokedAt = at
			}
			return nil
		}
	}
	return kind.Errorf(kind.NotFound, "no key %s", id)
}

func (m *memory) MarkKeyUsed(_ context.Context, id string, at time.Time) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return false, m.fail
	}
	for i := range m.keys {
		if m.keys[i].ID == id {
			first := m.keys[i].FirstUsedAt.IsZero()
			if first {
				m.keys[i].FirstUsedAt = at
			}
			return first, nil
		}
	}
	return false, kind.Errorf(kind.NotFound, "no key %s", id)
}

func (m *memory) setFail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

// events is a Record in memory; fail makes its writes fail.
type events struct {
	mu      sync.Mutex
	all     []audit.Entry
	refused []string // "action reason who"
	fail    error
}

func (e *events) Record(_ context.Context, in audit.Entry) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fail != nil {
		return e.fail
	}
	e.all = append(e.all, in)
	return nil
}

func (e *events) Begin(ctx context.Context, in audit.Entry) (func(audit.Entry) error, error) {
	if err := e.Record(ctx, in); err != nil {
		return nil, err
	}
	return func(out audit.Entry) error {
		out.Object, out.Actor = in.Object, in.Actor
		return e.Record(ctx, out)
	}, nil
}

func (e *events) CountRefused(a audit.Action, reason, who string, _ audit.Decision) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused = append(e.refused, string(a)+" "+reason+" "+who)
}

// list returns the events as "action object actor".
func (e *events) list() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, x := range e.all {
		out = append(out, string(x.Action)+" "+x.Object+" "+x.Actor.Subject)
	}
	return out
}

func open(t *testing.T, m *memory, e *events) *Keyring {
	t.Helper()
	r, err := Open(t.Context(), Options{Store: m, Record: e, Access: access.Roles{}})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func ring(t *testing.T, m *memory) *Keyring { return open(t, m, &events{}) }

const here = "192.0.2.7" // where requests come from

var root = access.Caller{Principal: session.Principal{Subject: "local:root"}, Role: access.Admin}

func TestKeys(t *testing.T) {
	m := &memory{}
	r := ring(t, m)
	token, k, err := r.Create(t.Context(), root, access.Developer, "ada's laptop")
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(token.Reveal()) {
		t.Errorf("token %q has not the shape that clients expect", token.Reveal())
	}
	if len(k.ID) != 8 || k.CreatedBy != root.Principal.Subject || k.Role != access.Developer || k.Label != "ada's laptop" || k.CreatedAt.IsZero() {
		t.Errorf("key %+v", k)
	}
	c, err := r.Authenticate(t.Context(), token.Reveal(), here)
	if want := (access.Caller{Principal: session.Principal{Subject: "key:" + k.ID}, Role: access.Developer}); err != nil || c != want {
		t.Errorf("got %+v, %v; want %+v", c, err, want)
	}
	if _, _, err := r.Create(t.Context(), root, access.Admin, "keeps the last one company"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.Revoke(t.Context(), root, k.ID); err != nil {
			t.Fatal(err)
		}
	}
	_, err = r.Authenticate(t.Context(), token.Reveal(), here)
	if !kind.Is(err, kind.Unauthentic) || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("revoked: %v", err)
	}
	if err := r.Revoke(t.Context(), root, "00000000"); !kind.Is(err, kind.NotFound) {
		t.Errorf("revoke an unknown key: %v", err)
	}
	all, err := r.List(t.Context(), root)
	if err != nil || len(all) != 2 {
		t.Errorf("%d keys, %v", len(all), err)
	}
}

func TestAuthenticateRefuses(t *testing.T) {
	r := ring(t, &memory{})
	good, _, err := r.Create(t.Context(), root, access.Admin, "")
	if err != nil {
		t.Fatal(err)
	}
	token := good.Reveal()
	for _, bad := range []string{
		"", "e2b_", token[:43], token + "0", " " + token, token + "\n", strings.ToUpper(token), "E2B_" + token[4:],
		"sk_" + token[4:], "e2b_" + strings.Repeat("0", 40), "e2b_" + strings.Repeat("g", 40), token[:20] + "\x00" + token[21:],
	} {
		c, err := r.Authenticate(t.Context(), bad, here)
		if !kind.Is(err, kind.Unauthentic) || kind.Hint(err) == "" || c != (access.Caller{}) {
			t.Errorf("%q: %+v, %v", bad, c, err)
		}
		if err != nil && len(bad) > 20 && strings.Contains(err.Error(), bad[4:20]) {
			t.Errorf("the error repeats what was sent: %v", err)
		}
	}
}

func TestCreateRefuses(t *testing.T) {
	m := &memory{}
	r := ring(t, m)
	for _, c := range []struct {
		role  access.Role
		label string
		field string
	}{
		{"", "", "role"}, {"root", "", "role"}, {"Admin", "", "role"},
		{access.Admin, strings.Repeat("x", MaxLabel+1), "label"}, {access.Admin, "a\nb", "label"}, {access.Admin, "\xff", "label"}, {access.Admin, "\x1b[0m", "label"},
	} {
		if _, _, err := r.Create(t.Context(), root, c.role, c.label); !kind.Is(err, kind.Invalid) || kind.Field(err) != c.field {
			t.Errorf("%q %q: %v", c.role, c.label, err)
		}
	}
	m.fail = kind.Errorf(kind.Exhausted, "disk full")
	if token, _, err := r.Create(t.Context(), root, access.Admin, ""); !kind.Is(err, kind.Exhausted) || token.Reveal() != "" {
		t.Errorf("a store that fails: %v", err)
	}
	if len(m.keys) != 0 {
		t.Errorf("keys %v", m.keys)
	}
}

func TestLastAdminKeyStays(t *testing.T) {
	r := ring(t, &memory{})
	_, first, err := r.Create(t.Context(), root, access.Admin, "first")
	if err != nil {
		t.Fatal(err)
	}
	_, developer, err := r.Create(t.Context(), root, access.Developer, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Revoke(t.Context(), root, first.ID); !kind.Is(err, kind.Conflict) || kind.Hint(err) == "" {
		t.Errorf("the last admin key: %v", err)
	}
	if err := r.Revoke(t.Context(), root, developer.ID); err != nil {
		t.Error(err)
	}
	_, second, err := r.Create(t.Context(), root, access.Admin, "second")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Revoke(t.Context(), root, first.ID); err != nil {
		t.Errorf("one of two: %v", err)
	}
	if err := r.Revoke(t.Context(), root, second.ID); !kind.Is(err, kind.Conflict) {
		t.Errorf("the last one again: %v", err)
	}
}

func TestEnsureAdmin(t *testing.T) {
	m := &memory{}
	r := ring(t, m)
	dir := t.TempDir()
	path := filepath.Join(dir, AdminKeyFile)
	// What lies there from a start that did not finish is replaced, with its mode.
	if err := os.WriteFile(path, []byte("e2b_stale\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	m.fail = errors.New("crash between file and store")
	if _, err := r.EnsureAdmin(t.Context(), dir); err == nil {
		t.Fatal("no error")
	}
	m.fail = nil
	got, err := r.EnsureAdmin(t.Context(), dir)
	if err != nil || got != path {
		t.Fatalf("got %q, %v", got, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.Authenticate(t.Context(), strings.TrimSuffix(string(data), "\n"), here)
	if err != nil || c.Role != access.Admin {
		t.Errorf("got %+v, %v", c, err)
	}
	if got, err := r.EnsureAdmin(t.Context(), dir); got != "" || err != nil {
		t.Errorf("again: %q, %v", got, err)
	}
	if got, err := ring(t, m).EnsureAdmin(t.Context(), dir); got != "" || err != nil {
		t.Errorf("after a restart: %q, %v", got, err)
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != string(data) {
		t.Error("the file was written again")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v", entries)
	}
}

func TestConcurrentUse(t *testing.T) {
	m := &memory{}
	r := ring(t, m)
	keep, _, err := r.Create(t.Context(), root, access.Admin, "")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				token, k, err := r.Create(context.Background(), root, access.Developer, "")
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := r.Authenticate(context.Background(), token.Reveal(), here); err != nil {
					t.Errorf("a new key: %v", err)
				}
				if err := r.Revoke(context.Background(), root, k.ID); err != nil {
					t.Error(err)
				}
				if _, err := r.Authenticate(context.Background(), token.Reveal(), here); err == nil {
					t.Error("a revoked key still works")
				}
				if _, err := r.Authenticate(context.Background(), keep.Reveal(), here); err != nil {
					t.Errorf("a key that nobody touched: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkAuthenticate(b *testing.B) {
	m := &memory{}
	r, err := Open(b.Context(), Options{Store: m, Record: &events{}, Access: access.Roles{}})
	if err != nil {
		b.Fatal(err)
	}
	var token string
	for range 1000 {
		v, _, err := r.Create(b.Context(), root, access.Developer, "")
		if err != nil {
			b.Fatal(err)
		}
		token = v.Reveal()
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Authenticate(b.Context(), token, here); err != nil {
			b.Fatal(err)
		}
	}
}
