package guestclient

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"bivy/internal/argv"
	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
	"bivy/internal/kind"
)

// Size is a terminal's size in character cells.
type Size struct{ Cols, Rows uint32 }

// Command is a program to run in the guest. No shell is involved: the program gets
// exactly the bytes of Argv.
type Command struct {
	Argv    []string          // Argv[0] is looked up in the command's own PATH
	Env     map[string]string // added to the sandbox's environment
	Cwd     string            // empty: the default directory; relative: to the home
	User    string            // empty: the default user
	Tag     string            // optional name, for Attach by tag
	PTY     *Size             // run on a terminal of this size
	Stdin   bool              // keep a pipe to write to; otherwise /dev/null
	Timeout time.Duration     // the whole process tree is killed after it; zero: no limit
}

// Exit is how a process ended.
type Exit struct {
	Code     int    // the exit status, or -1 when a signal ended it
	Signal   int    // the signal's number, or 0
	Status   string // as text: "exit status 1", "signal: killed"
	TimedOut bool   // it was killed at Command.Timeout
}

// ShellCode returns the exit code as a shell and timeout(1) report it: the code,
// 128+signal for a process killed by a signal, 124 after a timeout.
func (e Exit) ShellCode() int {
	switch {
	case e.TimedOut:
		return 124
	case e.Signal > 0:
		return 128 + e.Signal
	case e.Code < 0:
		return 255
	}
	return e.Code
}

// EventKind says which field of an Event is set.
type EventKind uint8

// The kinds of events: any number of outputs, then one End.
const (
	Stdout EventKind = iota + 1
	Stderr
	Terminal
	End
)

// Event is one thing that happened to a process. Data belongs to the receiver.
type Event struct {
	Kind EventKind
	Data []byte
	Exit Exit
}

// ProcessInfo describes a running process.
type ProcessInfo struct {
	PID  uint32
	Tag  string
	Argv []string
	Env  map[string]string
	Cwd  string
}

// Process is a subscription to one process in the guest. Next must be called
// by one goroutine; everything else may be called by any.
type Process struct {
	// PID is the process's id inside the guest.
	PID uint32

	client  *Client
	what    string
	pty     bool
	receive func() (*pb.ProcessEvent, error)
	cancel  context.CancelFunc
	finish  func() error
	once    sync.Once
	ended   atomic.Bool
}

// Exec starts cmd and returns once it runs. When ctx ends, Next returns an error
// and the process continues. The caller must Close the process.
func (c *Client) Exec(ctx context.Context, cmd Command) (*Process, error) {
	what := argv.Command{Argv: cmd.Argv, Env: cmd.Env, Dir: cmd.Cwd}
	if err := what.Check(); err != nil {
		return nil, err
	}
	request := &pb.StartRequest{Process: config(what), Stdin: &cmd.Stdin}
	if cmd.PTY != nil {
		request.Pty = &pb.PTY{Size: &pb.PTY_Size{Cols: cmd.PTY.Cols, Rows: cmd.PTY.Rows}}
	}
	if cmd.Tag != "" {
		request.Tag = &cmd.Tag
	}
	name := fmt.Sprintf("start %q", cmd.Argv[0])
	ctx, cancel := c.streamContext(context.WithValue(ctx, limitKey{}, cmd.Timeout))
	req := connect.NewRequest(request)
	setUser(req.Header(), cmd.User)
	stream, err := c.process.Start(ctx, req)
	if err != nil {
		cancel()
		return nil, mapError(name, err)
	}
	p := &Process{client: c, what: name, pty: cmd.PTY != nil, cancel: cancel, finish: stream.Close}
	p.receive = func() (*pb.ProcessEvent, error) {
		if !stream.Receive() {
			return nil, stream.Err()
		}
		return stream.Msg().GetEvent(), nil
	}
	return p.awaitStart()
}

// Attach subscribes to a running process; earlier output is not repeated. A
// process that ended less than [wire.Retention] ago only gives its End.
func (c *Client) Attach(ctx context.Context, pid uint32) (*Process, error) {
	return c.attach(ctx, fmt.Sprintf("attach to process %d", pid), &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}})
}

// AttachTag is Attach for the process that was started with a tag.
func (c *Client) AttachTag(ctx context.Context, tag string) (*Process, error) {
	return c.attach(ctx, fmt.Sprintf("attach to process %q", tag), &pb.ProcessSelector{Selector: &pb.ProcessSelector_Tag{Tag: tag}})
}

func (c *Client) attach(ctx context.Context, what string, sel *pb.ProcessSelector) (*Process, error) {
	ctx, cancel := c.streamContext(ctx)
	stream, err := c.process.Connect(ctx, connect.NewRequest(&pb.ConnectRequest{Process: sel}))
	if err != nil {
		cancel()
		return nil, mapError(what, err)
	}
	p := &Process{client: c, what: what, cancel: cancel, finish: stream.Close}
	p.receive = func() (*pb.ProcessEvent, error) {
		if !stream.Receive() {
			return nil, stream.Err()
		}
		return stream.Msg().GetEvent(), nil
	}
	return p.awaitStart()
}

func (p *Process) awaitStart() (*Process, error) {
	event, err := p.receive()
	if err != nil || event.GetStart() == nil {
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return nil, errors.Join(mapError(p.what, err), p.Close())
	}
	p.PID = event.GetStart().GetPid()
	return p, nil
}

// Next waits for the next event. After the End it returns io.EOF. A stream
// that breaks off before the End gives an error of kind Unavailable; the
// process may still run and can be attached to.
func (p *Process) Next() (Event, error) {
	for {
		if p.ended.Load() {
			return Event{}, io.EOF
		}
		event, err := p.receive()
		if wire.IsTimeout(err) {
			p.ended.Store(true)
			return Event{Kind: End, Exit: Exit{Code: -1, Signal: int(syscall.SIGKILL), Status: wire.SignalStatus(int(syscall.SIGKILL), false), TimedOut: true}}, nil
		}
		if err != nil {
			return Event{}, mapError(p.what, err)
		}
		if event == nil {
			return Event{}, kind.Wrap(kind.Unavailable, fmt.Errorf("%s: %w", p.what, io.ErrUnexpectedEOF))
		}
		switch e := event.Event.(type) {
		case *pb.ProcessEvent_Data:
			switch out := e.Data.GetOutput().(type) {
			case *pb.ProcessEvent_DataEvent_Stdout:
				return Event{Kind: Stdout, Data: out.Stdout}, nil
			case *pb.ProcessEvent_DataEvent_Stderr:
				return Event{Kind: Stderr, Data: out.Stderr}, nil
			case *pb.ProcessEvent_DataEvent_Pty:
				return Event{Kind: Terminal, Data: out.Pty}, nil
			}
		case *pb.ProcessEvent_End:
			p.ended.Store(true)
			return Event{Kind: End, Exit: Exit{
				Code:   int(e.End.GetExitCode()),
				Signal: wire.StatusSignal(e.End.GetStatus()),
				Status: e.End.GetStatus(),
			}}, nil
		}
		// Keep-alives, and events of a newer agent, are ignored.
	}
}

// endTime is how long Close waits for the end of the stream after the End event.
const endTime = time.Second

// Close ends the subscription. The process continues; Signal can end it.
func (p *Process) Close() error {
	var err error
	p.once.Do(func() {
		if p.ended.Load() {
			// Read the end of the stream, so that the connection can be reused,
			// but only for a limited time: the guest is not trusted.
			defer time.AfterFunc(endTime, p.cancel).Stop()
		} else {
			// Cancel first, so that closing does not wait for more output.
			p.cancel()
		}
		if e := p.finish(); e != nil && !isGone(e) {
			err = mapError(p.what, e)
		}
		p.cancel()
	})
	return err
}

func isGone(err error) bool {
	return connect.CodeOf(err) == connect.CodeCanceled || errors.Is(err, context.Canceled)
}

// Write sends input to the process: to its standard input, or to its terminal. It
// returns when the guest has written all of it, which takes as long as the process
// needs to read it.
func (p *Process) Write(ctx context.Context, data []byte) error {
	return p.client.SendInput(ctx, p.PID, p.pty, data)
}

// CloseStdin closes the write end of the standard input pipe.
func (p *Process) CloseStdin(ctx context.Context) error { return p.client.CloseStdin(ctx, p.PID) }

// Resize changes the terminal's size.
func (p *Process) Resize(ctx context.Context, size Size) error {
	return p.client.Resize(ctx, p.PID, size)
}

// Signal sends sig to the process group; SIGKILL ends the whole tree, also
// descendants that left the group.
func (p *Process) Signal(ctx context.Context, sig syscall.Signal) error {
	return p.client.Signal(ctx, p.PID, sig)
}

// inputChunk is how many bytes of input one message has at most.
const inputChunk = 256 << 10

// SendInput is Process.Write for the process with the given id.
func (c *Client) SendInput(ctx context.Context, pid uint32, pty bool, data []byte) error {
	ctx, cancel := c.streamContext(ctx)
	defer cancel()
	for len(data) > 0 {
		part := data[:min(len(data), inputChunk)]
		data = data[len(part):]
		input := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: part}}
		if pty {
			input.Input = &pb.ProcessInput_Pty{Pty: part}
		}
		_, err := c.process.SendInput(ctx, connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid), Input: input}))
		if err != nil {
			return mapError(fmt.Sprintf("write to process %d", pid), err)
		}
	}
	return nil
}

// CloseStdin is Process.CloseStdin for the process with the given id.
func (c *Client) CloseStdin(ctx context.Context, pid uint32) error {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	_, err := c.process.CloseStdin(ctx, connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)}))
	return mapError(fmt.Sprintf("close input of process %d", pid), err)
}

// Resize is Process.Resize for the process with the given id.
func (c *Client) Resize(ctx context.Context, pid uint32, size Size) error {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	_, err := c.process.Update(ctx, connect.NewRequest(&pb.UpdateRequest{
		Process: byPID(pid),
		Pty:     &pb.PTY{Size: &pb.PTY_Size{Cols: size.Cols, Rows: size.Rows}},
	}))
	return mapError(fmt.Sprintf("resize terminal of process %d", pid), err)
}

// Signal is Process.Signal for the process with the given id.
func (c *Client) Signal(ctx context.Context, pid uint32, sig syscall.Signal) error {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	_, err := c.process.SendSignal(ctx, connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal(sig)}))
	return mapError(fmt.Sprintf("signal process %d", pid), err)
}

// Processes lists the running processes.
func (c *Client) Processes(ctx context.Context) ([]ProcessInfo, error) {
	ctx, cancel := c.callContext(ctx)
	defer cancel()
	res, err := c.process.List(ctx, connect.NewRequest(&pb.ListRequest{}))
	if err != nil {
		return nil, mapError("list processes", err)
	}
	var all []ProcessInfo
	for _, p := range res.Msg.GetProcesses() {
		cfg := p.GetConfig()
		all = append(all, ProcessInfo{
			PID: p.GetPid(), Tag: p.GetTag(), Env: cfg.GetEnvs(), Cwd: wire.Unescape(cfg.GetCwd()),
			Argv: append([]string{cfg.GetCmd()}, cfg.GetArgs()...),
		})
	}
	return all, nil
}

func byPID(pid uint32) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}
}

// config turns a command into its message.
func config(cmd argv.Command) *pb.ProcessConfig {
	text, escaped := wire.EscapeCommand(cmd)
	cfg := &pb.ProcessConfig{Cmd: text.Argv[0], Args: text.Argv[1:], Envs: text.Env, Escaped: escaped}
	if text.Dir != "" {
		cfg.Cwd = &text.Dir
	}
	return cfg
}

// setUser sets the user of a request, as HTTP Basic authentication without a
// password.
func setUser(h http.Header, user string) {
	if user != "" {
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
}
