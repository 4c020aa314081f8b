package lifecycle

import (
	"context"
	"sync"

	"bivy/internal/kind"
)

// maxWaiting bounds the creates that wait for their turn.
const maxWaiting = 4096

// fairSemaphore lets a limited number of creates in at a time. Owners take turns, so
// that one who asks for a thousand sessions does not hold up one who asks for
// a single one.
type fairSemaphore struct {
	mu      sync.Mutex
	free    int
	total   int
	waiting map[string][]*ticket // by owner, oldest first
	owners  []string             // with waiting tickets, in the order of their turns
}

type ticket struct {
	owner string
	turn  chan struct{} // closes when it is this one's turn
}

func newFairSemaphore(limit int) *fairSemaphore {
	return &fairSemaphore{free: limit, waiting: map[string][]*ticket{}}
}

// take waits for a turn; done gives it back.
func (t *fairSemaphore) take(ctx context.Context, owner string) (done func(), err error) {
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return sync.OnceFunc(t.give), nil
	}
	if t.total >= maxWaiting {
		t.mu.Unlock()
		return nil, kind.Errorf(kind.Exhausted, "%d sessions are waiting to be created already", maxWaiting).WithHint("try again later")
	}
	k := &ticket{owner: owner, turn: make(chan struct{})}
	if len(t.waiting[owner]) == 0 {
		t.owners = append(t.owners, owner)
	}
	t.waiting[owner] = append(t.waiting[owner], k)
	t.total++
	t.mu.Unlock()

	select {
	case <-k.turn:
		return sync.OnceFunc(t.give), nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-k.turn: // the turn came at the same moment: give it back
		t.giveLocked()
	default:
		t.leaveLocked(k)
	}
	return nil, ctx.Err()
}

func (t *fairSemaphore) give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.giveLocked()
}

// giveLocked hands a turn to the next owner's oldest ticket.
func (t *fairSemaphore) giveLocked() {
	if len(t.owners) == 0 {
		t.free++
		return
	}
	owner := t.owners[0]
	t.owners = t.owners[1:]
	k := t.waiting[owner][0]
	t.shortenLocked(owner, t.waiting[owner][1:])
	if len(t.waiting[owner]) > 0 {
		t.owners = append(t.owners, owner)
	}
	close(k.turn)
}

func (t *fairSemaphore) leaveLocked(k *ticket) {
	var rest []*ticket
	for _, other := range t.waiting[k.owner] {
		if other != k {
			rest = append(rest, other)
		}
	}
	t.shortenLocked(k.owner, rest)
	if len(rest) > 0 {
		return
	}
	for i, o := range t.owners {
		if o == k.owner {
			t.owners = append(t.owners[:i:i], t.owners[i+1:]...)
			return
		}
	}
}

func (t *fairSemaphore) shortenLocked(owner string, rest []*ticket) {
	t.total -= len(t.waiting[owner]) - len(rest)
	if len(rest) == 0 {
		delete(t.waiting, owner)
		return
	}
	t.waiting[owner] = rest
}
