package node

import (
	"context"
	"sync"

	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// notifier carries notices to their reader. Sending never waits: notices of
// one sandbox that were not read yet are merged.
type notifier struct {
	out   chan sandbox.Notice
	fresh chan struct{}

	mu      sync.Mutex
	pending map[session.SandboxID]sandbox.Notice
}

func newNotifier() *notifier {
	return &notifier{
		out: make(chan sandbox.Notice), fresh: make(chan struct{}, 1), pending: map[session.SandboxID]sandbox.Notice{},
	}
}

func (w *notifier) send(x sandbox.Notice) {
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

// deliver hands out notices until ctx ends.
func (w *notifier) deliver(ctx context.Context) {
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

func (w *notifier) take() (sandbox.Notice, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, x := range w.pending {
		delete(w.pending, id)
		return x, true
	}
	return sandbox.Notice{}, false
}
