package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

// news carries what happened to sandboxes to who reads it. Telling never
// waits: what was told of one sandbox and not yet read is merged.
type news struct {
	out   chan lifecycle.Exited
	fresh chan struct{}

	mu      sync.Mutex
	pending map[session.SandboxID]lifecycle.Exited
}

func newNews() *news {
	return &news{
		out: make(chan lifecycle.Exited), fresh: make(chan struct{}, 1), pending: map[session.SandboxID]lifecycle.Exited{},
	}
}

func (w *news) tell(x lifecycle.Exited) {
	w.mu.Lock()
	old := w.pending[x.ID]
	x.Deadline = x.Deadline || old.Deadline
	x.OOMKills = max(x.OOMKills, old.OOMKills)
	if old.Stopped && !x.Stopped {
		x.Stopped, x.Exit = true, old.Exit
	}
	w.pending[x.ID] = x
	w.mu.Unlock()
	select {
	case w.fresh <- struct{}{}:
	default:
	}
}

// deliver hands out news until ctx ends.
func (w *news) deliver(ctx context.Context) {
	for {
		x, ok := w.take()
		if !ok {
			select {
			case <-w.fresh:
				continue
			case <-ctx.Done():
				return
			}
		}
		select {
		case w.out <- x:
		case <-ctx.Done():
			return
		}
	}
}

func (w *news) take() (lifecycle.Exited, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, x := range w.pending {
		delete(w.pending, id)
		return x, true
	}
	return lifecycle.Exited{}, false
}

// watch tells when the sandbox stops by itself.
func (n *Node) watch(e *entry) {
	n.goTracked(func() {
		for {
			x, err := n.o.Driver.Wait(n.base, e.id)
			if n.base.Err() != nil {
				return
			}
			e.mu.Lock()
			going := e.going
			e.mu.Unlock()
			if going {
				return
			}
			if err == nil || kind.Is(err, kind.NotFound) {
				if err != nil {
					x = driver.Exit{Code: -1, At: n.o.Now()}
				}
				n.stopped(e, x)
				return
			}
			n.log.Error("waiting for a sandbox", "sandbox", e.id, "error", err)
			timer := time.NewTimer(n.o.Tick)
			select {
			case <-timer.C:
			case <-n.base.Done():
				timer.Stop()
				return
			}
		}
	})
}

func (n *Node) stopped(e *entry, x driver.Exit) {
	e.mu.Lock()
	e.up = false
	kills := e.kills
	e.mu.Unlock()
	e.cut(false)
	if x.OOM {
		kills = max(kills, 1)
	}
	n.news.tell(lifecycle.Exited{ID: e.id, Stopped: true, Exit: x, OOMKills: kills})
}

// nudge makes Run look again.
func (n *Node) nudge() {
	select {
	case n.poke <- struct{}{}:
	default:
	}
}

// look tells of deadlines that have passed and returns when to look again. The
// timer runs on a clock that stops while the machine sleeps, so it is never set
// far ahead.
func (n *Node) look() time.Duration {
	n.mu.Lock()
	all := n.entriesLocked()
	n.mu.Unlock()
	next := n.o.Tick
	for _, e := range all {
		e.mu.Lock()
		d, going := e.rec.Due, e.going
		e.mu.Unlock()
		left, ok := n.left(d)
		switch {
		case !ok || going:
		case left > 0:
			next = min(next, left)
		case left > -n.o.Grace:
			n.news.tell(lifecycle.Exited{ID: e.id, Deadline: true})
			next = min(next, n.o.Grace+left)
		default:
			n.force(e)
		}
	}
	return max(next, time.Millisecond)
}

// countKills tells, until ctx ends, when memory limits have killed more than
// they had. It is apart from the deadlines, which a driver that hangs must not
// hold up.
func (n *Node) countKills(ctx context.Context) {
	s, ok := n.o.Driver.(driver.Statter)
	if !ok {
		return
	}
	tick := time.NewTicker(n.o.Tick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		n.mu.Lock()
		all := n.entriesLocked()
		n.mu.Unlock()
		for _, e := range all {
			n.lookForKills(ctx, s, e)
		}
	}
}

func (n *Node) lookForKills(ctx context.Context, s driver.Statter, e *entry) {
	e.mu.Lock()
	running := e.up && !e.going
	e.mu.Unlock()
	if !running {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	now, err := s.Stats(ctx, e.id)
	if err != nil {
		return // stopping, most likely; the watcher tells of that
	}
	e.mu.Lock()
	more := now.OOMKills > e.kills
	if more {
		e.kills = now.OOMKills
	}
	e.mu.Unlock()
	if more {
		n.news.tell(lifecycle.Exited{ID: e.id, OOMKills: now.OOMKills})
	}
}

// force destroys a sandbox that nobody ended although its time was up.
func (n *Node) force(e *entry) {
	e.mu.Lock()
	busy := e.forced
	e.forced = true
	e.mu.Unlock()
	if busy {
		return
	}
	begun := n.goTracked(func() {
		n.log.Warn("destroying a sandbox that was not ended at its deadline", "sandbox", e.id)
		ctx, cancel := context.WithTimeout(n.base, undoTime)
		defer cancel()
		err := n.Destroy(ctx, e.id)
		e.mu.Lock()
		e.forced = false
		// A failed try must not keep the next look from trying again.
		e.going = err == nil
		e.mu.Unlock()
		if err != nil {
			n.log.Error("destroying a sandbox at its deadline", "sandbox", e.id, "error", err)
		}
		n.news.tell(lifecycle.Exited{ID: e.id, Deadline: true})
	})
	if !begun {
		e.mu.Lock()
		e.forced = false
		e.mu.Unlock()
	}
}

// SetDeadline moves a sandbox's deadline. The distance from now is what
// counts; the same date again changes nothing.
func (n *Node) SetDeadline(id session.SandboxID, at time.Time) error {
	e, err := n.entry(id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.base, time.Second)
	defer cancel()
	if err := e.hold(ctx); err != nil {
		return kind.Errorf(kind.Unavailable, "sandbox %s is being started or destroyed", id)
	}
	defer e.release()
	if now, err := n.entry(id); err != nil || now != e {
		return kind.Errorf(kind.NotFound, "sandbox %s was destroyed meanwhile", id) // its file must not come back
	}
	e.mu.Lock()
	same := e.rec.Due.Wall.Equal(at) && e.rec.Due.Boot == n.o.BootID
	if !same {
		e.rec.Due = n.due(at)
	}
	rec := e.rec
	e.mu.Unlock()
	if same {
		return nil
	}
	n.nudge()
	if err := n.write(rec, false); err != nil {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	return nil
}
