package accounts

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"unicode/utf8"

	"bivy/internal/guest/wire"
)

// defaultPath is what processes get when the agent itself was given no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Settings are the defaults that the host sets when it initialises the agent.
type Settings struct {
	User    string            // used by a request that names none
	Workdir string            // of a process without a cwd; empty: the user's home
	Env     map[string]string // added to every process
}

// Resolver combines the guest's accounts with the settings. It determines the
// account, the environment and the paths of a request.
type Resolver struct {
	db   *DB
	path string

	mu       sync.Mutex
	settings Settings
	named    bool // the host has set the default user
}

// NewResolver returns a resolver that looks accounts up in db. path is the agent's own PATH.
func NewResolver(db *DB, path string, s Settings) *Resolver {
	if path == "" {
		path = defaultPath
	}
	return &Resolver{db: db, path: path, settings: s}
}

// Settings returns the current settings; the map must not be changed.
func (r *Resolver) Settings() Settings {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.settings
}

// Update replaces the environment and, where they are not empty, the default
// user and directory.
func (r *Resolver) Update(s Settings) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settings.Env = maps.Clone(s.Env)
	if s.User != "" {
		r.settings.User, r.named = s.User, true
	}
	if s.Workdir != "" {
		r.settings.Workdir = s.Workdir
	}
}

// User returns the account with the given name, or the default account for "".
// That is root when the host has set no default and the guest has no account with
// the built-in default name.
func (r *Resolver) User(name string) (User, error) {
	if name == "" {
		r.mu.Lock()
		named := r.named
		name = r.settings.User
		r.mu.Unlock()
		u, err := r.db.Lookup(name)
		if unknown := (*UnknownError)(nil); !named && errors.As(err, &unknown) {
			return r.db.Lookup("root")
		}
		return u, err
	}
	if !utf8.ValidString(name) || len(name) > 256 {
		return User{}, &UnknownError{Name: wire.Escape(name[:min(len(name), 256)])}
	}
	return r.db.Lookup(name)
}

// Names is [DB.Names].
func (r *Resolver) Names() (user, group func(id uint32) string) { return r.db.Names() }

// Env returns the environment of a process of u: PATH, HOME, USER and LOGNAME,
// then the settings' variables, then those of the call. Later ones win.
func (r *Resolver) Env(u User, call map[string]string) map[string]string {
	all := map[string]string{"PATH": r.path, "HOME": u.Home, "USER": u.Name, "LOGNAME": u.Name}
	maps.Copy(all, r.Settings().Env)
	maps.Copy(all, call)
	return all
}

// Path makes a path of a request by u absolute and clean. "~" and relative paths
// are below the user's home; an empty path is the default directory. Symbolic
// links are not resolved.
func (r *Resolver) Path(u User, path string) (string, error) {
	path = wire.Unescape(path)
	switch {
	case strings.IndexByte(path, 0) >= 0:
		return "", fmt.Errorf("path %q contains a NUL byte", wire.Escape(path))
	case len(path) > wire.MaxPath:
		return "", fmt.Errorf("path is %d bytes long; the limit is %d", len(path), wire.MaxPath)
	case path == "":
		dir := r.Settings().Workdir
		if dir == "" || dir == "~" {
			return u.Home, nil
		}
		return r.Path(u, dir)
	case strings.HasPrefix(path, "/"):
		return filepath.Clean(path), nil
	case path == "~":
		return u.Home, nil
	case strings.HasPrefix(path, "~/"):
		return filepath.Join(u.Home, path[2:]), nil
	case strings.HasPrefix(path, "~"):
		return "", fmt.Errorf("path '%s' names another user's home, which is not supported", wire.Escape(path))
	}
	return filepath.Join(u.Home, path), nil
}
