package lifecycle

import "bivy/internal/session"

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
