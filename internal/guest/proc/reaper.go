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

// Reaper waits for all children of this process, its own and the orphans that
// come to it. There must be only one in a program, and nothing else may wait
// for children: no os/exec, no os.Process.Wait.
//
// It holds one lock while it forks and while it reaps. So an exit is never
// seen before the start it belongs to, and a signal never reaches a process
// that took over the number of one that is gone.
type Reaper struct {
	log *slog.Logger

	mu       sync.Mutex
	children map[int]func(unix.WaitStatus)
	mark     uint64 // of the youngest child; see spawn
}

// firstMark is far above any memory a process could have, so that a limit of
// this size limits nothing.
const firstMark = 1 << 62

// lastMark is where marking stops making sense.
const lastMark = 1 << 61

// NewReaper makes this process the reaper of its descendants.
func NewReaper(log *slog.Logger) (*Reaper, error) {
	if os.Getpid() != 1 {
		// Process 1 inherits orphans by right; anyone else has to ask.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return nil, fmt.Errorf("become the reaper of descendants: %w", err)
		}
	}
	return &Reaper{log: log, children: map[int]func(unix.WaitStatus){}, mark: firstMark}, nil
}

// Run reaps until ctx is done.
func (r *Reaper) Run(ctx context.Context) {
	// One pending notice is enough: each makes us reap all there is.
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
		case pid <= 0: // none has ended, or there is none
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
// mark identifies the child and all that descends from it: it is the limit on
// resident memory (RLIMIT_RSS), which no kernel has enforced since Linux 2.4,
// which every descendant inherits whatever it does to its session, parents,
// environment, files or user, and which /proc shows to everyone. Marks count
// down, as anybody may lower a limit.
func (r *Reaper) spawn(path string, argv []string, attr *syscall.ProcAttr, exited func(unix.WaitStatus)) (pid int, mark uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mark > lastMark {
		limit := unix.Rlimit{Cur: r.mark - 1, Max: r.mark - 1}
		if err := unix.Prlimit(0, unix.RLIMIT_RSS, &limit, nil); err != nil {
			// Not even lowering is allowed: the tree is then found by
			// parents, sessions and groups alone.
			r.log.Warn("processes cannot be marked", "err", err)
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

// signal sends sig to a child that has not been reaped; group includes its
// process group. It reports whether there was one.
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
