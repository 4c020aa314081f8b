package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Name is the driver's name.
const Name = "fake"

// handleVersion is the version of State in this driver's handles.
const handleVersion = 1

// filesName is the one file of a checkpoint: a tar of the sandbox's files.
const filesName = "files.tar"

// Driver is one process's view of a Host. The zero value has a Host of its
// own.
type Driver struct {
	Host *Host

	once   sync.Once
	own    Host
	faults script
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

func (d *Driver) host() *Host {
	d.once.Do(func() {
		if d.Host == nil {
			d.Host = &d.own
		}
	})
	return d.Host
}

// Name returns "fake".
func (d *Driver) Name() string { return Name }

// Capabilities says that there is no isolation and no limit.
func (d *Driver) Capabilities() driver.Capabilities {
	return driver.Capabilities{Isolation: "none", Pause: true, Snapshot: true, Export: true, Attached: d.host().Program == nil}
}

// Start makes a sandbox.
func (d *Driver) Start(ctx context.Context, req driver.StartRequest) (driver.Handle, error) {
	var out driver.Handle
	err := d.play(ctx, "Start", req.ID, func(ctx context.Context) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		h := d.host()
		s, err := h.add(req)
		if err != nil {
			return err
		}
		defer func() { <-s.busy }()
		if err = s.fill(req.Snapshot); err == nil {
			if err = h.run(ctx, s); err == nil {
				err = s.save()
			}
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			if undo := h.remove(req.ID); undo != nil {
				return fmt.Errorf("%w (and %v)", err, undo) //nolint:errorlint // the kind is that of the first
			}
			return err
		}
		state, err := json.Marshal(map[string]string{"dir": s.dir})
		out = driver.Handle{Sandbox: req.ID, Owner: req.Owner, Driver: Name, Version: handleVersion, State: state}
		return err
	})
	if err != nil {
		return driver.Handle{}, err
	}
	return out, nil
}

// Recover takes back a sandbox.
func (d *Driver) Recover(ctx context.Context, handle driver.Handle) (driver.Recovery, error) {
	err := d.play(ctx, "Recover", handle.Sandbox, func(context.Context) error {
		if handle.Driver != Name || handle.Version != handleVersion {
			return kind.Errorf(kind.Invalid, "sandbox %s: a handle of driver %q version %d, this is %s version %d",
				handle.Sandbox, handle.Driver, handle.Version, Name, handleVersion)
		}
		_, err := d.host().recover(handle.Sandbox)
		return err
	})
	return driver.Recovery{}, err
}

// Dial connects to the agent.
func (d *Driver) Dial(ctx context.Context, id session.SandboxID, port uint16) (net.Conn, error) {
	var c net.Conn
	err := d.play(ctx, "Dial", id, func(ctx context.Context) (err error) {
		if err := ctx.Err(); err != nil {
			return err
		}
		c, err = d.host().dial(ctx, id, port)
		return err
	})
	if err != nil && c != nil {
		c.Close() // a scripted fault loses the reply, and the connection with it
		c = nil
	}
	return c, err
}

// Wait returns when the sandbox has stopped.
func (d *Driver) Wait(ctx context.Context, id session.SandboxID) (driver.Exit, error) {
	var e driver.Exit
	err := d.play(ctx, "Wait", id, func(ctx context.Context) error {
		s, err := d.host().get(id)
		if err != nil {
			return err
		}
		select {
		case <-s.exit.done:
			e = s.exit.exit
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return e, err
}

// Destroy ends a sandbox and removes it.
func (d *Driver) Destroy(ctx context.Context, id session.SandboxID) error {
	return d.play(ctx, "Destroy", id, func(ctx context.Context) error {
		if s, err := d.host().get(id); err == nil {
			release, err := s.hold(ctx)
			if err != nil {
				return err
			}
			defer release()
		}
		return d.host().remove(id)
	})
}

// List returns the sandboxes on the Host.
func (d *Driver) List(ctx context.Context) ([]driver.Found, error) {
	var found []driver.Found
	err := d.play(ctx, "List", "", func(context.Context) (err error) {
		found, err = d.host().list()
		return err
	})
	return found, err
}

// Close does nothing: a Driver holds nothing of its own.
func (d *Driver) Close() error { return nil }

// Pause stops everything in the sandbox.
func (d *Driver) Pause(ctx context.Context, id session.SandboxID) error {
	return d.play(ctx, "Pause", id, func(ctx context.Context) error {
		return d.with(ctx, id, func(s *sandbox) error {
			s.mu.Lock()
			if s.paused == nil {
				s.paused = make(chan struct{})
			}
			s.mu.Unlock()
			return signalAll(s, stopSignal)
		})
	})
}

// Resume lets it go on.
func (d *Driver) Resume(ctx context.Context, id session.SandboxID) error {
	return d.play(ctx, "Resume", id, func(ctx context.Context) error {
		return d.with(ctx, id, func(s *sandbox) error {
			err := signalAll(s, contSignal)
			s.resume()
			return err
		})
	})
}

// with runs f on a running sandbox, one call at a time.
func (d *Driver) with(ctx context.Context, id session.SandboxID, f func(*sandbox) error) error {
	s, err := d.host().running(id)
	if err != nil {
		return err
	}
	release, err := s.hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	if s.exit.stopped() {
		return kind.Errorf(kind.Unavailable, "sandbox %s has stopped", id)
	}
	return f(s)
}

// Checkpoint writes the sandbox's files into one file of the sink. Processes
// cannot be saved here, so they are not in it.
func (d *Driver) Checkpoint(ctx context.Context, id session.SandboxID, to driver.Sink, o driver.CheckpointOptions) error {
	return d.play(ctx, "Checkpoint", id, func(ctx context.Context) error {
		return d.with(ctx, id, func(s *sandbox) error {
			f, err := to.Create(filesName)
			if err != nil {
				return kind.Errorf(kind.Invalid, "checkpoint of %s: %w", id, err)
			}
			err = exportTree(ctx, f, s.root(), "")
			if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
				return err
			}
			if !o.Leave {
				s.exit.set(driver.Exit{})
				s.halt()
			}
			return nil
		})
	})
}

// SetLimits keeps the limits, of which none is enforced.
func (d *Driver) SetLimits(ctx context.Context, id session.SandboxID, l driver.Limits) error {
	return d.play(ctx, "SetLimits", id, func(ctx context.Context) error {
		return d.with(ctx, id, func(s *sandbox) error {
			if l.DiskBytes != s.Request.Limits.DiskBytes {
				return kind.Errorf(kind.Invalid, "the disk of %s has %d bytes and cannot be changed", id, s.Request.Limits.DiskBytes).WithField("limits.disk")
			}
			s.Request.Limits = l
			return s.save()
		})
	})
}

// ExportChanges writes what differs from the image. Everything that a sandbox
// has is in the directory that is its root, so the report is empty.
func (d *Driver) ExportChanges(ctx context.Context, id session.SandboxID, w io.Writer) (driver.ChangeReport, error) {
	return driver.ChangeReport{}, d.play(ctx, "ExportChanges", id, func(ctx context.Context) error {
		return d.with(ctx, id, func(s *sandbox) error { return exportTree(ctx, w, s.root(), s.Base) })
	})
}

// Stats returns what was scripted and little else.
func (d *Driver) Stats(ctx context.Context, id session.SandboxID) (driver.Stats, error) {
	var out driver.Stats
	err := d.play(ctx, "Stats", id, func(context.Context) error {
		s, err := d.host().running(id)
		if err != nil {
			return err
		}
		pids, err := marked(id)
		s.mu.Lock()
		defer s.mu.Unlock()
		out = driver.Stats{PIDs: int64(len(pids)), OOMKills: s.oomKills, OutboundRefused: s.refused}
		return err
	})
	return out, err
}

// Inspect returns a posture without isolation, which is what this driver
// claims.
func (d *Driver) Inspect(ctx context.Context, id session.SandboxID) (driver.Posture, error) {
	err := d.play(ctx, "Inspect", id, func(context.Context) error {
		_, err := d.host().running(id)
		return err
	})
	if err != nil {
		return driver.Posture{}, err
	}
	return driver.Posture{Checks: []driver.Check{{Name: "isolation", Want: "none", Got: "none", OK: true}}}, nil
}
