package fake

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"

	"bivy/internal/guest/wire"
	pb "bivy/internal/guest/wire/gen/process"
)

// proc is one command. Output is handed to every subscriber and waits for the
// slowest; with none it is thrown away.
type proc struct {
	cmd    *exec.Cmd
	tag    string
	config *pb.ProcessConfig
	tty    *os.File // the terminal, or nil

	inputMu sync.Mutex
	input   io.WriteCloser // nil: none, or closed

	mu      sync.Mutex
	subs    []*sub
	expired bool
	end     *pb.ProcessEvent_EndEvent
	over    chan struct{} // closes once end is set
}

type sub struct {
	events chan *pb.ProcessEvent_DataEvent
	gone   chan struct{}
}

// Start implements the process service.
func (a *agent) Start(ctx context.Context, req *connect.Request[pb.StartRequest], stream *connect.ServerStream[pb.StartResponse]) error {
	if err := knownUser(req.Header()); err != nil {
		return err
	}
	p, s, err := a.launch(req.Msg, lifetime(ctx))
	if err != nil {
		return err
	}
	return p.follow(ctx, a.over, s, true, func(e *pb.ProcessEvent) error { return stream.Send(&pb.StartResponse{Event: e}) })
}

// Connect implements the process service.
func (a *agent) Connect(ctx context.Context, req *connect.Request[pb.ConnectRequest], stream *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	return p.follow(ctx, a.over, p.subscribe(), false, func(e *pb.ProcessEvent) error { return stream.Send(&pb.ConnectResponse{Event: e}) })
}

// lifetime is how long the caller lets the process live, 0 without a limit.
func lifetime(ctx context.Context) time.Duration {
	if at, ok := ctx.Deadline(); ok {
		return max(time.Until(at), time.Millisecond)
	}
	return 0
}

func knownUser(h http.Header) error {
	name := ""
	if _, code, ok := strings.Cut(h.Get("Authorization"), " "); ok {
		b, err := base64.StdEncoding.DecodeString(code)
		if err != nil {
			return wire.NewError(connect.CodeUnauthenticated, wire.ReasonUser, err)
		}
		name = strings.TrimSuffix(string(b), ":")
	}
	if me, err := user.Current(); name != "" && name != "user" && name != "root" && (err != nil || name != me.Username) {
		return wire.NewError(connect.CodeUnauthenticated, wire.ReasonUser, fmt.Errorf("invalid username: '%s'", name))
	}
	return nil
}

// launch starts a command and subscribes to it before anything is put out.
func (a *agent) launch(req *pb.StartRequest, limit time.Duration) (*proc, *sub, error) {
	cfg := req.GetProcess()
	name, args := cfg.GetCmd(), slices.Clone(cfg.GetArgs())
	if cfg.GetEscaped() {
		name = wire.Unescape(name)
		for i := range args {
			args[i] = wire.Unescape(args[i])
		}
	}
	file, err := exec.LookPath(name)
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrNotExist):
		return nil, nil, wire.NewError(connect.CodeInvalidArgument, wire.ReasonCommandNotFound, fmt.Errorf("%q does not exist", name))
	case err != nil:
		return nil, nil, wire.NewError(connect.CodeInvalidArgument, wire.ReasonCommandNotExecutable, fmt.Errorf("%q cannot be executed: %w", name, err))
	}
	dir := a.path(cfg.GetCwd())
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return nil, nil, wire.NewError(connect.CodeInvalidArgument, wire.ReasonCwd, fmt.Errorf("cwd '%s' does not exist", cfg.GetCwd()))
	}
	p := &proc{cmd: exec.Command(file, args...), tag: req.GetTag(), config: cfg, over: make(chan struct{})}
	p.cmd.Args[0] = name
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), "HOME="+a.s.root(), marker+"="+string(a.s.ID))
	a.mu.Lock()
	for k, v := range a.env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	a.mu.Unlock()
	for k, v := range cfg.GetEnvs() {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	readers, err := p.open(req)
	if err != nil {
		return nil, nil, connect.NewError(connect.CodeInternal, err)
	}
	s := p.subscribe()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over.Err() != nil {
		p.kill()
	}
	a.ran = true
	a.procs[p.pid()] = p
	a.work.Go(func() { p.run(a, readers, limit) })
	return p, s, nil
}

// output is one stream of a process and how its data is labelled.
type output struct {
	r    io.ReadCloser
	wrap func([]byte) *pb.ProcessEvent_DataEvent
	size int
}

// open starts the process with its pipes or its terminal.
func (p *proc) open(req *pb.StartRequest) ([]output, error) {
	stdout := func(b []byte) *pb.ProcessEvent_DataEvent {
		return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: b}}
	}
	stderr := func(b []byte) *pb.ProcessEvent_DataEvent {
		return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: b}}
	}
	if size := req.GetPty().GetSize(); size != nil {
		tty, err := pty.StartWithSize(p.cmd, &pty.Winsize{Cols: uint16(size.GetCols()), Rows: uint16(size.GetRows())})
		if err != nil {
			return nil, err
		}
		p.tty, p.input = tty, tty
		return []output{{tty, func(b []byte) *pb.ProcessEvent_DataEvent {
			return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: b}}
		}, wire.PTYChunk}}, nil
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, outR.Close(), outW.Close())
	}
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	if req.Stdin == nil || req.GetStdin() {
		p.input, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	err = errors.Join(err, outW.Close(), errW.Close())
	if err != nil {
		return nil, errors.Join(err, outR.Close(), errR.Close())
	}
	return []output{{outR, stdout, wire.OutputChunk}, {errR, stderr, wire.OutputChunk}}, nil
}

func (p *proc) pid() uint32 { return uint32(p.cmd.Process.Pid) }

// run follows the process to its end and remembers it for a while.
func (p *proc) run(a *agent, outputs []output, limit time.Duration) {
	if limit > 0 {
		timer := time.AfterFunc(limit, func() {
			p.mu.Lock()
			p.expired = true
			p.mu.Unlock()
			p.kill()
		})
		defer timer.Stop()
	}
	var readers sync.WaitGroup
	for _, o := range outputs {
		readers.Go(func() {
			defer o.r.Close()
			buf := make([]byte, o.size)
			for {
				n, err := o.r.Read(buf)
				if n > 0 {
					p.publish(a.over, o.wrap(slices.Clone(buf[:n])))
				}
				if err != nil {
					return // the end of the stream; a terminal says EIO
				}
			}
		})
	}
	readers.Wait()
	err := p.cmd.Wait()
	end := &pb.ProcessEvent_EndEvent{ExitCode: int32(p.cmd.ProcessState.ExitCode()), Exited: p.cmd.ProcessState.Exited()}
	end.Status = wire.ExitStatus(int(end.ExitCode))
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		end.Status = wire.SignalStatus(int(ws.Signal()), ws.CoreDump())
	}
	if err != nil {
		end.Error = &end.Status
	}
	p.mu.Lock()
	p.end = end
	p.mu.Unlock()
	close(p.over)
	forget := time.NewTimer(wire.Retention)
	defer forget.Stop()
	select {
	case <-forget.C:
	case <-a.over.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.procs, p.pid())
}

func (p *proc) kill() {
	// An error means that the group is gone already.
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
}

func (p *proc) subscribe() *sub {
	s := &sub{events: make(chan *pb.ProcessEvent_DataEvent), gone: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subs = append(p.subs, s)
	return s
}

func (p *proc) publish(over context.Context, e *pb.ProcessEvent_DataEvent) {
	p.mu.Lock()
	subs := slices.Clone(p.subs)
	p.mu.Unlock()
	for _, s := range subs {
		select {
		case s.events <- e:
		case <-s.gone:
		case <-over.Done():
		}
	}
}

// follow sends the events of p until it ended or the caller is gone. The
// deadline of a Start is the process's, so only its cancellation counts.
func (p *proc) follow(ctx, over context.Context, s *sub, first bool, send func(*pb.ProcessEvent) error) error {
	defer func() {
		close(s.gone)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.subs = slices.DeleteFunc(p.subs, func(o *sub) bool { return o == s })
	}()
	if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: p.pid()}}}); err != nil {
		return err
	}
	done := ctx.Done()
	for {
		select {
		case e := <-s.events:
			if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: e}}); err != nil {
				return err
			}
		case <-done:
			if first && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				done = nil // the process is being killed; its end follows
				continue
			}
			return ctx.Err()
		case <-over.Done():
			return connect.NewError(connect.CodeUnavailable, errors.New("the sandbox stopped"))
		case <-p.over:
			p.mu.Lock()
			expired := p.expired
			p.mu.Unlock()
			if first && expired {
				return wire.NewError(connect.CodeDeadlineExceeded, wire.ReasonTimeout, errors.New("the process ran into its timeout and was killed"))
			}
			return send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: p.end}})
		}
	}
}

func (a *agent) find(sel *pb.ProcessSelector) (*proc, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for pid, p := range a.procs {
		if t, ok := sel.GetSelector().(*pb.ProcessSelector_Tag); ok && p.tag == t.Tag && t.Tag != "" {
			return p, nil
		}
		if n, ok := sel.GetSelector().(*pb.ProcessSelector_Pid); ok && pid == n.Pid {
			return p, nil
		}
	}
	return nil, wire.NewError(connect.CodeNotFound, wire.ReasonNoProcess, errors.New("no such process"))
}

// List implements the process service.
func (a *agent) List(context.Context, *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	res := &pb.ListResponse{}
	for pid, p := range a.procs {
		p.mu.Lock()
		if p.end == nil {
			res.Processes = append(res.Processes, &pb.ProcessInfo{Config: p.config, Pid: pid, Tag: &p.tag})
		}
		p.mu.Unlock()
	}
	return connect.NewResponse(res), nil
}

// SendInput implements the process service.
func (a *agent) SendInput(_ context.Context, req *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	data := req.Msg.GetInput().GetStdin()
	if p.tty != nil {
		data = req.Msg.GetInput().GetPty()
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.input == nil {
		return nil, wire.NewError(connect.CodeFailedPrecondition, wire.ReasonStdin, errors.New("the standard input is closed"))
	}
	if _, err := p.input.Write(data); err != nil {
		return nil, wire.NewError(connect.CodeFailedPrecondition, wire.ReasonStdin, err)
	}
	return connect.NewResponse(&pb.SendInputResponse{}), nil
}

// CloseStdin implements the process service.
func (a *agent) CloseStdin(_ context.Context, req *connect.Request[pb.CloseStdinRequest]) (*connect.Response[pb.CloseStdinResponse], error) {
	p, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if p.tty != nil {
		return nil, wire.NewError(connect.CodeFailedPrecondition, wire.ReasonStdin, errors.New("a terminal has no standard input to close"))
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.input != nil {
		_ = p.input.Close() // the process may have closed its end first
		p.input = nil
	}
	return connect.NewResponse(&pb.CloseStdinResponse{}), nil
}

// Update implements the process service.
func (a *agent) Update(_ context.Context, req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	p, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	size := req.Msg.GetPty().GetSize()
	if p.tty == nil || size == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal"))
	}
	if err := pty.Setsize(p.tty, &pty.Winsize{Cols: uint16(size.GetCols()), Rows: uint16(size.GetRows())}); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&pb.UpdateResponse{}), nil
}

// SendSignal implements the process service.
func (a *agent) SendSignal(_ context.Context, req *connect.Request[pb.SendSignalRequest]) (*connect.Response[pb.SendSignalResponse], error) {
	p, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := syscall.Kill(-p.cmd.Process.Pid, syscall.Signal(req.Msg.GetSignal())); err != nil && !errors.Is(err, syscall.ESRCH) {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&pb.SendSignalResponse{}), nil
}
