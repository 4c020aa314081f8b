package sqlite

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/access"
	"bivy/internal/auth"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// keyring opens the keys of a store, which it records changes of in the store.
func keyring(t *testing.T, s *Store) *auth.Keyring {
	t.Helper()
	ring, err := auth.Open(t.Context(), auth.Options{
		Store: s, Access: access.Roles{},
		Record: journal.NewSystemRecord(journal.SystemOptions{Store: s, Node: storetest.Node, Access: access.Roles{}}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// TestKeyIsFirstUsedOnce: the mark is set once, and a store that is opened
// again has it.
func TestKeyIsFirstUsedOnce(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	k := auth.Key{ID: "ab12cd34", Hash: [32]byte{1}, Role: access.Auditor, CreatedAt: time.UnixMicro(1).UTC(), CreatedBy: "test"}
	if err := s.PutKey(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	k.FirstUsedAt = time.UnixMicro(2_000_000).UTC()
	for _, want := range []bool{true, false} {
		at := k.FirstUsedAt
		if !want {
			at = at.Add(time.Hour)
		}
		if first, err := s.MarkKeyUsed(t.Context(), k.ID, at); err != nil || first != want {
			t.Errorf("first %t, %v; want %t", first, err, want)
		}
	}
	if _, err := s.MarkKeyUsed(t.Context(), "ffffffff", time.Now()); !kind.Is(err, kind.NotFound) {
		t.Errorf("an unknown key: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if keys, err := open(t, dir).Keys(t.Context()); err != nil || cmp.Diff([]auth.Key{k}, keys) != "" {
		t.Errorf("%v, %s", err, cmp.Diff([]auth.Key{k}, keys))
	}
}

func TestKeys(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	root := access.Caller{Principal: session.Principal{Subject: "local:root"}, Role: access.Admin}
	ring := keyring(t, s)
	token, k, err := ring.Create(t.Context(), root, access.Developer, "ci")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.PutKey(t.Context(), k); !kind.Is(err, kind.Conflict) {
		t.Errorf("the same key twice: %v", err)
	}
	if err := s.RevokeKey(t.Context(), "ffffffff", time.Now()); !kind.Is(err, kind.NotFound) {
		t.Errorf("revoke an unknown key: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// Not even the files show the token.
	for _, name := range []string{databaseFile, databaseFile + "-wal"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if bytes.Contains(data, []byte(token.Reveal())) {
			t.Errorf("%s holds the token", name)
		}
	}
	s = open(t, dir)
	ring = keyring(t, s)
	if c, err := ring.Authenticate(t.Context(), token.Reveal(), "10.1.2.3"); err != nil || c.Principal.Subject != k.Subject() || c.Role != access.Developer {
		t.Errorf("after reopening: %+v, %v", c, err)
	}
	if keys, err := ring.List(t.Context(), root); err != nil || cmp.Diff([]auth.Key{k}, keys) != "" {
		t.Errorf("%v, %s", err, cmp.Diff([]auth.Key{k}, keys))
	}
	for range 2 {
		if err := ring.Revoke(t.Context(), root, k.ID); err != nil {
			t.Error(err)
		}
	}
	if _, err := ring.Authenticate(t.Context(), token.Reveal(), "10.1.2.3"); !kind.Is(err, kind.Unauthentic) {
		t.Errorf("a revoked key: %v", err)
	}
}
