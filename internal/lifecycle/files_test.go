package lifecycle_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"bivy/internal/kind"
	"bivy/internal/lifecycle"
)

// silent gives a beginning and then waits for what never comes.
type silent struct {
	waits, aborted chan struct{}
	abort, reach   sync.Once
}

func (r *silent) Read(p []byte) (int, error) {
	begun := false
	r.reach.Do(func() { begun = true; close(r.waits) })
	if begun {
		return copy(p, "abc"), nil
	}
	<-r.aborted
	return 0, errors.New("aborted")
}

func (r *silent) Abort() { r.abort.Do(func() { close(r.aborted) }) }

// TestEndDuringSilentUpload: who has stopped sending holds up no end.
func TestEndDuringSilentUpload(t *testing.T) {
	w := newWorld(t)
	d := w.start(func(o *lifecycle.Options) { o.Bounds.Drain = time.Minute })
	s := d.create()
	r := &silent{waits: make(chan struct{}), aborted: make(chan struct{})}
	written := make(chan error, 1)
	go func() {
		_, err := d.WriteFile(t.Context(), alice, s.ID, "/f", "", r, 1000)
		written <- err
	}()
	<-r.waits
	began := time.Now()
	d.end(s.ID)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("the end took %s", took)
	}
	if err := <-written; !kind.Is(err, kind.Conflict) {
		t.Errorf("the write: %v, want that the session ends", err)
	}
	w.checkEnded(d, s.ID)
	w.checkNothingLeft()
}
