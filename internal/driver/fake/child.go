package fake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/driver"
	"bivy/internal/session"
)

// marker is the environment variable by which the processes of a sandbox are
// found, whatever session or parent they have made themselves.
const marker = "BIVY_FAKE_SANDBOX"

const (
	stopSignal = syscall.SIGSTOP
	contSignal = syscall.SIGCONT
)

// child is an agent that runs as a process of this machine.
type child struct {
	PID   int    `json:"pid"`
	Birth string `json:"birth"` // start time in the kernel's ticks: a pid alone may have passed to another process

	reaped chan struct{} // closes once it is; nil where another process started it
}

// startChild runs the agent and waits until it listens.
func startChild(ctx context.Context, cmd *exec.Cmd, s *sandbox) (*child, error) {
	log, err := os.OpenFile(filepath.Join(s.dir, "agent.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(append(cmd.Env, s.Request.Env...), marker+"="+string(s.ID))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{PID: cmd.Process.Pid, Birth: birth(cmd.Process.Pid), reaped: make(chan struct{})}
	go func() { // ends with the child, which Destroy ends
		defer close(c.reaped)
		err := cmd.Wait()
		e := driver.Exit{Code: -1}
		var failed *exec.ExitError
		if errors.As(err, &failed) || err == nil {
			e.Code = cmd.ProcessState.ExitCode()
			if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
				e.Signal = int(ws.Signal())
			}
		}
		s.exit.set(e)
	}()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if conn, err := net.Dial("unix", s.socket()); err == nil {
			return c, conn.Close()
		}
		select {
		case <-tick.C:
		case <-s.exit.done:
			return nil, fmt.Errorf("the agent stopped with code %d, signal %d", s.exit.exit.Code, s.exit.exit.Signal)
		case <-ctx.Done():
			c.kill()
			return nil, ctx.Err()
		}
	}
}

// statFields returns the fields of /proc/PID/stat behind the name, which may
// contain anything; nil when there is no such process.
func statFields(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
}

// birth returns the start time of a living process, empty when there is none.
func birth(pid int) string {
	fields := statFields(pid)
	if len(fields) < 20 || fields[0] == "Z" {
		return ""
	}
	return fields[19]
}

func (c *child) alive() bool { return c.Birth != "" && birth(c.PID) == c.Birth }

// kill ends the agent and everything below it. The agent adopts what its
// children leave behind, so as long as it is there, all of the sandbox is below
// it; it is stopped first, so that nothing new comes.
func (c *child) kill() {
	if c.alive() {
		// Errors mean that it died between two lines.
		_ = syscall.Kill(c.PID, syscall.SIGSTOP)
		for range 1000 {
			below := descendants(c.PID)
			if len(below) == 0 {
				break
			}
			for _, pid := range below {
				(&child{PID: pid, Birth: birth(pid)}).end()
			}
		}
		c.end()
	}
	if c.reaped != nil {
		<-c.reaped
	}
}

// end kills one process and waits until it is dead.
func (c *child) end() {
	if c.alive() {
		_ = syscall.Kill(c.PID, syscall.SIGKILL)
		c.await()
	}
}

// descendants returns the living processes below one.
func descendants(top int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	parent := map[int]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if f := statFields(pid); len(f) > 1 {
			if parent[pid], err = strconv.Atoi(f[1]); err != nil {
				delete(parent, pid)
			}
		}
	}
	var below []int
	for pid := range parent {
		for at, hops := parent[pid], 0; at > 1 && hops < 64; at, hops = parent[at], hops+1 {
			if at == top && birth(pid) != "" {
				below = append(below, pid)
				break
			}
		}
	}
	return below
}

// await returns when the process is dead.
func (c *child) await() {
	fd, err := unix.PidfdOpen(c.PID, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	for c.alive() {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if fds[0].Revents != 0 {
			return
		}
	}
}

// watch notes the exit of a child that another process started.
func (c *child) watch(n *stopping) {
	go func() { // ends with the child, which Destroy ends
		c.await()
		n.set(driver.Exit{Code: -1})
	}()
}

// signalAll sends a signal to every process of the sandbox.
func signalAll(s *sandbox, sig syscall.Signal) error {
	pids, err := marked(s.ID)
	if err != nil {
		return err
	}
	if s.Child != nil {
		pids = append(append(pids, s.Child.PID), descendants(s.Child.PID)...)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// marked returns the processes that carry a sandbox's mark.
func marked(id session.SandboxID) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	want := []byte(marker + "=" + string(id))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err != nil {
			continue // gone, or not ours
		}
		for kv := range bytes.SplitSeq(env, []byte{0}) {
			if bytes.Equal(kv, want) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids, nil
}

// killMarked kills until no process of the sandbox is left: a process may
// fork while it is looked for.
func killMarked(id session.SandboxID) {
	for range 100 {
		pids, err := marked(id)
		if err != nil || len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			(&child{PID: pid, Birth: birth(pid)}).end()
		}
	}
}
