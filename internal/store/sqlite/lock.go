package sqlite

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
)

const lockFile = "bivy.lock"

// lock takes the data directory for this process until the file is closed.
// The kernel releases it when the process dies. The file itself stays: removing it would let two processes lock two files of one name.
func lock(dir string) (*os.File, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		pid := strconv.Itoa(os.Getpid()) + "\n"
		_, werr := f.WriteAt([]byte(pid), 0)
		if werr = errors.Join(werr, f.Truncate(int64(len(pid)))); werr != nil {
			return nil, errors.Join(fmt.Errorf("lock data directory: %w", classify(werr)), f.Close())
		}
		return f, nil
	}
	defer f.Close()
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	holder := "another process"
	text, err := io.ReadAll(io.LimitReader(f, 32))
	if pid := strings.TrimSpace(string(text)); err == nil && pid != "" {
		holder = "process " + pid
	}
	return nil, kind.Errorf(kind.Conflict, "data directory %s is in use by %s", dir, holder).
		WithHint("stop that process, talk to it through its API, or choose another data directory")
}
