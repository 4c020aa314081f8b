package lifecycle

import (
	"context"
	"fmt"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/session"
)

// seal concludes what is left open and seals the record.
func (m *Manager) seal(ctx context.Context, e *managed, s session.Session, flow *journal.Flow) (session.Session, error) {
	if i := e.incarnation(); i != nil && !i.Drain(ctx, m.b.Drain) {
		m.log.Warn("operations did not stop in time; the end records their outcomes as lost", "session", e.id, "outcomes", e.log.PendingCount())
	}
	left, err := e.log.TakeOver(ctx, "end")
	if err != nil {
		return s, err
	}
	flow.Outcomes = append(flow.Outcomes, left...)
	ended := s
	ended.State, ended.EndedAt = session.Ended, m.o.Now()
	ended.Residuals, _ = flow.Residuals()
	result := audit.Closed
	if len(ended.Residuals) > 0 {
		result = audit.ClosedWithResiduals
	}
	m.failPoint("end.seal.do")
	var sealed session.Session
	err = flow.Flush(ctx, func(ctx context.Context, entries []audit.Entry) (_ uint64, err error) {
		sealed, err = m.o.Store.Seal(ctx, e.log.Fence(), ended, func(h audit.Head, before audit.Heads) (audit.Seal, error) {
			return m.o.Signer.Seal(h, before, m.closeout(ended))
		}, journal.Traced(ctx, entries)...)
		return 0, err
	}, flow.Entry(audit.SessionEnded, audit.OK, endedPayload{
		Result: result, Reason: ended.Reason, Detail: ended.Detail, Residuals: ended.Residuals,
	}))
	if err != nil {
		return s, fmt.Errorf("sealing the record: %w", err)
	}
	m.journal.Grown(e.id)
	m.failPoint("end.seal.done")
	return sealed, nil
}

// closeout is what the seal states about a session.
func (m *Manager) closeout(s session.Session) audit.Closeout {
	return audit.Closeout{
		Session: s.ID, Owner: s.Owner, CreatedAt: s.CreatedAt, StartedAt: s.StartedAt, EndedAt: s.EndedAt, SealedAt: m.o.Now(),
		Reason: s.Reason, Residuals: s.Residuals, SpecDigest: s.SpecDigest, Template: s.Template, Versions: m.o.Versions,
	}
}
