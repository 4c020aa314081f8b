package audit

import (
	"cmp"
	"maps"
	"slices"

	"bivy/internal/session"
)

// Intents follows a record and knows which intents have no outcome yet. The
// zero value is ready.
type Intents struct {
	open map[intentKey]Intent
}

// Intent is an announced effect without an outcome.
type Intent struct {
	Seq    uint64
	Action Action
	Ref    string
}

type intentKey struct {
	action Action
	ref    string
}

// conclusions says which actions conclude which intent; intent.lost concludes
// every one with its ref. An intent that is announced again is the same intent.
func conclusions(a Action) []Action {
	switch a {
	case StepDone, StepFailed:
		return []Action{StepIntent}
	case CommandEnded, CommandRefused:
		return []Action{CommandIntent}
	case FileWritten:
		return []Action{FileWriteIntent}
	case FileRead, FileDone:
		return []Action{FileIntent}
	case FileFailed:
		return []Action{FileWriteIntent, FileIntent}
	}
	return nil
}

// Add takes the next event of the record into account.
func (t *Intents) Add(seq uint64, a Action, ref string) {
	if a.Intent() {
		if t.open == nil {
			t.open = make(map[intentKey]Intent)
		}
		t.open[intentKey{a, ref}] = Intent{Seq: seq, Action: a, Ref: ref}
		return
	}
	if a == IntentLost {
		maps.DeleteFunc(t.open, func(k intentKey, _ Intent) bool { return k.ref == ref })
		return
	}
	for _, intent := range conclusions(a) {
		delete(t.open, intentKey{intent, ref})
	}
}

// Open returns the intents that nothing concluded, oldest first.
func (t *Intents) Open() []Intent {
	return slices.SortedFunc(maps.Values(t.open), func(a, b Intent) int { return cmp.Compare(a.Seq, b.Seq) })
}

// Len returns how many intents are open.
func (t *Intents) Len() int { return len(t.open) }

// Lost returns the entry in which actor says of i that its outcome is not
// known.
func (i Intent) Lost(actor session.Principal) Entry {
	return Entry{Action: IntentLost, Outcome: Failed, Ref: i.Ref, Actor: actor, Payload: map[string]any{"seq": i.Seq, "action": i.Action}}
}

// Clone returns a copy that goes its own way.
func (t *Intents) Clone() Intents { return Intents{open: maps.Clone(t.open)} }
