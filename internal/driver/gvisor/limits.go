package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"bivy/internal/cgroup"
	"bivy/internal/driver"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// groupLimits are the limits that the cgroup enforces. The disk's is the
// guest kernel's.
func groupLimits(l driver.Limits) cgroup.Limits {
	return cgroup.Limits{CPUMillis: l.CPUMillis, MemoryBytes: l.MemoryBytes, PIDs: l.PIDs}
}

// limitsFile holds the limits of a sandbox in its bundle once they are not
// those of its handle any more.
func (s *sandbox) limitsFile() string { return filepath.Join(s.d.bundle(s.slot), "limits.json") }

// savedLimits are those of the limits file, or started when there is none.
func (s *sandbox) savedLimits(started driver.Limits) (driver.Limits, error) {
	b, err := os.ReadFile(s.limitsFile())
	if errors.Is(err, fs.ErrNotExist) {
		return started, nil
	}
	if err != nil {
		return started, err
	}
	var l driver.Limits
	if err := json.Unmarshal(b, &l); err != nil {
		return started, fmt.Errorf("%s: %w", s.limitsFile(), err)
	}
	return l, nil
}

// SetLimits implements driver.Limiter.
func (d *Driver) SetLimits(ctx context.Context, id session.SandboxID, l driver.Limits) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, func() error { return s.setLimits(l) })
}

func (s *sandbox) setLimits(l driver.Limits) error {
	if l.DiskBytes != s.req.Limits.DiskBytes {
		return kind.Errorf(kind.Invalid, "the disk of %s has %d bytes and cannot be changed", s.id, s.req.Limits.DiskBytes).WithField("limits.disk")
	}
	if l.CPUMillis < 0 || l.MemoryBytes < 0 || l.PIDs < 0 {
		return kind.Errorf(kind.Invalid, "limits of %+v: none can be negative", l).WithField("limits")
	}
	if err := s.group.SetLimits(groupLimits(l)); err != nil {
		return fmt.Errorf("limits of %s: %w", s.id, err)
	}
	b, err := json.Marshal(l)
	if err == nil {
		err = durable.WriteFile(s.limitsFile(), b, 0o600)
	}
	if err != nil {
		// A later process would take the new limits for a deviation.
		return errors.Join(fmt.Errorf("limits of %s: %w", s.id, err), s.group.SetLimits(groupLimits(s.req.Limits)))
	}
	s.req.Limits = l
	return nil
}
