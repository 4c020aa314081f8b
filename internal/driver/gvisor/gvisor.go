// Package gvisor isolates sandboxes with gVisor, embedded: it drives runsc's
// container package in this process, and the sandboxes run bivy-sentry.
//
// Each sandbox is one gVisor container on an EROFS image without a gofer, with
// a writable layer in memory, no host network and one wire (package link). Its
// whole process tree is in one cgroup, whose limits are the session's.
//
// What runsc's Container does after New is not used where it would trust a
// process id across restarts or keep state of its own: death is watched
// through a pidfd, and destruction goes by cgroup.
package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/specutils"

	"bivy/internal/cgroup"
	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/link"
	"bivy/internal/session"
)

// Options of New.
type Options struct {
	// Root is where the driver keeps what sandboxes need while they live:
	// runsc's state, control sockets and bundles. Two drivers on one root are
	// the same driver, one after the other.
	Root string
	// Sentry is the path of the bivy-sentry binary.
	Sentry string
	// Cgroup is the name of the parent of all sandbox groups.
	Cgroup string
	// DebugDir, when set, receives gVisor's debug logs. They contain guest
	// data: never set it in production.
	DebugDir string
	Log      *slog.Logger
}

// Driver implements driver.Driver and all its optional interfaces.
type Driver struct {
	opt  Options
	conf *config.Config
	host *cgroup.Host
	log  *slog.Logger

	mu        sync.Mutex
	sandboxes map[session.SandboxID]*sandbox // also those being started
}

var (
	_ driver.Driver       = (*Driver)(nil)
	_ driver.Pauser       = (*Driver)(nil)
	_ driver.Checkpointer = (*Driver)(nil)
	_ driver.Exporter     = (*Driver)(nil)
	_ driver.Statter      = (*Driver)(nil)
	_ driver.Inspector    = (*Driver)(nil)
)

// Name of this driver in handles and records.
const Name = "gvisor"

// New prepares this process and host for sandboxes. It needs root. The
// process's os.Stdin, os.Stdout and os.Stderr become /dev/null for gVisor's
// sake, which hands them to every sandbox and changes their owner: who wants
// to keep them takes them before.
func New(opt Options) (*Driver, error) {
	if os.Geteuid() != 0 {
		return nil, kind.Errorf(kind.Unavailable, "gVisor sandboxes need root, this is uid %d", os.Geteuid()).
			WithHint("run bivy as root")
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if info, err := os.Stat(opt.Sentry); err != nil || info.Mode()&0o111 == 0 {
		return nil, kind.Errorf(kind.Unavailable, "no bivy-sentry binary at %q", opt.Sentry).
			WithHint("build with make build, which carries it inside bivy")
	}
	d := &Driver{opt: opt, log: opt.Log, sandboxes: map[session.SandboxID]*sandbox{}}
	for _, dir := range []string{opt.Root, d.stateDir(), d.bundles()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, fmt.Errorf("gvisor root: %w", err)
		}
	}
	for _, path := range []string{d.bundles(), opt.Sentry} {
		if err := reachable(path); err != nil {
			return nil, err
		}
	}
	var err error
	if d.host, err = cgroup.Detect(opt.Cgroup); err != nil {
		return nil, err
	}
	if d.conf, err = d.config(); err != nil {
		return nil, err
	}
	if err := detachStdio(); err != nil {
		return nil, err
	}
	specutils.ExePath = opt.Sentry
	log.SetTarget(discard{})
	return d, nil
}

// reachable checks that a sentry, which is no user this host knows, can walk
// to path: otherwise its start would fail without saying why.
func reachable(path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode()&0o001 == 0 {
			return kind.Errorf(kind.Unavailable, "%s is closed to other users (mode %o), and sandboxes run as one", dir, info.Mode().Perm()).
				WithHint("chmod o+x %s, or choose other directories with data_dir and run_dir", dir)
		}
		if dir == "/" {
			return nil
		}
	}
}

// detachStdio points the globals that gVisor hands to sandboxes at /dev/null.
func detachStdio() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	os.Stdin, os.Stdout, os.Stderr = null, null, null
	return nil
}

// discard drops gVisor's log, which is global and holds guest data.
type discard struct{}

func (discard) Emit(int, log.Level, time.Time, string, ...any) {}

func (d *Driver) stateDir() string { return filepath.Join(d.opt.Root, "state") }
func (d *Driver) bundles() string  { return filepath.Join(d.opt.Root, "bundles") }
func (d *Driver) bundle(id session.SandboxID) string {
	return filepath.Join(d.bundles(), string(id))
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return Name }

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() driver.Capabilities {
	return driver.Capabilities{
		Isolation: "gvisor",
		Pause:     true, Snapshot: true, Export: true,
		Limits: []string{"cpu", "memory", "pids", "disk"},
	}
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, req driver.StartRequest) (driver.Handle, error) {
	if err := validate(req); err != nil {
		return driver.Handle{}, err
	}
	s := newSandbox(d, req)
	s.busy <- struct{}{} // nobody else has it yet
	defer s.release()
	if err := d.claim(s); err != nil {
		return driver.Handle{}, err
	}
	handle, err := s.start(ctx, req.Snapshot)
	if err != nil {
		// On a context of its own: the caller's may be what failed.
		if cleanup := s.destroy(context.WithoutCancel(ctx)); cleanup != nil {
			return driver.Handle{}, errors.Join(err, cleanup) // stays listed, to be destroyed again
		}
		d.forget(s)
		return driver.Handle{}, err
	}
	return handle, nil
}

// claim takes the id, in this process and on the host.
func (d *Driver) claim(s *sandbox) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := os.Lstat(d.bundle(s.id))
	if d.sandboxes[s.id] != nil || err == nil {
		return kind.Errorf(kind.Conflict, "sandbox %s exists", s.id)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.sandboxes[s.id] = s
	return nil
}

func (d *Driver) forget(s *sandbox) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sandboxes[s.id] == s {
		delete(d.sandboxes, s.id)
	}
}

// find returns a sandbox of this process.
func (d *Driver) find(id session.SandboxID) (*sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sandboxes[id]
	if s == nil {
		return nil, kind.Errorf(kind.NotFound, "no sandbox %s", id)
	}
	return s, nil
}

// Dial implements driver.Driver.
func (d *Driver) Dial(ctx context.Context, id session.SandboxID, port uint16) (net.Conn, error) {
	s, err := d.find(id)
	if err != nil {
		return nil, err
	}
	var wire *link.Link
	if err := s.do(ctx, func() error { wire = s.wire.Load(); return nil }); err != nil {
		return nil, err
	}
	// Not as an operation: a dial may take as long as its context allows.
	conn, err := wire.Dial(ctx, port)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, kind.Wrap(kind.Unavailable, fmt.Errorf("sandbox %s: %w", id, err))
	}
	return conn, nil
}

// Wait implements driver.Driver.
func (d *Driver) Wait(ctx context.Context, id session.SandboxID) (driver.Exit, error) {
	s, err := d.find(id)
	if err != nil {
		return driver.Exit{}, err
	}
	select {
	case <-s.ended:
		return s.exit, nil
	case <-ctx.Done():
		return driver.Exit{}, ctx.Err()
	}
}

// Destroy implements driver.Driver.
func (d *Driver) Destroy(ctx context.Context, id session.SandboxID) error {
	if _, _, err := id.Split(); err != nil {
		return err
	}
	s, err := d.find(id)
	if err != nil {
		// Leftovers of another process, or nothing at all.
		s = newSandbox(d, driver.StartRequest{ID: id})
	}
	// First without waiting for a turn: an operation may be waiting for a
	// guest kernel that does not answer.
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	if err := errors.Join(s.killStrays(ctx), s.group.Kill(ctx)); err != nil {
		return err
	}
	if err := s.acquire(ctx); err != nil {
		return fmt.Errorf("sandbox %s is busy: %w", id, err)
	}
	defer s.release()
	if err := s.destroy(ctx); err != nil {
		return err
	}
	d.forget(s)
	return nil
}

// closeLimit bounds how long Close waits for operations in progress.
const closeLimit = 5 * time.Second

// Close implements driver.Driver.
func (d *Driver) Close() error {
	d.mu.Lock()
	all := slices.Collect(maps.Values(d.sandboxes))
	d.mu.Unlock()
	// Bounded: a guest kernel that does not answer keeps its sandbox busy, and
	// the link of a process that ends is closed by its end.
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	for _, s := range all {
		if s.acquire(ctx) != nil {
			continue
		}
		s.closeWire()
		s.release()
	}
	// Ours only while sandboxes are in it; if there are, it stays.
	return d.host.RemoveIfEmpty()
}

// OutboundRefused is how much the sandbox tried to send of its own accord.
func (s *sandbox) outboundRefused() uint64 {
	if wire := s.wire.Load(); wire != nil {
		return wire.Refused()
	}
	return 0
}

// Addresses inside every sandbox, for those who configure or test it.
var (
	GuestAddress   = link.Guest
	GatewayAddress = link.Gateway
)
