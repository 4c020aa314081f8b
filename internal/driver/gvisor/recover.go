package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/container"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/link"
)

// Recover implements driver.Driver. The guest is not touched: its wire is in
// its own sentry, and only the connections of the earlier process, which were
// that process's memory, are gone. A paused guest stays paused.
func (d *Driver) Recover(_ context.Context, h driver.Handle) (driver.Recovery, error) {
	var state handleState
	if h.Driver != Name || h.Version != handleVersion {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s is of driver %q version %d, this is %q version %d", h.Sandbox, h.Driver, h.Version, Name, handleVersion)
	}
	if err := json.Unmarshal(h.State, &state); err != nil {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s: %w", h.Sandbox, err)
	}
	if !isSlot(state.Slot) {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s names no slot: %.64q", h.Sandbox, state.Slot)
	}
	l, err := d.readLabel(state.Slot)
	if errors.Is(err, fs.ErrNotExist) {
		return driver.Recovery{}, kind.Errorf(kind.NotFound, "sandbox %s is gone: no slot %s", h.Sandbox, state.Slot)
	}
	if err != nil {
		return driver.Recovery{}, err
	}
	if l.Sandbox != h.Sandbox {
		return driver.Recovery{}, kind.Errorf(kind.Invalid, "handle of %s names slot %s, which is of %s", h.Sandbox, state.Slot, l.Sandbox)
	}
	s := newSandbox(d, state.Slot, driver.StartRequest{ID: l.Sandbox, Owner: l.Owner, Image: state.Image, Limits: state.Limits})
	s.busy <- struct{}{} // not known to any other caller yet
	defer s.release()
	d.mu.Lock()
	known := d.sandboxes[s.id]
	if known == nil {
		d.sandboxes[s.id] = s
	}
	d.mu.Unlock()
	if known != nil {
		return driver.Recovery{}, known.stopped()
	}
	if err := s.adopt(); err != nil {
		s.closeWire()
		d.forget(s) // Destroy finds it by its label
		return driver.Recovery{}, fmt.Errorf("sandbox %s: %w", s.id, err)
	}
	return driver.Recovery{Relinked: true, Paused: s.paused || s.unsure}, nil
}

// stopped fails with NotFound when the sandbox has ended.
func (s *sandbox) stopped() error {
	select {
	case <-s.ended:
		return kind.Errorf(kind.NotFound, "sandbox %s does not run any more", s.id)
	default:
		return nil
	}
}

// adopt takes hold of the sandbox's sentry, which an earlier process started.
// It fails with NotFound when that does not run.
func (s *sandbox) adopt() error {
	c, err := container.Load(s.d.stateDir(), container.FullID{SandboxID: s.slot, ContainerID: s.slot}, container.LoadOpts{Exact: true, SkipCheck: true})
	if errors.Is(err, fs.ErrNotExist) {
		return kind.Errorf(kind.NotFound, "runsc has no state of it: %w", err)
	}
	if err != nil {
		return fmt.Errorf("runsc state: %w", err)
	}
	// The state file's pid may have passed to another process long ago; the
	// marks on the process say which slot it is of.
	pid := c.Sandbox.Pid.Load()
	if slot, ok := s.d.slotOf(pid); !ok || slot != s.slot {
		return kind.Errorf(kind.NotFound, "its process has ended")
	}
	s.runsc = c.Sandbox
	if s.req.Limits, err = s.savedLimits(s.req.Limits); err != nil {
		return err
	}
	in, err := s.group.Contains(pid)
	if err != nil {
		return err
	}
	s.placed.Store(in)
	mark, err := os.ReadFile(s.pausedMark())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.paused, s.unsure = string(mark) == certainly, string(mark) == maybe
	if err := s.watch(pid, false); err != nil {
		return err
	}
	return s.openLink()
}

func wireRoute() boot.Route {
	return boot.Route{Destination: net.IPNet{IP: net.IP(link.Guest.AsSlice()).Mask(net.CIDRMask(link.PrefixBits, 32)), Mask: net.CIDRMask(link.PrefixBits, 32)}}
}

func everywhere() net.IPNet { return net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)} }
