package workload

import (
	"time"

	"bivy/internal/audit"
	"bivy/internal/journal"
	"bivy/internal/session"
)

// Payloads of the events that this package writes. Their fields are part of
// the record's format: they may be added to, not renamed.

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

type refusedPayload struct {
	Command string `json:"command"`
	Error   string `json:"error"`
}

type endedPayload struct {
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

type oomPayload struct {
	Kills int64 `json:"kills"` // since the sandbox started
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

type cutPayload struct {
	Listed   int    `json:"listed"`
	Unlisted int    `json:"unlisted"`
	Unhashed int    `json:"unhashed"`
	Why      string `json:"why"`
}

type outsidePayload struct {
	Path  string `json:"path"`
	Files int64  `json:"files"`
	Bytes int64  `json:"bytes"`
	Guest bool   `json:"guest,omitempty"` // the session made the mount itself
}

// History is what a record tells of the workload of a sandbox that an earlier
// process was following. The zero value is ready; journal.Journal.Read fills
// it.
type History struct {
	// OOMKills is how many processes the memory limit has killed, as far as
	// the record tells.
	OOMKills int64

	commands map[string]*openCommand // by id
}

// openCommand is what the record says of a command without an end.
type openCommand struct {
	intent  audit.Intent
	payload commandPayload
	actor   session.Principal
	at      time.Time
	pid     uint32
}

// Add takes the next event into account.
func (h *History) Add(e audit.Stored) {
	ev := e.Event
	switch ev.Action {
	case audit.CommandIntent:
		c := &openCommand{
			intent: audit.Intent{Seq: ev.Seq, Action: ev.Action, Ref: ev.Ref}, actor: ev.Actor, at: ev.Time,
		}
		journal.Decode(e, &c.payload)
		if h.commands == nil {
			h.commands = map[string]*openCommand{}
		}
		h.commands[ev.Ref] = c
	case audit.CommandStarted:
		var s startedPayload
		if c := h.commands[ev.Ref]; c != nil && journal.Decode(e, &s) {
			c.pid = s.PID
		}
	case audit.OutOfMemory:
		var o oomPayload
		if journal.Decode(e, &o) {
			h.OOMKills = max(h.OOMKills, o.Kills)
		}
	default:
		if c := h.commands[ev.Ref]; c != nil && ev.Concludes == c.intent.Seq {
			delete(h.commands, ev.Ref)
		}
	}
}

// Lost returns the events that conclude open intents of an earlier process
// whose outcome will never become known. Those of commands are among them only
// when the sandbox, and the commands with it, is gone.
func (h *History) Lost(open []audit.Intent, sandboxGone bool) []audit.Entry {
	var entries []audit.Entry
	for _, i := range open {
		c := h.commands[i.Ref]
		switch {
		case c == nil || i.Action != audit.CommandIntent:
			entries = append(entries, i.Lost(journal.System))
		case sandboxGone:
			entries = append(entries, audit.Entry{
				Action: audit.CommandEnded, Outcome: audit.Failed, Ref: i.Ref, Actor: c.actor, Object: commandObject(i.Ref), Concludes: i.Seq,
				Payload: endedPayload{Command: i.Ref, Exit: -1, Error: lostText, Recovered: true},
			})
		}
	}
	return entries
}

// lostText is why nothing is known of a command.
const lostText = "lost: bivy was restarted and the command is gone"

func commandObject(id string) string { return "command/" + id }
