package journal

import (
	"sync"

	"bivy/internal/session"
)

// notifier tells those who follow a record that it has grown.
type notifier struct {
	mu sync.Mutex
	// waiting has an entry for every session that somebody waits for.
	waiting map[session.ID]*subscription
}

type subscription struct {
	grown   chan struct{}
	readers int
}

// subscribe returns a channel that closes when the record of id grows, and how
// to stop waiting, which must be called.
func (n *notifier) subscribe(id session.ID) (grown <-chan struct{}, cancel func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.waiting[id]
	if s == nil {
		s = &subscription{grown: make(chan struct{})}
		n.waiting[id] = s
	}
	s.readers++
	return s.grown, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if s.readers--; s.readers == 0 && n.waiting[id] == s {
			delete(n.waiting, id)
		}
	}
}

// notify wakes those who wait for id; to wait again they subscribe again.
func (n *notifier) notify(id session.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s := n.waiting[id]; s != nil {
		close(s.grown)
		delete(n.waiting, id)
	}
}

func (n *notifier) notifyAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.waiting {
		close(s.grown)
	}
	clear(n.waiting)
}

func (n *notifier) hasSubscribers() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.waiting) > 0
}
