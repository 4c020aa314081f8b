package journal

import (
	"encoding/json"
	"strings"

	"bivy/internal/audit"
)

// History is what a record tells a process that takes up the work of an
// earlier one. The zero value is ready; Journal.Read fills it.
type History struct {
	Intents audit.Intents
	// Broken is why the record does not follow the rules of intents; nil for
	// every record that this program wrote.
	Broken error

	steps []stepEvent
}

// stepEvent is one outcome of a step.
type stepEvent struct {
	ref     string
	done    bool
	payload stepPayload
}

// Add takes the next event into account. Payloads that were erased or do not
// decode are passed over: the skeleton says what matters.
func (h *History) Add(e audit.Stored) {
	ev := e.Event
	if err := h.Intents.Add(ev.Seq, ev.Action, ev.Ref, ev.Concludes); err != nil && h.Broken == nil {
		h.Broken = err
	}
	if ev.Action != audit.StepDone && ev.Action != audit.StepFailed {
		return
	}
	s := stepEvent{ref: ev.Ref, done: ev.Action == audit.StepDone}
	if !Decode(e, &s.payload) && !s.done {
		s.payload.Error = "failed"
	}
	h.steps = append(h.steps, s)
}

// Decode decodes the payload of an event into v. It reports false for a
// payload that was erased or does not decode.
func Decode(e audit.Stored, v any) bool {
	return len(e.Payload) > 0 && json.Unmarshal(e.Payload, v) == nil
}

// OpenExcept returns the open intents, oldest first, without those of the
// named flow.
func (h *History) OpenExcept(flow string) []audit.Intent {
	var open []audit.Intent
	for _, i := range h.Intents.Open() {
		if !strings.HasPrefix(i.Ref, flow+".") {
			open = append(open, i)
		}
	}
	return open
}
