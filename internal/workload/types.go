package workload

import (
	"bivy/internal/argv"
	"errors"
	"time"
)

// Size is a terminal's, in characters.
type Size struct{ Cols, Rows uint16 }

// Command is a process to run in a session.
type Command struct {
	Argv    argv.Argv         // the program and its arguments
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
	Data []byte // of Stdout, Stderr and PTY
	Exit Exit   // of End
}

// Exit is how a command ended.
type Exit struct {
	Code   int    // -1 when a signal ended it or nothing is known
	Signal int    // 0 for none
	OOM    bool   // killed by the session's memory limit
	Error  string // why it ended other than by itself: time limit, session over, lost; may be empty
}

// CommandInfo describes a command that runs or ended a moment ago.
type CommandInfo struct {
	ID        string    // 20 characters
	PID       uint32    // inside the session; 0 until it runs
	Argv      argv.Argv // the program and its arguments
	Cwd       string    // as asked for
	User      string    // as asked for
	PTY       bool      // it has a terminal
	Tag       string    // the caller's own note
	StartedAt time.Time // when it was asked for
	Exit      *Exit     // nil while it runs
}

// FileInfo describes a file inside a session.
type FileInfo struct {
	Path          string    // absolute
	Name          string    // last element of Path
	Type          FileType  // what it is
	Size          int64     // bytes; -1 when not known
	Mode          uint32    // permission bits
	Owner, Group  string    // names inside, or numbers
	ModTime       time.Time // of its content
	SymlinkTarget string    // of a symbolic link
	SHA256        string    // hex; of files just written or read whole
}

// FileType is what a FileInfo is about.
type FileType string

// The types that a client tells apart.
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
