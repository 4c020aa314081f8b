package node

import (
	"context"
	"fmt"
	"time"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// watch sends a notice when the sandbox stops by itself.
func (n *Node) watch(e *entry) {
	n.goTracked(func() {
		for {
			x, err := n.o.Driver.Wait(n.base, e.id)
			if n.base.Err() != nil {
				return
			}
			e.mu.Lock()
			destroying := e.destroying
			e.mu.Unlock()
			if destroying {
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
			if poll.Sleep(n.base, n.o.Tick) != nil {
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
	n.notices.send(sandbox.Notice{ID: e.id, Stopped: true, Exit: x, OOMKills: kills})
}

// checkSoon makes Run check deadlines now.
func (n *Node) checkSoon() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// checkDeadlines sends notices of deadlines that have passed, destroys what
// nothing ended within the grace, and returns after how long to check again.
// The timer runs on a clock that stops while the machine sleeps, so it is
// never set far ahead.
func (n *Node) checkDeadlines() time.Duration {
	n.mu.Lock()
	all := n.entriesLocked()
	n.mu.Unlock()
	next := n.o.Tick
	for _, e := range all {
		e.mu.Lock()
		d, destroying, pool := e.saved.Due, e.destroying, e.saved.Owner.Kind == driver.OwnedByPool
		e.mu.Unlock()
		left, ok := n.left(d)
		switch {
		case !ok || destroying:
		case left > 0:
			next = min(next, left)
		case left > -n.o.Grace || pool:
			n.notices.send(sandbox.Notice{ID: e.id, Deadline: true})
			if !pool {
				next = min(next, n.o.Grace+left)
			}
		default:
			n.force(e)
		}
	}
	return max(next, time.Millisecond)
}

// countKills sends a notice, until ctx ends, when a memory limit has killed
// more processes than before. It has a goroutine of its own so that a driver
// that hangs does not delay deadlines.
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
			n.checkKills(ctx, s, e)
		}
	}
}

func (n *Node) checkKills(ctx context.Context, s driver.Statter, e *entry) {
	e.mu.Lock()
	running := e.up && !e.destroying
	e.mu.Unlock()
	if !running {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	now, err := s.Stats(ctx, e.id)
	if err != nil {
		return // stopping, most likely; watch sends a notice of that
	}
	e.mu.Lock()
	more := now.OOMKills > e.kills
	if more {
		e.kills = now.OOMKills
	}
	e.mu.Unlock()
	if more {
		n.notices.send(sandbox.Notice{ID: e.id, OOMKills: now.OOMKills})
	}
}

// force destroys a sandbox that nothing ended within the grace after its
// deadline. A try that fails is repeated at the next check.
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
		err := n.removeRecorded(ctx, e, "deadline passed and nothing ended it within "+n.o.Grace.String())
		e.mu.Lock()
		e.forced = false
		e.mu.Unlock()
		if err != nil {
			n.log.Error("destroying a sandbox at its deadline", "sandbox", e.id, "error", err)
		}
		n.notices.send(sandbox.Notice{ID: e.id, Deadline: true})
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
	same := e.saved.Due.Wall.Equal(at) && e.saved.Due.Boot == n.o.BootID
	if !same {
		e.saved.Due = n.due(at)
	}
	file := e.saved
	e.mu.Unlock()
	if same {
		return nil
	}
	n.checkSoon()
	if err := n.write(file, false); err != nil {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	return nil
}
