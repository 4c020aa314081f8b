package lifecycle

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/session"
)

// Payloads of the events that this package writes. Their fields are part of
// the record's format: they may be added to, not renamed.

type createdPayload struct {
	Spec       session.Spec      `json:"spec"`
	SpecDigest string            `json:"spec_digest"`
	Owner      session.Principal `json:"owner"`
	Template   string            `json:"template"`
	Node       session.NodeID    `json:"node"`
	Deadline   time.Time         `json:"deadline"`
}

type runningPayload struct {
	Template string         `json:"template"`
	Image    string         `json:"image"`
	Posture  driver.Posture `json:"posture"`
}

type endedPayload struct {
	Result    audit.Result   `json:"result"`
	Reason    session.Reason `json:"reason"`
	Detail    string         `json:"detail,omitempty"`
	Residuals []string       `json:"residuals,omitempty"`
}

type exitedPayload struct {
	Code   int  `json:"code"`
	Signal int  `json:"signal,omitempty"`
	OOM    bool `json:"oom"`
	PIDs   bool `json:"pids,omitempty"` // the limit of threads was reached
}

type oomPayload struct {
	Kills int64 `json:"kills"` // since the sandbox started
}

type commandPayload struct {
	Argv     []string `json:"argv"`
	Cwd      string   `json:"cwd,omitempty"`
	User     string   `json:"user,omitempty"`
	Env      []string `json:"env,omitempty"` // names only: values may be secrets
	Stdin    bool     `json:"stdin"`
	PTY      bool     `json:"pty"`
	Millis   int64    `json:"timeout_ms,omitempty"`
	Tag      string   `json:"tag,omitempty"`
	Encoding string   `json:"encoding,omitempty"` // "escaped" when argv or cwd is not UTF-8
}

type signalledPayload struct {
	Command string `json:"command"`
	Signal  int    `json:"signal"`
}

type attachedPayload struct {
	Command string `json:"command"`
}

type startedPayload struct {
	Command string `json:"command"`
	PID     uint32 `json:"pid"`
}

type commandEndedPayload struct {
	Command  string  `json:"command"`
	Exit     int     `json:"exit"`
	Signal   int     `json:"signal,omitempty"`
	Millis   float64 `json:"ms"`
	Stdin    int64   `json:"stdin_bytes"`
	Stdout   int64   `json:"stdout_bytes"`
	Stderr   int64   `json:"stderr_bytes"`
	OOM      bool    `json:"oom,omitempty"`
	TimedOut bool    `json:"timed_out,omitempty"`
	Error    string  `json:"error,omitempty"`
	// Recovered: bivy was restarted while it ran; bytes before are not counted.
	Recovered bool `json:"recovered,omitempty"`
}

type filePayload struct {
	Op     string `json:"op,omitempty"`
	Path   string `json:"path"`
	To     string `json:"to,omitempty"`
	User   string `json:"user,omitempty"`
	Kind   string `json:"kind,omitempty"`
	Size   *int64 `json:"size,omitempty"`
	Mode   string `json:"mode,omitempty"`
	SHA256 string `json:"sha256,omitempty"`
	Target string `json:"target,omitempty"`
	Error  string `json:"error,omitempty"`
	// Partial: the reader went away before the end; size and digest are of
	// what was given.
	Partial bool `json:"partial,omitempty"`
}

// past is what a record tells of what an earlier process was doing.
type past struct {
	intents  audit.Intents
	boot     string // of the last event
	oomKills int64
	ended    map[string]bool   // steps of the end that are done
	left     []stepPayload     // of those and of failed ones: what was not proved
	commands map[string]*aside // open commands by id
}

// aside is what the record says about an open command.
type aside struct {
	payload commandPayload
	actor   session.Principal
	at      time.Time
	pid     uint32
}

// past reads the record of a session.
func (m *Manager) past(ctx context.Context, id session.ID) (*past, error) {
	p := &past{ended: map[string]bool{}, commands: map[string]*aside{}}
	err := m.o.Store.Events(ctx, id, 0, 0, func(e audit.Stored) error {
		p.add(e)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("record of session %s: %w", id, err)
	}
	return p, nil
}

// add takes one event into account. Payloads that were erased or do not
// decode are passed over: the skeleton says what matters.
func (p *past) add(e audit.Stored) {
	ev := e.Event
	p.boot = ev.Boot
	p.intents.Add(ev.Seq, ev.Action, ev.Ref)
	decode := func(v any) bool { return len(e.Payload) > 0 && json.Unmarshal(e.Payload, v) == nil }
	switch ev.Action {
	case audit.StepDone, audit.StepFailed:
		name, ok := strings.CutPrefix(ev.Ref, endRef)
		if !ok {
			return
		}
		p.ended[name] = ev.Action == audit.StepDone
		s := stepPayload{Step: name}
		if !decode(&s) && ev.Action == audit.StepFailed {
			s.Error = "failed"
		}
		p.left = append(p.left, s)
	case audit.CommandIntent:
		c := &aside{actor: ev.Actor, at: ev.Time}
		decode(&c.payload)
		p.commands[ev.Ref] = c
	case audit.CommandStarted:
		var s startedPayload
		if c := p.commands[ev.Ref]; c != nil && decode(&s) {
			c.pid = s.PID
		}
	case audit.CommandEnded, audit.CommandRefused:
		delete(p.commands, ev.Ref)
	case audit.OutOfMemory:
		var o oomPayload
		if decode(&o) {
			p.oomKills = max(p.oomKills, o.Kills)
		}
	case audit.IntentLost:
		delete(p.commands, ev.Ref)
	default: // the rest does not bear on going on
	}
}

// endRef is how the refs of the end's steps begin.
const endRef = "end."

// unpaid returns the open intents by ref, without those of the end's own
// steps, which the end does again.
func (p *past) unpaid() map[string]audit.Intent {
	open := map[string]audit.Intent{}
	for _, i := range p.intents.Open() {
		if !strings.HasPrefix(i.Ref, endRef) {
			open[i.Ref] = i
		}
	}
	return open
}

// resume makes f go on from where the record stops.
func (p *past) resume(f *flow) {
	for _, i := range p.intents.Open() {
		if name, ok := strings.CutPrefix(i.Ref, endRef); ok {
			f.intended[name] = true
		}
	}
	for name, ok := range p.ended {
		if ok {
			f.done[name], f.intended[name] = true, true
		}
	}
	for _, s := range p.left {
		switch {
		case s.Error != "":
			f.leave(s.Step, undone(s.Step, s.Error))
		case s.Residual != "":
			f.leave(s.Step, residual{s.Residual, s.Residual})
		default:
			delete(f.left, s.Step)
		}
	}
}
