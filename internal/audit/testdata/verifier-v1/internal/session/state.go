package session

// State is where a session is in its life.
type State string

// The states. Standby, pausing, resuming and quarantined are part of the
// life and of the transition rule; nothing drives a
// session into them yet.
const (
	Creating    State = "creating"
	Running     State = "running"
	Pausing     State = "pausing"
	Standby     State = "standby"
	Resuming    State = "resuming"
	Quarantined State = "quarantined"
	Ending      State = "ending"
	Ended       State = "ended"
)

// States lists every state, in the order of a life.
func States() []State {
	return []State{Creating, Running, Pausing, Standby, Resuming, Quarantined, Ending, Ended}
}

// CanBecome is the transition rule, the only one. A state may become itself
// (a fact beside the state changed) unless it is Ended.
func (s State) CanBecome(next State) bool {
	if s == Ended {
		return false
	}
	if s == next || next == Ending {
		return true
	}
	switch s {
	case Creating:
		return next == Running
	case Running:
		return next == Pausing || next == Quarantined
	case Pausing:
		return next == Standby || next == Running || next == Quarantined
	case Standby:
		return next == Resuming || next == Quarantined
	case Resuming:
		return next == Running || next == Standby || next == Quarantined
	case Ending:
		return next == Ended
	case Quarantined, Ended:
		return false
	}
	return false
}

// Terminal reports whether nothing more can happen.
func (s State) Terminal() bool { return s == Ended }

// Reason says why a session ended.
type Reason string

// The reasons. A session that is ending or ended always has one.
const (
	Requested    Reason = "requested"
	Deadline     Reason = "deadline"
	OOM          Reason = "oom"
	ResourceOut  Reason = "resource_exceeded"
	Crashed      Reason = "crashed"
	NodeLost     Reason = "node_lost"
	CreateFailed Reason = "create_failed"
)
