package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"bivy/internal/dirlock"
	"bivy/internal/durable"
	"bivy/internal/kind"
)

// Running describes the running server of a run directory. It holds no secret: the
// key is in a file that only its owner can read.
type Running struct {
	URL     string `json:"url"`
	PID     int    `json:"pid"`
	KeyFile string `json:"key_file,omitempty"`
	DataDir string `json:"data_dir,omitempty"`
}

const runningFile = "server.json"

// LockPatience is how long a process waits for another that holds the run
// directory: a server that starts is announced by then, and a short command
// has ended.
const (
	LockPatience = 3 * time.Second
	LockInterval = 20 * time.Millisecond // between two tries: the release of a lock gives no event
)

// Held reports whether a process uses a run directory, as far as the caller's
// permissions show it.
func Held(runDir string) bool { return dirlock.Holder(runDir) != nil }

// HeldError returns the error, of [kind.Conflict], for a run directory in use. It
// names the process and has a hint.
func HeldError(runDir string) error {
	held := dirlock.Holder(runDir)
	if held == nil {
		held = &dirlock.HeldError{Dir: runDir} // released just now, or not readable
	}
	err := kind.Errorf(kind.Conflict, "run %w", held)
	// If the command line of the process cannot be read it is assumed to be a
	// short command.
	if cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", held.PID)); slices.Contains(strings.Split(string(cmdline), "\x00"), "serve") {
		return err.WithHint("it is a server: use that one, stop it, or choose other directories with data_dir and run_dir")
	}
	return err.WithHint("to run several commands at once, start the server first: bivy serve")
}

// Announce writes the file by which Find finds this process. The returned function
// removes it.
func Announce(runDir string, r Running) (withdraw func() error, err error) {
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return nil, fmt.Errorf("announce the server: %w", err)
	}
	r.PID = os.Getpid()
	data, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(runDir, runningFile)
	// Readable by every user. Not synced, because the server does not survive a
	// power failure either.
	if err := durable.WriteFile(path, append(data, '\n'), 0o644, durable.NotSynced); err != nil {
		return nil, fmt.Errorf("announce the server: %w", err)
	}
	return func() error {
		now, ok, err := Find(runDir)
		if err != nil || !ok || now.PID != r.PID {
			return err // another server has replaced the file
		}
		return os.Remove(path)
	}, nil
}

// Find returns the server of a run directory, and whether its process exists.
func Find(runDir string) (Running, bool, error) {
	data, err := os.ReadFile(filepath.Join(runDir, runningFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Running{}, false, nil
	}
	if err != nil {
		return Running{}, false, err
	}
	var r Running
	if err := json.Unmarshal(data, &r); err != nil {
		return Running{}, false, fmt.Errorf("%s: %w", filepath.Join(runDir, runningFile), err)
	}
	if r.PID <= 0 {
		return Running{}, false, nil
	}
	// EPERM means that the process exists and belongs to another user.
	if err := syscall.Kill(r.PID, 0); err != nil && !errors.Is(err, syscall.EPERM) {
		return Running{}, false, nil
	}
	return r, true, nil
}
