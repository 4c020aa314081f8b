package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/driver"
	"bivy/internal/kind"
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
		// Without this, callers that talk to a dead guest would wait without end. In turn: a
		// destroy holds the sandbox until it has ended.
		s.busy <- struct{}{}
		defer s.release()
		s.closeWire()
	}()
	return nil
}

// reap collects a dead child. A code of -1 means that it was collected by
// another part of the process.
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

// placeEarly moves the sentry into its group while it boots. The move takes the
// kernel ten milliseconds, which then pass beside the boot. It does not have to
// succeed: PlaceTree is called again afterwards. The returned function ends it.
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
			pid, ok := s.d.findChild(s.slot)
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
