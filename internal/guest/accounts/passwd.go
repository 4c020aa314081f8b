// Package accounts looks up the users of the guest, resolves what a request means
// by its user and paths (Resolver), and runs functions with a user's rights
// (User.Do).
//
// It reads passwd(5) and group(5) itself: the guest is an arbitrary image, its
// files are untrusted, and a static binary cannot use the C library.
package accounts

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of what is read; anything beyond is ignored.
const (
	maxFile   = 4 << 20 // bytes of one file
	maxLine   = 64 << 10
	maxGroups = 1024 // supplementary groups of one user
)

// User is an account and everything needed to run a process as that account.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// UnknownError is returned for a user that the guest does not have.
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string { return "invalid username: '" + e.Name + "'" }

// DB reads accounts from two files and caches them until the files change.
type DB struct {
	passwd, group string

	mu     sync.Mutex
	loaded [2]stamp
	bare   bool // the guest has no passwd file
	users  []User
	groups []group
}

type group struct {
	name    string
	gid     uint32
	members []string
}

type stamp struct {
	ino      uint64
	size     int64
	modified time.Time
}

// Open returns the accounts in the given files, usually /etc/passwd and
// /etc/group. Nothing is read yet.
func Open(passwd, group string) *DB { return &DB{passwd: passwd, group: group} }

// Lookup returns the account with the given name, or with that number as uid. An
// unknown name is an [UnknownError]. A guest without a passwd file, such as an
// image of a single static program, has root and every uid.
func (d *DB) Lookup(name string) (User, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.load(); err != nil {
		return User{}, err
	}
	i := slices.IndexFunc(d.users, func(u User) bool { return u.Name == name })
	if uid, err := parseID(name); i < 0 && err == nil {
		i = slices.IndexFunc(d.users, func(u User) bool { return u.UID == uid })
	}
	u := User{Name: name, Home: "/", Shell: "/bin/sh"}
	switch uid, err := parseID(name); {
	case i >= 0:
		u = d.users[i]
	case d.bare && name == "root":
	case d.bare && err == nil:
		u.UID, u.GID = uid, uid
	default:
		return User{}, &UnknownError{Name: name}
	}
	for _, g := range d.groups {
		if g.gid != u.GID && slices.Contains(g.members, u.Name) && !slices.Contains(u.Groups, g.gid) && len(u.Groups) < maxGroups {
			u.Groups = append(u.Groups, g.gid)
		}
	}
	return u, nil
}

// Names returns functions that give the names of users and groups by id, or the
// id in decimal where there is no name. They use the files as they are now.
func (d *DB) Names() (user, group func(id uint32) string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	// On an error the ids are shown as numbers.
	_ = d.load()
	users, groups := d.users, d.groups
	user = func(id uint32) string {
		for _, u := range users {
			if u.UID == id {
				return u.Name
			}
		}
		return strconv.FormatUint(uint64(id), 10)
	}
	group = func(id uint32) string {
		for _, g := range groups {
			if g.gid == id {
				return g.name
			}
		}
		return strconv.FormatUint(uint64(id), 10)
	}
	return user, group
}

// load reads the files that have changed. A guest without a group file has no
// groups.
func (d *DB) load() error {
	text, now, changed, err := readIfChanged(d.passwd, d.loaded[0])
	switch {
	case errors.Is(err, os.ErrNotExist):
		d.users, d.loaded[0], d.bare = nil, stamp{}, true
	case err != nil:
		return err
	case changed:
		d.users, d.loaded[0], d.bare = parsePasswd(text), now, false
	}
	text, now, changed, err = readIfChanged(d.group, d.loaded[1])
	switch {
	case errors.Is(err, os.ErrNotExist):
		d.groups, d.loaded[1] = nil, stamp{}
	case err != nil:
		return err
	case changed:
		d.groups, d.loaded[1] = parseGroup(text), now
	}
	return nil
}

func readIfChanged(path string, old stamp) ([]byte, stamp, bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, old, false, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	now := stamp{ino: st.Ino, size: st.Size, modified: time.Unix(st.Mtim.Unix())}
	if now == old {
		return nil, old, false, nil
	}
	// O_NONBLOCK: root in the guest may have put a FIFO here.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, old, false, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, old, false, fmt.Errorf("read %s: %w", path, err)
	}
	return text, now, true, nil
}

// parsePasswd reads passwd(5); malformed lines are skipped, as libc does.
func parsePasswd(text []byte) []User {
	var users []User
	for line := range lines(text) {
		f := strings.Split(line, ":")
		if len(f) != 7 || f[0] == "" {
			continue
		}
		uid, err1 := parseID(f[2])
		gid, err2 := parseID(f[3])
		if err1 != nil || err2 != nil {
			continue
		}
		home := f[5]
		if !strings.HasPrefix(home, "/") || strings.IndexByte(home, 0) >= 0 {
			home = "/"
		}
		users = append(users, User{Name: f[0], UID: uid, GID: gid, Home: filepath.Clean(home), Shell: f[6]})
	}
	return users
}

// parseGroup reads group(5).
func parseGroup(text []byte) []group {
	var groups []group
	for line := range lines(text) {
		f := strings.Split(line, ":")
		if len(f) != 4 || f[0] == "" {
			continue
		}
		gid, err := parseID(f[2])
		if err != nil {
			continue
		}
		g := group{name: f[0], gid: gid}
		if f[3] != "" {
			g.members = strings.Split(f[3], ",")
		}
		groups = append(groups, g)
	}
	return groups
}

// lines yields the lines that can be entries: no comments, NIS markers or
// overlong lines.
func lines(text []byte) func(func(string) bool) {
	return func(yield func(string) bool) {
		for line := range bytes.Lines(text) {
			line = bytes.TrimRight(line, "\r\n")
			if len(line) == 0 || len(line) > maxLine || line[0] == '#' || line[0] == '+' || line[0] == '-' {
				continue
			}
			if !yield(string(line)) {
				return
			}
		}
	}
}

// parseID parses a user or group number. The highest one is
// refused: in system calls it means "no change".
func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 1<<32-1 {
		return 0, errors.New("invalid id: " + strconv.Quote(s))
	}
	return uint32(n), nil
}
