package node

import (
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
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

// recordVersion is the version of record that this build writes; it reads
// that and older ones.
const recordVersion = 1

// record is what the node remembers of a sandbox, in a file readable by root
// alone: the environment may hold what its owner would not show. It never
// holds the agent's token, which is derived from the node's key.
type record struct {
	Version int               `json:"version"`
	Sandbox session.SandboxID `json:"sandbox"`
	Handle  *driver.Handle    `json:"handle,omitempty"` // nil: its start was not finished
	Init    identity          `json:"init"`
	Due     due               `json:"due"`
}

// identity is what Bind tells the agent.
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

func (n *Node) newRecord(want lifecycle.SandboxSpec) record {
	env := maps.Clone(want.Template.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, want.Spec.Env)
	return record{
		Version: recordVersion, Sandbox: want.ID, Due: n.due(want.Deadline),
		Init: identity{
			Env: env, Hostname: want.Spec.Hostname,
			User: or(want.Spec.User, want.Template.User), Workdir: or(want.Spec.Workdir, want.Template.Workdir),
		},
	}
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
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
	tmpPrefix  = ".tmp-"
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

// token is the access token of a sandbox's agent. Whoever has it can act
// inside that one sandbox and derive nothing else from it.
func (n *Node) token(id session.SandboxID) string {
	mac := hmac.New(sha256.New, n.key)
	mac.Write([]byte("bivy/agent-token/v1\n" + string(id)))
	return hex.EncodeToString(mac.Sum(nil))
}

func (n *Node) path(id session.SandboxID) string {
	return filepath.Join(n.o.Dir, handlesDir, string(id)+suffix)
}

// write replaces a sandbox's file. Sync waits for the disk: the first write
// does, since it announces what is about to exist. Later ones need not,
// because a power cut that loses them ends the sandbox too.
func (n *Node) write(rec record, sync bool) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	if err := writeFile(n.path(rec.Sandbox), b, sync); err != nil {
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

// writeFile replaces path as a whole, mode 0600.
func writeFile(path string, data []byte, sync bool) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, tmpPrefix) // 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(data)
	if err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil || !sync {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	// A file that might be lost with power goes back to its temporary name,
	// which the deferred cleanup removes.
	if syncErr := errors.Join(d.Sync(), d.Close()); syncErr != nil {
		return errors.Join(syncErr, os.Rename(path, f.Name()))
	}
	return nil
}

// readAll reads every sandbox's file. One that does not read is returned by
// its name alone, as a start that was not finished: whatever there is of that
// sandbox has to go. Half-written files are removed.
func (n *Node) readAll() ([]record, error) {
	dir := filepath.Join(n.o.Dir, handlesDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []record
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		id := session.SandboxID(strings.TrimSuffix(e.Name(), suffix))
		if _, _, err := id.Split(); err != nil {
			n.log.Warn("a file among the handles that is none", "file", e.Name())
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		var rec record
		if err := json.Unmarshal(b, &rec); err != nil || rec.Sandbox != id || rec.Version < 1 || rec.Version > recordVersion {
			n.log.Error("a handle that does not read; its sandbox will be destroyed", "sandbox", id, "version", rec.Version, "error", err)
			rec = record{Version: recordVersion, Sandbox: id}
		}
		all = append(all, rec)
	}
	return all, nil
}
