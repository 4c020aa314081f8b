package template

import (
	"context"
	"sync"

	"bivy/internal/kind"
)

// flight is one running build that any number of callers wait for.
type flight struct {
	cancel  context.CancelFunc
	started chan struct{} // closed when cancel is set
	done    chan struct{} // closed when result and err are set
	result  Template
	err     error

	mu      sync.Mutex
	waiters map[int]Progress
	next    int
}

// join enters the build with the given key, and leads it when there is none.
// The leader sets cancel, closes started and calls land when it is over.
func (s *Store) join(key string, progress Progress) (f *flight, id int, leader bool) {
	if progress == nil {
		progress = func(Event) {}
	}
	s.flightsMu.Lock()
	defer s.flightsMu.Unlock()
	f = s.flights[key]
	if f == nil {
		leader = true
		f = &flight{started: make(chan struct{}), done: make(chan struct{}), waiters: map[int]Progress{}}
		s.flights[key] = f
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	id = f.next
	f.next++
	f.waiters[id] = progress
	return f, id, leader
}

// land ends the build for all who wait.
func (s *Store) land(key string, f *flight, t Template, err error) {
	s.flightsMu.Lock()
	if s.flights[key] == f {
		delete(s.flights, key)
	}
	s.flightsMu.Unlock()
	f.result, f.err = t, err
	close(f.done)
}

// wait returns what the build gives, or leaves it when ctx ends first.
func (s *Store) wait(ctx context.Context, f *flight, id int) (Template, error) {
	select {
	case <-f.done:
		return f.result, f.err
	case <-ctx.Done():
		s.leave(f, id)
		return Template{}, kind.Wrap(kind.Unavailable, context.Cause(ctx))
	}
}

// leave stops waiting. The last to leave stops the build and sees it end, so
// that nothing of it is left when no caller is.
func (s *Store) leave(f *flight, id int) {
	s.flightsMu.Lock() // before f.mu, as in join: no caller may join a build that is being stopped
	f.mu.Lock()
	delete(f.waiters, id)
	last := len(f.waiters) == 0
	f.mu.Unlock()
	if last {
		for key, other := range s.flights {
			if other == f {
				delete(s.flights, key)
			}
		}
	}
	s.flightsMu.Unlock()
	if !last {
		return
	}
	<-f.started
	f.cancel()
	<-f.done
}

// report passes an event to everyone who waits.
func (f *flight) report(e Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.waiters {
		p(e)
	}
}
