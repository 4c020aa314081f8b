package auth

import (
	"context"
	"errors"
	"sync"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/session"
	"bivy/internal/trace"
)

// uses are the first uses of keys that are not in the record of the node yet.
type uses struct {
	added chan struct{} // of one: something was added

	mu      sync.Mutex
	pending map[string]*use // by the key's ID
}

// use is the first use of a key.
type use struct {
	key   Key
	from  string // host that the request came from
	at    time.Time
	trace trace.ID // of the request

	recorded bool // the event is durable, the mark in the store is missing
}

func newUses() uses {
	return uses{added: make(chan struct{}, 1), pending: map[string]*use{}}
}

// add notes the use of a key unless one is noted already.
func (u *uses) add(ctx context.Context, k Key, from string, at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, noted := u.pending[k.ID]; noted {
		return
	}
	u.pending[k.ID] = &use{key: k, from: from, at: at, trace: trace.FromContext(ctx)}
	select {
	case u.added <- struct{}{}:
	default:
	}
}

func (u *uses) list() []*use {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := make([]*use, 0, len(u.pending))
	for _, x := range u.pending {
		all = append(all, x)
	}
	return all
}

func (u *uses) remove(id string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.pending, id)
}

const (
	useRetry = 5 * time.Second  // until a use that could not be recorded is tried again
	useWrite = 10 * time.Second // for what is left when Run ends
)

// Run records the first use of each key until ctx ends, and then what is left.
// A caller does not wait for that: a use is recorded a moment after it. The
// mark in the store is set after the event is durable: after a crash between
// the two, or before both, the next use of the key is recorded.
func (r *Keyring) Run(ctx context.Context) {
	retry := time.NewTicker(useRetry)
	defer retry.Stop()
	for {
		select {
		case <-r.uses.added:
		case <-retry.C:
		case <-ctx.Done():
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), useWrite)
			defer cancel()
			r.recordUses(late)
			return
		}
		r.recordUses(ctx)
	}
}

func (r *Keyring) recordUses(ctx context.Context) {
	for _, u := range r.uses.list() {
		if err := r.recordUse(ctx, u); err != nil {
			if ctx.Err() == nil {
				r.o.Log.Error("recording the first use of an API key", "key", u.key.ID, "error", err)
			}
			continue
		}
		r.uses.remove(u.key.ID)
	}
}

// usedPayload is the payload of audit.KeyUsed.
type usedPayload struct {
	Role access.Role `json:"role"`
	From string      `json:"from,omitempty"` // host
}

func (r *Keyring) recordUse(ctx context.Context, u *use) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	// A request that looked the key up before the mark was loaded notes the
	// use again.
	if k, ok := r.findLocked(u.key.ID); !ok || !k.FirstUsedAt.IsZero() {
		return nil
	}
	if !u.recorded {
		if err := r.o.Record.Record(ctx, audit.Entry{
			Action: audit.KeyUsed, Outcome: audit.OK, Actor: session.Principal{Subject: u.key.Subject()}, Object: u.key.object(),
			Time: u.at, Trace: u.trace, Payload: usedPayload{Role: u.key.Role, From: u.from},
		}); err != nil {
			return err
		}
		u.recorded = true
	}
	_, err := r.o.Store.MarkKeyUsed(ctx, u.key.ID, u.at.UTC().Truncate(time.Microsecond))
	return errors.Join(err, r.reloadLocked(ctx))
}
