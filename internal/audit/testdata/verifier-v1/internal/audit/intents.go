package audit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"bivy/internal/session"
)

// Intents follows the events of one record and knows which intents have no
// outcome yet. The zero value is ready.
type Intents struct {
	open map[uint64]Intent
}

// Intent is an announced effect without an outcome.
type Intent struct {
	Seq    uint64 // number of the event that announces it
	Action Action // of that event
	Ref    string // of that event
}

// Add takes the next event of the record into account. It fails when the event
// concludes something that is not an open intent.
func (t *Intents) Add(seq uint64, a Action, ref string, concludes uint64) error {
	if a.Intent() {
		if concludes != 0 {
			return fmt.Errorf("%s concludes event %d: an intent concludes nothing", a, concludes)
		}
		if t.open == nil {
			t.open = make(map[uint64]Intent)
		}
		t.open[seq] = Intent{Seq: seq, Action: a, Ref: ref}
		return nil
	}
	if concludes == 0 {
		return nil
	}
	if _, ok := t.open[concludes]; !ok {
		return fmt.Errorf("%s concludes event %d, which is not an open intent of this record", a, concludes)
	}
	delete(t.open, concludes)
	return nil
}

// Open returns the intents without an outcome, oldest first.
func (t *Intents) Open() []Intent {
	return slices.SortedFunc(maps.Values(t.open), func(a, b Intent) int { return cmp.Compare(a.Seq, b.Seq) })
}

// Len returns how many intents are open.
func (t *Intents) Len() int { return len(t.open) }

// Clone returns an independent copy.
func (t *Intents) Clone() Intents { return Intents{open: maps.Clone(t.open)} }

// Lost returns the entry that concludes i when its outcome is not known.
func (i Intent) Lost(actor session.Principal) Entry {
	return Entry{Action: IntentLost, Outcome: Failed, Ref: i.Ref, Concludes: i.Seq, Actor: actor, Payload: map[string]any{"seq": i.Seq, "action": i.Action}}
}
