package node

import (
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"bivy/internal/driver"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// savedVersion is the version of handle files that this build writes; it reads
// that and older ones.
const savedVersion = 1

// saved is what the node remembers of a sandbox, in a handle file that only
// root can read: the environment may hold secrets of the session's owner. It
// never holds the agent's token, which is derived from the node's key.
type saved struct {
	Version int               `json:"version"`
	Sandbox session.SandboxID `json:"sandbox"`
	Owner   driver.Owner      `json:"owner"`
	Handle  *driver.Handle    `json:"handle,omitempty"` // nil: its start was not finished
	Init    identity          `json:"init"`
	Due     due               `json:"due"`

	unreadable string // why the file does not read; empty when it does
}

// identity is what Bind gives to the agent.
type identity struct {
	Env      map[string]string `json:"env,omitempty"`
	Hostname string            `json:"hostname,omitempty"`
	User     string            `json:"user,omitempty"`
	Workdir  string            `json:"workdir,omitempty"`
}

// due is a deadline: a moment on the machine's own clock in one boot. Wall is
// the date it was set to, and only counts after a reboot.
type due struct {
	Boot   string        `json:"boot"`
	Uptime time.Duration `json:"uptime_ns"`
	Wall   time.Time     `json:"wall"`
}

func (n *Node) newSaved(want sandbox.Spec) saved {
	env := maps.Clone(want.Template.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, want.Session.Env)
	return saved{
		Version: savedVersion, Sandbox: want.ID, Owner: want.Owner, Due: n.due(want.Deadline),
		Init: identity{
			Env: env, Hostname: want.Session.Hostname,
			User: cmp.Or(want.Session.User, want.Template.User), Workdir: cmp.Or(want.Session.Workdir, want.Template.Workdir),
		},
	}
}

// due places a date on the machine's clock by its distance from now. The
// zero date is no deadline.
func (n *Node) due(at time.Time) due {
	if at.IsZero() {
		return due{}
	}
	return due{Boot: n.o.BootID, Uptime: n.o.Uptime() + at.Sub(n.o.Now()), Wall: at.UTC()}
}

// left returns how long it is to the deadline; ok is false when there is none.
func (n *Node) left(d due) (left time.Duration, ok bool) {
	switch {
	case d.Wall.IsZero():
		return 0, false
	case d.Boot != n.o.BootID:
		return d.Wall.Sub(n.o.Now()), true
	}
	return d.Uptime - n.o.Uptime(), true
}

// Files of the node's directory.
const (
	keyFile    = "node.key"
	handlesDir = "handles"
	suffix     = ".json"
	keySize    = 32
)

// openDir makes the node's directory and returns its key.
func openDir(dir string) ([]byte, error) {
	if err := os.MkdirAll(filepath.Join(dir, handlesDir), 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, keyFile)
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, keySize)
		rand.Read(key)
		if err := writeFile(path, key, true); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if len(key) != keySize || st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s: want %d bytes readable by their owner alone, found %d of mode %04o", path, keySize, len(key), st.Mode().Perm())
	}
	return key, nil
}

// token is the access token of a sandbox's agent. It is of use inside that one
// sandbox, and nothing else can be derived from it.
func (n *Node) token(id session.SandboxID) string {
	mac := hmac.New(sha256.New, n.key)
	mac.Write([]byte("bivy/agent-token/v1\n" + string(id)))
	return hex.EncodeToString(mac.Sum(nil))
}

func (n *Node) path(id session.SandboxID) string {
	return filepath.Join(n.o.Dir, handlesDir, string(id)+suffix)
}

// write replaces a sandbox's handle file. With sync it waits for the disk, as
// the first write does, which announces what is about to exist. Later ones
// need not: a power cut that loses them ends the sandbox too.
func (n *Node) write(file saved, sync bool) error {
	b, err := json.Marshal(file)
	if err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	if err := writeFile(n.path(file.Sandbox), b, sync); err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	return nil
}

func (n *Node) erase(id session.SandboxID) error {
	if err := os.Remove(n.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("handle: %w", err)
	}
	return nil
}

// writeFile replaces path as a whole; with sync it survives a loss of power.
func writeFile(path string, data []byte, sync bool) error {
	if sync {
		return durable.WriteFile(path, data, 0o600)
	}
	return durable.WriteFile(path, data, 0o600, durable.NotSynced)
}

// readAll reads every handle file. One that does not read is returned with its
// sandbox's id, which is its name, and why it does not read. Temporary files
// of writes that were cut short are removed.
func (n *Node) readAll() ([]saved, error) {
	dir := filepath.Join(n.o.Dir, handlesDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []saved
	for _, e := range entries {
		if durable.IsTemp(e.Name()) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		id := session.SandboxID(strings.TrimSuffix(e.Name(), suffix))
		if _, _, err := id.Split(); err != nil {
			n.log.Warn("not a handle file", "file", e.Name())
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		var file saved
		why := decode(b, id, &file)
		if file.Version > savedVersion {
			return nil, kind.Errorf(kind.Conflict, "the handle file of sandbox %s has version %d, and this build reads up to %d", id, file.Version, savedVersion).
				WithHint("start the newer build of bivy that wrote it, or end its sessions with that build first")
		}
		if why != "" {
			file = saved{Version: savedVersion, Sandbox: id, unreadable: why}
		}
		all = append(all, file)
	}
	return all, nil
}

// decode reads the handle file of a sandbox and says why it does not read.
func decode(b []byte, id session.SandboxID, file *saved) (why string) {
	err := json.Unmarshal(b, file)
	switch {
	case err != nil:
		return err.Error()
	case file.Sandbox != id:
		return fmt.Sprintf("it is for sandbox %.64q", string(file.Sandbox))
	case file.Version < 1:
		return fmt.Sprintf("it has version %d, and the first is 1", file.Version)
	}
	return ""
}
