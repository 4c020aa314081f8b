package lifecycle

import (
	"errors"
	"log/slog"
	"time"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// Options are what a Manager is made of. Store, Node, Templates, Signer and
// NodeID are required.
type Options struct {
	Store     Store
	Node      Node
	Templates Templates
	Signer    *audit.Signer
	NodeID    session.NodeID
	Now       func() time.Time // wall clock; nil: time.Now
	Log       *slog.Logger     // nil: discard
	// CreateLimit bounds how many sessions are created at the same time;
	// others queue, taking turns by owner. 0: one per CPU.
	CreateLimit int
	// BootID is this boot of this machine; empty: read from the kernel. A
	// session whose record was last written in another boot lost its node.
	BootID string
	// Versions of bivy and what it is made of, for the seal; may be nil.
	Versions map[string]string
	// Bounds on waiting; zero fields have working values.
	Bounds Bounds
	// Hook is called at the named points of every flow, for fault tests that
	// stop the process there. Nil in production.
	Hook func(point string)
}

// Bounds are how long and how much the manager is willing to take.
type Bounds struct {
	Create      time.Duration // one create, once admitted; 0: 2 min
	Undo        time.Duration // undoing a failed create; 0: 30 s
	Digest      time.Duration // listing what a session changed; 0: 10 s
	DigestFiles int           // files listed at the end; 0: 10,000
	DigestNames int           // bytes of the names of those files; 0: 8 MiB
	DigestBytes int64         // bytes hashed at the end; 0: 1 GiB
	Kill        time.Duration // one attempt to kill and remove a sandbox; 0: 20 s
	Drain       time.Duration // running commands and file operations after the cut; 0: 3 s
	Settle      time.Duration // writing one outcome; 0: 10 s
	Sweep       time.Duration // between reconciliations; 0: 30 s
	RetryMin    time.Duration // first wait before ending again; 0: 200 ms
	RetryMax    time.Duration // longest wait before ending again; 0: 30 s
	Commands    int           // commands running at once in one session; 0: 512
	Keep        time.Duration // a finished command can be attached to; 0: 30 s
	Stop        time.Duration // work in progress when Run is told to stop; 0: 10 s
}

func (b Bounds) withDefaults() Bounds {
	dur := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	dur(&b.Create, 2*time.Minute)
	dur(&b.Undo, 30*time.Second)
	dur(&b.Digest, 10*time.Second)
	dur(&b.Kill, 20*time.Second)
	dur(&b.Drain, 3*time.Second)
	dur(&b.Settle, 10*time.Second)
	dur(&b.Sweep, 30*time.Second)
	dur(&b.RetryMin, 200*time.Millisecond)
	dur(&b.RetryMax, 30*time.Second)
	dur(&b.Keep, 30*time.Second)
	dur(&b.Stop, 10*time.Second)
	if b.DigestFiles == 0 {
		b.DigestFiles = 10_000
	}
	if b.DigestNames == 0 {
		b.DigestNames = 8 << 20
	}
	if b.DigestBytes == 0 {
		b.DigestBytes = 1 << 30
	}
	if b.Commands == 0 {
		b.Commands = 512
	}
	return b
}

// CreateRequest asks for a session.
type CreateRequest struct {
	Spec  session.Spec // defaults are filled in
	Owner session.Principal
	// Key makes the request repeatable. A create with a key goes on when its
	// caller has gone, since the caller can come back for it; one without is
	// undone, since nobody could ever learn its id.
	Key IdempotencyKey
	// Progress is told about long work, such as building a template; may be
	// nil.
	Progress func(done, total int64, what string)
}

// Timing is where the time of a flow went, in order.
type Timing []Phase

// Phase is one part of a flow and how long it took.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"`
}

// EndRequest asks for a session's end.
type EndRequest struct {
	ID     session.ID
	Actor  session.Principal
	Reason session.Reason // empty: session.Requested
	Detail string         // one human sentence; may be empty
}

// Size is a terminal's, in characters.
type Size struct{ Cols, Rows uint16 }

// Command is a process to run in a session.
type Command struct {
	Argv    []string
	Env     map[string]string // beside the session's
	Cwd     string            // empty: the session's working directory
	User    string            // empty: the session's user
	Stdin   bool              // false: reads end of file at once
	PTY     *Size             // nil: pipes
	Timeout time.Duration     // kills the whole tree; 0: none
	Tag     string            // the caller's own note; may be empty
}

// EventKind says what an Event of a process is.
type EventKind uint8

// The kinds of Event.
const (
	Stdout EventKind = iota + 1
	Stderr
	PTY
	End // the last one
)

// Event is output or the end of a process.
type Event struct {
	Kind EventKind
	Data []byte      // of Stdout, Stderr and PTY
	Exit CommandExit // of End
}

// CommandExit is how a command ended.
type CommandExit struct {
	Code   int    // -1 when a signal ended it or nothing is known
	Signal int    // 0 for none
	OOM    bool   // killed by the session's memory limit
	Error  string // why it ended other than by itself: time limit, session over, lost; may be empty
}

// CommandInfo describes a command that runs or ended a moment ago.
type CommandInfo struct {
	ID        string
	PID       uint32
	Argv      []string
	Cwd       string
	User      string
	PTY       bool
	Tag       string
	StartedAt time.Time
	Exit      *CommandExit // nil while it runs
}

// FileInfo describes a file inside a session.
type FileInfo struct {
	Path          string
	Name          string
	Type          FileType
	Size          int64
	Mode          uint32 // permission bits
	Owner, Group  string
	ModTime       time.Time
	SymlinkTarget string
	SHA256        string // hex; of files just written or read whole
}

// FileType is what a FileInfo is about.
type FileType string

// The types a client tells apart.
const (
	RegularFile FileType = "file"
	Directory   FileType = "dir"
	Symlink     FileType = "symlink"
	OtherFile   FileType = "other"
)

// Exit codes of commands that were not run, as shells give them.
const (
	ExitNotExecutable = 126
	ExitNotFound      = 127
)

// commandError is a refused command with the exit code a shell would give.
type commandError struct {
	code int
	err  error
}

func (e *commandError) Error() string { return e.err.Error() }
func (e *commandError) Unwrap() error { return e.err }

// ExitCodeOf returns the exit code that a shell gives for a command refused
// with err: 127 when there is no such command, 126 when it cannot be
// executed, 0 when err says neither.
func ExitCodeOf(err error) int {
	var e *commandError
	if errors.As(err, &e) {
		return e.code
	}
	return 0
}
