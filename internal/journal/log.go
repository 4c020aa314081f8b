package journal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/trace"
)

// Log writes the record of a session for one incarnation of it: all under one
// fence. It knows every intent whose outcome it has not written. Its methods
// may be called from any goroutine.
type Log struct {
	j  *Journal
	id session.ID
	at session.Fence

	mu        sync.Mutex
	closed    bool                // no new intent is taken
	pending   map[string]*Pending // by ref
	uncertain bool                // a write failed: what it has done only the record can tell
}

// Pending is an intent in the record whose outcome is not there yet.
type Pending struct {
	seq   uint64 // of the intent
	ref   string
	actor session.Principal
	trace trace.ID
	lost  audit.Entry   // what the record says when the outcome never becomes known
	known []audit.Entry // the outcome, not written yet
	// writing is not nil while the intent or the outcome is being written, and
	// closes after.
	writing chan struct{}
}

// ErrClosed is why a closed Log takes no intent.
var ErrClosed = errors.New("the session is ending")

// NewLog returns a Log for the record of session id under the given fence.
func (j *Journal) NewLog(id session.ID, at session.Fence) *Log {
	return &Log{j: j, id: id, at: at, pending: map[string]*Pending{}}
}

// Fence returns the fence that the log writes under.
func (l *Log) Fence() session.Fence { return l.at }

// Begin makes an intent durable; its action ends in ".intent", and its ref
// names the piece of work. When it fails the effect must not happen. lost is
// the outcome that the record gets when the real one never becomes known; ref
// and actor are filled in.
func (l *Log) Begin(ctx context.Context, intent, lost audit.Entry) (*Pending, error) {
	intent.Outcome = audit.Pending
	if intent.Trace == "" {
		intent.Trace = trace.FromContext(ctx)
	}
	p := &Pending{ref: intent.Ref, actor: intent.Actor, trace: intent.Trace, writing: make(chan struct{})}
	lost.Outcome = audit.Failed
	p.lost = p.fill(lost)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, kind.Wrap(kind.Conflict, ErrClosed)
	}
	l.pending[p.ref] = p
	l.mu.Unlock()

	seq, err := l.j.Append(ctx, l.id, l.at, intent)

	l.mu.Lock()
	defer l.mu.Unlock()
	close(p.writing)
	p.writing = nil
	if err != nil {
		delete(l.pending, p.ref)
		l.uncertain = true
		return nil, fmt.Errorf("session %s: refused, because it cannot be recorded: %w", l.id, err)
	}
	p.seq = seq
	return p, nil
}

// Resume takes up an intent of an earlier process whose outcome will become
// known after all. It reports false when the log is closed.
func (l *Log) Resume(i audit.Intent, actor session.Principal, lost audit.Entry) (*Pending, bool) {
	p := &Pending{seq: i.Seq, ref: i.Ref, actor: actor}
	lost.Outcome = audit.Failed
	p.lost = p.fill(lost)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, false
	}
	l.pending[p.ref] = p
	return p, true
}

// Fact returns a fact about the work of p as an event, for Append or as one of
// the first entries of Conclude.
func (p *Pending) Fact(e audit.Entry) audit.Entry { return p.fill(e) }

// fill completes an event that belongs to the work of p.
func (p *Pending) fill(e audit.Entry) audit.Entry {
	e.Ref, e.Actor = p.ref, p.actor
	if e.Trace == "" {
		e.Trace = p.trace
	}
	return e
}

// Note records what is about to be done and has no outcome of its own. When it
// fails it must not be done.
func (l *Log) Note(ctx context.Context, e audit.Entry) error {
	e.Outcome = audit.OK
	if _, err := l.j.Append(ctx, l.id, l.at, e); err != nil {
		return fmt.Errorf("session %s: refused, because it cannot be recorded: %w", l.id, err)
	}
	return nil
}

// Append records facts. They are written on a context of the process, also
// when their caller has gone.
func (l *Log) Append(entries ...audit.Entry) error {
	ctx, cancel := context.WithTimeout(l.j.o.Work.Late(), l.j.o.Wait)
	defer cancel()
	_, err := l.j.Append(ctx, l.id, l.at, entries...)
	return err
}

// Conclude writes the outcome of an intent: the last of the entries concludes
// it, those before it are facts that belong to it. It is written on a context
// of the process, because the effect has happened, whether or not its caller
// still waits. When it cannot be written it stays pending.
func (l *Log) Conclude(p *Pending, entries ...audit.Entry) error {
	for i := range entries {
		entries[i] = p.fill(entries[i])
	}
	l.mu.Lock()
	if l.pending[p.ref] != p || p.writing != nil {
		l.mu.Unlock()
		return kind.Errorf(kind.Conflict, "session %s ended before the outcome of %s was known", l.id, p.ref)
	}
	entries[len(entries)-1].Concludes = p.seq
	writing := make(chan struct{})
	p.known, p.writing = entries, writing
	l.mu.Unlock()

	err := l.Append(slices.Clone(entries)...)

	l.mu.Lock()
	defer l.mu.Unlock()
	p.writing = nil
	close(writing)
	if err != nil {
		l.uncertain = true
		return fmt.Errorf("session %s: outcome of %s: %w", l.id, p.ref, err)
	}
	delete(l.pending, p.ref)
	return nil
}

// WritePending writes the outcomes that could not be written when they became
// known.
func (l *Log) WritePending(ctx context.Context) error {
	l.mu.Lock()
	var due []*Pending
	for _, p := range l.pending {
		if p.known != nil && p.writing == nil {
			due = append(due, p)
		}
	}
	uncertain := l.uncertain
	l.mu.Unlock()
	if len(due) == 0 {
		return nil
	}
	var open map[uint64]audit.Intent
	if uncertain {
		var err error
		if open, err = l.open(ctx); err != nil {
			return err
		}
	}
	var errs []error
	for _, p := range due {
		if _, ok := open[p.seq]; uncertain && !ok {
			l.forget(p) // it was written after all
			continue
		}
		errs = append(errs, l.Conclude(p, p.known...))
	}
	return errors.Join(errs...)
}

// forget drops an intent whose outcome is in the record.
func (l *Log) forget(p *Pending) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending[p.ref] == p && p.writing == nil {
		delete(l.pending, p.ref)
	}
}

// Close takes no intent from now on.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// PendingCount returns how many intents have no outcome in the record.
func (l *Log) PendingCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pending)
}

// TakeOver closes the log and returns the events that conclude every intent
// left in it, which the caller writes; the intents of the flow that asks,
// which concludes its own, are not among them. It waits for writes in
// progress, which are bounded.
func (l *Log) TakeOver(ctx context.Context, flow string) ([]audit.Entry, error) {
	l.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.awaitWritesLocked(ctx); err != nil {
		return nil, err
	}
	pending, uncertain := l.pending, l.uncertain
	l.pending = map[string]*Pending{}
	var open map[uint64]audit.Intent
	if uncertain {
		l.mu.Unlock()
		var err error
		open, err = l.open(ctx)
		l.mu.Lock()
		if err != nil {
			l.pending = pending
			return nil, err
		}
		l.uncertain = false
	}
	var entries []audit.Entry
	for _, ref := range slices.Sorted(maps.Keys(pending)) {
		p := pending[ref]
		if _, ok := open[p.seq]; uncertain && !ok {
			continue // it was written after all
		}
		delete(open, p.seq)
		if p.known != nil {
			entries = append(entries, p.known...)
			continue
		}
		lost := p.lost
		lost.Concludes = p.seq
		entries = append(entries, lost)
	}
	for _, seq := range slices.Sorted(maps.Keys(open)) {
		if i := open[seq]; !strings.HasPrefix(i.Ref, flow+".") {
			entries = append(entries, i.Lost(System))
		}
	}
	return entries, nil
}

func (l *Log) awaitWritesLocked(ctx context.Context) error {
	for {
		var writing chan struct{}
		for _, p := range l.pending {
			if p.writing != nil {
				writing = p.writing
			}
		}
		if writing == nil {
			return nil
		}
		l.mu.Unlock()
		select {
		case <-writing:
		case <-ctx.Done():
		}
		l.mu.Lock()
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// open returns the open intents of the record by sequence number.
func (l *Log) open(ctx context.Context) (map[uint64]audit.Intent, error) {
	var h History
	if err := l.j.Read(ctx, l.id, h.Add); err != nil {
		return nil, err
	}
	open := map[uint64]audit.Intent{}
	for _, i := range h.Intents.Open() {
		open[i.Seq] = i
	}
	return open, nil
}

// Unwritten returns what of a batch of events is not in the record, after a
// write of them whose answer was an error: a batch is written whole or not at
// all, and the intents that it concludes tell which.
func (l *Log) Unwritten(ctx context.Context, batch []audit.Entry) ([]audit.Entry, error) {
	if !slices.ContainsFunc(batch, func(e audit.Entry) bool { return e.Concludes != 0 }) {
		return batch, nil
	}
	open, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	for _, e := range batch {
		if _, ok := open[e.Concludes]; e.Concludes != 0 && !ok {
			return nil, nil
		}
	}
	return batch, nil
}
