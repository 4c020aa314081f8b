package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/container"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/link"
	"bivy/internal/session"
)

func (d *Driver) relinks() string { return filepath.Join(d.opt.Root, "relink") }
func (d *Driver) relinkDir(id session.SandboxID) string {
	return filepath.Join(d.relinks(), string(id))
}

// Recover implements driver.Driver. The host's end of the wire died with the
// process that held it and cannot be made again for a running guest kernel.
// So the sandbox is checkpointed in place and restored around a new wire,
// under the same id: its memory, files and processes are as they were. A
// crash on the way is continued from the checkpoint.
func (d *Driver) Recover(ctx context.Context, h driver.Handle) (driver.Recovery, error) {
	var state handleState
	if h.Driver != Name || h.Version != handleVersion {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s is of driver %q version %d, this is %q version %d", h.Sandbox, h.Driver, h.Version, Name, handleVersion)
	}
	if err := json.Unmarshal(h.State, &state); err != nil {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s: %w", h.Sandbox, err)
	}
	if err := validate(state.Request); err != nil || state.Request.ID != h.Sandbox {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s is for %s: %w", h.Sandbox, state.Request.ID, err)
	}
	s := newSandbox(d, state.Request)
	s.busy <- struct{}{} // nobody else has it yet
	defer s.release()
	d.mu.Lock()
	known := d.sandboxes[s.id]
	if known == nil {
		d.sandboxes[s.id] = s
	}
	d.mu.Unlock()
	if known != nil {
		return driver.Recovery{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, recoverLimit)
	defer cancel()
	frozen, err := s.adoptFrozen()
	if frozen {
		return driver.Recovery{}, nil
	}
	if err == nil {
		if err = s.relink(ctx); err == nil {
			return driver.Recovery{Relinked: true}, nil
		}
	}
	// Recover or destroy, never neither.
	if cleanup := s.destroy(context.WithoutCancel(ctx)); cleanup != nil {
		return driver.Recovery{}, errors.Join(err, cleanup)
	}
	d.forget(s)
	return driver.Recovery{}, kind.Wrap(kind.NotFound, fmt.Errorf("sandbox %s is gone: %w", s.id, err))
}

// recoverLimit bounds the recovery of one sandbox: a guest kernel that does
// not answer by then is destroyed.
const recoverLimit = 60 * time.Second

// adoptFrozen takes back a sandbox that is paused, as it is: it must not run
// again for the sake of a wire that nobody can use meanwhile.
func (s *sandbox) adoptFrozen() (bool, error) {
	if _, err := os.Stat(s.pausedMark()); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	if err := s.adopt(); err != nil {
		return false, err
	}
	s.paused = true
	return true, nil
}

// adopt takes hold of the sandbox's sentry, which an earlier process started.
func (s *sandbox) adopt() error {
	if s.proc != nil {
		return nil
	}
	c, err := container.Load(s.d.stateDir(), container.FullID{SandboxID: string(s.id), ContainerID: string(s.id)}, container.LoadOpts{Exact: true, SkipCheck: true})
	if err != nil {
		return fmt.Errorf("runsc state: %w", err)
	}
	// The state file's pid may have passed to another process long ago; the
	// marks on the process say whose it is.
	pid := c.Sandbox.Pid.Load()
	if id, ours := s.d.owner(pid); !ours || id != s.id {
		return errors.New("its process has ended")
	}
	s.runsc = c.Sandbox
	return s.watch(pid, false)
}

// checkpointed is the name of the file that says a relink directory holds a
// complete checkpoint.
const checkpointed = "complete"

func (s *sandbox) relink(ctx context.Context) error {
	dir := s.d.relinkDir(s.id)
	_, err := os.Stat(filepath.Join(dir, checkpointed))
	if errors.Is(err, fs.ErrNotExist) {
		err = s.checkpointForRelink(ctx, dir)
	}
	if err != nil {
		return err
	}
	// From here on the checkpoint is the sandbox; what ran is only in the way.
	if err := s.killAll(ctx); err != nil {
		return err
	}
	if err := errors.Join(s.removeState(), s.group.Remove(), os.RemoveAll(s.d.bundle(s.id))); err != nil {
		return err
	}
	s.renew()
	if _, err := s.start(ctx, dir); err != nil {
		return err
	}
	// Mark first: the guest runs, and must not be taken back to then.
	return errors.Join(os.Remove(filepath.Join(dir, checkpointed)), os.RemoveAll(dir))
}

// renew forgets the process that the sandbox was.
func (s *sandbox) renew() {
	s.runsc, s.proc, s.link, s.paused = nil, nil, nil, false
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = make(chan struct{})
}

func (s *sandbox) checkpointForRelink(ctx context.Context, dir string) error {
	if err := s.adopt(); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil { // of an earlier attempt
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := s.orKill(ctx, func() error { return s.checkpoint(dir, false) }); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, checkpointed), nil, 0o600)
}

func wireRoute() boot.Route {
	return boot.Route{Destination: net.IPNet{IP: net.IP(link.Guest.AsSlice()).Mask(net.CIDRMask(link.PrefixBits, 32)), Mask: net.CIDRMask(link.PrefixBits, 32)}}
}

func everywhere() net.IPNet { return net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)} }
