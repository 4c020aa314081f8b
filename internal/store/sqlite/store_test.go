package sqlite

import (
	"context"
	"testing"

	"bivy/internal/store/storetest"
)

func open(t testing.TB, dir string) *Store {
	t.Helper()
	return opened(t, dir, true)
}

// opened opens dir, without exclusive beside other stores.
func opened(t testing.TB, dir string, exclusive bool) *Store {
	t.Helper()
	s, err := openStore(t.Context(), dir, Options{}, exclusive)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestContract(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() storetest.Store {
		dir := t.TempDir()
		return func() storetest.Store {
			s := opened(t, dir, false)
			t.Cleanup(func() {
				if err := s.Check(context.Background()); err != nil {
					t.Error(err)
				}
			})
			return s
		}
	})
}
