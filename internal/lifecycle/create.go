package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/driver"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/trace"
	"bivy/internal/workgroup"
	"bivy/internal/workload"
)

// CreateRequest asks for a session.
type CreateRequest struct {
	Caller access.Caller
	// OnBehalfOf and Trigger are what the caller says about the session's
	// origin; they stand in the owner beside the caller's subject.
	OnBehalfOf, Trigger string
	Spec                session.Spec // defaults are filled in
	// Key makes the request repeatable. A create with a key goes on when its
	// caller has gone, since the caller can come back for it; one without is
	// undone, since the caller could never learn its id.
	Key session.IdempotencyKey
	// Progress is told about long work, such as building a template; may be
	// nil.
	Progress func(done, total int64, what string)
}

// errExisted stops a create whose idempotency key named an earlier session.
var errExisted = errors.New("the session exists already")

// creation is one create in progress.
type creation struct {
	m        *Manager
	req      CreateRequest
	decision audit.Decision
	s        session.Session
	e        *managed
	flow     *journal.Flow
	template sandbox.Template
	posture  driver.Posture

	// ran: the row says that the session runs, or may say so. What runs is
	// ended, step by step, and not undone.
	ran bool
}

// Create makes a session and returns it running. A create that fails leaves
// nothing on the host; where its record was opened already, the returned
// session is the ended one that tells why.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (session.Session, journal.Timing, error) {
	if err := m.available(); err != nil {
		return session.Session{}, nil, err
	}
	decision, err := m.o.Access.Decide(ctx, access.Request{Caller: req.Caller, Action: access.SessionCreate})
	if err != nil {
		return session.Session{}, nil, err
	}
	done, ok := m.work.Begin()
	if !ok {
		return session.Session{}, nil, workgroup.StoppingError()
	}
	defer done()

	req.Spec = req.Spec.WithDefaults()
	if err := req.Spec.Validate(); err != nil {
		return session.Session{}, nil, err
	}
	digest, err := req.Spec.Digest()
	if err != nil {
		return session.Session{}, nil, fmt.Errorf("digest of the spec: %w", err)
	}
	if req.Key.Key != "" {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(m.work.Live(), func() { stop(workgroup.StoppingError()) })()

	var timing journal.Timing
	phase := func(name string, since time.Time) {
		timing = append(timing, journal.Phase{Name: name, Took: time.Since(since)})
	}
	start := time.Now()
	template, err := m.o.Templates.Resolve(ctx, req.Spec.Template, req.Progress)
	if err != nil {
		return session.Session{}, timing, fmt.Errorf("template %q: %w", req.Spec.Template, orCause(ctx, err))
	}
	phase("resolve", start)
	start = time.Now()
	owner := req.Caller.Principal
	owner.OnBehalfOf, owner.Trigger = req.OnBehalfOf, req.Trigger
	release, err := m.creates.take(ctx, owner.Subject)
	if err != nil {
		return session.Session{}, timing, orCause(ctx, err)
	}
	defer release()
	phase("queue", start)

	ctx, cancel := context.WithTimeoutCause(ctx, m.b.Create,
		kind.Errorf(kind.Unavailable, "the sandbox was not ready within %s", m.b.Create))
	defer cancel()
	now := m.o.Now()
	s := session.Session{
		ID: session.NewID(), State: session.Creating, Spec: req.Spec, SpecDigest: digest, Owner: owner,
		Node: m.o.NodeID, Generation: 1, Boot: m.o.BootID, Template: template.Digest,
		CreatedAt: now, Deadline: now.Add(req.Spec.Timeout.Duration()),
	}
	e := m.manage(s)
	m.incarnate(e, s, nil)
	defer e.createOver() // an end that came meanwhile goes on from here
	e.mu.Lock()
	e.stopCreate = stop
	e.mu.Unlock()
	c := &creation{
		m: m, req: req, decision: decision, s: s, e: e, template: template,
		flow: e.log.NewFlow(journal.FlowOptions{Name: "create", Actor: owner, Decision: decision}),
	}
	err = c.run(ctx)
	timing = append(timing, c.flow.Timing...)
	if err == nil {
		return c.s, timing, nil
	}
	if errors.Is(err, errExisted) {
		m.drop(e)
		out, err := m.earlier(ctx, c.s)
		return out, nil, err // no phases: nothing was made
	}
	out, err := c.fail(ctx, orCause(ctx, err))
	return out, timing, err
}

// steps is a create, in order.
func (c *creation) steps() []journal.Step {
	m, id := c.m, c.s.SandboxID()
	return []journal.Step{
		{
			Name: "lease",
			Do:   func(ctx context.Context) (journal.Result, error) { return c.lease(ctx) },
			Undo: func(ctx context.Context) error { return m.o.Templates.Release(ctx, string(c.s.ID)) },
		},
		{
			Name: "start", Joined: true,
			Do: func(ctx context.Context) (journal.Result, error) { return c.start(ctx) },
			Undo: func(ctx context.Context) error {
				_, err := m.o.Node.Destroy(ctx, id)
				return err
			},
		},
		{
			Name: "bind", Joined: true,
			Do:     func(ctx context.Context) (journal.Result, error) { return journal.Result{}, m.o.Node.Bind(ctx, id) },
			NoUndo: "what it changed is inside the sandbox, which start's undo destroys",
		},
		{
			Name: "posture", Joined: true,
			Do:     func(ctx context.Context) (journal.Result, error) { return c.inspect(ctx) },
			NoUndo: "it only looks",
		},
	}
}

func (c *creation) run(ctx context.Context) error {
	open := func(ctx context.Context, intents []audit.Entry) (uint64, error) {
		entries := append([]audit.Entry{c.flow.Entry(audit.SessionCreated, audit.OK, createdPayload{
			Spec: c.s.Spec.WithoutEnvValues(), SpecDigest: c.s.SpecDigest, Owner: c.s.Owner, Template: c.s.Template, Node: c.s.Node, Deadline: c.s.Deadline.UTC(),
		})}, intents...)
		stored, existed, err := c.m.o.Store.Create(ctx, c.s, c.req.Key, journal.Traced(ctx, entries)...)
		if err != nil {
			return 0, err
		}
		c.s = stored
		if existed {
			return 0, errExisted
		}
		c.m.journal.Grown(c.s.ID)
		return 2, nil // after session.created, which is the first
	}
	if err := c.flow.Run(ctx, c.steps(), open); err != nil {
		return err
	}
	c.m.failPoint("create.running.intent")
	start := time.Now()
	next := c.s
	next.State, next.StartedAt = session.Running, c.m.o.Now()
	err := c.flow.Flush(ctx, func(ctx context.Context, entries []audit.Entry) (first uint64, err error) {
		var stored session.Session
		if stored, first, err = c.m.transition(ctx, c.s.Fence(), next, entries...); err == nil {
			c.s, c.ran = stored, true
		}
		return first, err
	}, c.flow.Entry(audit.SessionRunning, audit.OK, runningPayload{
		Template: c.s.Template, Image: c.template.ImageDigest, Posture: c.posture,
	}))
	if err != nil {
		c.lookAgain()
		return err
	}
	c.flow.Timing = append(c.flow.Timing, journal.Phase{Name: "record", Took: time.Since(start)})
	c.m.failPoint("create.running.done")
	// Work is admitted only now: nothing enters before the record says that
	// the session runs.
	return c.e.admit()
}

// lookAgain finds out whether the session runs after all, when the answer to
// that change was an error: replies get lost.
func (c *creation) lookAgain() {
	ctx, cancel := context.WithTimeout(c.m.work.Late(), c.m.b.Workload.Settle)
	defer cancel()
	s, err := c.m.o.Store.Get(ctx, c.s.ID)
	if err == nil && s.State == session.Creating {
		return
	}
	c.ran = true // or that is not known
	if err == nil {
		c.s, c.flow.Outcomes = s, nil
	}
}

func (c *creation) lease(ctx context.Context) (journal.Result, error) {
	err := c.m.o.Templates.Lease(ctx, c.template.Digest, string(c.s.ID))
	return journal.Result{Facts: map[string]any{"template": c.template.Digest}}, err
}

func (c *creation) start(ctx context.Context) (journal.Result, error) {
	want := sandbox.Spec{
		ID: c.s.SandboxID(), Owner: driver.Owner{Kind: driver.OwnedBySession, ID: string(c.s.ID)},
		Session: c.s.Spec, Template: c.template, Deadline: c.s.Deadline,
	}
	err := c.m.o.Node.Start(ctx, want)
	return journal.Result{Facts: map[string]any{"sandbox": want.ID, "from": c.m.o.Node.StartsFrom(want)}}, err
}

func (c *creation) inspect(ctx context.Context) (journal.Result, error) {
	p, err := c.m.o.Node.Inspect(ctx, c.s.SandboxID())
	if err != nil {
		return journal.Result{}, err
	}
	c.posture = p
	if p.OK() {
		return journal.Result{}, nil
	}
	var wrong []string
	for _, check := range p.Checks {
		if !check.OK {
			wrong = append(wrong, fmt.Sprintf("%s is %s, want %s", check.Name, check.Got, check.Want))
		}
	}
	if len(wrong) == 0 {
		wrong = []string{"nothing was checked"}
	}
	return journal.Result{}, fmt.Errorf("isolation is not as it must be: %v", wrong)
}

// fail undoes a create that stopped with cause and ends the session; one that
// runs already it only ends. It works on a context that outlives the caller.
func (c *creation) fail(ctx context.Context, cause error) (session.Session, error) {
	m := c.m
	m.failPoint("create.fail")
	undoing, cancel := context.WithTimeout(trace.NewContext(m.work.Late(), trace.FromContext(ctx)), m.b.Undo)
	defer cancel()
	c.e.mu.Lock()
	died := c.e.died
	c.e.mu.Unlock()
	var undoErr error
	if !c.ran {
		if undoErr = c.flow.Undo(undoing, c.steps()); undoErr != nil {
			// Not lost: the end that follows destroys again, and is retried.
			m.log.Error("undoing a create", "session", c.s.ID, "error", undoErr)
		}
	}
	if c.s.Version == 0 {
		// The record may not have been opened. Where a reply was lost it was,
		// and then its session has to be ended like any other.
		if _, err := m.o.Store.Get(undoing, c.s.ID); kind.Is(err, kind.NotFound) {
			m.drop(c.e)
			return session.Session{}, errors.Join(cause, undoErr)
		}
	}
	outcomes, err := c.unwritten(undoing)
	if err != nil {
		// What is missing is found at the seal, as an intent without outcome.
		m.log.Error("outcomes of a failed create", "session", c.s.ID, "error", err)
	}
	c.e.carry(outcomes...)
	c.e.mu.Lock()
	c.e.stopCreate = nil
	c.e.mu.Unlock()
	req := endRequest{actor: c.s.Owner, trace: trace.FromContext(ctx), reason: session.CreateFailed, detail: failureDetail(ctx, cause)}
	var facts []audit.Entry
	if died != nil {
		facts = died.facts
		if c.ran {
			req = died.end
		}
	}
	end := m.beginEnd(c.e, req, facts...)
	if end == nil {
		// Stopping: the next process ends the session.
		return c.s, errors.Join(cause, c.e.log.Append(c.e.take()...))
	}
	c.e.createOver()
	out, err := end.wait(undoing)
	if err != nil {
		// The end goes on without being waited for; the state of the session shows it.
		m.log.Warn("a failed create is not cleared away yet", "session", c.s.ID, "error", err)
	}
	if out.ID == "" {
		out = c.s
	}
	if errors.Is(cause, workload.ErrEnding) || errors.Is(context.Cause(ctx), workload.ErrEnding) {
		cause = kind.Errorf(kind.Conflict, "session %s was ended while it was being created", c.s.ID)
	}
	return out, cause
}

// unwritten returns the outcomes of the create that the record does not have.
func (c *creation) unwritten(ctx context.Context) ([]audit.Entry, error) {
	if !c.flow.Uncertain() {
		return c.flow.Outcomes, nil
	}
	return c.e.log.Unwritten(ctx, c.flow.Outcomes)
}

// failureDetail says to people why a create failed.
func failureDetail(ctx context.Context, cause error) string {
	switch {
	case errors.Is(context.Cause(ctx), context.Canceled):
		return "its caller went away"
	case kind.Of(cause) == kind.Internal:
		return "an internal fault; the record has it"
	}
	return clip.Counted(cause.Error(), journal.MaxErrorText)
}

// earlier returns the session of a repeated create, once it is no longer
// being created.
func (m *Manager) earlier(ctx context.Context, s session.Session) (session.Session, error) {
	if e := m.find(s.ID); e != nil {
		select {
		case <-e.created:
		case <-ctx.Done():
			return s, orCause(ctx, ctx.Err())
		}
	}
	return m.o.Store.Get(ctx, s.ID)
}

// orCause replaces the error of a context that ended by the reason why.
func orCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if cause == nil || errors.Is(err, cause) || errors.Is(cause, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w (%v)", cause, err) //nolint:errorlint // the kind is that of the cause
}
