package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/session"
)

// endSteps are the steps of an end, in order. The writable layer lives in the
// sandbox, so what changed is read while it is frozen, before it is killed.
func (m *Manager) endSteps(e *managed, s *session.Session) []journal.Step {
	const never = "an end is never taken back"
	within := func(d time.Duration, do func(context.Context) (journal.Result, error)) func(context.Context) (journal.Result, error) {
		return func(ctx context.Context) (journal.Result, error) {
			ctx, cancel := context.WithTimeout(ctx, d)
			defer cancel()
			return do(ctx)
		}
	}
	return []journal.Step{
		{Name: "shut", NoUndo: never, Do: within(m.b.Kill, func(ctx context.Context) (journal.Result, error) {
			if i := e.incarnation(); i != nil {
				i.Cut()
			}
			return orGone(m.o.Node.Shut(ctx, s.SandboxID()))
		})},
		{Name: "freeze", Joined: true, NoUndo: never, Do: within(m.b.Kill, func(ctx context.Context) (journal.Result, error) {
			return orGone(m.o.Node.Freeze(ctx, s.SandboxID()))
		})},
		{Name: "measure", Joined: true, NoUndo: never, Do: within(measureTime, func(ctx context.Context) (journal.Result, error) {
			return m.measure(ctx, s.SandboxID())
		})},
		{Name: "digest", Joined: true, NoUndo: never, Do: func(ctx context.Context) (journal.Result, error) {
			if s.StartedAt.IsZero() {
				return journal.Result{Facts: map[string]any{"skipped": "the session never ran"}}, nil
			}
			return m.workload.ListChanges(ctx, s.SandboxID())
		}},
		{Name: "kill", Must: true, NoUndo: never, Do: within(m.b.Kill, func(ctx context.Context) (journal.Result, error) {
			return m.kill(ctx, s.SandboxID())
		})},
		{Name: "dispose", Joined: true, Must: true, NoUndo: never, Do: within(m.b.Kill, func(ctx context.Context) (journal.Result, error) {
			return m.dispose(ctx, e.id)
		})},
		{Name: "release", Joined: true, NoUndo: never, Do: within(m.b.Kill, func(ctx context.Context) (journal.Result, error) {
			return journal.Result{}, m.release(ctx, e.id)
		})},
	}
}

// measureTime bounds the last measurement of a sandbox.
const measureTime = 2 * time.Second

// measure records what the sandbox used in its life, and what it tried to
// send. For a sandbox that is gone that is unknown, which is recorded.
func (m *Manager) measure(ctx context.Context, id session.SandboxID) (journal.Result, error) {
	s, err := m.o.Node.Stats(ctx, id)
	if kind.Is(err, kind.NotFound) || kind.Is(err, kind.Unavailable) {
		return journal.Result{Facts: map[string]any{"unknown": clip.Counted(err.Error(), journal.MaxErrorText)}}, nil
	}
	if err != nil {
		return journal.Result{}, err
	}
	out := journal.Result{Facts: map[string]any{
		"cpu_ms": s.CPU.Milliseconds(), "memory_peak_bytes": s.MemoryPeakBytes, "oom_kills": s.OOMKills,
	}}
	if s.OutboundRefused > 0 {
		out.Entries = append(out.Entries, audit.Entry{
			Action: audit.OutboundRefused, Outcome: audit.Refused, Object: sandboxObject(id), Payload: packetsPayload{Packets: s.OutboundRefused},
		})
	}
	return out, nil
}

// kill has the node destroy the sandbox and reports whether this call did: if
// the node had destroyed it by itself before, the end does not claim it.
func (m *Manager) kill(ctx context.Context, id session.SandboxID) (journal.Result, error) {
	removal, err := m.o.Node.Destroy(ctx, id)
	if err != nil {
		return journal.Result{}, err
	}
	facts := map[string]any{"found": removal.Found}
	if removal.Earlier != "" {
		facts["destroyed_before_by"] = clip.Counted(removal.Earlier, journal.MaxErrorText)
	}
	return journal.Result{Facts: facts}, nil
}

// orGone turns the absence of a sandbox, which is what an end wants, into a
// fact.
func orGone(err error) (journal.Result, error) {
	if kind.Is(err, kind.NotFound) {
		return journal.Result{Facts: map[string]any{"gone": true}}, nil
	}
	return journal.Result{}, err
}

// dispose proves that nothing of the sandbox is left by looking again.
func (m *Manager) dispose(ctx context.Context, id session.ID) (journal.Result, error) {
	found, err := m.o.Node.List(ctx)
	if err != nil {
		return journal.Result{}, err
	}
	for _, f := range found {
		if owner, _, err := f.ID.Split(); err == nil && owner == id {
			return journal.Result{}, fmt.Errorf("sandbox %s is still on the host", f.ID)
		}
	}
	return journal.Result{Facts: map[string]any{"state": "destroyed", "proof": "not on the host"}}, nil
}

// releaseTries is how often a template's lease is given back before that
// becomes a residual and the sweep retries it.
const releaseTries = 3

func (m *Manager) release(ctx context.Context, id session.ID) error {
	tries := 0
	err := poll.Until(ctx, poll.Delays{First: m.b.RetryMin, Max: m.b.RetryMax}, func() (done bool, err error) {
		tries++
		err = m.o.Templates.Release(ctx, string(id))
		return err == nil || tries == releaseTries, err
	})
	if err != nil {
		m.mu.Lock()
		m.unreleased[id] = true
		m.mu.Unlock()
	}
	return err
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
		// The seal names the lease as a residual; that it is given back after
		// all is an addendum.
		err := m.addFact(ctx, id, audit.Entry{Action: audit.LeaseReleased, Outcome: audit.OK, Actor: journal.System, Object: "template"})
		if err != nil {
			errs = append(errs, fmt.Errorf("template lease of session %s: %w", id, err))
			continue
		}
		m.mu.Lock()
		delete(m.unreleased, id)
		m.mu.Unlock()
	}
	return errors.Join(errs...)
}
