package workload

import (
	"context"
	"errors"
	"sync"
	"time"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// ErrEnding is why work in progress is cut when a session ends.
var ErrEnding = journal.ErrClosed

// Incarnation is one sandbox of a session, from its start to its end, as the
// workload sees it. A new one admits no work.
//
// Lock order: Incarnation.mu, then command.mu. Neither is held across a call
// to the node or the journal.
type Incarnation struct {
	s       *Service
	id      session.SandboxID
	session session.ID
	owner   session.Principal
	log     *journal.Log

	// ctx ends when the incarnation is cut off: what works inside works on it.
	ctx context.Context
	cut context.CancelCauseFunc

	mu         sync.Mutex
	open       bool          // operations are admitted
	closed     bool          // and never will be again
	inside     int           // operations admitted and not out yet
	idle       chan struct{} // closes when inside is 0 and closed
	commands   map[string]*command
	running    int   // commands that have not ended
	oomKills   int64 // processes killed by the memory limit, in the record
	oomWriting int64 // the same, being written
}

// NewIncarnation returns the incarnation of the session's current sandbox,
// closed. log is what it writes into. earlier is what the record tells of the
// same sandbox under an earlier process; nil for a new one.
func (s *Service) NewIncarnation(of session.Session, log *journal.Log, earlier *History) *Incarnation {
	i := &Incarnation{
		s: s, id: of.SandboxID(), session: of.ID, owner: of.Owner, log: log,
		idle: make(chan struct{}), commands: map[string]*command{},
	}
	if earlier != nil {
		i.oomKills = earlier.OOMKills
	}
	i.ctx, i.cut = context.WithCancelCause(s.o.Work.Live())
	return i
}

// ID returns the id of the sandbox.
func (i *Incarnation) ID() session.SandboxID { return i.id }

// Owner returns whose session it is.
func (i *Incarnation) Owner() session.Principal { return i.owner }

// Admits reports whether the incarnation is open.
func (i *Incarnation) Admits() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.open
}

// Log returns what the incarnation writes into.
func (i *Incarnation) Log() *journal.Log { return i.log }

// Open admits work. It fails with Conflict after Close.
func (i *Incarnation) Open() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return kind.Wrap(kind.Conflict, ErrEnding)
	}
	i.open = true
	return nil
}

// Close admits no work any more; what is inside goes on until it is cut. It
// may be repeated.
func (i *Incarnation) Close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return
	}
	i.open, i.closed = false, true
	if i.inside == 0 {
		close(i.idle)
	}
}

// Cut ends the work in progress because the session ends.
func (i *Incarnation) Cut() { i.cut(ErrEnding) }

// Drain waits until no operation is inside, for at most patience or until ctx
// ends, and reports whether it came to that. It is called after Close.
func (i *Incarnation) Drain(ctx context.Context, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-i.idle:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// enter counts an operation in; ok is false when the incarnation admits none.
func (i *Incarnation) enter() (leave func(), ok bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.open {
		return nil, false
	}
	i.inside++
	return sync.OnceFunc(i.leave), true
}

func (i *Incarnation) leave() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.inside--; i.inside == 0 && i.closed {
		close(i.idle)
	}
}

// within returns a context that ends with ctx and when the incarnation is cut.
func (i *Incarnation) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(i.ctx, func() { cancel(context.Cause(i.ctx)) })
	return ctx, func() { stop(); cancel(nil) }
}

// cutError explains err when the session's end is its cause.
func (i *Incarnation) cutError(err error) error {
	if errors.Is(context.Cause(i.ctx), ErrEnding) {
		return kind.Errorf(kind.Conflict, "session %s is ending (%w)", i.session, err)
	}
	return err
}

// RecordOOM records that the memory limit has killed kills processes so far,
// unless the record has it. It does not wait for the write.
func (i *Incarnation) RecordOOM(kills int64) {
	i.mu.Lock()
	more := kills > i.killsLocked() && !i.closed
	if more {
		i.oomWriting = kills
	}
	i.mu.Unlock()
	if !more {
		return
	}
	i.s.o.Work.Go(func() {
		err := i.log.Append(audit.Entry{
			Action: audit.OutOfMemory, Outcome: audit.Failed, Actor: journal.System, Object: "sandbox/" + string(i.id), Payload: oomPayload{Kills: kills},
		})
		if err != nil {
			i.s.log.Error("recording that the memory limit was reached", "session", i.session, "error", err)
		}
		i.mu.Lock()
		defer i.mu.Unlock()
		if err == nil {
			i.oomKills = max(i.oomKills, kills)
		} else if i.oomWriting == kills {
			i.oomWriting = 0 // the node tells it again
		}
	})
}

// killsLocked is how many kills of the memory limit are in the record, or on
// their way there.
func (i *Incarnation) killsLocked() int64 { return max(i.oomKills, i.oomWriting) }

// Resume takes up what an earlier process was doing inside: it follows its
// commands again. It is called on an open incarnation.
func (i *Incarnation) Resume(h *History) {
	for id, c := range h.commands {
		i.follow(id, c)
	}
}
