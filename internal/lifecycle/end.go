package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// ending is the end of one session, in progress. There is at most one, and
// it goes on until the session has ended or the process stops.
type ending struct {
	req  EndRequest
	stop <-chan struct{} // the process gives up on it

	mu    sync.Mutex
	s     session.Session
	err   error
	tried chan struct{} // closes after an attempt; replaced by the next
	over  bool
}

// End ends a session, whatever it is doing, and waits until it has ended. It
// may be repeated; the first reason stands. ctx bounds the waiting only: the
// end itself goes on. When the sandbox cannot be proved dead, End fails with
// Unavailable and the session stays Ending, which is tried again and again.
func (m *Manager) End(ctx context.Context, req EndRequest) (session.Session, error) {
	if err := m.available(); err != nil {
		return session.Session{}, err
	}
	s, err := m.o.Store.Get(ctx, req.ID)
	if err != nil || s.State.Terminal() {
		return s, err
	}
	a := m.find(req.ID)
	if a == nil {
		if s, err = m.o.Store.Get(ctx, req.ID); err != nil || s.State.Terminal() {
			return s, err // it ended between the two looks
		}
		return s, kind.Errorf(kind.Conflict, "session %s is on node %s", req.ID, s.Node)
	}
	if req.Reason == "" {
		req.Reason = session.Requested
	}
	e := m.beginEnd(a, req)
	if e == nil {
		return s, stoppingError()
	}
	return e.wait(ctx)
}

// beginEnd sets the end of a session going, with facts to record beside it;
// one that is going already is returned. It returns nil when the manager is
// stopping.
func (m *Manager) beginEnd(a *active, req EndRequest, facts ...audit.Entry) *ending {
	a.mu.Lock()
	if e := a.ending; e != nil {
		a.mu.Unlock()
		return e
	}
	e := &ending{req: req, stop: m.ends.Done(), tried: make(chan struct{})}
	if !m.track() {
		a.mu.Unlock()
		return nil
	}
	a.ending = e
	a.carried = append(a.carried, facts...)
	a.fenceLocked()
	stop := a.stopCreate
	a.mu.Unlock()
	if stop != nil {
		stop(errEnding)
	}
	go func() {
		defer m.work.Done()
		m.endLoop(a, e)
	}()
	return e
}

// wait waits for the session to have ended, or for an attempt that failed.
func (e *ending) wait(ctx context.Context) (session.Session, error) {
	e.mu.Lock()
	tried, over := e.tried, e.over
	e.mu.Unlock()
	if !over {
		select {
		case <-tried:
		case <-ctx.Done():
			return session.Session{}, ctx.Err()
		case <-e.stop:
			return session.Session{}, stoppingError()
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.s, e.err
}

// report tells those who wait how an attempt went.
func (e *ending) report(s session.Session, err error, over bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.s, e.err, e.over = s, err, over
	close(e.tried)
	e.tried = make(chan struct{})
}

// endLoop ends a session, again and again until it has ended.
func (m *Manager) endLoop(a *active, e *ending) {
	select {
	case <-a.created: // a create in progress has been stopped and undoes itself
	case <-m.ends.Done():
		return
	}
	f := newFlow(m, "end", a.id, a.sandbox, e.req.Actor)
	f.goOn = true
	wait := m.b.RetryMin
	for {
		s, err := m.endOnce(m.ends, a, e.req, f)
		if err == nil {
			m.drop(a)
			e.report(s, nil, true)
			return
		}
		if kind.Is(err, kind.NotFound) && s.ID == "" {
			m.drop(a) // no such session: nothing was ever recorded
			e.report(s, err, true)
			return
		}
		m.log.Error("ending a session; will try again", "session", a.id, "wait", wait, "error", err)
		err = kind.Errorf(kind.Unavailable, "session %s is still ending: %w", a.id, err).
			WithHint("its gates are shut; ending is tried again until the sandbox is proved dead")
		e.report(s, err, false)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-m.ends.Done():
			timer.Stop()
			return
		}
		wait = min(2*wait, m.b.RetryMax)
	}
}

// endOnce runs the end from where it is.
func (m *Manager) endOnce(ctx context.Context, a *active, req EndRequest, f *flow) (session.Session, error) {
	s, err := m.o.Store.Get(ctx, a.id)
	if err != nil {
		return session.Session{}, err
	}
	if s.State.Terminal() {
		return s, nil
	}
	if s.State == session.Ending && len(f.intended) == 0 {
		// An earlier process began, or a reply was lost: go on from the last
		// intent.
		past, err := m.past(ctx, a.id)
		if err != nil {
			return s, err
		}
		past.resume(f)
	}
	began := false
	fence := func(ctx context.Context, intents []audit.Entry) error {
		s, err = m.fence(ctx, a, req, f, intents)
		began = err == nil
		return err
	}
	if err := f.run(ctx, m.endSteps(a, &s), fence); err != nil {
		if !began {
			// Not even the intent can be written. What protects others needs
			// no record: nothing gets in or out, and nothing runs.
			a.cut(errEnding)
			err = errors.Join(err, m.o.Node.Shut(ctx, a.sandbox), m.o.Node.Freeze(ctx, a.sandbox))
			return s, err
		}
		return m.stuck(ctx, s, f, err)
	}
	m.drain(a)
	debts, err := m.claim(ctx, a)
	if err != nil {
		return s, err
	}
	f.owed = append(f.owed, debts...)
	s.State, s.EndedAt = session.Ended, m.o.Now()
	s.Residuals, _ = f.residuals()
	result := audit.Closed
	if len(s.Residuals) > 0 {
		result = audit.ClosedWithResiduals
	}
	m.hook("end.seal.do")
	sealed, err := m.seal(ctx, s, append(f.owed, f.entry(audit.SessionEnded, audit.OK, endedPayload{
		Result: result, Reason: s.Reason, Detail: s.Detail, Residuals: s.Residuals,
	}))...)
	if err != nil {
		s.State, s.EndedAt = session.Ending, time.Time{}
		return s, fmt.Errorf("sealing the record: %w", err)
	}
	m.hook("end.seal.done")
	return sealed, nil
}

// endSteps is an end, in order, with the steps that exist. The writable layer
// lives in the sandbox, so what changed is read while it is frozen, before it
// is killed.
func (m *Manager) endSteps(a *active, s *session.Session) []step {
	const never = "an end is never taken back"
	within := func(d time.Duration, do func(context.Context) (outcome, error)) func(context.Context) (outcome, error) {
		return func(ctx context.Context) (outcome, error) {
			ctx, cancel := context.WithTimeout(ctx, d)
			defer cancel()
			return do(ctx)
		}
	}
	return []step{
		{name: "shut", noUndo: never, do: within(m.b.Kill, func(ctx context.Context) (outcome, error) {
			a.cut(errEnding)
			return gone(m.o.Node.Shut(ctx, a.sandbox))
		})},
		{name: "freeze", joined: true, noUndo: never, do: within(m.b.Kill, func(ctx context.Context) (outcome, error) {
			return gone(m.o.Node.Freeze(ctx, a.sandbox))
		})},
		{name: "measure", joined: true, noUndo: never, do: within(measureTime, func(ctx context.Context) (outcome, error) {
			return m.measure(ctx, a)
		})},
		{name: "digest", joined: true, noUndo: never, do: func(ctx context.Context) (outcome, error) {
			if s.StartedAt.IsZero() {
				return outcome{facts: map[string]any{"skipped": "the session never ran"}}, nil
			}
			return m.digest(ctx, a)
		}},
		{name: "kill", must: true, noUndo: never, do: within(m.b.Kill, func(ctx context.Context) (outcome, error) {
			return outcome{}, m.o.Node.Destroy(ctx, a.sandbox)
		})},
		{name: "dispose", joined: true, must: true, noUndo: never, do: within(m.b.Kill, func(ctx context.Context) (outcome, error) {
			return m.dispose(ctx, a)
		})},
		{name: "release", joined: true, noUndo: never, do: within(m.b.Kill, func(ctx context.Context) (outcome, error) {
			return outcome{}, m.release(ctx, a.id)
		})},
	}
}

// measureTime bounds the last measurement of a sandbox.
const measureTime = 2 * time.Second

// measure records what the sandbox used in its life, and what it tried to
// send. A sandbox that is gone took that with it, which is a fact.
func (m *Manager) measure(ctx context.Context, a *active) (outcome, error) {
	s, err := m.o.Node.Stats(ctx, a.sandbox)
	if kind.Is(err, kind.NotFound) || kind.Is(err, kind.Unavailable) {
		return outcome{facts: map[string]any{"unknown": clip(err.Error(), maxErrorText)}}, nil
	}
	if err != nil {
		return outcome{}, err
	}
	out := outcome{facts: map[string]any{
		"cpu_ms": s.CPU.Milliseconds(), "memory_peak_bytes": s.MemoryPeakBytes, "oom_kills": s.OOMKills,
	}}
	if s.OutboundRefused > 0 {
		out.entries = append(out.entries, audit.Entry{
			Action: audit.OutboundRefused, Outcome: audit.Refused, Payload: map[string]any{"packets": s.OutboundRefused},
		})
	}
	return out, nil
}

// gone turns the absence of a sandbox, which is what an end wants, into a fact.
func gone(err error) (outcome, error) {
	if kind.Is(err, kind.NotFound) {
		return outcome{facts: map[string]any{"gone": true}}, nil
	}
	return outcome{}, err
}

// fence makes the end of the session durable, together with the first intents.
func (m *Manager) fence(ctx context.Context, a *active, req EndRequest, f *flow, intents []audit.Entry) (session.Session, error) {
	if err := a.lock(ctx); err != nil {
		return session.Session{}, err
	}
	defer a.unlock()
	s, err := m.o.Store.Get(ctx, a.id)
	if err != nil {
		return s, err
	}
	carried := a.take()
	entries := append(carried, intents...)
	if s.State == session.Ending {
		if len(entries) > 0 {
			err = m.append(ctx, a.id, entries...)
		}
	} else {
		next := s
		next.State, next.Reason, next.Detail = session.Ending, req.Reason, req.Detail
		ending := f.entry(audit.SessionEnding, audit.OK, map[string]any{"reason": req.Reason, "detail": req.Detail})
		entries = append(append(carried, ending), intents...)
		var stored session.Session
		if stored, err = m.transition(ctx, next, entries...); err == nil {
			s = stored
		}
	}
	if err != nil {
		a.carry(carried...)
	}
	return s, err
}

func (a *active) take() []audit.Entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	carried := a.carried
	a.carried = nil
	return carried
}

func (a *active) carry(entries ...audit.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.carried = append(entries, a.carried...)
}

// stuck shows on the session what keeps it from ending.
func (m *Manager) stuck(ctx context.Context, s session.Session, f *flow, cause error) (session.Session, error) {
	if len(f.owed) == 0 {
		return s, cause
	}
	_, s.Residuals = f.residuals()
	stored, err := m.transition(ctx, s, f.owed...)
	if err != nil {
		return s, errors.Join(cause, err)
	}
	f.owed = nil
	return stored, cause
}

// dispose proves that nothing of the sandbox is left by looking again.
func (m *Manager) dispose(ctx context.Context, a *active) (outcome, error) {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		return outcome{}, err
	}
	for _, f := range found {
		if id, _, err := f.ID.Split(); err == nil && id == a.id {
			return outcome{}, fmt.Errorf("sandbox %s is still on the host", f.ID)
		}
	}
	return outcome{facts: map[string]any{"state": "destroyed", "proof": "not on the host"}}, nil
}

// releaseTries is how often a template's lease is given back before that
// becomes a residual and the sweep's business.
const releaseTries = 3

func (m *Manager) release(ctx context.Context, id session.ID) error {
	wait := m.b.RetryMin
	for try := 1; ; try++ {
		err := m.o.Templates.Release(ctx, string(id))
		if err == nil {
			return nil
		}
		if try == releaseTries || ctx.Err() != nil {
			m.mu.Lock()
			m.unreleased[id] = true
			m.mu.Unlock()
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		wait *= 2
	}
}

// releaseOverdue gives back the leases of ended sessions that could not be
// given back at their end.
func (m *Manager) releaseOverdue(ctx context.Context) error {
	m.mu.Lock()
	overdue := slices.Collect(maps.Keys(m.unreleased))
	m.mu.Unlock()
	var errs []error
	for _, id := range overdue {
		if err := m.o.Templates.Release(ctx, string(id)); err != nil {
			errs = append(errs, fmt.Errorf("template lease of session %s: %w", id, err))
			continue
		}
		m.mu.Lock()
		delete(m.unreleased, id)
		m.mu.Unlock()
	}
	return errors.Join(errs...)
}

// drain waits for operations that were cut to write their outcomes.
func (m *Manager) drain(a *active) {
	timer := time.NewTimer(m.b.Drain)
	defer timer.Stop()
	select {
	case <-a.idle:
	case <-timer.C:
		m.log.Warn("operations did not stop in time; the end records their outcomes as lost", "session", a.id)
	case <-m.ends.Done():
	}
}
