package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"time"

	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/container"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/link"
)

// recoverLimit bounds the recovery of one sandbox.
const recoverLimit = 30 * time.Second

// Recover implements driver.Driver. The guest is not touched: its wire is in
// its own sentry, and only the connections of the earlier process, which were
// that process's memory, are gone. A paused guest stays paused.
func (d *Driver) Recover(ctx context.Context, h driver.Handle) (driver.Recovery, error) {
	var state handleState
	if h.Driver != Name || h.Version != handleVersion {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s is of driver %q version %d, this is %q version %d", h.Sandbox, h.Driver, h.Version, Name, handleVersion)
	}
	if err := json.Unmarshal(h.State, &state); err != nil {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s: %w", h.Sandbox, err)
	}
	if state.Request.ID != h.Sandbox {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s is for %s", h.Sandbox, state.Request.ID)
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
	err := s.adopt()
	if err == nil {
		return driver.Recovery{Relinked: true, Paused: s.paused || s.unsure}, nil
	}
	// Recover or destroy, never neither.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recoverLimit)
	defer cancel()
	if cleanup := s.destroy(ctx); cleanup != nil {
		return driver.Recovery{}, errors.Join(err, cleanup)
	}
	d.forget(s)
	return driver.Recovery{}, kind.Wrap(kind.NotFound, fmt.Errorf("sandbox %s is gone: %w", s.id, err))
}

// adopt takes hold of the sandbox's sentry, which an earlier process started.
func (s *sandbox) adopt() error {
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
	if err := s.watch(pid, false); err != nil {
		return err
	}
	mark, err := os.ReadFile(s.pausedMark())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.paused, s.unsure = string(mark) == certainly, string(mark) == maybe
	return s.openLink()
}

func wireRoute() boot.Route {
	return boot.Route{Destination: net.IPNet{IP: net.IP(link.Guest.AsSlice()).Mask(net.CIDRMask(link.PrefixBits, 32)), Mask: net.CIDRMask(link.PrefixBits, 32)}}
}

func everywhere() net.IPNet { return net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)} }
