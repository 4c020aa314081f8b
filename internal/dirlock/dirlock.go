// Package dirlock lets one process at a time use a directory.
//
// The lock is an advisory flock(2) on a file in the directory. The kernel
// releases it when the process ends, however it ends, so a lock is never left
// over. The file holds the process id of the last holder, for error messages
// only, and stays in place after the release: if it were removed, two processes
// could lock two files of the same name.
package dirlock

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"bivy/internal/kind"
)

// File is the name of the lock file in a locked directory.
const File = "lock"

// Lock is a directory that this process has for itself.
type Lock struct{ f *os.File }

// HeldError says that another holder has the lock of a directory. That is
// another process, or another Lock of this one.
type HeldError struct {
	Dir string
	PID int // of the holder; 0 when it is not known
}

// Error names the directory and the process.
func (e *HeldError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("directory %s is in use by another process", e.Dir)
	}
	return fmt.Sprintf("directory %s is in use by process %d", e.Dir, e.PID)
}

// Acquire locks dir, which exists, and does not wait. The lock is held until
// Close or the end of the process. When it is held already, the error is a
// [*HeldError] of [kind.Conflict]; the caller adds the hint that says what to
// do about it.
func Acquire(dir string) (*Lock, error) {
	f, err := os.OpenFile(filepath.Join(dir, File), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock directory %s: %w", dir, err)
	}
	if err := flock(f, syscall.LOCK_EX); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = kind.Wrap(kind.Conflict, &HeldError{Dir: dir, PID: holder(f)})
		} else {
			err = fmt.Errorf("lock directory %s: %w", dir, err)
		}
		return nil, errors.Join(err, f.Close())
	}
	pid := strconv.Itoa(os.Getpid()) + "\n"
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(pid), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock directory %s: %w", dir, err), f.Close())
	}
	return &Lock{f}, nil
}

// Close releases the directory. Closing it again is an error.
func (l *Lock) Close() error { return l.f.Close() }

// Holder returns who has dir locked, without locking it. The result is nil
// when dir is free, and also when its lock file does not exist or may not be
// read: it can be stale as soon as it is returned, and serves messages and
// decisions to wait only.
func Holder(dir string) *HeldError {
	f, err := os.Open(filepath.Join(dir, File))
	if err != nil {
		return nil
	}
	defer f.Close() // which also releases the shared lock
	if !errors.Is(flock(f, syscall.LOCK_SH), syscall.EWOULDBLOCK) {
		return nil
	}
	return &HeldError{Dir: dir, PID: holder(f)}
}

func flock(f *os.File, how int) error {
	for {
		err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// holder reads the process id from a lock file. A holder that has not written
// it yet, or anything else that is not a process id, gives 0.
func holder(f *os.File) int {
	text, err := io.ReadAll(io.LimitReader(f, 32))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}
