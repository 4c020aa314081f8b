// Package snapshot makes and keeps the snapshots that sandboxes start from:
// an image booted once, its agent answering, written to disk.
//
// A snapshot belongs to one image, one shape of sandbox, one build of the
// sentry and one kind of processor; any other combination gets another
// directory. It holds no secret: it is taken before the agent gets its token.
package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"bivy/internal/driver"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/session"
)

// formatVersion is part of every key: a change of what is kept makes new
// snapshots.
const formatVersion = 2

const manifestName = "snapshot.json"

// Options are what a Maker is made of. All but BootLimit are required.
type Options struct {
	// Driver is the maker's own: Recover destroys every sandbox it has.
	Driver interface {
		driver.Driver
		driver.Checkpointer
	}
	// Build identifies what must not change between saving and restoring.
	Build string
	// Ready reports whether the agent in a booted sandbox answers; it is
	// asked again until it does.
	Ready func(ctx context.Context, d driver.Driver, id session.SandboxID) error
	// BootLimit bounds boot and readiness; 0: one minute.
	BootLimit time.Duration
	Log       *slog.Logger // required
}

// Maker makes snapshots.
type Maker struct {
	Options
	turn chan struct{} // one is checked or made at a time: it is rare and heavy

	mu      sync.Mutex
	checked map[string]map[string]file // by directory: what was found to be whole
}

// New returns a Maker that has made nothing yet.
func New(o Options) *Maker {
	return &Maker{Options: o, turn: make(chan struct{}, 1), checked: map[string]map[string]file{}}
}

// Request names what to snapshot.
type Request struct {
	Dir   string              // of the template; snapshots lie below, one directory each
	Start driver.StartRequest // boots the sandbox that is saved; made by sandbox.Spec
}

// manifest lists a snapshot's files.
type manifest struct {
	Version int             `json:"version"`
	Key     string          `json:"key"`
	Files   map[string]file `json:"files"`
}

type file struct {
	Size   int64  `json:"size"`   // bytes
	SHA256 string `json:"sha256"` // hex
}

// Recover destroys what an earlier process left half made.
func (m *Maker) Recover(ctx context.Context) error {
	left, err := m.Driver.List(ctx)
	for _, f := range left {
		err = errors.Join(err, m.Driver.Destroy(ctx, f.ID))
	}
	return err
}

// Ensure returns the directory of the snapshot, a driver.Dir, and makes it when
// there is none. For one that this process has checked or made it compares the
// sizes of files; others are read whole, one at a time.
func (m *Maker) Ensure(ctx context.Context, req Request) (string, error) {
	key, err := m.key(req)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(req.Dir, key)
	if files := m.known(dir); files != nil && sizes(dir, files) == nil {
		return dir, nil
	}
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	err = m.check(dir, key)
	if err == nil {
		return dir, nil
	}
	if !kind.Is(err, kind.NotFound) {
		m.Log.Warn("a snapshot is damaged and is made again", "dir", dir, "error", err)
	}
	if err := m.make(ctx, req, dir, key); err != nil {
		return "", err
	}
	return dir, m.prune(req.Dir, key)
}

// prune removes the snapshots of other builds and processors: what is restored
// from one was read whole by the time it runs.
func (m *Maker) prune(dir, keep string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.Name() != keep {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

func (m *Maker) known(dir string) map[string]file {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.checked[dir]
}

func (m *Maker) note(dir string, files map[string]file) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.checked[dir] = files
}

func (m *Maker) make(ctx context.Context, req Request, dir, key string) (err error) {
	if err := os.MkdirAll(req.Dir, 0o700); err != nil {
		return err
	}
	// What a killed process left: nothing else makes one here, see turn.
	left, err := filepath.Glob(filepath.Join(req.Dir, ".making-*"))
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp(req.Dir, ".making-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work) // gone already when renamed
	files := filepath.Join(work, "files")
	if err := os.Mkdir(files, 0o700); err != nil {
		return err
	}
	if err := m.boot(ctx, req.Start, files); err != nil {
		return fmt.Errorf("snapshot of %s: %w", req.Start.Image, err)
	}
	man := manifest{Version: formatVersion, Key: key}
	if man.Files, err = digest(files); err != nil {
		return err
	}
	b, err := json.MarshalIndent(man, "", "  ")
	if err != nil {
		return err
	}
	if err := durable.WriteFile(filepath.Join(files, manifestName), b, 0o600); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil { // damaged, or of a crash
		return err
	}
	if err := os.Rename(files, dir); err != nil {
		return err
	}
	m.note(dir, man.Files)
	return durable.SyncDir(req.Dir)
}

// boot runs the image until its agent answers and saves it.
func (m *Maker) boot(ctx context.Context, start driver.StartRequest, dir string) (err error) {
	limit := m.BootLimit
	if limit == 0 {
		limit = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer func() { err = errors.Join(err, m.Driver.Destroy(context.WithoutCancel(ctx), start.ID)) }()
	if _, err := m.Driver.Start(ctx, start); err != nil {
		return err
	}
	err = poll.Until(ctx, poll.Delays{First: time.Millisecond, Max: 100 * time.Millisecond}, func() (done bool, err error) {
		err = m.Ready(ctx, m.Driver, start.ID)
		return err == nil, err
	})
	if err != nil {
		return kind.Errorf(kind.Unavailable, "the agent does not answer within %s: %w", limit, err)
	}
	return m.Driver.Checkpoint(ctx, start.ID, driver.Dir(dir), driver.CheckpointOptions{})
}

// key names everything a restore depends on.
func (m *Maker) key(req Request) (string, error) {
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	s := req.Start
	b, err := json.Marshal([]any{formatVersion, m.Build, runtime.GOARCH, features(cpu), s.Image, s.Args, s.Env, s.Shape, s.Limits.DiskBytes})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16]), nil
}

// features are the first processor's flags, sorted.
func features(cpuinfo []byte) []string {
	for line := range bytes.Lines(cpuinfo) {
		if name, flags, ok := strings.Cut(string(line), ":"); ok && strings.TrimSpace(name) == "flags" {
			f := strings.Fields(flags)
			slices.Sort(f)
			return f
		}
	}
	return nil
}

// check fails with NotFound for no snapshot, and says what is wrong with a
// damaged one. Called in turn.
func (m *Maker) check(dir, key string) error {
	b, err := os.ReadFile(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return kind.Errorf(kind.NotFound, "no snapshot %s", key)
	}
	if err != nil {
		return err
	}
	var man manifest
	if err := json.Unmarshal(b, &man); err != nil {
		return fmt.Errorf("snapshot manifest %s: %w", dir, err)
	}
	if man.Version != formatVersion || man.Key != key || len(man.Files) == 0 {
		return fmt.Errorf("snapshot manifest %s: version %d, key %s, %d files", dir, man.Version, man.Key, len(man.Files))
	}
	found, err := digest(dir)
	if err != nil {
		return err
	}
	delete(found, manifestName)
	for name, want := range man.Files {
		if found[name] != want {
			return fmt.Errorf("snapshot file %s is not as it was written", filepath.Join(dir, name))
		}
	}
	m.note(dir, man.Files)
	return nil
}

func sizes(dir string, files map[string]file) error {
	for name, want := range files {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return fmt.Errorf("snapshot file: %w", err)
		}
		if info.Size() != want.Size {
			return fmt.Errorf("snapshot file %s has %d bytes instead of %d", filepath.Join(dir, name), info.Size(), want.Size)
		}
	}
	return nil
}

func digest(dir string) (map[string]file, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	out := map[string]file{}
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		h := sha256.New()
		n, err := io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		out[e.Name()] = file{Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}
	}
	return out, nil
}
