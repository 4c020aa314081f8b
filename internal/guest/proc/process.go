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
	// quiet is how long the output may be silent after the leader's exit
	// before it counts as finished although a background process still has the
	// other end open, as in sh -c 'server & echo ready'.
	quiet = 100 * time.Millisecond
	// lingering is how long, at most, output of such a background process is
	// reported after all that the leader left in the pipe.
	lingering = 2 * time.Second
	flood     = 1 << 20 // bytes of it
	// terminalBuffer is more than a kernel keeps for a terminal's reader.
	terminalBuffer = 64 << 10
)

// Process is one process started through the service, with its descendants.
type Process struct {
	pid    int
	tag    *string
	config *pb.ProcessConfig
	reaper *Reaper
	mark   uint64
	out    fanout

	pty     *os.File   // the terminal's master, or nil
	outputs []*os.File // what is read, in the order of their streams

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

// left is called by the reaper when the leader is gone.
func (p *Process) left(status unix.WaitStatus) {
	p.status, p.exitAt = status, time.Now()
	close(p.exited)
	// Whoever waits in a read gets until the end of the quiet time.
	for _, f := range p.outputs {
		_ = f.SetReadDeadline(p.exitAt.Add(quiet)) // fails only on a closed file
	}
}

// run reads the outputs, and when they and the leader are finished, says so.
// The caller starts it on a goroutine of its own.
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
		_ = p.pty.Close() // hangs up what is left on the terminal
	}
}

// read follows one output until its end, or until the leader has gone and
// nothing more comes. A pipe that outlives the leader goes on being drained,
// so that a background process neither blocks nor dies of it.
func (p *Process) read(f *os.File, from stream, limit int) {
	var waited time.Duration // in reads, since the leader's exit was noticed
	left := -1               // of what the leader left behind, in bytes
	more := 0                // what came after that
	for {
		began := time.Now()
		gone := p.gone()
		if gone {
			if left < 0 {
				left = p.leftIn(f)
			}
			if (left == 0 && (began.Sub(p.exitAt) > lingering || more > flood)) || waited > lingering {
				p.drain(f)
				return
			}
			// Time spent on a slow follower must not count as silence.
			_ = f.SetReadDeadline(began.Add(quiet)) // fails only on a closed file
		}
		c, err := readable(f, p.out.pool, limit)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if !gone {
				continue
			}
			// The deadline may have passed before there was a chance to look.
			if c, err = tryRead(f, p.out.pool, limit); again(err) {
				p.drain(f)
				return
			}
		}
		if err != nil || c == nil { // the end; a terminal says so with EIO
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

func (p *Process) gone() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// leftIn bounds how much of the leader's output is still unread. A pipe says
// so exactly; a terminal does not, but its buffer is small.
func (p *Process) leftIn(f *os.File) int {
	if p.pty != nil {
		return terminalBuffer
	}
	return pending(f)
}

// drain reads and drops the rest of a pipe in the background.
func (p *Process) drain(f *os.File) {
	if p.pty != nil {
		return // closed by run, which hangs up
	}
	// Ends when the last background process closes the pipe or dies, at the
	// latest with the guest.
	go func() {
		_ = f.SetReadDeadline(time.Time{}) // fails only on a closed file
		for {
			c, err := readable(f, p.out.pool, wire.OutputChunk)
			if err != nil || c == nil {
				_ = f.Close()
				return
			}
			p.out.pool.put(c)
		}
	}()
}

// limit arranges for the tree to be killed at the deadline.
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

// expired reports that the lifetime limit ended the process.
func (p *Process) expired() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.timedOut
}

// kill ends the whole tree.
func (p *Process) kill() {
	// The group at once, then whatever has left it.
	_, _ = p.reaper.signal(p.pid, unix.SIGSTOP, true)
	killTree(p.pid, p.mark)
	_, _ = p.reaper.signal(p.pid, unix.SIGKILL, true)
}

// signal sends sig to the process group, on a terminal to the foreground group
// too. SIGKILL means the tree.
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

// write feeds input; it gives up when ctx is done.
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
	// The end of the process interrupts a write too: a background process may
	// hold the other end and never read.
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
	<-stopped // or it could interrupt the next write
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return errNoStdin
	}
	return err
}

// closeStdin closes the pipe for good.
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

// closeInput is closeStdin at the end of the process; a write that is under
// way has been interrupted by then.
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
