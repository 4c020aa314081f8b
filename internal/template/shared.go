package template

import (
	"context"
	"sync"

	"bivy/internal/kind"
)

// sharedBuild is a build in progress that any number of callers wait for.
type sharedBuild struct {
	cancel  context.CancelFunc
	started chan struct{} // closed when cancel is set
	done    chan struct{} // closed when result and err are set
	result  Template
	err     error

	mu      sync.Mutex
	waiters map[int]Progress
	next    int
}

// join registers a caller for the build with the given key. If there is none it
// creates one and returns leader true: the leader runs the build, sets cancel,
// closes started, and calls finish at the end.
func (s *Store) join(key string, progress Progress) (f *sharedBuild, id int, leader bool) {
	if progress == nil {
		progress = func(Event) {}
	}
	s.runningMu.Lock()
	defer s.runningMu.Unlock()
	f = s.running[key]
	if f == nil {
		leader = true
		f = &sharedBuild{started: make(chan struct{}), done: make(chan struct{}), waiters: map[int]Progress{}}
		s.running[key] = f
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	id = f.next
	f.next++
	f.waiters[id] = progress
	return f, id, leader
}

// finish ends the build for all callers that wait.
func (s *Store) finish(key string, f *sharedBuild, t Template, err error) {
	s.runningMu.Lock()
	if s.running[key] == f {
		delete(s.running, key)
	}
	s.runningMu.Unlock()
	f.result, f.err = t, err
	close(f.done)
}

// wait returns the result of the build, or leaves it when ctx ends first.
func (s *Store) wait(ctx context.Context, f *sharedBuild, id int) (Template, error) {
	select {
	case <-f.done:
		return f.result, f.err
	case <-ctx.Done():
		s.leave(f, id)
		return Template{}, kind.Wrap(kind.Unavailable, context.Cause(ctx))
	}
}

// leave stops waiting. The last caller to leave cancels the build and waits for its
// end, so that no build runs without a caller.
func (s *Store) leave(f *sharedBuild, id int) {
	s.runningMu.Lock() // before f.mu, as in join: no caller may join a build that is being stopped
	f.mu.Lock()
	delete(f.waiters, id)
	last := len(f.waiters) == 0
	f.mu.Unlock()
	if last {
		for key, other := range s.running {
			if other == f {
				delete(s.running, key)
			}
		}
	}
	s.runningMu.Unlock()
	if !last {
		return
	}
	<-f.started
	f.cancel()
	<-f.done
}

// report passes an event to every caller that waits.
func (f *sharedBuild) report(e Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.waiters {
		p(e)
	}
}
