package api

import (
	"context"
	"io"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/driver"
	"bivy/internal/journal"
	"bivy/internal/lifecycle"
	"bivy/internal/secret"
	"bivy/internal/session"
	"bivy/internal/template"
	"bivy/internal/workload"
)

// The parts that do the work. Each of their methods takes the caller and
// decides whether it may do what it asks for: Denied, or NotFound where the
// caller must not learn that something exists.

// Sessions makes, finds and ends sessions and reads their records.
// lifecycle.Manager is one.
type Sessions interface {
	// Create makes a session and answers once it runs.
	Create(ctx context.Context, req lifecycle.CreateRequest) (session.Session, journal.Timing, error)
	// Get returns one session, ended ones too.
	Get(ctx context.Context, who access.Caller, id session.ID) (session.Session, error)
	// List returns a page of sessions, newest first, and the cursor of the
	// next one.
	List(ctx context.Context, who access.Caller, f session.Filter, cursor string, limit int) ([]session.Session, string, error)
	// End ends a session and answers when nothing of it is left.
	End(ctx context.Context, req lifecycle.EndRequest) (session.Session, error)
	// SetTimeout makes a session end seconds from now.
	SetTimeout(ctx context.Context, who access.Caller, id session.ID, seconds session.Seconds) (session.Session, error)
	// Events calls fn for at most limit events of a record after a sequence
	// number.
	Events(ctx context.Context, who access.Caller, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error
	// Follow is Events, and goes on until the record is complete.
	Follow(ctx context.Context, who access.Caller, id session.ID, after uint64, fn func(audit.Stored) error) error
	// Export writes a record in the form that is verified offline.
	Export(ctx context.Context, who access.Caller, id session.ID, w io.Writer) error
}

// Workload runs commands and moves files in sessions. workload.Service is one.
type Workload interface {
	// Start runs a command; the Process must be detached.
	Start(ctx context.Context, who access.Caller, id session.ID, cmd workload.Command) (*workload.Process, error)
	// Attach takes hold of a command that runs or has just ended.
	Attach(ctx context.Context, who access.Caller, id session.ID, command string) (*workload.Process, error)
	// Commands lists commands that run or have just ended.
	Commands(ctx context.Context, who access.Caller, id session.ID) ([]workload.CommandInfo, error)
	// Describe is Commands for one command.
	Describe(ctx context.Context, who access.Caller, id session.ID, command string) (workload.CommandInfo, error)
	// Stats measures a session's sandbox.
	Stats(ctx context.Context, who access.Caller, id session.ID) (driver.Stats, error)
	// ReadFile opens a file, which the caller closes.
	ReadFile(ctx context.Context, who access.Caller, id session.ID, path, user string) (io.ReadCloser, workload.FileInfo, error)
	// WriteFile makes or replaces a file of size bytes; -1 when not known.
	WriteFile(ctx context.Context, who access.Caller, id session.ID, path, user string, r io.Reader, size int64) (workload.FileInfo, error)
	// Stat describes a file.
	Stat(ctx context.Context, who access.Caller, id session.ID, path, user string) (workload.FileInfo, error)
	// ListDir describes what is in a directory, depth levels deep.
	ListDir(ctx context.Context, who access.Caller, id session.ID, path, user string, depth int) ([]workload.FileInfo, error)
	// MakeDir makes a directory and its parents.
	MakeDir(ctx context.Context, who access.Caller, id session.ID, path, user string) (workload.FileInfo, error)
	// Move renames a file or directory.
	Move(ctx context.Context, who access.Caller, id session.ID, from, to, user string) (workload.FileInfo, error)
	// Remove removes a file, or a directory with all in it.
	Remove(ctx context.Context, who access.Caller, id session.ID, path, user string) error
}

// System is the record of the node. journal.SystemRecord is one.
type System interface {
	// Export writes the record in the form that is verified offline.
	Export(ctx context.Context, who access.Caller, w io.Writer) error
	// Head returns a signed statement of the heads of all records of the node.
	Head(ctx context.Context, who access.Caller) (audit.Seal, error)
	// Listing calls fn for every record of the node.
	Listing(ctx context.Context, who access.Caller, fn func(audit.ListedRecord) error) error
	// RotateKey replaces the key that signs records.
	RotateKey(ctx context.Context, who access.Caller) error
}

// Templates keeps templates. catalog.Service is one.
type Templates interface {
	// List returns every template, oldest first.
	List(ctx context.Context, who access.Caller) ([]template.Listed, error)
	// Get returns a template by name or digest.
	Get(ctx context.Context, who access.Caller, nameOrDigest string) (template.Listed, error)
	// Build makes a template; progress may be nil.
	Build(ctx context.Context, who access.Caller, spec template.Spec, progress template.Progress) (template.Listed, error)
	// Remove takes a name away, or with a digest removes the template.
	Remove(ctx context.Context, who access.Caller, nameOrDigest string) error
}

// Keys keeps API keys. auth.Keyring is one.
type Keys interface {
	// Authenticate returns whose key token is; from is the host that the
	// request came from.
	Authenticate(ctx context.Context, token, from string) (access.Caller, error)
	// Create makes a key and returns its token, this once.
	Create(ctx context.Context, who access.Caller, role access.Role, label string) (secret.Value, auth.Key, error)
	// List returns every key, revoked ones too.
	List(ctx context.Context, who access.Caller) ([]auth.Key, error)
	// Revoke makes a key invalid.
	Revoke(ctx context.Context, who access.Caller, id string) error
}

// Node tells about the node itself. nodeinfo.Service is one.
type Node interface {
	// Version returns which build the node runs.
	Version(ctx context.Context, who access.Caller) (client.Version, error)
	// Node returns what was found on the machine.
	Node(ctx context.Context, who access.Caller) (client.Node, error)
	// AuditKey returns the keys that sign records.
	AuditKey(ctx context.Context, who access.Caller) (client.AuditKey, error)
}
