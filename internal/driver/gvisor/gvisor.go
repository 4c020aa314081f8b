package gvisor

import (
	"context"
	"errors"
	"fmt"
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
	// Outbound handles the TCP connections that guests open; nil: they are
	// refused.
	Outbound driver.Outbound
	// DebugDir, when set, receives gVisor's debug logs. They contain guest
	// data: never set it in production.
	DebugDir string
	Log      *slog.Logger // nil: discard
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
	_ driver.Limiter      = (*Driver)(nil)
)

// Name of this driver in handles and records.
const Name = "gvisor"

// New prepares this process and host for sandboxes. It needs root. The
// process's os.Stdin, os.Stdout and os.Stderr become /dev/null, because gVisor
// hands them to every sandbox and changes their owner: a program that needs
// them keeps copies before.
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
	if err := d.removeTemporary(); err != nil {
		return nil, fmt.Errorf("gvisor root: %w", err)
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

// reachable checks that a sentry, whose user has no rights on this host, can
// walk to path: otherwise its start would fail without saying why.
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
func (d *Driver) bundle(slot string) string {
	return filepath.Join(d.bundles(), slot)
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
	snapshot := req.Snapshot
	req.Snapshot = nil // read once, at the start
	s := newSandbox(d, newSlot(), req)
	s.busy <- struct{}{} // not known to any other caller yet
	defer s.release()
	if err := d.claim(s); err != nil {
		return driver.Handle{}, err
	}
	handle, err := s.start(ctx, snapshot)
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
	exists := d.sandboxes[s.id] != nil
	if !exists {
		slots, err := d.slotsOfLocked(s.id)
		if err != nil {
			return err
		}
		exists = len(slots) > 0
	}
	if exists {
		return kind.Errorf(kind.Conflict, "sandbox %s exists", s.id)
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
	d.mu.Lock()
	s := d.sandboxes[id]
	var slots []string
	var err error
	if s == nil {
		slots, err = d.slotsOfLocked(id)
	}
	d.mu.Unlock()
	if err != nil {
		return err
	}
	if s != nil {
		return d.destroy(ctx, s)
	}
	// Leftovers of an earlier process; two slots of one id cannot be, and
	// both would have to go.
	var errs []error
	for _, slot := range slots {
		errs = append(errs, d.destroy(ctx, newSandbox(d, slot, driver.StartRequest{ID: id})))
	}
	return errors.Join(errs...)
}

func (d *Driver) destroy(ctx context.Context, s *sandbox) error {
	// First without waiting for a turn: an operation may be waiting for a
	// guest kernel that does not answer.
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	if err := errors.Join(s.killUnplaced(ctx), s.group.Kill(ctx)); err != nil {
		return err
	}
	if err := s.acquire(ctx); err != nil {
		return fmt.Errorf("sandbox %s is busy: %w", s.id, err)
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
	// The parent group stays while there are sandboxes in it.
	return d.host.RemoveIfEmpty()
}

// outboundRefused counts what the guest tried to send and was refused.
func (s *sandbox) outboundRefused() uint64 {
	if wire := s.wire.Load(); wire != nil {
		return wire.Refused()
	}
	return 0
}

// Addresses inside every sandbox.
var (
	GuestAddress   = link.Guest
	GatewayAddress = link.Gateway
)
