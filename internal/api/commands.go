package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"

	"bivy/client"
	"bivy/internal/kind"
	"bivy/internal/workload"
)

func startCommand(c *call) error {
	typ, err := c.accepts(client.NDJSONType, client.StreamType, "application/json")
	if err != nil {
		return err
	}
	var in client.Command
	var frames *client.FrameReader
	if t, _, err := mime.ParseMediaType(c.req.Header.Get("Content-Type")); err == nil && t == client.StreamType {
		// Callers send nothing before they know that the session is there.
		if _, err := c.h.o.Sessions.Get(c.ctx(), c.caller, c.session); err != nil {
			return err
		}
		frames, err = c.firstFrame(&in)
		if err != nil {
			return err
		}
	} else if err := c.decode(&in); err != nil {
		return err
	}
	p, err := c.startProcess(in, typ, frames != nil)
	if err != nil {
		return err
	}
	defer p.Detach()
	if typ == "application/json" {
		id, _ := p.Identity()
		return c.describe(http.StatusCreated, id)
	}
	s := &stream{c: c, p: p, enc: newEncoder(typ), frames: frames, kill: in.OnDisconnect == client.Kill}
	return s.run()
}

func (c *call) startProcess(in client.Command, typ string, duplex bool) (*workload.Process, error) {
	bad := func(field, format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField(field)
	}
	switch {
	case len(in.Argv) == 0:
		return nil, bad("argv", "missing")
	case in.TimeoutSeconds < 0 || in.TimeoutSeconds > 30*24*3600:
		return nil, bad("timeout_seconds", "%g is outside 0 to %d", in.TimeoutSeconds, 30*24*3600)
	case in.OnDisconnect != "" && in.OnDisconnect != client.Detach && in.OnDisconnect != client.Kill:
		return nil, bad("on_disconnect", "%.40q; want %q or %q", in.OnDisconnect, client.Detach, client.Kill)
	case typ == "application/json" && in.OnDisconnect == client.Kill:
		return nil, bad("on_disconnect", "kill needs an answer that is a stream")
	case typ == "application/json" && duplex:
		return nil, bad("Accept", "input in the request needs an answer that is a stream")
	}
	ctx := c.ctx()
	if in.OnDisconnect == client.Kill {
		// A start that is cancelled when its caller goes may have happened, and
		// the command would run on. It is started, found without a caller, and
		// killed.
		ctx = context.WithoutCancel(ctx)
	}
	return c.h.o.Workload.Start(ctx, c.caller, c.session, commandIn(in))
}

// firstFrame reads the command that begins a body of frames.
func (c *call) firstFrame(in *client.Command) (*client.FrameReader, error) {
	if err := c.ctl.EnableFullDuplex(); err != nil {
		return nil, fmt.Errorf("full duplex: %w", err)
	}
	_ = c.ctl.SetReadDeadline(time.Now().Add(bodyTimeout))
	frames := client.NewFrameReader(bufio.NewReaderSize(c.req.Body, 32<<10))
	t, payload, err := frames.Next()
	tooLong := errors.Is(err, client.ErrFrame)
	if err != nil && !tooLong {
		return nil, kind.Errorf(kind.Invalid, "reading the first frame: %w", err)
	}
	if t != client.FrameCommand {
		return nil, kind.Errorf(kind.Invalid, "the first frame has type %d; want %d, a command", t, client.FrameCommand)
	}
	_ = c.ctl.SetReadDeadline(time.Time{})
	return frames, decodeStrict(payload, tooLong, in)
}

// lingerTime is how long a caller may take to end its side of a stream that
// is over.
const lingerTime = 5 * time.Second

// abandonBody bounds the time that the HTTP server waits for the end of a body
// that is not read any more.
func (c *call) abandonBody() { _ = c.ctl.SetReadDeadline(time.Now().Add(lingerTime)) }

func attachCommand(c *call) error {
	typ, err := c.accepts(client.NDJSONType, client.StreamType, "application/json")
	if err != nil {
		return err
	}
	if typ == "application/json" {
		return c.describe(http.StatusOK, c.req.PathValue("command"))
	}
	p, err := c.attach()
	if err != nil {
		return err
	}
	defer p.Detach()
	s := &stream{c: c, p: p, enc: newEncoder(typ)}
	return s.run()
}

// describe answers with what is known of one command.
func (c *call) describe(status int, id string) error {
	info, err := c.h.o.Workload.Describe(c.ctx(), c.caller, c.session, id)
	if err != nil {
		return err
	}
	return c.reply(status, commandOut(info))
}

func (c *call) attach() (*workload.Process, error) {
	return c.h.o.Workload.Attach(c.ctx(), c.caller, c.session, c.req.PathValue("command"))
}

func listCommands(c *call) error {
	list, err := c.h.o.Workload.Commands(c.ctx(), c.caller, c.session)
	if err != nil {
		return err
	}
	items := make([]client.CommandInfo, 0, len(list))
	for _, info := range list {
		items = append(items, commandOut(info))
	}
	return page(c, items)
}

// stream carries one command's output to a caller, and in full duplex the
// caller's input to the command.
type stream struct {
	c      *call
	p      *workload.Process
	enc    encoder
	frames *client.FrameReader // nil: no input here
	kill   bool                // the command when the caller goes
	out    *bufio.Writer
}

const (
	outputBuffer  = 64 << 10
	eventsAhead   = 8                // events taken from the command before the caller has taken them
	pingInterval  = 15 * time.Second // so that a caller who has silently gone is noticed
	killPatience  = 5 * time.Second
	killSignal    = 9
	flushedEnough = 32 << 10
)

func (s *stream) run() error {
	ctx, cancel := context.WithCancelCause(s.c.ctx())
	defer cancel(nil)
	s.out = bufio.NewWriterSize(s.c.w, outputBuffer)
	s.c.w.Header().Set("Content-Type", s.enc.mediaType())
	s.c.w.Header().Set("X-Accel-Buffering", "no")
	s.c.w.WriteHeader(http.StatusOK)

	inputDone := make(chan struct{})
	if s.frames == nil {
		close(inputDone)
	} else {
		go func() { // waited for below, on inputDone
			defer close(inputDone)
			if err := s.input(ctx); err != nil {
				cancel(err)
			}
		}()
	}
	ended, err := s.output(ctx)
	if !ended && s.kill {
		s.killCommand()
	}
	cancel(err)
	if s.frames != nil {
		s.c.abandonBody()
		<-inputDone
	}
	if err != nil && !errors.Is(err, errCallerGone) && s.c.ctx().Err() == nil {
		return err
	}
	if !ended {
		panic(http.ErrAbortHandler) // the stream must not look complete
	}
	return nil
}

// errCallerGone says that the caller does not read the answer any more.
var errCallerGone = errors.New("the caller has gone")

// output forwards until the command ends, which it reports, or the caller goes.
func (s *stream) output(ctx context.Context) (ended bool, err error) {
	type next struct {
		ev  workload.Event
		err error
	}
	events := make(chan next, eventsAhead)
	pumpCtx, stop := context.WithCancel(ctx)
	pumped := make(chan struct{})
	defer func() { stop(); <-pumped }()
	go func() { // waited for on pumped
		defer close(pumped)
		for {
			ev, err := s.p.Next(pumpCtx)
			select {
			case events <- next{ev, err}:
			case <-pumpCtx.Done():
				return
			}
			if err != nil || ev.Kind == workload.End {
				return
			}
		}
	}()

	id, pid := s.p.Identity()
	if err := s.enc.started(s.out, client.Started{ID: id, PID: pid}); err != nil {
		return false, errCallerGone
	}
	if len(events) == 0 {
		if err := s.flush(); err != nil {
			return false, err
		}
	}
	ping := time.NewTicker(pingInterval)
	defer ping.Stop()
	for {
		select {
		case n := <-events:
			if n.err != nil && protocolError(ctx) != nil {
				n.err = protocolError(ctx) // which is why the command is no longer followed
			}
			ended, err := s.forward(n.ev, n.err)
			if err == nil && (ended || n.err != nil || len(events) == 0 || s.out.Buffered() >= flushedEnough) {
				err = s.flush()
			}
			if ended || err != nil || n.err != nil {
				return ended, err
			}
		case <-ping.C:
			if err := s.enc.ping(s.out); err != nil {
				return false, errCallerGone
			}
			if err := s.flush(); err != nil {
				return false, err
			}
		case <-ctx.Done():
			if cause := protocolError(ctx); cause != nil {
				if _, err := s.forward(workload.Event{}, cause); err != nil {
					return false, err
				}
				return false, s.flush()
			}
			return false, errCallerGone
		}
	}
}

// protocolError is the error of a caller that is still connected and broke the
// protocol of the stream, or nil.
func protocolError(ctx context.Context) error {
	cause := context.Cause(ctx)
	switch {
	case kind.Is(cause, kind.Invalid):
		return cause
	case errors.Is(cause, client.ErrFrame):
		return kind.Wrap(kind.Invalid, cause)
	}
	return nil
}

// forward writes one event, or an error, which ends the stream.
func (s *stream) forward(ev workload.Event, err error) (ended bool, _ error) {
	switch {
	case err != nil && gone(s.c.ctx(), err):
		return false, errCallerGone
	case err != nil:
		s.c.h.logInternal(s.c.w, s.c.req, err)
		e := wireError(err, s.c.w.request)
		if s.enc.failed(s.out, e) != nil {
			return false, errCallerGone
		}
		return false, nil
	case ev.Kind == workload.End:
		if s.enc.ended(s.out, exitOut(ev.Exit)) != nil {
			return true, errCallerGone
		}
		return true, nil
	}
	if s.enc.data(s.out, ev.Kind, ev.Data) != nil {
		return false, errCallerGone
	}
	return false, nil
}

func (s *stream) flush() error {
	if s.out.Flush() != nil || s.c.ctl.Flush() != nil {
		return errCallerGone
	}
	return nil
}

// killCommand ends a command whose caller went without waiting for it.
func (s *stream) killCommand() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.c.ctx()), killPatience)
	defer cancel()
	// NotFound and Conflict: it has ended, or its session has.
	err := s.p.Signal(ctx, killSignal)
	if err != nil && !kind.Is(err, kind.NotFound) && !kind.Is(err, kind.Conflict) {
		id, _ := s.p.Identity()
		s.c.h.logOf(s.c.w).Warn("command not killed after its caller went", "session", s.c.session, "command", id, "error", err)
	}
}

// input takes frames from the caller until it ends its side, which ends the
// command's input too. An error means that the caller is gone or does not
// speak the protocol.
func (s *stream) input(ctx context.Context) error {
	closed := false // the command takes no more input
	for {
		t, payload, err := s.frames.Next()
		if errors.Is(err, io.EOF) {
			if !closed {
				// The command may have ended, which its end says.
				_ = s.p.CloseStdin(ctx)
			}
			return nil
		}
		if err != nil {
			return err
		}
		switch t {
		case client.FrameStdin:
			// What the command does not take any more is dropped, as a pipe's
			// writer would be told; signals must still get through.
			if !closed && len(payload) > 0 && s.p.Write(ctx, payload) != nil {
				closed = true
			}
		case client.FrameCloseStdin:
			if !closed {
				closed = true
				_ = s.p.CloseStdin(ctx)
			}
		case client.FrameResize:
			var size client.Size
			if err := decodeStrict(payload, false, &size); err != nil {
				return err
			}
			_ = s.p.Resize(ctx, workload.Size{Cols: size.Cols, Rows: size.Rows})
		case client.FrameSignal:
			var sig client.SendSignal
			if err := decodeStrict(payload, false, &sig); err != nil {
				return err
			}
			if err := checkSignal(sig.Signal); err != nil {
				return err
			}
			_ = s.p.Signal(ctx, sig.Signal)
		default:
			return kind.Errorf(kind.Invalid, "frame type %d is not one of a caller's", t)
		}
	}
}

func checkSignal(n int) error {
	if n < 1 || n > 64 {
		return kind.Errorf(kind.Invalid, "%d is not a signal; want 1 to 64", n).WithField("signal")
	}
	return nil
}

// Input that comes by its own requests.

func commandStdin(c *call) error {
	if err := c.wantType("application/octet-stream"); err != nil {
		return err
	}
	return c.withProcess(func(p *workload.Process) error {
		buf := make([]byte, 32<<10)
		for {
			n, err := c.req.Body.Read(buf)
			if n > 0 {
				if err := p.Write(c.ctx(), buf[:n]); err != nil {
					c.drain()
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return kind.Errorf(kind.Invalid, "reading the body: %w", err)
			}
		}
	})
}

// withProcess calls fn for the command of the path. Meanwhile it takes the
// output and drops it, because the command waits for every reader.
func (c *call) withProcess(fn func(p *workload.Process) error) error {
	p, err := c.attach()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(c.ctx())
	taken := make(chan struct{})
	go func() { // waited for below, on taken
		defer close(taken)
		for {
			if _, err := p.Next(ctx); err != nil {
				return
			}
		}
	}()
	err = fn(p)
	stop()
	<-taken
	p.Detach()
	if err != nil {
		return err
	}
	return c.nothing()
}

func commandCloseStdin(c *call) error {
	if err := c.noBody(); err != nil {
		return err
	}
	return c.withProcess(func(p *workload.Process) error { return p.CloseStdin(c.ctx()) })
}

func commandSignal(c *call) error {
	var in client.SendSignal
	if err := c.decode(&in); err != nil {
		return err
	}
	if err := checkSignal(in.Signal); err != nil {
		return err
	}
	return c.withProcess(func(p *workload.Process) error { return p.Signal(c.ctx(), in.Signal) })
}

func commandResize(c *call) error {
	var in client.Size
	if err := c.decode(&in); err != nil {
		return err
	}
	return c.withProcess(func(p *workload.Process) error {
		return p.Resize(c.ctx(), workload.Size{Cols: in.Cols, Rows: in.Rows})
	})
}
