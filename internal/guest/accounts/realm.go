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

// Settings are the sandbox-wide choices the host makes when it initialises the
// agent.
type Settings struct {
	User    string            // who a request without a user acts as
	Workdir string            // where a process without a cwd starts; empty: home
	Env     map[string]string // for every process
}

// Realm joins the guest's accounts with the sandbox-wide settings: it says who
// a request acts as, with which environment and where.
type Realm struct {
	db   *DB
	path string

	mu       sync.Mutex
	settings Settings
	named    bool // the host has chosen the default user
}

// NewRealm returns a realm over db. path is the agent's own PATH.
func NewRealm(db *DB, path string, s Settings) *Realm {
	if path == "" {
		path = defaultPath
	}
	return &Realm{db: db, path: path, settings: s}
}

// Settings returns the current settings; the map must not be changed.
func (r *Realm) Settings() Settings {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.settings
}

// Update replaces the environment and, where they are not empty, the default
// user and directory.
func (r *Realm) Update(s Settings) {
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

// User returns the account called name, or the default one for "". If
// the host has chosen no default, and the guest has no account of the built-in
// default name, that is root.
func (r *Realm) User(name string) (User, error) {
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
func (r *Realm) Names() (user, group func(id uint32) string) { return r.db.Names() }

// Env composes the environment of a process of u: the identity first, then the
// sandbox's, then the call's; later ones win.
func (r *Realm) Env(u User, call map[string]string) map[string]string {
	all := map[string]string{"PATH": r.path, "HOME": u.Home, "USER": u.Name, "LOGNAME": u.Name}
	maps.Copy(all, r.Settings().Env)
	maps.Copy(all, call)
	return all
}

// Path resolves a path as a request of u means it: absolute as it is, "~" and
// relative ones from the home. An empty one is the default directory. The
// result is clean and absolute; symbolic links are not looked at.
func (r *Realm) Path(u User, path string) (string, error) {
	path = wire.Unescape(path)
	switch {
	case strings.IndexByte(path, 0) >= 0:
		return "", fmt.Errorf("path %q contains a NUL byte", wire.Escape(path))
	case len(path) > wire.MaxPath:
		return "", fmt.Errorf("path is %d bytes long, at most %d are possible", len(path), wire.MaxPath)
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
