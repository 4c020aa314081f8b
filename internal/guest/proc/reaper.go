package proc

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reaper waits for all children of this process: those that it starts and the
// orphans that the kernel assigns to it. A program must have only one, and nothing
// else may wait for children: no os/exec, no os.Process.Wait.
//
// It holds one lock while it forks and while it reaps, so that the exit of a child
// is never seen before its start, and a signal never reaches another process that
// was given the same pid.
type Reaper struct {
	log *slog.Logger

	mu       sync.Mutex
	children map[int]func(unix.WaitStatus)
	mark     uint64 // of the newest child; see spawn
}

// firstMark is the highest mark. It is far above the memory of any process, so
// that a limit of this size has no effect.
const firstMark = 1 << 62

// lastMark is the lowest mark. Below it children are not marked.
const lastMark = 1 << 61

// NewReaper makes this process the reaper of its descendants.
func NewReaper(log *slog.Logger) (*Reaper, error) {
	if os.Getpid() != 1 {
		// The kernel assigns orphans to process 1, or to a process that asks.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return nil, fmt.Errorf("become the reaper of descendants: %w", err)
		}
	}
	return &Reaper{log: log, children: map[int]func(unix.WaitStatus){}, mark: firstMark}, nil
}

// Run reaps until ctx is done.
func (r *Reaper) Run(ctx context.Context) {
	// One pending signal is enough, since reap waits for all that have ended.
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	defer signal.Stop(died)
	for {
		r.reap()
		select {
		case <-died:
		case <-ctx.Done():
			return
		}
	}
}

func (r *Reaper) reap() {
	for {
		r.mu.Lock()
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		exited := r.children[pid]
		if pid > 0 {
			delete(r.children, pid)
		}
		r.mu.Unlock()
		switch {
		case err == unix.EINTR:
		case pid <= 0: // no child has ended, or there is none
			return
		case exited != nil:
			exited(status)
		default:
			r.log.Debug("reaped an orphan", "pid", pid, "status", int(status))
		}
	}
}

// spawn forks a child. exited is called once, from the reaping goroutine, when
// the child ends; it must not block.
//
// mark identifies the child and all its descendants. It is the value of the
// resource limit RLIMIT_RSS, which Linux has not enforced since 2.4, which every
// descendant inherits whatever it does to its session, parent, environment or
// user, and which /proc shows. Marks count down, because lowering a limit needs no
// privilege.
func (r *Reaper) spawn(path string, argv []string, attr *syscall.ProcAttr, exited func(unix.WaitStatus)) (pid int, mark uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mark > lastMark {
		limit := unix.Rlimit{Cur: r.mark - 1, Max: r.mark - 1}
		if err := unix.Prlimit(0, unix.RLIMIT_RSS, &limit, nil); err != nil {
			// Without marks a tree is found by parents, sessions and process
			// groups only.
			r.log.Warn("cannot set RLIMIT_RSS, which marks descendants", "err", err)
			r.mark = 0
		} else {
			r.mark--
			mark = r.mark
		}
	}
	pid, err = syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, 0, err
	}
	r.children[pid] = exited
	return pid, mark, nil
}

// signal sends sig to a child that has not been reaped, or with group to its
// process group. It reports whether there is such a child.
func (r *Reaper) signal(pid int, sig unix.Signal, group bool) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.children[pid]; !ok {
		return false, nil
	}
	if group {
		pid = -pid
	}
	return true, unix.Kill(pid, sig)
}
