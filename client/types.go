package client

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Spec is what a session asks for. Zero fields are filled by the server.
type Spec struct {
	Version        int               `json:"version,omitempty"`         // of the spec's format; 0: the server's
	Template       string            `json:"template,omitempty"`        // name[:tag] or sha256:…
	Resources      Resources         `json:"resources,omitzero"`        // hard limits
	TimeoutSeconds int64             `json:"timeout_seconds,omitempty"` // life of the session
	Env            map[string]string `json:"env,omitempty"`             // of every process
	User           string            `json:"user,omitempty"`            // default user; empty: the template's
	Workdir        string            `json:"workdir,omitempty"`         // default directory; empty: the user's home
	Hostname       string            `json:"hostname,omitempty"`        // empty: "bivy"
	Labels         map[string]string `json:"labels,omitempty"`          // the owner's own notes
}

// Resources are hard limits of a session, enforced from outside it.
type Resources struct {
	CPUMillis int64 `json:"cpu_millis,omitempty"` // thousandths of a core
	MemoryMiB int64 `json:"memory_mib,omitempty"` // everything the sandbox holds
	DiskMiB   int64 `json:"disk_mib,omitempty"`   // the writable layer
	PIDs      int64 `json:"pids,omitempty"`       // host threads
}

// CreateSession is the body of POST /v1/sessions: a spec and who is behind it.
type CreateSession struct {
	Spec
	OnBehalfOf string `json:"on_behalf_of,omitempty"` // whom the caller acts for, as it says
	Trigger    string `json:"trigger,omitempty"`      // what set it off, as it says
}

// Principal is who is behind a call or a session.
type Principal struct {
	Subject    string `json:"subject"`
	OnBehalfOf string `json:"on_behalf_of,omitempty"`
	Trigger    string `json:"trigger,omitempty"`
}

// State is where a session is in its life.
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

// SessionInfo is a session as the server sees it.
type SessionInfo struct {
	ID         string    `json:"id"`
	Version    int64     `json:"version"` // grows with every change
	State      State     `json:"state"`
	Reason     string    `json:"reason,omitempty"` // why it is ending or ended
	Detail     string    `json:"detail,omitempty"` // one sentence beside Reason
	Spec       Spec      `json:"spec"`
	SpecDigest string    `json:"spec_digest"`
	Owner      Principal `json:"owner"`
	Node       string    `json:"node"`
	Generation uint32    `json:"generation"`        // of the current or last sandbox
	Sandbox    string    `json:"sandbox,omitempty"` // id of the current or last sandbox
	Template   string    `json:"template,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	Deadline   time.Time `json:"deadline,omitzero"`   // when it ends by itself
	Residuals  []string  `json:"residuals,omitempty"` // what the end could not prove
}

// CreatedSession is the answer to POST /v1/sessions.
type CreatedSession struct {
	SessionInfo
	Timing []Phase `json:"timing,omitempty"` // empty when the session existed already
}

// Phase is one part of a longer work and how long it took.
type Phase struct {
	Name         string `json:"name"`
	Microseconds int64  `json:"us"`
}

// Took returns the phase's duration.
func (p Phase) Took() time.Duration { return time.Duration(p.Microseconds) * time.Microsecond }

// Progress is news of long work.
type Progress struct {
	What  string `json:"what"`
	Done  int64  `json:"done"`
	Total int64  `json:"total"` // 0: not known
}

// CreateUpdate is one line of POST /v1/sessions when it answers with NDJSON:
// any number with Progress, then one with Session or Error.
type CreateUpdate struct {
	Progress *Progress       `json:"progress,omitempty"`
	Session  *CreatedSession `json:"session,omitempty"`
	Error    *Error          `json:"error,omitempty"`
}

// SetTimeout is the body of POST /v1/sessions/{session}/timeout.
type SetTimeout struct {
	TimeoutSeconds int64 `json:"timeout_seconds"` // from now
}

// Command is what to start in a session.
type Command struct {
	Argv           []string          `json:"argv"`
	Env            map[string]string `json:"env,omitempty"` // added to the session's
	Cwd            string            `json:"cwd,omitempty"`
	User           string            `json:"user,omitempty"`
	Stdin          bool              `json:"stdin,omitempty"` // false: stdin is empty
	PTY            *Size             `json:"pty,omitempty"`   // a terminal of this size
	TimeoutSeconds float64           `json:"timeout_seconds,omitempty"`
	Tag            string            `json:"tag,omitempty"`
	OnDisconnect   OnDisconnect      `json:"on_disconnect,omitempty"`
}

// OnDisconnect says what becomes of a command when the caller that started it
// goes away before its end.
type OnDisconnect string

// What becomes of the command; empty means Detach.
const (
	Detach OnDisconnect = "detach" // it runs on, and can be attached to again
	Kill   OnDisconnect = "kill"   // it is killed
)

// Size is a terminal's.
type Size struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// CommandInfo is a command that runs in a session or ended a moment ago.
type CommandInfo struct {
	ID        string    `json:"id"`
	PID       uint32    `json:"pid"` // inside the session
	Argv      []string  `json:"argv"`
	Cwd       string    `json:"cwd,omitempty"`
	User      string    `json:"user,omitempty"`
	Tag       string    `json:"tag,omitempty"`
	PTY       bool      `json:"pty"`
	Running   bool      `json:"running"`
	StartedAt time.Time `json:"started_at"`
	Exit      *Exit     `json:"exit,omitempty"` // nil while it runs
}

// Started is the first thing a command's stream says.
type Started struct {
	ID  string `json:"id"`
	PID uint32 `json:"pid"` // inside the session
}

// Exit is how a command ended.
type Exit struct {
	Code   int    `json:"code"`             // -1 when a signal ended it
	Signal int    `json:"signal,omitempty"` // that ended it; 0 for none
	OOM    bool   `json:"oom,omitempty"`    // killed by the session's memory limit
	Error  string `json:"error,omitempty"`  // why it ended other than by itself: time limit, session over, lost
}

// Status returns the exit status as a shell counts it: the code, or 128 plus
// the signal.
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

// FileInfo is one file of a session.
type FileInfo struct {
	Path    string    `json:"path"`               // U+FFFD stands for bytes that are not UTF-8
	RawPath []byte    `json:"path_raw,omitempty"` // the exact bytes, in base64, when Path is not exact
	Type    FileType  `json:"type"`
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode"` // permission bits, e.g. 420 for 0644
	User    string    `json:"user,omitempty"`
	Group   string    `json:"group,omitempty"`
	ModTime time.Time `json:"modified_at,omitzero"`
	Target  string    `json:"target,omitempty"` // of a symbolic link
	SHA256  string    `json:"sha256,omitempty"` // hex; where the content went through bivy
}

// ExactPath returns the path's exact bytes.
func (f FileInfo) ExactPath() string {
	if len(f.RawPath) > 0 {
		return string(f.RawPath)
	}
	return f.Path
}

// FileType is what a file is.
type FileType string

// The types of files.
const (
	RegularFile FileType = "file"
	Directory   FileType = "dir"
	Symlink     FileType = "symlink"
	OtherFile   FileType = "other"
)

// Stats is one measurement of a session, from outside it.
type Stats struct {
	CPUMicroseconds int64  `json:"cpu_us"` // since the sandbox started
	MemoryBytes     int64  `json:"memory_bytes"`
	MemoryPeakBytes int64  `json:"memory_peak_bytes"`
	PIDs            int64  `json:"pids"` // host threads
	OOMKills        int64  `json:"oom_kills"`
	OutboundRefused uint64 `json:"outbound_refused"` // packets and connections that tried to leave
}

// Event is one event of a session's record.
type Event struct {
	Session       string          `json:"session"`
	Seq           uint64          `json:"seq"` // from 1, without gaps
	Time          time.Time       `json:"time"`
	Action        string          `json:"action"`
	Outcome       string          `json:"outcome"`
	Actor         Principal       `json:"actor"`
	Sandbox       string          `json:"sandbox,omitempty"`
	Ref           string          `json:"ref,omitempty"` // ties intent and outcome together
	Payload       json.RawMessage `json:"payload,omitempty"`
	Version       int             `json:"v"`
	Boot          string          `json:"boot,omitempty"`      // of the host
	UptimeMicros  int64           `json:"uptime_us,omitempty"` // the host's monotonic clock
	Prev          string          `json:"prev,omitempty"`      // hash of the event before
	Hash          string          `json:"hash,omitempty"`      // of this one
	PayloadCommit string          `json:"commit,omitempty"`    // what the chain holds of the payload
}

// EventUpdate is one line of GET …/events?follow=true: an event, or an error
// as the last line. A line with neither says that the stream lives.
type EventUpdate struct {
	Event *Event `json:"event,omitempty"`
	Error *Error `json:"error,omitempty"`
}

// Template is an environment sessions start from.
type Template struct {
	Digest      string            `json:"digest"`          // of image and defaults together
	Names       []string          `json:"names,omitempty"` // each with its tag
	ImageDigest string            `json:"image_digest"`
	ImageBytes  int64             `json:"image_bytes"`
	Source      string            `json:"source"` // what it was made from, for people
	Env         map[string]string `json:"env,omitempty"`
	User        string            `json:"user,omitempty"`
	Workdir     string            `json:"workdir,omitempty"`
	Cmd         []string          `json:"cmd,omitempty"`
	CreatedAt   time.Time         `json:"created_at"`
	Notes       []string          `json:"notes,omitempty"`  // what the image could not hold or was not allowed to
	InUse       int               `json:"in_use"`           // sessions that hold it
	Broken      string            `json:"broken,omitempty"` // why it cannot be used
}

// BuildTemplate is the body of POST /v1/templates, and what a template file
// holds.
type BuildTemplate struct {
	Version int               `json:"version"`        // 1
	Name    string            `json:"name,omitempty"` // [namespace/]name[:tag]
	From    TemplateSource    `json:"from"`
	Env     map[string]string `json:"env,omitempty"` // added to the source's own, and wins
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	Cmd     []string          `json:"cmd,omitempty"`
}

// TemplateSource says where a template's files come from; exactly one field
// is set. Every path is one on the server.
type TemplateSource struct {
	HostPackages *HostPackages `json:"host_packages,omitempty"`
	Image        *OCIImage     `json:"image,omitempty"`
	Tarball      *OCIFile      `json:"tarball,omitempty"`
	Layout       *OCIFile      `json:"layout,omitempty"`
	Directory    *PathSource   `json:"directory,omitempty"`
	Tar          *PathSource   `json:"tar,omitempty"`
}

// HostPackages are Debian packages as installed on the server.
type HostPackages struct {
	Packages []string `json:"packages"`
}

// OCIImage is an image in a registry.
type OCIImage struct {
	Ref         string               `json:"ref"`
	PlainHTTP   bool                 `json:"plain_http,omitempty"`
	Credentials *RegistryCredentials `json:"credentials,omitempty"`
}

// RegistryCredentials say where on the server a registry's credentials are;
// they are never sent themselves.
type RegistryCredentials struct {
	Username     string `json:"username,omitempty"`
	PasswordEnv  string `json:"password_env,omitempty"`
	PasswordFile string `json:"password_file,omitempty"`
	DockerConfig string `json:"docker_config,omitempty"`
}

// OCIFile is an image in a tarball or a layout directory.
type OCIFile struct {
	Path string `json:"path"`
	Ref  string `json:"ref,omitempty"` // which image, when there are several
}

// PathSource is a directory or a tarball of files.
type PathSource struct {
	Path string `json:"path"`
}

// BuildUpdate is one line of POST /v1/templates: any number with Progress,
// then one with Template or Error.
type BuildUpdate struct {
	Progress *Progress `json:"progress,omitempty"`
	Template *Template `json:"template,omitempty"`
	Error    *Error    `json:"error,omitempty"`
}

// Role is what a key may do.
type Role string

// The roles.
const (
	Admin     Role = "admin"     // everything
	Developer Role = "developer" // its own sessions
	Auditor   Role = "auditor"   // read sessions and records, all of them
)

// Key is an API key, without its secret.
type Key struct {
	ID        string    `json:"id"`
	Label     string    `json:"label,omitempty"` // what its owner calls it
	Role      Role      `json:"role"`
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"`
	RevokedAt time.Time `json:"revoked_at,omitzero"` // absent while it is good
}

// CreateKey is the body of POST /v1/keys.
type CreateKey struct {
	Label string `json:"label,omitempty"`
	Role  Role   `json:"role"`
}

// CreatedKey is a new key with its secret, which is shown this once.
type CreatedKey struct {
	Key
	Secret string `json:"secret"`
}

// AuditKey is the public key that a node signs its records with.
type AuditKey struct {
	Algorithm   string `json:"algorithm"`  // "ed25519"
	PublicKey   string `json:"public_key"` // in PEM
	Fingerprint string `json:"fingerprint"`
}

// Version says what a server is.
type Version struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Go      string `json:"go"`
	API     string `json:"api"` // "v1"
}

// Health says whether a server takes work.
type Health struct {
	Status string `json:"status"` // "ok" or "starting"
}

// Node is what was found on the server's machine.
type Node struct {
	ID     string `json:"id"`
	Driver string `json:"driver"`
	OK     bool   `json:"ok"` // no fact has failed
	Facts  []Fact `json:"facts"`
}

// Fact is one thing found on a machine and what it means for bivy.
type Fact struct {
	Name   string     `json:"name"`
	Status FactStatus `json:"status"`
	Found  string     `json:"found"`          // what is there
	Means  string     `json:"means"`          // what that enables or forbids
	Hint   string     `json:"hint,omitempty"` // what to do about it
}

// FactStatus is how good a fact is.
type FactStatus string

// The statuses of a fact.
const (
	FactOK   FactStatus = "ok"
	FactWarn FactStatus = "warn"
	FactFail FactStatus = "fail"
)

// Page is one page of a list.
type Page[T any] struct {
	Items      []T    `json:"items"`
	NextCursor string `json:"next_cursor,omitempty"` // for the next page
	Complete   bool   `json:"complete"`              // nothing comes after Items
}

// Error is a failure that the server reports.
type Error struct {
	Status    int    `json:"-"`                    // of the HTTP answer; 0 within a stream
	Code      string `json:"code"`                 // "invalid", "not_found", "conflict", …
	Message   string `json:"message"`              // for people
	Hint      string `json:"hint,omitempty"`       // the next step
	RequestID string `json:"request_id,omitempty"` // names the request in the server's log
	Field     string `json:"field,omitempty"`      // the input at fault
	ExitCode  int    `json:"exit_code,omitempty"`  // 126 or 127 when a command cannot be started
}

func (e *Error) Error() string {
	if e.Field != "" && !strings.Contains(e.Message, e.Field) {
		return e.Field + ": " + e.Message
	}
	return e.Message
}

// The codes of errors.
const (
	CodeInternal        = "internal"
	CodeInvalid         = "invalid"
	CodeNotFound        = "not_found"
	CodeConflict        = "conflict"
	CodeDenied          = "denied"
	CodeUnauthenticated = "unauthenticated"
	CodeExhausted       = "exhausted"
	CodeUnavailable     = "unavailable"
)

// Is makes errors.Is(err, &Error{Code: …}) compare codes.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// unexpected describes an answer that is not bivy's.
func unexpected(status int, what string) *Error {
	return &Error{Status: status, Code: CodeInternal, Message: fmt.Sprintf("unexpected answer: %s", what),
		Hint: "is this address a bivy server?"}
}
