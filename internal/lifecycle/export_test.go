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

// Owing is how many outcomes a session owes to its record.
func (m *Manager) Owing(id session.ID) int {
	a := m.find(id)
	if a == nil {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.owing)
}
