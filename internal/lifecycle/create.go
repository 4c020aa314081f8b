package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// errExisted stops a create whose idempotency key named an earlier session.
var errExisted = errors.New("the session exists already")

// creation is one create in progress.
type creation struct {
	m        *Manager
	req      CreateRequest
	s        session.Session
	a        *active
	flow     *flow
	template Template
	posture  driver.Posture

	// ran: the row says that the session runs, or may say so. What runs is
	// ended, step by step, and not undone.
	ran bool
}

// Create makes a session and returns it running. A create that fails leaves
// nothing on the host; where its record was opened already, the returned
// session is the ended one that tells why.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (session.Session, Timing, error) {
	if err := m.available(); err != nil {
		return session.Session{}, nil, err
	}
	if !m.track() {
		return session.Session{}, nil, stoppingError()
	}
	defer m.work.Done()

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
	defer context.AfterFunc(m.live, func() { stop(stoppingError()) })()

	var timing Timing
	phase := func(name string, since time.Time) {
		timing = append(timing, Phase{Name: name, Took: time.Since(since)})
	}
	start := time.Now()
	template, err := m.o.Templates.Resolve(ctx, req.Spec.Template, req.Progress)
	if err != nil {
		return session.Session{}, timing, fmt.Errorf("template %q: %w", req.Spec.Template, orCause(ctx, err))
	}
	phase("resolve", start)
	start = time.Now()
	done, err := m.admit.take(ctx, req.Owner.Subject)
	if err != nil {
		return session.Session{}, timing, orCause(ctx, err)
	}
	defer done()
	phase("queue", start)

	ctx, cancel := context.WithTimeoutCause(ctx, m.b.Create,
		kind.Errorf(kind.Unavailable, "the sandbox was not ready within %s", m.b.Create))
	defer cancel()
	now := m.o.Now()
	s := session.Session{
		ID: session.NewID(), State: session.Creating, Spec: req.Spec, SpecDigest: digest, Owner: req.Owner,
		Node: m.o.NodeID, Generation: 1, Template: template.Digest,
		CreatedAt: now, Deadline: now.Add(req.Spec.Timeout.Duration()),
	}
	a := m.adopt(s.ID, s.SandboxID())
	defer a.createOver() // an end that came meanwhile goes on from here
	a.mu.Lock()
	a.stopCreate = stop
	a.mu.Unlock()
	c := &creation{m: m, req: req, s: s, a: a, template: template, flow: newFlow(m, "create", s.ID, a.sandbox, req.Owner)}
	err = c.run(ctx)
	timing = append(timing, c.flow.timing...)
	if err == nil {
		return c.s, timing, nil
	}
	if errors.Is(err, errExisted) {
		m.drop(a)
		out, err := m.earlier(ctx, c.s)
		return out, nil, err // no phases: nothing was made
	}
	out, err := c.fail(ctx, orCause(ctx, err))
	return out, timing, err
}

// steps is a create, in order.
func (c *creation) steps() []step {
	m, a := c.m, c.a
	return []step{
		{
			name: "lease",
			do:   func(ctx context.Context) (outcome, error) { return c.lease(ctx) },
			undo: func(ctx context.Context) error { return m.o.Templates.Release(ctx, string(a.id)) },
		},
		{
			name: "start", joined: true,
			do:   func(ctx context.Context) (outcome, error) { return c.start(ctx) },
			undo: func(ctx context.Context) error { return m.o.Node.Destroy(ctx, a.sandbox) },
		},
		{
			name: "bind", joined: true,
			do:     func(ctx context.Context) (outcome, error) { return outcome{}, m.o.Node.Bind(ctx, a.sandbox) },
			noUndo: "what it changed is inside the sandbox, which start's undo destroys",
		},
		{
			name: "posture", joined: true,
			do:     func(ctx context.Context) (outcome, error) { return c.inspect(ctx) },
			noUndo: "it only looks",
		},
	}
}

func (c *creation) run(ctx context.Context) error {
	open := func(ctx context.Context, intents []audit.Entry) error {
		entries := append([]audit.Entry{c.flow.entry(audit.SessionCreated, audit.OK, createdPayload{
			Spec: c.s.Spec.WithoutEnvValues(), SpecDigest: c.s.SpecDigest, Owner: c.s.Owner, Template: c.s.Template, Node: c.s.Node, Deadline: c.s.Deadline.UTC(),
		})}, intents...)
		stored, existed, err := c.m.o.Store.Create(ctx, c.s, c.req.Key, entries...)
		if err != nil {
			return err
		}
		if existed {
			c.s = stored
			return errExisted
		}
		c.s = stored
		c.m.news.tell(c.s.ID)
		return nil
	}
	if err := c.flow.run(ctx, c.steps(), open); err != nil {
		return err
	}
	c.m.hook("create.running.intent")
	start := time.Now()
	next := c.s
	next.State, next.StartedAt = session.Running, c.m.o.Now()
	entries := append(c.flow.owed, c.flow.entry(audit.SessionRunning, audit.OK, runningPayload{
		Template: c.s.Template, Image: c.template.ImageDigest, Posture: c.posture,
	}))
	stored, err := c.m.transition(ctx, next, entries...)
	if err != nil {
		c.lookAgain()
		return err
	}
	c.flow.owed = nil
	c.s, c.ran = stored, true
	c.flow.timing = append(c.flow.timing, Phase{Name: "record", Took: time.Since(start)})
	c.m.hook("create.running.done")
	// Gates open only now: nothing enters before the record says that the
	// session runs.
	return c.a.letIn()
}

// lookAgain finds out whether the session runs after all, when the answer to
// that change was an error: replies get lost.
func (c *creation) lookAgain() {
	ctx, cancel := context.WithTimeout(c.m.ends, c.m.b.Settle)
	defer cancel()
	s, err := c.m.o.Store.Get(ctx, c.s.ID)
	if err == nil && s.State == session.Creating {
		return
	}
	c.ran = true // or nobody can tell
	if err == nil {
		c.s, c.flow.owed = s, nil
	}
}

func (c *creation) lease(ctx context.Context) (outcome, error) {
	err := c.m.o.Templates.Lease(ctx, c.template.Digest, string(c.a.id))
	return outcome{facts: map[string]any{"template": c.template.Digest}}, err
}

func (c *creation) start(ctx context.Context) (outcome, error) {
	want := SandboxSpec{ID: c.a.sandbox, Spec: c.s.Spec, Template: c.template, Deadline: c.s.Deadline}
	from := "image"
	if want.Snapshot() != "" {
		from = "snapshot"
	}
	err := c.m.o.Node.Start(ctx, want)
	return outcome{facts: map[string]any{"sandbox": c.a.sandbox, "from": from}}, err
}

func (c *creation) inspect(ctx context.Context) (outcome, error) {
	p, err := c.m.o.Node.Inspect(ctx, c.a.sandbox)
	if err != nil {
		return outcome{}, err
	}
	c.posture = p
	if p.OK() {
		return outcome{}, nil
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
	return outcome{}, fmt.Errorf("isolation is not as it must be: %v", wrong)
}

// fail undoes a create that stopped with cause and ends the session; one that
// runs already it only ends. It works on a context that outlives the caller.
func (c *creation) fail(ctx context.Context, cause error) (session.Session, error) {
	m := c.m
	m.hook("create.fail")
	undoing, cancel := context.WithTimeout(m.ends, m.b.Undo)
	defer cancel()
	c.a.mu.Lock()
	died := c.a.died
	c.a.mu.Unlock()
	var undoErr error
	if !c.ran {
		if undoErr = c.flow.undo(undoing, c.steps()); undoErr != nil {
			// Not lost: the end that follows destroys again, and is retried.
			m.log.Error("undoing a create", "session", c.s.ID, "error", undoErr)
		}
	}
	if c.s.Version == 0 {
		// The record may not have been opened. Where a reply was lost it was,
		// and then its session has to be ended like any other.
		if _, err := m.o.Store.Get(undoing, c.s.ID); kind.Is(err, kind.NotFound) {
			m.drop(c.a)
			return session.Session{}, errors.Join(cause, undoErr)
		}
	}
	c.a.mu.Lock()
	c.a.carried = append(c.a.carried, c.flow.owed...)
	c.a.stopCreate = nil
	c.a.mu.Unlock()
	detail := clip(cause.Error(), maxErrorText)
	if kind.Of(cause) == kind.Internal {
		detail = "an internal fault; the record has it"
	}
	if errors.Is(context.Cause(ctx), context.Canceled) {
		detail = "whoever asked for it went away"
	}
	req := EndRequest{ID: c.s.ID, Actor: c.req.Owner, Reason: session.CreateFailed, Detail: detail}
	var facts []audit.Entry
	if died != nil {
		facts = died.facts
		if c.ran {
			req = died.end
		}
	}
	e := m.beginEnd(c.a, req, facts...)
	if e == nil {
		// Stopping: the next process ends the session.
		return c.s, errors.Join(cause, m.append(undoing, c.s.ID, c.a.take()...))
	}
	c.a.createOver()
	out, err := e.wait(undoing)
	if err != nil {
		// The end goes on without anybody waiting; the session tells.
		m.log.Warn("a failed create is not cleared away yet", "session", c.s.ID, "error", err)
	}
	if out.ID == "" {
		out = c.s
	}
	if errors.Is(cause, errEnding) || errors.Is(context.Cause(ctx), errEnding) {
		cause = kind.Errorf(kind.Conflict, "session %s was ended while it was being created", c.s.ID)
	}
	return out, cause
}

// earlier returns the session of a repeated create, once it is no longer
// being created.
func (m *Manager) earlier(ctx context.Context, s session.Session) (session.Session, error) {
	if a := m.find(s.ID); a != nil {
		select {
		case <-a.created:
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
