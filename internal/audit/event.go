// Package audit is the record of a session: events that are sequenced,
// chained by hash, sealed and signed at the end, and verified offline.
//
// An event has a skeleton, which is chained for ever, and a payload, which
// the skeleton commits to with a random salt: commit = SHA-256(salt ‖ payload).
// Deleting payload and salt erases what was said while order, actions,
// outcomes and the signature still verify.
package audit

import (
	"encoding/json"
	"time"

	"bivy/internal/session"
)

// Action names what an event is about: "area.verb", past tense for facts,
// ".intent" at the end for what is about to be done.
type Action string

// The actions of this version. The set is open for readers, closed for writers.
const (
	SessionCreated    Action = "session.created"       // payload: spec, digest, owner; opens the record
	StepIntent        Action = "step.intent"           // payload: {flow, step}
	StepDone          Action = "step.done"             // payload: {flow, step, ms, …facts}
	StepFailed        Action = "step.failed"           // payload: {flow, step, error}
	SessionRunning    Action = "session.running"       // payload: {template, image, posture}; digests of the template and its image
	SessionTimeoutSet Action = "session.timeout_set"   // payload: {timeout_seconds, deadline}
	SessionEnding     Action = "session.ending"        // payload: {reason, detail}
	SessionEnded      Action = "session.ended"         // payload: {result, residuals, reason, detail}
	SandboxRelinked   Action = "sandbox.relinked"      // payload: {cause}
	SandboxRecovered  Action = "sandbox.recovered"     // payload: {relinked}
	SandboxExited     Action = "sandbox.exited"        // payload: {code, signal, oom, …}
	CommandIntent     Action = "command.intent"        // payload: argv, cwd, user, env names
	CommandStarted    Action = "command.started"       // payload: {command, pid}
	CommandEnded      Action = "command.ended"         // payload: {command, exit, signal, ms, stdin, stdout, stderr bytes}
	CommandRefused    Action = "command.refused"       // payload: {command, error}
	CommandSignalled  Action = "command.signalled"     // payload: {command, signal}; written before the signal is sent
	CommandAttached   Action = "command.attached"      // payload: {command}; a caller took hold of it, for the first time
	FileWriteIntent   Action = "file.write.intent"     // payload: {path, user}
	FileWritten       Action = "file.written"          // payload: {path, size, sha256}
	FileRead          Action = "file.read"             // payload: {path, size, sha256}
	FileChanged       Action = "file.changed"          // payload: {path, kind, size, sha256}; at the end, what the life left
	FileChangesCut    Action = "file.changes_cut"      // payload: {listed, unlisted, unhashed, why}; what file.changed does not say
	FileFailed        Action = "file.failed"           // payload: {path, op, error}
	FileIntent        Action = "file.intent"           // payload: {op, path, …}: mkdir, move, remove, read
	FileDone          Action = "file.done"             // payload: {op, path}
	OutOfMemory       Action = "sandbox.oom"           // payload: {kills}
	OutboundRefused   Action = "link.outbound_refused" // payload: {packets}
	ClockJumped       Action = "clock.jumped"          // payload: {ms}
	IntentLost        Action = "intent.lost"           // payload: {seq, action}; what became of the intent with this Ref is not known
)

// Outcome is how the action went.
type Outcome string

// Outcomes.
const (
	OK      Outcome = "ok"
	Failed  Outcome = "failed"
	Refused Outcome = "refused"
	Pending Outcome = "pending" // an intent: its outcome is a later event
)

// Verdict is what a set of rules answered to a request.
type Verdict string

// Verdicts.
const (
	Allow Verdict = "allow"
	Deny  Verdict = "deny"
	Held  Verdict = "held" // until a person decides
)

// Decision is which rules allowed, denied or held an action. The zero value
// says that nothing decided.
type Decision struct {
	Verdict Verdict `json:"verdict"`
	Policy  string  `json:"policy"` // digest of the rules, "sha256:…"
}

// Entry is what a caller wants recorded; the store makes an Event of it.
type Entry struct {
	Action  Action
	Outcome Outcome
	Actor   session.Principal
	Sandbox session.SandboxID // empty when no incarnation is concerned
	Ref     string            // ties intent and outcome together, e.g. a command id
	Time    time.Time         // zero: the store's clock
	Payload any               // marshalled to JSON, at most MaxPayload bytes
}

// MaxPayload bounds one payload; Bounded cuts what a guest can make long.
const MaxPayload = 64 << 10

// Event is one chained entry of a record. Its JSON encoding, as first
// written, is what is hashed and stored; it is never re-serialised.
type Event struct {
	Version int               `json:"v"`
	Session session.ID        `json:"session"`
	Seq     uint64            `json:"seq"`       // from 1, without gaps
	Prev    string            `json:"prev"`      // hex hash of the event before; of 32 zero bytes for the first
	Time    time.Time         `json:"time"`      // wall clock, UTC, microseconds
	Boot    string            `json:"boot"`      // the host's boot id
	Uptime  int64             `json:"uptime_us"` // host monotonic clock, microseconds
	Action  Action            `json:"action"`
	Outcome Outcome           `json:"outcome"`
	Actor   session.Principal `json:"actor"`
	Sandbox session.SandboxID `json:"sandbox,omitempty"`
	Ref     string            `json:"ref,omitempty"`
	Commit  string            `json:"commit"` // hex SHA-256(salt ‖ payload bytes)
}

// Stored is an event with the bytes that were hashed and the payload that
// the skeleton commits to.
type Stored struct {
	Event   Event
	Raw     []byte          // the skeleton's exact bytes
	Hash    string          // hex SHA-256 of a domain prefix and Raw
	Salt    []byte          // empty when erased
	Payload json.RawMessage // empty when erased
}
