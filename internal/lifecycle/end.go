package lifecycle

import (
	"context"
	"errors"
	"slices"
	"sync"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/session"
	"bivy/internal/trace"
	"bivy/internal/workgroup"
)

// EndRequest asks for a session's end.
type EndRequest struct {
	Caller access.Caller
	ID     session.ID
	Reason session.Reason // empty: session.Requested
	Detail string         // one human sentence; may be empty
}

// endRequest is an end that was decided on.
type endRequest struct {
	actor    session.Principal
	decision audit.Decision // empty where nothing decided
	trace    trace.ID       // of the request that asked for it; empty when none did
	reason   session.Reason
	detail   string
}

// ending is the end of one session, in progress. There is at most one, and
// it goes on until the session has ended or the process stops.
type ending struct {
	req  endRequest
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
	if err != nil {
		return session.Session{}, err
	}
	decision, err := m.decide(ctx, req.Caller, access.SessionEnd, s)
	if err != nil {
		return session.Session{}, err
	}
	if s.State.Terminal() {
		return s, nil
	}
	e := m.find(req.ID)
	if e == nil {
		if s, err = m.o.Store.Get(ctx, req.ID); err != nil || s.State.Terminal() {
			return s, err // it ended between the two looks
		}
		return s, kind.Errorf(kind.Conflict, "session %s is on node %s", req.ID, s.Node)
	}
	end := m.beginEnd(e, endRequest{
		actor: req.Caller.Principal, decision: decision, trace: trace.FromContext(ctx),
		reason: orRequested(req.Reason), detail: req.Detail,
	})
	if end == nil {
		return s, workgroup.StoppingError()
	}
	return end.wait(ctx)
}

func orRequested(r session.Reason) session.Reason {
	if r == "" {
		return session.Requested
	}
	return r
}

// beginEnd sets the end of a session going, with facts to record beside it;
// one that is going already is returned. It returns nil when the process is
// stopping.
func (m *Manager) beginEnd(e *managed, req endRequest, facts ...audit.Entry) *ending {
	e.mu.Lock()
	if end := e.ending; end != nil {
		e.mu.Unlock()
		return end
	}
	end := &ending{req: req, stop: m.work.Late().Done(), tried: make(chan struct{})}
	done, ok := m.work.Begin()
	if !ok {
		e.mu.Unlock()
		return nil
	}
	e.ending = end
	e.carried = append(e.carried, facts...)
	current, stop := e.current, e.stopCreate
	e.mu.Unlock()
	if current != nil {
		current.Close()
	}
	e.log.Close()
	if stop != nil {
		stop(journal.ErrClosed)
	}
	go func() {
		defer done()
		m.endLoop(e, end)
	}()
	return end
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
			return session.Session{}, workgroup.StoppingError()
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
func (m *Manager) endLoop(e *managed, end *ending) {
	select {
	case <-e.created: // a create in progress has been stopped and undoes itself
	case <-m.work.Late().Done():
		return
	}
	ctx := trace.NewContext(m.work.Late(), end.req.trace)
	flow := e.log.NewFlow(journal.FlowOptions{Name: "end", Actor: end.req.actor, Decision: end.req.decision, GoOn: true})
	wait := m.b.RetryMin
	for {
		s, err := m.endOnce(ctx, e, end.req, flow)
		if err == nil {
			m.drop(e)
			end.report(s, nil, true)
			return
		}
		if kind.Is(err, kind.NotFound) && s.ID == "" {
			m.drop(e) // no such session: nothing was ever recorded
			end.report(s, err, true)
			return
		}
		m.log.Error("ending a session; will try again", "session", e.id, "wait", wait, "error", err)
		err = kind.Errorf(kind.Unavailable, "session %s is still ending: %w", e.id, err).
			WithHint("it admits no work; ending is tried again until the sandbox is proved dead")
		end.report(s, err, false)
		if poll.Sleep(ctx, wait) != nil {
			return
		}
		wait = min(2*wait, m.b.RetryMax)
	}
}

// endOnce runs the end from where it is.
func (m *Manager) endOnce(ctx context.Context, e *managed, req endRequest, flow *journal.Flow) (session.Session, error) {
	s, err := m.o.Store.Get(ctx, e.id)
	if err != nil {
		return session.Session{}, err
	}
	if s.State.Terminal() {
		return s, nil
	}
	if s.State == session.Ending && (flow.Uncertain() || !flow.Begun()) {
		// An earlier process began, or a reply was lost: go on from the last
		// intent.
		var h journal.History
		if err := m.journal.Read(ctx, e.id, h.Add); err != nil {
			return s, err
		}
		flow.Continue(&h)
	}
	began := false
	fence := func(ctx context.Context, intents []audit.Entry) (first uint64, err error) {
		s, first, err = m.recordEnding(ctx, e, req, flow, intents)
		began = err == nil
		return first, err
	}
	if err := flow.Run(ctx, m.endSteps(e, &s), fence); err != nil {
		if !began {
			// Not even the intent can be written. What protects others needs
			// no record: nothing gets in or out, and nothing runs.
			if i := e.incarnation(); i != nil {
				i.Cut()
			}
			err = errors.Join(err, m.o.Node.Shut(ctx, s.SandboxID()), m.o.Node.Freeze(ctx, s.SandboxID()))
			return s, err
		}
		return m.showStuck(ctx, e, s, flow, err)
	}
	return m.seal(ctx, e, s, flow)
}

// recordEnding makes the end of the session durable, together with the first intents,
// and returns the sequence number of the first of them.
func (m *Manager) recordEnding(ctx context.Context, e *managed, req endRequest, flow *journal.Flow, intents []audit.Entry) (session.Session, uint64, error) {
	if err := e.lock(ctx); err != nil {
		return session.Session{}, 0, err
	}
	defer e.unlock()
	s, err := m.o.Store.Get(ctx, e.id)
	if err != nil {
		return s, 0, err
	}
	facts, err := m.carriedFacts(ctx, e, s)
	if err != nil {
		return s, 0, err
	}
	var first uint64
	before := facts
	if s.State == session.Ending {
		if entries := append(slices.Clone(before), intents...); len(entries) > 0 {
			first, err = m.journal.Append(ctx, e.id, e.log.Fence(), entries...)
		}
	} else {
		next := s
		next.State, next.Reason, next.Detail = session.Ending, req.reason, req.detail
		before = append(slices.Clone(facts), flow.Entry(audit.SessionEnding, audit.OK, endingPayload{Reason: req.reason, Detail: req.detail}))
		e.endingSent = true
		var stored session.Session
		if stored, first, err = m.transition(ctx, e.log.Fence(), next, append(slices.Clone(before), intents...)...); err == nil {
			s = stored
		}
	}
	if err != nil {
		e.carry(facts...)
	}
	return s, first + uint64(len(before)), err
}

// carriedFacts takes the events that wait for the next commit of the end,
// without those that a write whose reply was lost has written already. The
// caller holds the row.
func (m *Manager) carriedFacts(ctx context.Context, e *managed, s session.Session) ([]audit.Entry, error) {
	carried := e.take()
	if s.State == session.Ending && e.endingSent {
		return nil, nil // they came with the change of state
	}
	facts, err := e.log.Unwritten(ctx, carried)
	if err != nil {
		e.carry(carried...)
	}
	return facts, err
}

// showStuck shows on the session what keeps it from ending.
func (m *Manager) showStuck(ctx context.Context, e *managed, s session.Session, flow *journal.Flow, cause error) (session.Session, error) {
	if len(flow.Outcomes) == 0 || flow.Uncertain() {
		return s, cause // nothing to show, or the next try has to read the record first
	}
	_, s.Residuals = flow.Residuals()
	err := flow.Flush(ctx, func(ctx context.Context, entries []audit.Entry) (first uint64, err error) {
		var stored session.Session
		if stored, first, err = m.transition(ctx, e.log.Fence(), s, entries...); err == nil {
			s = stored
		}
		return first, err
	})
	return s, errors.Join(cause, err)
}
