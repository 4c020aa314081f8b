package session

// State is where a session is in its life.
type State string

// The states. Nothing leads to pausing, standby, resuming and quarantined yet.
const (
	Creating    State = "creating"    // its sandbox is being made
	Running     State = "running"     // it admits work
	Pausing     State = "pausing"     // on its way to standby
	Standby     State = "standby"     // state is kept, compute is free
	Resuming    State = "resuming"    // on its way back to running
	Quarantined State = "quarantined" // kept as evidence: nothing runs, nothing is destroyed
	Ending      State = "ending"      // being taken away
	Ended       State = "ended"       // for good; its record is sealed
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
	Requested    Reason = "requested"         // a caller asked for it
	Deadline     Reason = "deadline"          // its time was up
	OOM          Reason = "oom"               // its sandbox reached the memory limit and stopped
	ResourceOut  Reason = "resource_exceeded" // its sandbox reached another limit and stopped
	Crashed      Reason = "crashed"           // its sandbox stopped by itself
	NodeLost     Reason = "node_lost"         // the machine was restarted, or is gone
	CreateFailed Reason = "create_failed"     // it never ran
)
