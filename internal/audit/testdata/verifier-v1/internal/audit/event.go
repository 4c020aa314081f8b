package audit

import (
	"encoding/json"
	"time"

	"bivy/internal/session"
	"bivy/internal/trace"
)

// Action names what an event is about: "area.verb", in the past tense for
// facts, with ".intent" at the end for what is about to be done.
type Action string

// The actions that this build writes. Readers accept every action.
const (
	SessionCreated    Action = "session.created"       // payload: spec, digest, owner; opens the record
	StepIntent        Action = "step.intent"           // payload: {flow, step}
	StepDone          Action = "step.done"             // payload: {flow, step, ms, …facts}
	StepFailed        Action = "step.failed"           // payload: {flow, step, error}; without concludes when the step is tried again
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
	CommandAttached   Action = "command.attached"      // payload: {command}; a caller attached to it for the first time
	FileWriteIntent   Action = "file.write.intent"     // payload: {path, user}
	FileWritten       Action = "file.written"          // payload: {path, size, sha256}
	FileRead          Action = "file.read"             // payload: {path, size, sha256}
	FileChanged       Action = "file.changed"          // payload: {path, kind, size, sha256}; at the end: a file that the session changed
	FileChangesCut    Action = "file.changes_cut"      // payload: {listed, unlisted, unhashed, why}; which changes no file.changed lists
	FilesOutside      Action = "file.outside"          // payload: {path, files, bytes, guest}; at the end: files that no file.changed lists, since they are not in the writable layer
	FileFailed        Action = "file.failed"           // payload: {path, op, error}
	FileIntent        Action = "file.intent"           // payload: {op, path, …}: mkdir, move, remove, read
	FileDone          Action = "file.done"             // payload: {op, path}
	OutOfMemory       Action = "sandbox.oom"           // payload: {kills}
	LeaseReleased     Action = "template.released"     // payload: {}; an addendum: a lease that the end could not give back is given back
	OutboundRefused   Action = "link.outbound_refused" // payload: {packets}
	ClockJumped       Action = "clock.jumped"          // payload: {ms}
	IntentLost        Action = "intent.lost"           // payload: {seq, action}; the outcome of the intent that it concludes is not known
	PayloadErased     Action = "payload.erased"        // object: ErasedEvents or ErasedAddenda; payload: {why}

	SegmentOpened Action = "segment.opened" // payload: {segment}; opens a segment of a system record
	SegmentClosed Action = "segment.closed" // payload: {why}; closes it

	// Of a system record, and where they concern a session of its record too.
	ServerStarted        Action = "server.started"             // payload: {versions, config}
	ServerStopped        Action = "server.stopped"             // payload: {}
	KeyCreateIntent      Action = "key.create.intent"          // payload: {role, label}; an API key
	KeyCreated           Action = "key.created"                // payload: {role, label}
	KeyUsed              Action = "key.used"                   // payload: {role}; the first use of an API key
	KeyRevokeIntent      Action = "key.revoke.intent"          // payload: {}
	KeyRevoked           Action = "key.revoked"                // payload: {}
	KeyFailed            Action = "key.failed"                 // payload: {error}; of an intent about a key
	LoginRefused         Action = "login.refused"              // payload: {reason, who, count, first, last}
	AccessDenied         Action = "access.denied"              // payload: {reason, who, count, first, last}
	TemplateBuildIntent  Action = "template.build.intent"      // payload: {name, source}
	TemplateBuilt        Action = "template.built"             // payload: {name, digest, image, replaced}
	TemplateRemoveIntent Action = "template.remove.intent"     // payload: {name}
	TemplateRemoved      Action = "template.removed"           // payload: {name, digest, why}
	TemplateFailed       Action = "template.failed"            // payload: {error}; of an intent about a template
	SandboxDestroyIntent Action = "sandbox.destroy.intent"     // payload: {by, why}; by the node or the lifecycle, not by the end of a session
	SandboxDestroyed     Action = "sandbox.destroyed"          // payload: {found} or {error}
	HeadsSigned          Action = "heads.signed"               // payload: {statement}; heads of all records of the node
	SigningKeyIntent     Action = "signing_key.replace.intent" // payload: {}
	SigningKeyReplaced   Action = "signing_key.replaced"       // payload: {old, new, lost}; fingerprints
	SigningKeyFailed     Action = "signing_key.failed"         // payload: {error}
)

// Outcome is how the action went.
type Outcome string

// Outcomes.
const (
	OK      Outcome = "ok"
	Failed  Outcome = "failed"
	Refused Outcome = "refused"
	Pending Outcome = "pending" // of an intent: a later event has the outcome
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
	Verdict Verdict `json:"verdict"` // what the rules answered
	Policy  string  `json:"policy"`  // digest of the rules, "sha256:…"
}

// Entry is what a caller wants recorded; the store makes an Event of it. The
// node and the generation of the sandbox come from the session.Fence that the
// write is made under.
type Entry struct {
	// Action names what the event is about.
	Action Action
	// Outcome is how the action went; Pending for intents and for nothing else.
	Outcome Outcome
	// Actor is who acted.
	Actor session.Principal
	// Object is what the event is about, in a form that can never hold a secret:
	// "command/<id>", "sandbox/<id>", "template/sha256:…", "key/ab12cd34". It is
	// printable ASCII of at most MaxObject bytes, or empty.
	Object string
	// Ref is the same in all events of one piece of work, e.g. a command's id.
	// It is printable ASCII of at most MaxRef bytes. Every intent has one.
	Ref string
	// Concludes is the number of the intent of the same record whose outcome
	// this is; 0 for an event that concludes nothing.
	Concludes uint64
	// Decision is which rules allowed, denied or held the action; zero where
	// nothing decided.
	Decision Decision
	// Trace is the request that the event belongs to; empty when there is none.
	Trace trace.ID
	// Time is when it happened; zero: when the store writes it.
	Time time.Time
	// Payload is encoded as JSON of at most MaxPayload bytes; longer ones are
	// cut, as Bounded says.
	Payload any
}

// MaxPayload bounds one payload, in bytes of JSON.
const MaxPayload = 64 << 10

// Event is the skeleton of one entry of a record. Its JSON encoding, as first
// written, is what is hashed and stored; it is never encoded again.
type Event struct {
	Version    int               `json:"v"`                    // EventVersion
	Record     RecordID          `json:"record"`               // the record that it is in
	Seq        uint64            `json:"seq"`                  // from 1, without gaps
	Prev       string            `json:"prev"`                 // hex hash of the event before, see Start
	Time       time.Time         `json:"time"`                 // wall clock, UTC, microseconds
	Boot       string            `json:"boot"`                 // the host's boot id
	Uptime     int64             `json:"uptime_us"`            // time since that boot, microseconds
	Node       session.NodeID    `json:"node"`                 // the node that wrote it
	Generation uint32            `json:"generation,omitempty"` // of the session's sandbox at that time; 0: none yet
	Trace      trace.ID          `json:"trace,omitempty"`      // the request that it belongs to
	Action     Action            `json:"action"`               // what it is about
	Outcome    Outcome           `json:"outcome"`              // how that went
	Actor      session.Principal `json:"actor"`                // who acted
	Object     string            `json:"object,omitempty"`     // what was acted on
	Concludes  uint64            `json:"concludes,omitempty"`  // number of the intent whose outcome this is
	Decision   Decision          `json:"decision,omitzero"`    // which rules decided
	Ref        string            `json:"ref,omitempty"`        // joins events of one piece of work
	Commit     string            `json:"commit"`               // hex SHA-256(salt ‖ payload bytes)
}

// Session returns the session that the event is about. ok is false for events
// of a system record.
func (e Event) Session() (id session.ID, ok bool) { return e.Record.Session() }

// SandboxID returns the incarnation that was current when the event was
// written, or "" when there was none or the event is not of a session.
func (e Event) SandboxID() session.SandboxID {
	id, ok := e.Record.Session()
	if !ok || e.Generation == 0 {
		return ""
	}
	return id.Sandbox(e.Generation)
}

// Stored is an event with the bytes that were hashed and the payload that the
// skeleton commits to.
type Stored struct {
	Event   Event           // decoded from Raw
	Raw     []byte          // the skeleton's exact bytes
	Hash    string          // hex SHA-256 of a domain prefix and Raw
	Salt    []byte          // empty when erased
	Payload json.RawMessage // empty when erased
}
