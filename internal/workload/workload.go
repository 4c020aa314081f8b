package workload

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/guest/guestclient"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/workgroup"
)

// Sessions finds the incarnations of sessions. The lifecycle is one.
type Sessions interface {
	// Current returns whose session it is and its incarnation, which is nil
	// while work cannot be admitted; then closed says why, in the words of the
	// session's state. The error is NotFound for an unknown session.
	Current(ctx context.Context, id session.ID) (owner session.Principal, current *Incarnation, closed, err error)
}

// Node is what the workload needs of the machine. Errors carry kinds as
// driver's do.
type Node interface {
	// Guest returns the client of the agent inside a running sandbox.
	Guest(ctx context.Context, id session.SandboxID) (*guestclient.Client, error)
	// Stats measures the sandbox from the host's side.
	Stats(ctx context.Context, id session.SandboxID) (driver.Stats, error)
	// Changes writes what the sandbox changed in its file system as a tar, and
	// returns which places the tar does not cover.
	Changes(ctx context.Context, id session.SandboxID, w io.Writer) (driver.ChangeReport, error)
}

// Bounds are how long and how much the workload takes.
type Bounds struct {
	Commands int           // commands running at once in one session; 0: 512
	Keep     time.Duration // an ended command can be attached to; 0: 30 s
	Settle   time.Duration // writing one outcome; 0: 10 s

	List      time.Duration // listing what a session changed; 0: 10 s
	ListFiles int           // files listed; 0: 10,000
	ListNames int           // bytes of the names of those files; 0: 8 MiB
	ListBytes int64         // bytes hashed; 0: 1 GiB
}

func (b Bounds) withDefaults() Bounds {
	if b.Commands == 0 {
		b.Commands = 512
	}
	if b.Keep == 0 {
		b.Keep = 30 * time.Second
	}
	if b.Settle == 0 {
		b.Settle = 10 * time.Second
	}
	if b.List == 0 {
		b.List = 10 * time.Second
	}
	if b.ListFiles == 0 {
		b.ListFiles = 10_000
	}
	if b.ListNames == 0 {
		b.ListNames = 8 << 20
	}
	if b.ListBytes == 0 {
		b.ListBytes = 1 << 30
	}
	return b
}

// Options are what a Service is made of. All but Now, Log, Bounds and
// FailPoint are required.
type Options struct {
	Sessions Sessions
	Node     Node
	Journal  *journal.Journal
	Access   access.Decider
	Work     *workgroup.Group // what is in progress

	Now    func() time.Time // wall clock; nil: time.Now
	Log    *slog.Logger     // nil: discard
	Bounds Bounds
	// FailPoint is a fail point: tests stop the process in it. Nil in
	// production.
	FailPoint func(point string)
}

// Service runs commands and moves files. Its methods may be called from any
// goroutine; each asks for a decision on its caller first.
type Service struct {
	o   Options
	b   Bounds
	log *slog.Logger
}

// New returns a Service.
func New(o Options) *Service {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Service{o: o, b: o.Bounds.withDefaults(), log: o.Log}
}

func (s *Service) failPoint(point string) {
	if s.o.FailPoint != nil {
		s.o.FailPoint(point)
	}
}

// entered is an operation that was admitted into an incarnation.
type entered struct {
	*Incarnation
	who      access.Caller
	decision audit.Decision
	leave    func() // must be called when the operation is over; may be repeated
}

// enter decides whether the caller may do what it asks for and admits it into
// the session's incarnation. The end of a session waits for those inside,
// after cutting them off, and so does the stop of the process: what they have
// to write into the record is written by then.
func (s *Service) enter(ctx context.Context, who access.Caller, action access.Action, id session.ID) (entered, error) {
	owner, current, closed, err := s.o.Sessions.Current(ctx, id)
	if err != nil {
		return entered{}, err
	}
	decision, err := s.o.Access.Decide(ctx, access.Request{
		Caller: who, Action: action, Resource: access.Resource{Session: id, Owner: owner},
	})
	if err != nil {
		return entered{}, err
	}
	if current == nil {
		return entered{}, closed
	}
	leave, ok := current.enter()
	if !ok {
		// It closed a moment ago; the session tells why.
		if _, current, closed, err = s.o.Sessions.Current(ctx, id); err != nil {
			return entered{}, err
		} else if current == nil {
			return entered{}, closed
		}
		return entered{}, kind.Errorf(kind.Unavailable, "session %s is about to end", id)
	}
	done, ok := s.o.Work.Begin()
	if !ok {
		leave()
		return entered{}, workgroup.StoppingError()
	}
	return entered{Incarnation: current, who: who, decision: decision, leave: func() { leave(); done() }}, nil
}

// guest returns the client of the agent inside.
func (i *Incarnation) guest(ctx context.Context) (*guestclient.Client, error) {
	c, err := i.s.o.Node.Guest(ctx, i.id)
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", i.session, err)
	}
	return c, nil
}

// Stats measures the sandbox of a session from the host's side.
func (s *Service) Stats(ctx context.Context, who access.Caller, id session.ID) (driver.Stats, error) {
	e, err := s.enter(ctx, who, access.SessionRead, id)
	if err != nil {
		return driver.Stats{}, err
	}
	defer e.leave()
	ctx, cancel := e.within(ctx)
	defer cancel()
	return s.o.Node.Stats(ctx, e.id)
}
