// Package workgroup counts the work that a process has in progress, so that it
// can stop in order: first no new work begins and what follows sandboxes is
// cut, then what has to be written is given some time, then everything ends.
package workgroup

import (
	"context"
	"sync"
	"time"

	"bivy/internal/kind"
)

// Group is the work in progress of one part of the process. Its methods may be
// called from any goroutine.
type Group struct {
	live, late         context.Context
	stopLive, stopLate context.CancelFunc

	work sync.WaitGroup // grows only under mu while !stopping

	mu       sync.Mutex
	stopping bool
}

// New returns a Group that takes work until Stop.
func New() *Group {
	g := &Group{}
	g.live, g.stopLive = context.WithCancel(context.Background())
	g.late, g.stopLate = context.WithCancel(context.Background())
	return g
}

// Live is the context of work that another process can take up again: it ends
// as soon as Stop is called.
func (g *Group) Live() context.Context { return g.live }

// Late is the context of work that has to be finished, such as writing down
// what became of an effect: it ends when Stop has waited long enough.
func (g *Group) Late() context.Context { return g.late }

// Begin counts one piece of work in; done counts it out and must be called. ok
// is false when the group is stopping and the work must not begin.
func (g *Group) Begin() (done func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopping {
		return nil, false
	}
	g.work.Add(1)
	return sync.OnceFunc(g.work.Done), true
}

// Go runs f in a goroutine that Stop waits for. It reports whether f runs.
func (g *Group) Go(f func()) bool {
	done, ok := g.Begin()
	if !ok {
		return false
	}
	go func() {
		defer done()
		f()
	}()
	return true
}

// Stopping reports whether Stop has been called.
func (g *Group) Stopping() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stopping
}

// Stop takes no more work, ends Live, waits for the work in progress, ends
// Late after patience at the latest, and returns when no work is left.
func (g *Group) Stop(patience time.Duration) {
	g.mu.Lock()
	g.stopping = true
	g.mu.Unlock()
	g.stopLive()
	over := make(chan struct{})
	go func() { // ends with the work, which the end of Late makes finite
		g.work.Wait()
		close(over)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-over:
	case <-timer.C:
	}
	g.stopLate()
	<-over
}

// StoppingError is the error of work that a stopping process does not take.
func StoppingError() error {
	return kind.Errorf(kind.Unavailable, "bivy is stopping").WithHint("try again when it has been started again")
}
