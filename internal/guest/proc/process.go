package proc

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
)

const (
	// quietTime is how long, after the leader's exit, the agent waits for more
	// output before it considers the output finished although a background
	// process has the pipe open, as in sh -c 'server & echo ready'.
	quietTime = 100 * time.Millisecond
	// maxAfterExit limits how long output of such a background process is
	// reported after the leader's own output, and maxAfterExitBytes how much.
	maxAfterExit      = 2 * time.Second
	maxAfterExitBytes = 1 << 20
	// terminalBuffer is more bytes than a kernel buffers for the reader of a
	// terminal.
	terminalBuffer = 64 << 10
)

// Process is one process started through the service, with its descendants. The
// process itself is called the leader.
type Process struct {
	pid    int
	tag    *string
	config *pb.ProcessConfig
	reaper *Reaper
	mark   uint64
	out    fanout

	pty     *os.File   // the terminal's master, or nil
	outputs []*os.File // stdout and stderr, or the terminal

	input chan struct{} // capacity 1: held while input is written
	stdin *os.File      // the pipe's write end or nil; guarded by input

	exited chan struct{} // closed when the leader has been reaped
	status unix.WaitStatus
	exitAt time.Time

	// timer kills the tree at the lifetime limit; guarded by mu.
	mu       sync.Mutex
	timer    *time.Timer
	timedOut bool

	done chan struct{} // closed when end is set
	end  *pb.ProcessEvent_EndEvent
}

var (
	errNoStdin     = errors.New("the process has no open standard input")
	errIsTerminal  = errors.New("the process runs on a terminal: send terminal input")
	errNotTerminal = errors.New("the process does not run on a terminal")
)

// onExit is called by the reaper when the leader has ended.
func (p *Process) onExit(status unix.WaitStatus) {
	p.status, p.exitAt = status, time.Now()
	close(p.exited)
	// Readers that wait get until the end of the quiet time.
	for _, f := range p.outputs {
		_ = f.SetReadDeadline(p.exitAt.Add(quietTime)) // fails only on a closed file
	}
}

// run reads the outputs. When they and the leader have ended it sets the end event
// and calls ended. The caller starts it in a goroutine.
func (p *Process) run(ended func(*Process)) {
	var readers sync.WaitGroup
	for i, f := range p.outputs {
		from, limit := stream(i), wire.OutputChunk
		if p.pty != nil {
			from, limit = terminal, wire.PTYChunk
		}
		readers.Go(func() { p.read(f, from, limit) })
	}
	readers.Wait()
	<-p.exited
	p.mu.Lock()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.end = endEvent(p.status)
	p.mu.Unlock()
	close(p.done)
	p.out.close()
	ended(p)
	p.closeInput()
	if p.pty != nil {
		_ = p.pty.Close() // the kernel sends SIGHUP to processes left on the terminal
	}
}

// read sends one output to the followers until its end, or until the leader has
// ended and no more output comes. A pipe that a background process has open is
// still drained after that, so that the process neither blocks nor gets SIGPIPE.
func (p *Process) read(f *os.File, from stream, limit int) {
	var waited time.Duration // in reads since the leader's exit
	left := -1               // bytes of the leader's own output that are unread; -1: not known yet
	more := 0                // bytes read after those
	for {
		began := time.Now()
		gone := p.hasExited()
		if gone {
			if left < 0 {
				left = p.unreadBytes(f)
			}
			if (left == 0 && (began.Sub(p.exitAt) > maxAfterExit || more > maxAfterExitBytes)) || waited > maxAfterExit {
				p.drain(f)
				return
			}
			// Set here, so that the time spent on a slow follower does not count.
			_ = f.SetReadDeadline(began.Add(quietTime)) // fails only on a closed file
		}
		c, err := waitRead(f, p.out.pool, limit)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if !gone {
				continue
			}
			// The deadline may have passed before the first read.
			if c, err = tryRead(f, p.out.pool, limit); isEAGAIN(err) {
				p.drain(f)
				return
			}
		}
		if err != nil || c == nil { // the end, which a terminal reports as EIO
			if p.pty == nil {
				_ = f.Close()
			}
			return
		}
		if gone {
			waited += time.Since(began)
			more += max(0, len(c.data)-left)
			left = max(0, left-len(c.data))
		}
		c.from = from
		p.out.send(c)
	}
}

func (p *Process) hasExited() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// unreadBytes returns how much of the leader's output is unread at most. The size
// is exact for a pipe; a terminal does not report it, but its buffer is small.
func (p *Process) unreadBytes(f *os.File) int {
	if p.pty != nil {
		return terminalBuffer
	}
	return pending(f)
}

// drain reads and drops the rest of a pipe in the background.
func (p *Process) drain(f *os.File) {
	if p.pty != nil {
		return // run closes the terminal
	}
	// Ends when the last background process closes the pipe or ends.
	go func() {
		_ = f.SetReadDeadline(time.Time{}) // fails only on a closed file
		for {
			c, err := waitRead(f, p.out.pool, wire.OutputChunk)
			if err != nil || c == nil {
				_ = f.Close()
				return
			}
			p.out.pool.put(c)
		}
	}()
}

// limit makes a timer kill the tree at the deadline.
func (p *Process) limit(deadline time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = time.AfterFunc(time.Until(deadline), func() {
		p.mu.Lock()
		over := p.end != nil
		p.timedOut = !over
		p.mu.Unlock()
		if !over {
			p.kill()
		}
	})
}

// expired reports whether the process was killed at its deadline.
func (p *Process) expired() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.timedOut
}

// kill ends the whole tree.
func (p *Process) kill() {
	// First the process group, then descendants that have left it.
	_, _ = p.reaper.signal(p.pid, unix.SIGSTOP, true)
	killTree(p.pid, p.mark)
	_, _ = p.reaper.signal(p.pid, unix.SIGKILL, true)
}

// signal sends sig to the process group and, on a terminal, to the foreground
// process group. SIGKILL goes to the whole tree.
func (p *Process) signal(sig unix.Signal) error {
	if sig == unix.SIGKILL {
		p.kill()
		return nil
	}
	found, err := p.reaper.signal(p.pid, sig, true)
	if !found || err != nil {
		return errors.Join(err, missing(found))
	}
	if p.pty != nil {
		group, err := foreground(p.pty)
		if err == nil && group > 0 && group != p.pid {
			return unix.Kill(-group, sig)
		}
	}
	return nil
}

func missing(found bool) error {
	if found {
		return nil
	}
	return unix.ESRCH
}

// write writes input to standard input or to the terminal. It stops when ctx is
// done or the process ends.
func (p *Process) write(ctx context.Context, data []byte, toTerminal bool) error {
	select {
	case p.input <- struct{}{}:
		defer func() { <-p.input }()
	case <-ctx.Done():
		return ctx.Err()
	}
	f := p.stdin
	switch {
	case toTerminal && p.pty == nil:
		return errNotTerminal
	case !toTerminal && p.pty != nil:
		return errIsTerminal
	case toTerminal:
		f = p.pty
	case f == nil:
		return errNoStdin
	}
	if err := f.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	// The end of the process interrupts a write, because a background process
	// may have the pipe open and never read.
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-ctx.Done():
		case <-p.done:
		case <-stop:
			return
		}
		_ = f.SetWriteDeadline(time.Unix(1, 0)) // fails only on a closed file
	}()
	_, err := f.Write(data)
	close(stop)
	<-stopped // otherwise it could interrupt the next write
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return errNoStdin
	}
	return err
}

// closeStdin closes the standard input pipe.
func (p *Process) closeStdin(ctx context.Context) error {
	if p.pty != nil {
		return errIsTerminal
	}
	select {
	case p.input <- struct{}{}:
		defer func() { <-p.input }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.stdin == nil {
		return errNoStdin
	}
	err := p.stdin.Close()
	p.stdin = nil
	return err
}

// closeInput closes the pipe at the end of the process. A write in progress has
// been interrupted by then.
func (p *Process) closeInput() {
	p.input <- struct{}{}
	defer func() { <-p.input }()
	if p.stdin != nil {
		_ = p.stdin.Close()
		p.stdin = nil
	}
}

// resize sets the terminal's size.
func (p *Process) resize(size *pb.PTY_Size) error {
	if p.pty == nil {
		return errNotTerminal
	}
	return setSize(p.pty, size)
}

func (p *Process) info() *pb.ProcessInfo {
	return &pb.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag} //nolint:gosec // process ids are positive
}

func endEvent(status unix.WaitStatus) *pb.ProcessEvent_EndEvent {
	end := &pb.ProcessEvent_EndEvent{}
	if status.Signaled() {
		end.ExitCode = -1
		end.Status = wire.SignalStatus(int(status.Signal()), status.CoreDump())
	} else {
		end.ExitCode = int32(status.ExitStatus()) //nolint:gosec // a byte
		end.Exited = true
		end.Status = wire.ExitStatus(status.ExitStatus())
	}
	if end.ExitCode != 0 {
		end.Error = &end.Status
	}
	return end
}
