package journal

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"bivy/internal/audit"
	"bivy/internal/session"
	"bivy/internal/trace"
	"bivy/internal/workgroup"
)

// System is who acts when no caller asked.
var System = session.Principal{Subject: "system:lifecycle"}

// Options are what a Journal is made of. Store and Work are required.
type Options struct {
	Store Store
	// Work is what outcomes are written within when their caller has gone.
	Work *workgroup.Group
	Log  *slog.Logger  // nil: discard
	Wait time.Duration // for one outcome to be written; 0: 10 s
	Poll time.Duration // between looks for events that another process wrote; 0: 1 s
	// FailPoint is a fail point: tests stop the process in it. Nil in
	// production.
	FailPoint func(point string)
}

// Journal writes the records of sessions and tells followers when one has
// grown. Its methods may be called from any goroutine.
type Journal struct {
	o        Options
	log      *slog.Logger
	notifier notifier
}

// New returns a Journal.
func New(o Options) *Journal {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Wait == 0 {
		o.Wait = 10 * time.Second
	}
	if o.Poll == 0 {
		o.Poll = time.Second
	}
	return &Journal{o: o, log: o.Log, notifier: notifier{waiting: map[session.ID]*subscription{}}}
}

// failPoint passes a fail point.
func (j *Journal) failPoint(point string) {
	if j.o.FailPoint != nil {
		j.o.FailPoint(point)
	}
}

// Append adds events to the record of a session, as Store.Append does. Events
// that name no trace get the one of ctx.
func (j *Journal) Append(ctx context.Context, id session.ID, at session.Fence, entries ...audit.Entry) (first uint64, err error) {
	first, err = j.o.Store.Append(ctx, id, at, Traced(ctx, entries)...)
	if err == nil {
		j.Grown(id)
	}
	return first, err
}

// Traced gives the entries that name no trace the one of ctx.
func Traced(ctx context.Context, entries []audit.Entry) []audit.Entry {
	id := trace.FromContext(ctx)
	if id == "" {
		return entries
	}
	for i := range entries {
		if entries[i].Trace == "" {
			entries[i].Trace = id
		}
	}
	return entries
}

// Grown tells followers that the record of a session has grown. Code that
// writes to a record other than through Append must call it.
func (j *Journal) Grown(id session.ID) { j.notifier.notify(id) }

// Read gives every event of a record to each of the readers, in order.
func (j *Journal) Read(ctx context.Context, id session.ID, readers ...func(audit.Stored)) error {
	err := j.o.Store.Events(ctx, id, 0, 0, func(e audit.Stored) error {
		for _, read := range readers {
			read(e)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("record of session %s: %w", id, err)
	}
	return nil
}

// Follow calls fn for each event with a sequence number above after, also for
// those that this or another process writes later. It returns nil once over
// reports that the record is complete and every event was given; otherwise the
// error of fn or over, ctx's, or Unavailable when the process stops.
func (j *Journal) Follow(ctx context.Context, id session.ID, after uint64, over func(context.Context) (bool, error), fn func(audit.Stored) error) error {
	for {
		grown, cancel := j.notifier.subscribe(id)
		// over is asked first: of a record that is completed meanwhile every
		// event is then read below.
		complete, err := over(ctx)
		if err == nil {
			err = j.o.Store.Events(ctx, id, after, 0, func(e audit.Stored) error {
				if err := fn(e); err != nil {
					return err
				}
				after = e.Event.Seq
				return nil
			})
		}
		if err != nil || complete {
			cancel()
			return err
		}
		select {
		case <-grown:
		case <-ctx.Done():
			cancel()
			return ctx.Err()
		case <-j.o.Work.Live().Done():
			cancel()
			return workgroup.StoppingError()
		}
		cancel()
	}
}

// Run looks for what other processes have written, for the sake of followers,
// until ctx ends.
func (j *Journal) Run(ctx context.Context) {
	tick := time.NewTicker(j.o.Poll)
	defer tick.Stop()
	var last int64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if !j.notifier.hasSubscribers() {
			continue
		}
		revision, err := j.o.Store.Revision(ctx)
		if err != nil {
			if ctx.Err() == nil {
				j.log.Error("looking for events of other processes", "error", err)
			}
			continue
		}
		if revision != last {
			last = revision
			j.notifier.notifyAll()
		}
	}
}
