package sqlite

import (
	"context"
	"testing"

	"bivy/internal/lifecycle"
	"bivy/internal/store/storetest"
)

var _ lifecycle.Store = (*Store)(nil)

func open(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(t.Context(), dir, Options{})
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
	storetest.Run(t, func(t *testing.T) lifecycle.Store {
		s := open(t, t.TempDir())
		t.Cleanup(func() {
			if err := s.Check(context.Background()); err != nil {
				t.Error(err)
			}
		})
		return s
	})
}
