package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// process is a sentry, held by a pidfd that cannot come to mean another.
type process struct {
	Pid   int
	pidfd *os.File
}

// open takes hold of process pid as it is now.
func open(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	return &process{Pid: pid, pidfd: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// take returns a copy of one of the process's descriptors.
func (p *process) take(fd int) (int, error) {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return -1, err
	}
	taken := -1
	var takeErr error
	if err := raw.Control(func(pidfd uintptr) { taken, takeErr = unix.PidfdGetfd(int(pidfd), fd, 0) }); err != nil {
		return -1, err
	}
	if takeErr != nil {
		return -1, fmt.Errorf("descriptor %d of process %d: %w", fd, p.Pid, takeErr)
	}
	return taken, nil
}

// wait returns when the process has died. It holds no thread meanwhile.
func (p *process) wait() error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var pollErr error
	err = raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			return false
		}
		pollErr = err
		return err != nil || n > 0
	})
	return errors.Join(err, pollErr)
}

// kill ends the process and waits for its death.
func (p *process) kill(ctx context.Context) error {
	defer p.pidfd.Close()
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var killErr error
	if err := raw.Control(func(fd uintptr) { killErr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return err
	}
	if killErr != nil && !errors.Is(killErr, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.Pid, killErr)
	}
	if limit, ok := ctx.Deadline(); ok {
		if err := p.pidfd.SetReadDeadline(limit); err != nil {
			return err
		}
	}
	return p.wait()
}

// watch follows the sentry from now on: when it dies it is reaped, if it is a
// child of ours, and the sandbox has ended. Called busy.
func (s *sandbox) watch(pid int, child bool) error {
	p, err := open(pid)
	if err != nil {
		return kind.Wrap(kind.Unavailable, fmt.Errorf("sandbox %s died while starting: %w", s.id, err))
	}
	s.proc = p
	// Ends with the sentry; Destroy kills it and waits on ended.
	go func() {
		if err := p.wait(); err != nil {
			s.d.log.Error("watching a sandbox", "sandbox", s.id, "error", err)
		}
		p.pidfd.Close()
		exit := driver.Exit{Code: -1, At: time.Now()}
		if child {
			exit.Code, exit.Signal = reap(pid)
		}
		if st, err := s.group.Stats(); err == nil {
			exit.OOM = st.OOMKills > 0
		}
		// A sentry that cannot have a thread does not live on.
		if n, err := s.group.PIDsRefused(); err == nil {
			exit.PIDs = n > 0
		}
		s.exit = exit
		close(s.ended)
		// Whoever talks to a dead guest would wait for ever. In turn: whoever
		// destroys it is busy until it has ended.
		s.busy <- struct{}{}
		defer s.release()
		s.closeWire()
	}()
	return nil
}

// reap collects a dead child. A code of -1 means that somebody else did.
func reap(pid int) (code, signal int) {
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return -1, 0
		case ws.Signaled():
			return -1, int(ws.Signal())
		}
		return ws.ExitStatus(), 0
	}
}

// strays finds sentry processes of this driver's root by the marks on them:
// our binary, our root, the sandbox's id as last argument; all ids when id is
// empty. A start that was cut short may have left one outside every group and
// without a state file.
func (d *Driver) strays(id session.SandboxID) ([]*process, error) {
	ids, err := d.scan()
	if err != nil {
		return nil, err
	}
	var found []*process
	for pid, owner := range ids {
		if id != "" && owner != id {
			continue
		}
		p, err := open(pid)
		if err != nil {
			continue // ended by itself meanwhile
		}
		// Looked at again through what is now held: the pid may have passed
		// to another process in between.
		if again, ok := d.owner(pid); !ok || again != owner {
			p.pidfd.Close()
			continue
		}
		found = append(found, p)
	}
	return found, nil
}

// placeEarly moves the sentry into its group while it boots, which takes the
// kernel ten milliseconds that nobody then waits for. It is no more than a
// head start: what counts is the pass that follows, which finds what was
// missed. The returned function ends it.
func (s *sandbox) placeEarly() (stop func()) {
	over, done := make(chan struct{}), make(chan struct{})
	go func() { // waited for by stop
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			pid, ok := s.born()
			if !ok {
				continue
			}
			if err := s.group.PlaceTree(pid); err != nil {
				s.d.log.Debug("placing a sandbox early", "sandbox", s.id, "error", err)
			}
			return
		}
	}()
	return func() { close(over); <-done }
}

// born finds the sentry among this process's children, once it executes.
func (s *sandbox) born() (pid int, ok bool) {
	children, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return 0, false
	}
	for _, file := range children {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // of a thread that ended meanwhile
		}
		for _, f := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				continue
			}
			if id, ok := s.d.owner(pid); ok && id == s.id {
				return pid, true
			}
		}
	}
	return 0, false
}

// scan lists the sentries of this root, by pid.
func (d *Driver) scan() (map[int]session.SandboxID, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	found := map[int]session.SandboxID{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if id, ok := d.owner(pid); ok {
			found[pid] = id
		}
	}
	return found, nil
}

// isSentry reports whether a process runs as the user that only sentries are:
// any user of the host can give a process of its own the marks, but not that.
func isSentry(pid int) bool {
	status, err := statusOf(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	real, _, _ := strings.Cut(status["Uid"], "\t")
	uid, err := strconv.ParseInt(real, 10, 64)
	return err == nil && uid >= hostID && uid < hostID+idCount
}

// owner reads whose sentry a process is, if it is one of ours. Guests cannot
// fake it: their processes have no command line on the host but the stub's.
func (d *Driver) owner(pid int) (session.SandboxID, bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return "", false
	}
	args := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	if args[0] != "runsc-sandbox" || !isSentry(pid) {
		return "", false
	}
	id := session.SandboxID(args[len(args)-1])
	for _, a := range args {
		if a == "--root="+d.stateDir() {
			_, _, err := id.Split()
			return id, err == nil
		}
	}
	return "", false
}

// List implements driver.Driver: the union of processes, groups, bundles and
// runsc's own state.
func (d *Driver) List(ctx context.Context) ([]driver.Found, error) {
	running, err := d.scan()
	if err != nil {
		return nil, err
	}
	all := map[session.SandboxID]bool{}
	for _, id := range running {
		all[id] = true
	}
	var names []string
	entries, err := os.ReadDir(d.bundles())
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	groups, err := d.host.List()
	if err != nil {
		return nil, err
	}
	for _, name := range append(names, groups...) {
		id := session.SandboxID(name)
		if _, _, err := id.Split(); err == nil && !all[id] {
			all[id] = false
		}
	}
	found := make([]driver.Found, 0, len(all))
	for id, up := range all {
		found = append(found, driver.Found{ID: id, Running: up})
	}
	return found, ctx.Err()
}
