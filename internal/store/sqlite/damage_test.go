package sqlite

import (
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/store/storetest"
	"os"
	"path/filepath"
	"testing"
)

func TestDamageIsFound(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := storetest.Created(t, s)
	for range 50 {
		if err := storetest.Append(t.Context(), s, at, func() audit.Entry { e := big(); e.Action = audit.StepDone; return e }()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, databaseFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Every page after the schema gets a broken header.
	for page := 8 * 4096; page < len(data); page += 4096 {
		copy(data[page:page+8], "\xff\xff\xff\xff\xff\xff\xff\xff")
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err = Open(t.Context(), dir, Options{})
	if err != nil {
		return // found at once
	}
	defer s.Close()
	if err := s.Check(t.Context()); !kind.Is(err, kind.Internal) || kind.Hint(err) == "" {
		t.Errorf("got %v, want the damage and what to do", err)
	}
}

// keyring opens the keys of a store, which it records changes of in the store.
