package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"bivy/internal/driver"
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

// pausedMark tells a later process that the guest is paused, or may be. gVisor
// cannot be asked, and panics when it is to resume what is not paused, so the
// mark says "certainly" only while the guest is paused. A crash between the
// two leaves a sandbox that may not answer; it never lets a paused guest run.
func (s *sandbox) pausedMark() string { return filepath.Join(s.d.bundle(s.slot), "paused") }

func (s *sandbox) pause() error {
	if s.paused {
		return nil
	}
	// A disk that is full does not keep a guest from being paused: without its
	// mark the sandbox is lost only if this process dies.
	if err := os.WriteFile(s.pausedMark(), []byte(maybe), 0o600); err != nil {
		s.d.log.Error("a pause is not written down", "sandbox", s.id, "error", err)
	}
	if err := s.runsc.Pause(s.slot); err != nil {
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
	if l := s.req.Limits.MemoryBytes; l > 0 { // an export may have raised the limit
		if err := s.group.LimitMemory(l); err != nil {
			return err
		}
	}
	if err := os.Remove(s.pausedMark()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := s.runsc.Resume(s.slot); err != nil {
		return err
	}
	s.paused = false
	return nil
}

// Checkpoint implements driver.Checkpointer.
func (d *Driver) Checkpoint(ctx context.Context, id session.SandboxID, to driver.Sink, o driver.CheckpointOptions) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, func() error {
		err := s.checkpoint(to, o)
		if err == nil && !o.Leave {
			// A running guest kernel ends by itself; one that is paused waits
			// for its resume.
			err = s.group.Kill(ctx)
		}
		if err != nil {
			return fmt.Errorf("checkpoint %s: %w", s.id, err)
		}
		return nil
	})
}

// checkpointSlack is the disk a checkpoint needs beside guest memory.
const checkpointSlack = 64 << 20

// checkpointFiles are the files of a checkpoint in the order in which gVisor
// takes them.
var checkpointFiles = []string{checkpointfiles.StateFileName, checkpointfiles.PagesMetadataFileName, checkpointfiles.PagesFileName}

// openAll opens the files of a checkpoint; on failure none stays open.
func openAll(open func(name string) (*os.File, error)) (files []*os.File, err error) {
	for _, name := range checkpointFiles {
		f, err := open(name)
		if err != nil {
			return nil, errors.Join(err, closeAll(files))
		}
		files = append(files, f)
	}
	return files, nil
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// checkpoint hands the files to the sentry over its control connection, as
// runsc's Sandbox.Checkpoint does with files of a directory. gVisor counts
// pauses: it pauses a kernel that is paused already once more for the time of
// the checkpoint, so that a paused guest does not run.
func (s *sandbox) checkpoint(to driver.Sink, o driver.CheckpointOptions) (err error) {
	files, err := openAll(to.Create)
	if err != nil {
		return kind.Wrap(kind.Invalid, err)
	}
	defer func() { err = errors.Join(err, closeAll(files)) }()
	// gVisor may cut the file of pages short without an error on a full disk.
	if err := s.roomFor(files[len(files)-1]); err != nil {
		return err
	}
	conn, err := client.ConnectTo(s.runsc.ControlSocketPath)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	defer conn.Close()
	opts := control.SaveOpts{
		Metadata: statefile.CompressionLevelNone.ToMetadata(), HavePagesFile: true, Resume: o.Leave,
		FilePayload: urpc.FilePayload{Files: files},
	}
	if err := conn.Call(boot.ContMgrCheckpoint, &opts, nil); err != nil {
		return err
	}
	for _, f := range files {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// restore hands the files of a checkpoint to a sentry that waits for its
// start, as runsc's Sandbox.Restore does with files of a directory.
func restore(conn *urpc.Client, from driver.Source) error {
	files, err := openAll(from.Open)
	if errors.Is(err, fs.ErrNotExist) {
		return kind.Errorf(kind.Invalid, "not a snapshot: %w", err).WithField("snapshot")
	}
	if err != nil {
		return err
	}
	opts := boot.RestoreOpts{FilePayload: urpc.FilePayload{Files: files}, HavePagesFile: true}
	return errors.Join(conn.Call(boot.ContMgrRestore, &opts, nil), closeAll(files))
}

// roomFor fails with Exhausted when the disk that file is on is too small for
// the guest's memory.
func (s *sandbox) roomFor(file *os.File) error {
	st, err := s.group.Stats()
	if err != nil {
		return err
	}
	var disk unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &disk); err != nil {
		return fmt.Errorf("%s: %w", file.Name(), err)
	}
	if free := int64(disk.Bavail) * disk.Bsize; free < st.MemoryBytes+checkpointSlack {
		return kind.Errorf(kind.Exhausted, "it needs %d MiB on the disk of %s, which has %d MiB free", (st.MemoryBytes+checkpointSlack)>>20, file.Name(), free>>20).
			WithHint("free disk space on this host")
	}
	return nil
}
