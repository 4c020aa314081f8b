package lifecycle

import (
	"context"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// AddFact records a fact about a session that may have ended.
func (m *Manager) AddFact(ctx context.Context, id session.ID, e audit.Entry) error {
	return m.addFact(ctx, id, e)
}

// Died reports whether the manager has heard that the sandbox of a create in
// progress stopped.
func (m *Manager) Died(id session.ID) bool {
	a := m.find(id)
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.died != nil
}

// PendingOutcomes is how many outcomes of a session are not in its record.
func (m *Manager) PendingOutcomes(id session.ID) int {
	e := m.find(id)
	if e == nil {
		return 0
	}
	return e.log.PendingCount()
}
