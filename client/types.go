package client

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Spec says what a session is made of. The server fills fields that are zero.
type Spec struct {
	Version        int               `json:"version,omitempty"`         // of the spec's format; 0: the server's
	Template       string            `json:"template,omitempty"`        // name[:tag] or sha256:…
	Resources      Resources         `json:"resources,omitzero"`        // hard limits
	TimeoutSeconds int64             `json:"timeout_seconds,omitempty"` // life of the session
	Env            map[string]string `json:"env,omitempty"`             // environment of every process
	User           string            `json:"user,omitempty"`            // default user; empty: the template's
	Workdir        string            `json:"workdir,omitempty"`         // default directory; empty: the user's home
	Hostname       string            `json:"hostname,omitempty"`        // empty: "bivy"
	Labels         map[string]string `json:"labels,omitempty"`          // set by the owner, to find the session by
}

// Resources are the hard limits of a session, enforced from outside it.
type Resources struct {
	CPUMillis int64 `json:"cpu_millis,omitempty"` // thousandths of a core
	MemoryMiB int64 `json:"memory_mib,omitempty"` // memory of the whole sandbox, files included
	DiskMiB   int64 `json:"disk_mib,omitempty"`   // size of the writable layer
	PIDs      int64 `json:"pids,omitempty"`       // threads on the host
}

// CreateSession is the body of POST /v1/sessions: a spec and who asks for it.
type CreateSession struct {
	Spec
	OnBehalfOf string `json:"on_behalf_of,omitempty"` // whom the caller acts for; not verified
	Trigger    string `json:"trigger,omitempty"`      // what caused the request; not verified
}

// Principal identifies who made a request or owns a session.
type Principal struct {
	Subject    string `json:"subject"`                // e.g. "key:ab12cd34", authenticated
	OnBehalfOf string `json:"on_behalf_of,omitempty"` // as the caller states it
	Trigger    string `json:"trigger,omitempty"`      // as the caller states it
}

// State is the state of a session.
type State string

// The states of a session.
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

// SessionInfo describes a session.
type SessionInfo struct {
	ID         string    `json:"id"`                  // 20 characters of a-z and 0-9
	Version    int64     `json:"version"`             // grows with every change
	State      State     `json:"state"`               // at the time of the answer
	Reason     string    `json:"reason,omitempty"`    // why it is ending or has ended
	Detail     string    `json:"detail,omitempty"`    // one sentence that adds to Reason
	Spec       Spec      `json:"spec"`                // with defaults filled in
	SpecDigest string    `json:"spec_digest"`         // of the spec without the values of Env
	Owner      Principal `json:"owner"`               // who created it
	Node       string    `json:"node"`                // id of the node it runs on
	Generation uint32    `json:"generation"`          // of the current or last sandbox
	Sandbox    string    `json:"sandbox,omitempty"`   // id of the current or last sandbox
	Template   string    `json:"template,omitempty"`  // digest of the template that Spec.Template named
	CreatedAt  time.Time `json:"created_at"`          // when the request was accepted
	StartedAt  time.Time `json:"started_at,omitzero"` // when it became running
	EndedAt    time.Time `json:"ended_at,omitzero"`   // when it ended
	Deadline   time.Time `json:"deadline,omitzero"`   // when it ends by itself
	Residuals  []string  `json:"residuals,omitempty"` // what the end could not prove
}

// CreatedSession is the answer to POST /v1/sessions.
type CreatedSession struct {
	SessionInfo
	Timing []Phase `json:"timing,omitempty"` // empty when the session existed already
}

// Phase is a part of a longer operation.
type Phase struct {
	Name         string `json:"name"` // e.g. "start"
	Microseconds int64  `json:"us"`   // how long it took
}

// Took returns the phase's duration.
func (p Phase) Took() time.Duration { return time.Duration(p.Microseconds) * time.Microsecond }

// Progress reports how far a longer operation is.
type Progress struct {
	What  string `json:"what"`  // what is being done
	Done  int64  `json:"done"`  // of Total, in the same unit
	Total int64  `json:"total"` // 0: not known
}

// CreateUpdate is one line of POST /v1/sessions when it answers with NDJSON:
// any number with Progress, then one with Session or Error.
type CreateUpdate struct {
	Progress *Progress       `json:"progress,omitempty"` // not the last line
	Session  *CreatedSession `json:"session,omitempty"`  // the last line after a success
	Error    *Error          `json:"error,omitempty"`    // the last line after a failure
}

// SetTimeout is the body of POST /v1/sessions/{session}/timeout.
type SetTimeout struct {
	TimeoutSeconds int64 `json:"timeout_seconds"` // from now
}

// Command is a command to start in a session.
type Command struct {
	Argv           []string          `json:"argv"`                      // program and arguments
	Env            map[string]string `json:"env,omitempty"`             // added to the session's; wins over it
	Cwd            string            `json:"cwd,omitempty"`             // directory; empty: the session's Workdir
	User           string            `json:"user,omitempty"`            // empty: the session's
	Stdin          bool              `json:"stdin,omitempty"`           // false: standard input is empty
	PTY            *Size             `json:"pty,omitempty"`             // a terminal of this size; nil: pipes
	TimeoutSeconds float64           `json:"timeout_seconds,omitempty"` // after which it is killed; 0: none
	Tag            string            `json:"tag,omitempty"`             // free text kept with the command
	OnDisconnect   OnDisconnect      `json:"on_disconnect,omitempty"`   // empty: Detach
}

// OnDisconnect says what happens to a command when the caller that started it
// disconnects before it ends.
type OnDisconnect string

// What happens to the command; empty means Detach.
const (
	Detach OnDisconnect = "detach" // it keeps running, and can be attached to
	Kill   OnDisconnect = "kill"   // it is killed
)

// Size is the size of a terminal, in characters.
type Size struct {
	Cols uint16 `json:"cols"` // width
	Rows uint16 `json:"rows"` // height
}

// CommandInfo describes a command that runs in a session or ended within the
// last 30 seconds.
type CommandInfo struct {
	ID        string    `json:"id"`             // unique in the session
	PID       uint32    `json:"pid"`            // inside the session
	Argv      []string  `json:"argv"`           // program and arguments
	Cwd       string    `json:"cwd,omitempty"`  // directory it was started in
	User      string    `json:"user,omitempty"` // it runs as
	Tag       string    `json:"tag,omitempty"`  // as given at the start
	PTY       bool      `json:"pty"`            // it has a terminal
	Running   bool      `json:"running"`        // it has not ended
	StartedAt time.Time `json:"started_at"`     // when it started
	Exit      *Exit     `json:"exit,omitempty"` // nil while it runs
}

// Started is the first message of a command's stream.
type Started struct {
	ID  string `json:"id"`  // of the command
	PID uint32 `json:"pid"` // inside the session
}

// Exit says how a command ended.
type Exit struct {
	Code   int    `json:"code"`             // exit code; -1 when a signal ended it
	Signal int    `json:"signal,omitempty"` // the signal that ended it; 0: none
	OOM    bool   `json:"oom,omitempty"`    // the session's memory limit killed it
	Error  string `json:"error,omitempty"`  // why it was ended from outside: time limit, end of the session, lost
}

// Status returns the exit status as a shell reports it: the code, or 128 plus
// the signal; 255 for a command that was ended from outside and has neither.
func (e Exit) Status() int {
	if e.Signal != 0 {
		return 128 + e.Signal
	}
	if e.Code < 0 {
		return 255
	}
	return e.Code
}

// SendSignal is the body of POST …/commands/{command}/signal.
type SendSignal struct {
	Signal int `json:"signal"` // as Linux numbers them: 2 INT, 9 KILL, 15 TERM
}

// CommandEvent is one line of a command's stream when it is NDJSON; exactly
// one of the fields Started, Exit and Error, or a piece of output, is set.
type CommandEvent struct {
	Type    string   `json:"type"`              // "start", "stdout", "stderr", "pty", "end", "error", "ping"
	Started *Started `json:"started,omitempty"` // of "start"
	Text    string   `json:"text,omitempty"`    // output that is UTF-8
	Data    []byte   `json:"data,omitempty"`    // output that is not, in base64
	Exit    *Exit    `json:"exit,omitempty"`    // of "end"
	Error   *Error   `json:"error,omitempty"`   // of "error"; the command may still run
}

// FileInfo describes a file of a session.
type FileInfo struct {
	Path    string    `json:"path"`                 // bytes that are not UTF-8 are shown as U+FFFD
	RawPath []byte    `json:"path_raw,omitempty"`   // the exact bytes, in base64, when Path is not exact
	Type    FileType  `json:"type"`                 // file, directory, symbolic link or other
	Size    int64     `json:"size"`                 // in bytes
	Mode    uint32    `json:"mode"`                 // permission bits, e.g. 420 for 0644
	User    string    `json:"user,omitempty"`       // owner, by name if it has one
	Group   string    `json:"group,omitempty"`      // by name if it has one
	ModTime time.Time `json:"modified_at,omitzero"` // time of the last change
	Target  string    `json:"target,omitempty"`     // of a symbolic link
	SHA256  string    `json:"sha256,omitempty"`     // of the content, in hex; only where it passed through bivy
}

// ExactPath returns the path's exact bytes.
func (f FileInfo) ExactPath() string {
	if len(f.RawPath) > 0 {
		return string(f.RawPath)
	}
	return f.Path
}

// FileType is the type of a file.
type FileType string

// The types of files.
const (
	RegularFile FileType = "file"
	Directory   FileType = "dir"
	Symlink     FileType = "symlink"
	OtherFile   FileType = "other"
)

// Stats is a measurement of a session's sandbox, taken from outside it.
type Stats struct {
	CPUMicroseconds int64  `json:"cpu_us"`            // CPU time since the sandbox started
	MemoryBytes     int64  `json:"memory_bytes"`      // in use
	MemoryPeakBytes int64  `json:"memory_peak_bytes"` // most that was in use
	PIDs            int64  `json:"pids"`              // threads on the host
	OOMKills        int64  `json:"oom_kills"`         // processes that the memory limit killed
	OutboundRefused uint64 `json:"outbound_refused"`  // packets and connections to the outside that were refused
}

// Event is one event of a record.
type Event struct {
	Record        string          `json:"record,omitempty"`     // id of the record
	Session       string          `json:"session,omitempty"`    // that the record is of; empty in a system record
	Seq           uint64          `json:"seq"`                  // from 1, without gaps
	Time          time.Time       `json:"time"`                 // wall clock of the node
	Action        string          `json:"action"`               // what happened, e.g. "command.intent"
	Outcome       string          `json:"outcome"`              // "ok", "failed", "refused", or "pending" of an intent
	Actor         Principal       `json:"actor"`                // who caused it
	Node          string          `json:"node,omitempty"`       // that wrote it
	Generation    uint32          `json:"generation,omitempty"` // of the sandbox at that time
	Sandbox       string          `json:"sandbox,omitempty"`    // id of the sandbox
	Trace         string          `json:"trace,omitempty"`      // trace id of the request behind it
	Object        string          `json:"object,omitempty"`     // what it is about, e.g. "command/<id>"
	Concludes     uint64          `json:"concludes,omitempty"`  // Seq of the intent whose outcome this is
	Decision      *Decision       `json:"decision,omitempty"`   // that allowed or refused it; nil: nothing decided
	Ref           string          `json:"ref,omitempty"`        // common to the events of one piece of work
	Payload       json.RawMessage `json:"payload,omitempty"`    // details; missing when they were erased
	Version       int             `json:"v"`                    // of the event format
	Boot          string          `json:"boot,omitempty"`       // boot id of the host
	UptimeMicros  int64           `json:"uptime_us,omitempty"`  // monotonic clock of the host, in microseconds
	Prev          string          `json:"prev,omitempty"`       // hash of the event before
	Hash          string          `json:"hash,omitempty"`       // of this event
	PayloadCommit string          `json:"commit,omitempty"`     // commitment to the payload that the hash covers
}

// Decision is what a set of rules decided about a request.
type Decision struct {
	Verdict string `json:"verdict"`          // "allow", "deny" or "held"
	Policy  string `json:"policy,omitempty"` // digest of the rules
}

// EventUpdate is one line of GET …/events?follow=true: an event, or an error
// as the last line. A line with neither keeps the connection alive.
type EventUpdate struct {
	Event *Event `json:"event,omitempty"` // the next event
	Error *Error `json:"error,omitempty"` // why the stream ends early
}

// Template is an immutable environment that sessions start from.
type Template struct {
	Digest      string            `json:"digest"`            // of image and defaults together
	Names       []string          `json:"names,omitempty"`   // each with its tag
	ImageDigest string            `json:"image_digest"`      // of the file system image
	ImageBytes  int64             `json:"image_bytes"`       // size of the image
	Source      string            `json:"source"`            // what it was built from, as text
	Env         map[string]string `json:"env,omitempty"`     // default environment
	User        string            `json:"user,omitempty"`    // default user
	Workdir     string            `json:"workdir,omitempty"` // default directory
	Cmd         []string          `json:"cmd,omitempty"`     // default command
	CreatedAt   time.Time         `json:"created_at"`        // when it was built
	Notes       []string          `json:"notes,omitempty"`   // what of the source is not in the image
	InUse       int               `json:"in_use"`            // sessions that use it
	Broken      string            `json:"broken,omitempty"`  // why it cannot be used; empty: it can
}

// BuildTemplate is the body of POST /v1/templates, and the content of a
// template file.
type BuildTemplate struct {
	Version int               `json:"version"`           // 1
	Name    string            `json:"name,omitempty"`    // [namespace/]name[:tag]
	From    TemplateSource    `json:"from"`              // where the files come from
	Env     map[string]string `json:"env,omitempty"`     // added to the source's; wins over it
	User    string            `json:"user,omitempty"`    // default user; empty: the source's
	Workdir string            `json:"workdir,omitempty"` // default directory; empty: the source's
	Cmd     []string          `json:"cmd,omitempty"`     // default command; empty: the source's
}

// TemplateSource says where the files of a template come from; exactly one
// field is set. Every path is a path of the server's machine.
type TemplateSource struct {
	HostPackages *HostPackages `json:"host_packages,omitempty"` // Debian packages of the server's machine
	Image        *OCIImage     `json:"image,omitempty"`         // image in a registry
	Tarball      *OCIFile      `json:"tarball,omitempty"`       // tarball of an OCI or Docker image
	Layout       *OCIFile      `json:"layout,omitempty"`        // directory of an OCI image layout
	Directory    *PathSource   `json:"directory,omitempty"`     // directory that becomes the root
	Tar          *PathSource   `json:"tar,omitempty"`           // tarball of a root file system
}

// HostPackages are Debian packages as installed on the server's machine, with
// their dependencies.
type HostPackages struct {
	Packages []string `json:"packages"` // names
}

// OCIImage is an image in a registry.
type OCIImage struct {
	Ref         string               `json:"ref"`                   // e.g. docker.io/library/debian:12
	PlainHTTP   bool                 `json:"plain_http,omitempty"`  // speak HTTP without TLS
	Credentials *RegistryCredentials `json:"credentials,omitempty"` // nil: anonymous
}

// RegistryCredentials say where on the server's machine the credentials of a
// registry are. A request never carries the credentials themselves.
type RegistryCredentials struct {
	Username     string `json:"username,omitempty"`      // with one of the two below
	PasswordEnv  string `json:"password_env,omitempty"`  // environment variable of the server
	PasswordFile string `json:"password_file,omitempty"` // file with the password
	DockerConfig string `json:"docker_config,omitempty"` // config.json of Docker, instead of the above
}

// OCIFile is an image in a tarball or in a layout directory.
type OCIFile struct {
	Path string `json:"path"`          // of the tarball or directory
	Ref  string `json:"ref,omitempty"` // which image, when there are several
}

// PathSource is a directory, or a tarball of files.
type PathSource struct {
	Path string `json:"path"` // of the directory or tarball
}

// BuildUpdate is one line of POST /v1/templates: any number with Progress,
// then one with Template or Error.
type BuildUpdate struct {
	Progress *Progress `json:"progress,omitempty"` // not the last line
	Template *Template `json:"template,omitempty"` // the last line after a success
	Error    *Error    `json:"error,omitempty"`    // the last line after a failure
}

// Role says what the holder of a key may do.
type Role string

// The roles.
const (
	Admin     Role = "admin"     // everything
	Developer Role = "developer" // create sessions and use its own
	Auditor   Role = "auditor"   // read all sessions and records
)

// Key is an API key, without its secret.
type Key struct {
	ID        string    `json:"id"`                  // names it, e.g. in records
	Label     string    `json:"label,omitempty"`     // free text
	Role      Role      `json:"role"`                // what its holder may do
	CreatedAt time.Time `json:"created_at"`          // when it was created
	CreatedBy string    `json:"created_by"`          // subject of the principal who created it
	RevokedAt time.Time `json:"revoked_at,omitzero"` // zero: it is valid
}

// CreateKey is the body of POST /v1/keys.
type CreateKey struct {
	Label string `json:"label,omitempty"` // free text
	Role  Role   `json:"role"`            // what its holder may do
}

// CreatedKey is the answer to POST /v1/keys.
type CreatedKey struct {
	Key
	Secret string `json:"secret"` // the only time that it is shown
}

// AuditKey is the public key that a node signs its records with.
type AuditKey struct {
	Algorithm   string      `json:"algorithm"`        // "ed25519"
	PublicKey   string      `json:"public_key"`       // in PEM
	Fingerprint string      `json:"fingerprint"`      // names it in seals
	Former      []FormerKey `json:"former,omitempty"` // replaced keys, newest first

	// Rotations are the signed statements of each replacement, oldest first: DSSE
	// envelopes.
	Rotations []json.RawMessage `json:"rotations,omitempty"`
}

// FormerKey is a signing key that was replaced by another one. Records that it
// sealed still verify with it.
type FormerKey struct {
	Algorithm   string    `json:"algorithm"`            // "ed25519"
	PublicKey   string    `json:"public_key"`           // in PEM
	Fingerprint string    `json:"fingerprint"`          // names it in seals
	ReplacedAt  time.Time `json:"replaced_at,omitzero"` // when the next key was made
	Lost        bool      `json:"lost,omitempty"`       // it did not sign its successor, which has to be trusted on its own
}

// RotateAuditKey is the body of POST /v1/audit/key/rotate.
type RotateAuditKey struct {
	Lost bool `json:"lost,omitempty"` // the present key is lost: make a new one that it does not sign
}

// ListedRecord is one line of GET /v1/audit/listing: a record of the node. A
// session with addenda has one line for its seal and one for each signed head of
// its addenda.
type ListedRecord struct {
	Record string `json:"record"` // "session/<id>", "addenda/<id>" or "system/<node>/<segment>"
	Seq    uint64 `json:"seq"`    // number of the last event
	Hash   string `json:"hash"`   // hex hash of that event
	Sealed bool   `json:"sealed"` // whether it is signed
}

// Version identifies a build of bivy.
type Version struct {
	Version string `json:"version"`          // of the release
	Commit  string `json:"commit,omitempty"` // it was built from
	Go      string `json:"go"`               // version of the Go toolchain
	API     string `json:"api"`              // "v1"
}

// Health says whether a server accepts work.
type Health struct {
	Status string `json:"status"` // "ok" or "starting"
}

// Node says what was found on the server's machine.
type Node struct {
	ID     string `json:"id"`     // of the node
	Driver string `json:"driver"` // that isolates sandboxes
	OK     bool   `json:"ok"`     // no fact has status fail
	Facts  []Fact `json:"facts"`  // in the order to show them
}

// Fact is one property of a machine and its consequence for bivy.
type Fact struct {
	Name   string     `json:"name"`           // of the property
	Status FactStatus `json:"status"`         // whether bivy can work with it
	Found  string     `json:"found"`          // its value
	Means  string     `json:"means"`          // what it enables or forbids
	Hint   string     `json:"hint,omitempty"` // what to do about it
}

// FactStatus says whether bivy can work with a fact.
type FactStatus string

// The statuses of a fact.
const (
	FactOK   FactStatus = "ok"   // as needed
	FactWarn FactStatus = "warn" // something is limited
	FactFail FactStatus = "fail" // sandboxes cannot be made
)

// Page is one page of a list.
type Page[T any] struct {
	Items      []T    `json:"items"`                 // in order
	NextCursor string `json:"next_cursor,omitempty"` // for the next page
	Complete   bool   `json:"complete"`              // nothing follows Items
}

// Error is a failure that the server reports.
type Error struct {
	Status    int    `json:"-"`                    // of the HTTP answer; 0 within a stream
	TraceID   string `json:"-"`                    // trace that the request belongs to; empty: not known
	Code      string `json:"code"`                 // "invalid", "not_found", "conflict", …
	Message   string `json:"message"`              // text for people
	Hint      string `json:"hint,omitempty"`       // what to do next
	RequestID string `json:"request_id,omitempty"` // names the request in the server's log
	Field     string `json:"field,omitempty"`      // the input at fault
	ExitCode  int    `json:"exit_code,omitempty"`  // 126 or 127 when a command cannot be started
}

// Error returns the message with the field at fault. An internal error, whose
// cause is only in the server's log, also names the trace to look for.
func (e *Error) Error() string {
	text := e.Message
	if e.Field != "" && !strings.Contains(e.Message, e.Field) {
		text = e.Field + ": " + text
	}
	if e.Code == CodeInternal && e.TraceID != "" {
		text += " (trace " + e.TraceID + ")"
	}
	return text
}

// The codes of errors.
const (
	CodeInternal        = "internal"        // a fault of bivy or its host
	CodeInvalid         = "invalid"         // the request is wrong
	CodeNotFound        = "not_found"       // it does not exist, or belongs to another owner
	CodeConflict        = "conflict"        // its state forbids this
	CodeDenied          = "denied"          // the role of the key forbids this
	CodeUnauthenticated = "unauthenticated" // no key, or an unknown one
	CodeExhausted       = "exhausted"       // a limit or a resource is used up
	CodeUnavailable     = "unavailable"     // it may work later
)

// Is makes errors.Is(err, &Error{Code: …}) compare codes.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// unexpected returns the error for an answer that a bivy server does not give.
func unexpected(status int, what string) *Error {
	return &Error{Status: status, Code: CodeInternal, Message: fmt.Sprintf("unexpected answer: %s", what),
		Hint: "is this address a bivy server?"}
}
