package api

import (
	"context"
	"io"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/template"
)

// Sessions makes, finds and ends sessions. lifecycle.Manager is one.
type Sessions interface {
	Create(ctx context.Context, req lifecycle.CreateRequest) (session.Session, lifecycle.Timing, error)
	Get(ctx context.Context, id session.ID) (session.Session, error)
	List(ctx context.Context, f lifecycle.Filter, cursor string, limit int) ([]session.Session, string, error)
	End(ctx context.Context, req lifecycle.EndRequest) (session.Session, error)
	SetTimeout(ctx context.Context, id session.ID, actor session.Principal, seconds session.Seconds) (session.Session, error)
	Stats(ctx context.Context, id session.ID) (driver.Stats, error)
}

// Commands runs commands in sessions.
type Commands interface {
	Start(ctx context.Context, id session.ID, actor session.Principal, cmd lifecycle.Command) (Process, error)
	Attach(ctx context.Context, id session.ID, actor session.Principal, command string) (Process, error)
	Commands(ctx context.Context, id session.ID) ([]lifecycle.CommandInfo, error)
}

// Process is one caller's hold on a command. lifecycle.Process is one.
type Process interface {
	// Info says what runs.
	Info() lifecycle.CommandInfo
	// Next waits for output or the end. Data belongs to the caller.
	Next(ctx context.Context) (lifecycle.Event, error)
	Write(ctx context.Context, b []byte) error
	CloseStdin(ctx context.Context) error
	Resize(ctx context.Context, size lifecycle.Size) error
	Signal(ctx context.Context, signal int) error
	// Detach lets go; the command runs on.
	Detach()
}

// Files moves files in and out of sessions.
type Files interface {
	ReadFile(ctx context.Context, id session.ID, actor session.Principal, path, user string) (io.ReadCloser, lifecycle.FileInfo, error)
	WriteFile(ctx context.Context, id session.ID, actor session.Principal, path, user string, mode uint32, r io.Reader) (lifecycle.FileInfo, error)
	Stat(ctx context.Context, id session.ID, path, user string) (lifecycle.FileInfo, error)
	ListDir(ctx context.Context, id session.ID, path, user string, depth int) ([]lifecycle.FileInfo, error)
	MakeDir(ctx context.Context, id session.ID, actor session.Principal, path, user string) (lifecycle.FileInfo, error)
	Move(ctx context.Context, id session.ID, actor session.Principal, from, to, user string) (lifecycle.FileInfo, error)
	Remove(ctx context.Context, id session.ID, actor session.Principal, path, user string) error
}

// Records reads the records of sessions.
type Records interface {
	Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error
	Watch(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error
	Export(ctx context.Context, id session.ID, w io.Writer) error
}

// Templates keeps templates. template.Store is one.
type Templates interface {
	List() ([]template.Listed, error)
	Get(nameOrDigest string) (template.Template, error)
	Build(ctx context.Context, spec template.Spec, progress template.Progress) (template.Template, error)
	Remove(nameOrDigest string) error
}

// Keys keeps API keys.
type Keys interface {
	// Authenticate returns whose key secret is; Unauthentic when nobody's,
	// or when it has expired or was revoked. It takes the same time for every
	// wrong secret.
	Authenticate(ctx context.Context, secret string) (Key, error)
	// Create makes a key and its secret. A name that is taken is a Conflict,
	// which is what makes a repeated create harmless.
	Create(ctx context.Context, k NewKey) (Key, string, error)
	List(ctx context.Context) ([]Key, error)
	// Revoke is NotFound for an unknown id, and Conflict for the last admin.
	Revoke(ctx context.Context, id string) error
}

// Role is what a key may do.
type Role string

// The roles.
const (
	Admin     Role = "admin"     // everything
	Developer Role = "developer" // its own sessions
	Auditor   Role = "auditor"   // read sessions and records, all of them
)

// Key is an API key without its secret.
type Key struct {
	ID        string
	Name      string
	Role      Role
	CreatedAt time.Time
	ExpiresAt time.Time // zero: never
}

// NewKey asks for a key.
type NewKey struct {
	Name     string
	Role     Role
	Lifetime time.Duration // 0: for ever
}

// subject names the key in records and as an owner.
func (k Key) subject() string { return "key:" + k.ID }
