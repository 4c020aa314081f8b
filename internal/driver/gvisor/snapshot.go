package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"
	"gvisor.dev/gvisor/pkg/state/statefile"
	runsc "gvisor.dev/gvisor/runsc/sandbox"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Pause implements driver.Pauser.
func (d *Driver) Pause(ctx context.Context, id session.SandboxID) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, s.pause)
}

// Resume implements driver.Pauser.
func (d *Driver) Resume(ctx context.Context, id session.SandboxID) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, s.resume)
}

// pausedMark says to a later process that the guest is paused, or may be.
// gVisor cannot be asked, and panics when told to resume what is not paused,
// so it says certainly only while it is: a crash beside it costs the sandbox,
// which then may not answer, but never lets a frozen guest run.
func (s *sandbox) pausedMark() string { return filepath.Join(s.d.bundle(s.id), "paused") }

func (s *sandbox) pause() error {
	if s.paused {
		return nil
	}
	// Nothing may run on because a disk is full: without its mark a sandbox is
	// only lost if this process dies.
	if err := os.WriteFile(s.pausedMark(), []byte(maybe), 0o600); err != nil {
		s.d.log.Error("a pause is not written down", "sandbox", s.id, "error", err)
	}
	if err := s.runsc.Pause(string(s.id)); err != nil {
		return errors.Join(err, os.RemoveAll(s.pausedMark())) // it may not have been written
	}
	s.paused = true
	if err := os.WriteFile(s.pausedMark(), []byte(certainly), 0o600); err != nil {
		s.d.log.Error("a pause is not written down", "sandbox", s.id, "error", err)
	}
	return nil
}

// What a pausedMark says.
const (
	maybe     = "maybe"
	certainly = "certainly"
)

func (s *sandbox) resume() error {
	if !s.paused {
		return nil
	}
	if l := s.req.Limits.MemoryBytes; l > 0 { // an export may have raised it
		if err := s.group.LimitMemory(l); err != nil {
			return err
		}
	}
	if err := os.Remove(s.pausedMark()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := s.runsc.Resume(string(s.id)); err != nil {
		return err
	}
	s.paused = false
	return nil
}

// Checkpoint implements driver.Checkpointer.
func (d *Driver) Checkpoint(ctx context.Context, id session.SandboxID, dir string, leave bool) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, func() error { return s.checkpoint(dir, leave) })
}

// checkpointSlack is the disk a checkpoint needs beside guest memory.
const checkpointSlack = 64 << 20

func (s *sandbox) checkpoint(dir string, leave bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return kind.Errorf(kind.Invalid, "checkpoint directory: %w", err)
	}
	if len(entries) > 0 {
		return kind.Errorf(kind.Invalid, "checkpoint directory %s is not empty: it has %d entries", dir, len(entries))
	}
	// gVisor may truncate a page file silently on a full disk.
	if err := s.roomFor(dir); err != nil {
		return err
	}
	if err := s.resume(); err != nil { // a paused kernel cannot quiesce
		return err
	}
	err = s.runsc.Checkpoint(s.d.conf, string(s.id), dir, runsc.CheckpointOpts{Compression: statefile.CompressionLevelNone, Resume: leave})
	if err == nil {
		err = complete(dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("checkpoint %s: %w", s.id, err), empty(dir))
	}
	return nil
}

func (s *sandbox) roomFor(dir string) error {
	st, err := s.group.Stats()
	if err != nil {
		return err
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return fmt.Errorf("checkpoint directory: %w", err)
	}
	if free := int64(disk.Bavail) * disk.Bsize; free < st.MemoryBytes+checkpointSlack {
		return kind.Errorf(kind.Exhausted, "a checkpoint of %s needs %d MiB, %s has %d MiB free", s.id, (st.MemoryBytes+checkpointSlack)>>20, dir, free>>20).
			WithHint("free disk space on this host")
	}
	return nil
}

// complete checks that every file of a checkpoint is there and on disk.
func complete(dir string) error {
	for _, name := range []string{checkpointfiles.StateFileName, checkpointfiles.PagesMetadataFileName, checkpointfiles.PagesFileName} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		err = f.Sync()
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}
