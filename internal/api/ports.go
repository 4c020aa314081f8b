package api

import (
	"bivy/internal/access"
	"context"
	"io"

	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/driver"
	"bivy/internal/lifecycle"
	"bivy/internal/secret"
	"bivy/internal/session"
	"bivy/internal/template"
)

// Sessions makes, finds and ends sessions. lifecycle.Manager is one.
type Sessions interface {
	Create(ctx context.Context, req lifecycle.CreateRequest) (session.Session, lifecycle.Timing, error)
	Get(ctx context.Context, id session.ID) (session.Session, error)
	List(ctx context.Context, f session.Filter, cursor string, limit int) ([]session.Session, string, error)
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

// Process is one caller's hold on a command. Its output waits for every hold,
// so Next must be called, or Detach.
type Process interface {
	// Identity is the command's id and its pid inside the session.
	Identity() (id string, pid uint32)
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
	WriteFile(ctx context.Context, id session.ID, actor session.Principal, path, user string, r io.Reader, size int64) (lifecycle.FileInfo, error)
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

// Keys keeps API keys. auth.Keyring is one.
type Keys interface {
	Authenticate(ctx context.Context, token string) (access.Caller, error)
	Create(ctx context.Context, by session.Principal, role access.Role, label string) (secret.Value, auth.Key, error)
	List(ctx context.Context) ([]auth.Key, error)
	Revoke(ctx context.Context, id string) error
}

// CommandsOf makes Commands of a Manager, which gives its own type of process.
func CommandsOf(m *lifecycle.Manager) Commands { return managed{m} }

type managed struct{ *lifecycle.Manager }

func (m managed) Start(ctx context.Context, id session.ID, actor session.Principal, cmd lifecycle.Command) (Process, error) {
	return hold(m.Manager.Start(ctx, id, actor, cmd))
}

func (m managed) Attach(ctx context.Context, id session.ID, actor session.Principal, command string) (Process, error) {
	return hold(m.Manager.Attach(ctx, id, actor, command))
}

func hold(p *lifecycle.Process, err error) (Process, error) {
	if err != nil {
		return nil, err
	}
	return held{p}, nil
}

type held struct{ *lifecycle.Process }

func (h held) Identity() (string, uint32) { return h.ID, h.PID }

// What a Manager, a template store and a keyring are used as.
var (
	_ Sessions  = (*lifecycle.Manager)(nil)
	_ Files     = (*lifecycle.Manager)(nil)
	_ Records   = (*lifecycle.Manager)(nil)
	_ Templates = (*template.Store)(nil)
	_ Keys      = (*auth.Keyring)(nil)
)
