package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
)

// Process is a stream to a command of a session. Next and Wait must be called
// from one goroutine; the other methods are safe for concurrent use.
type Process struct {
	ID  string // of the command
	PID uint32 // inside the session

	s      *Session
	cancel context.CancelFunc
	resp   *http.Response
	frames *FrameReader
	exit   *Exit

	// Input is sent in the body of the request that started the command, or,
	// for an attached stream, with a request for each piece.
	stdinMu sync.Mutex
	up      *io.PipeWriter // into that body; nil: attached
	scratch []byte
	ctx     context.Context // of the stream, for the requests Write makes
}

// ProcessEvent is a piece of output, or the end of the command.
type ProcessEvent struct {
	Type FrameType // FrameStdout, FrameStderr, FramePTY or FrameEnd
	Data []byte    // output; valid until the next call of Next
	Exit Exit      // how it ended, for FrameEnd
}

// Start starts a command and returns a stream to it. The stream is closed when
// ctx is done; cmd.OnDisconnect says what happens to the command then. The caller
// calls Wait, or Next until the end, or Close.
func (s *Session) Start(ctx context.Context, cmd Command) (*Process, error) {
	payload, err := json.Marshal(cmd)
	if err != nil {
		return nil, err
	}
	r := call{method: "POST", path: s.path("/commands"), accept: StreamType}
	var up *io.PipeWriter
	if cmd.Stdin || cmd.PTY != nil {
		var down *io.PipeReader
		down, up = io.Pipe()
		if len(payload) > MaxFrame {
			// The server refuses it, and needs only the first part to say which
			// field is too large.
			payload = payload[:MaxFrame+1]
		}
		first := AppendFrame(make([]byte, 0, frameHeader+len(payload)), FrameCommand, payload)
		r.body, r.typ = &duplex{first: bytes.NewReader(first), rest: down}, StreamType
	} else {
		r.body, r.typ = bytes.NewReader(payload), "application/json"
	}
	return s.open(ctx, r, up)
}

// Attach opens another stream to a command that runs, or that ended within the
// last 30 seconds. Output from before is not repeated.
func (s *Session) Attach(ctx context.Context, command string) (*Process, error) {
	return s.open(ctx, call{method: "GET", path: s.commandPath(command, ""), accept: StreamType}, nil)
}

func (s *Session) commandPath(id, rest string) string {
	return s.path("/commands/" + url.PathEscape(id) + rest)
}

func (s *Session) open(ctx context.Context, r call, up *io.PipeWriter) (*Process, error) {
	ctx, cancel := context.WithCancel(ctx)
	fail := func(err error) (*Process, error) {
		cancel()
		if up != nil {
			up.CloseWithError(err)
		}
		return nil, err
	}
	resp, err := s.c.send(ctx, r)
	if err != nil {
		return fail(err)
	}
	p := &Process{s: s, ctx: ctx, cancel: cancel, resp: resp, up: up,
		frames: NewFrameReader(bufio.NewReaderSize(resp.Body, 64<<10))}
	t, payload, err := p.frames.Next()
	if err == nil && t == FrameError {
		err = traced(frameError(payload), resp)
	}
	if err == nil && t != FrameStart {
		err = unexpected(resp.StatusCode, fmt.Sprintf("a stream that begins with a frame of type %d", t))
	}
	if err == nil {
		var started Started
		if err = json.Unmarshal(payload, &started); err == nil {
			p.ID, p.PID = started.ID, started.PID
			return p, nil
		}
	}
	resp.Body.Close()
	return fail(fmt.Errorf("start a command: %w", err))
}

func frameError(payload []byte) error {
	e := &Error{}
	if err := json.Unmarshal(payload, e); err != nil {
		return unexpected(0, err.Error())
	}
	return e
}

// ErrDetached is wrapped by the error of Next when the stream broke before the
// command ended. The command may still run.
var ErrDetached = errors.New("the connection to the command was lost")

// Next waits for output or for the end. After the end it returns io.EOF.
func (p *Process) Next() (ProcessEvent, error) {
	if p.exit != nil {
		return ProcessEvent{}, io.EOF
	}
	for {
		t, payload, err := p.frames.Next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			p.Close()
			return ProcessEvent{}, fmt.Errorf("%w: %w", ErrDetached, err)
		}
		switch t {
		case FrameStdout, FrameStderr, FramePTY:
			return ProcessEvent{Type: t, Data: payload}, nil
		case FrameEnd:
			var e Exit
			if err := json.Unmarshal(payload, &e); err != nil {
				p.Close()
				return ProcessEvent{}, unexpected(0, err.Error())
			}
			p.exit = &e
			p.finish()
			return ProcessEvent{Type: t, Exit: e}, nil
		case FrameError:
			p.Close()
			return ProcessEvent{}, fmt.Errorf("%w: %w", ErrDetached, traced(frameError(payload), p.resp))
		default: // a ping, or a frame that this version does not know
		}
	}
}

// finish reads the answer to its end, so that the connection can be reused.
func (p *Process) finish() {
	if p.up != nil {
		p.up.Close()
	}
	// After the last frame there is only the end of the answer.
	io.Copy(io.Discard, io.LimitReader(p.resp.Body, 4<<10)) //nolint:errcheck // after an error the connection is not reused, and that is all
	p.resp.Body.Close()
	p.cancel()
}

// Wait copies output to stdout and stderr, either of which may be nil, until the
// command ends. Output of a terminal goes to stdout. When a writer fails, Wait
// closes the stream and returns the writer's error.
func (p *Process) Wait(stdout, stderr io.Writer) (Exit, error) {
	for {
		ev, err := p.Next()
		if err != nil {
			return Exit{}, err
		}
		w := stdout
		switch ev.Type {
		case FrameEnd:
			return ev.Exit, nil
		case FrameStderr:
			w = stderr
		default:
		}
		if w == nil {
			continue
		}
		if _, err := w.Write(ev.Data); err != nil {
			p.Close()
			return Exit{}, err
		}
	}
}

// Close closes the stream. A command that has not ended is detached or killed,
// according to its OnDisconnect.
func (p *Process) Close() error {
	p.cancel()
	if p.up != nil {
		p.up.CloseWithError(context.Canceled)
	}
	return p.resp.Body.Close()
}

const stdinChunk = 32 << 10

// Write sends standard input. It blocks while the command does not read.
func (p *Process) Write(b []byte) (int, error) {
	p.stdinMu.Lock()
	defer p.stdinMu.Unlock()
	for n := 0; n < len(b); {
		part := b[n:min(len(b), n+stdinChunk)]
		if p.up == nil {
			err := p.post(p.ctx, "/stdin", call{body: bytes.NewReader(part), typ: "application/octet-stream"})
			if err != nil {
				return n, err
			}
		} else {
			p.scratch = AppendFrame(p.scratch[:0], FrameStdin, part)
			if _, err := p.up.Write(p.scratch); err != nil {
				return n, err
			}
		}
		n += len(part)
	}
	return len(b), nil
}

// CloseStdin closes the command's standard input.
func (p *Process) CloseStdin() error {
	p.stdinMu.Lock()
	defer p.stdinMu.Unlock()
	if p.up == nil {
		return p.post(p.ctx, "/stdin/close", call{})
	}
	_, err := p.up.Write(AppendFrame(nil, FrameCloseStdin, nil))
	return err
}

// Signal sends a signal, by its Linux number, to the command. It may arrive
// before input that was sent earlier.
func (p *Process) Signal(ctx context.Context, signal int) error {
	return p.s.Signal(ctx, p.ID, signal)
}

// Resize sets the size of the command's terminal.
func (p *Process) Resize(ctx context.Context, size Size) error {
	return p.s.c.json(ctx, "POST", p.s.commandPath(p.ID, "/resize"), nil, size, nil, "")
}

func (p *Process) post(ctx context.Context, rest string, r call) error {
	r.method, r.path = "POST", p.s.commandPath(p.ID, rest)
	resp, err := p.s.c.send(ctx, r)
	if err != nil {
		return err
	}
	return readJSON(resp, nil)
}

// Signal sends a signal, by its Linux number, to a command.
func (s *Session) Signal(ctx context.Context, command string, signal int) error {
	return s.c.json(ctx, "POST", s.commandPath(command, "/signal"), nil, SendSignal{Signal: signal}, nil, "")
}

// StartDetached starts a command without a stream and returns once it has
// started. Its output is not kept.
func (s *Session) StartDetached(ctx context.Context, cmd Command) (CommandInfo, error) {
	var info CommandInfo
	return info, s.c.json(ctx, "POST", s.path("/commands"), nil, cmd, &info, "")
}

// Commands lists the commands that run or ended within the last 30 seconds.
func (s *Session) Commands(ctx context.Context) ([]CommandInfo, error) {
	var p Page[CommandInfo]
	return p.Items, s.c.json(ctx, "GET", s.path("/commands"), nil, nil, &p, "")
}

// MaxRunOutput is how many bytes of each output Run keeps.
const MaxRunOutput = 16 << 20

// Result is the outcome of Run.
type Result struct {
	Exit
	Stdout    []byte // standard output, or the output of the terminal
	Stderr    []byte // standard error
	Truncated bool   // an output was longer than MaxRunOutput; the rest is missing
}

// Run runs a command until it ends and returns its output; for more than
// MaxRunOutput use Start. A command that fails is not an error: see
// Result.Status. When ctx is done first, the command is killed unless
// cmd.OnDisconnect is Detach.
func (s *Session) Run(ctx context.Context, cmd Command) (Result, error) {
	if cmd.OnDisconnect == "" {
		cmd.OnDisconnect = Kill
	}
	p, err := s.Start(ctx, cmd)
	if err != nil {
		return Result{}, err
	}
	var out, errs bounded
	exit, err := p.Wait(&out, &errs)
	return Result{Exit: exit, Stdout: out.b, Stderr: errs.b, Truncated: out.cut || errs.cut}, err
}

// bounded keeps the first MaxRunOutput bytes written to it.
type bounded struct {
	b   []byte
	cut bool
}

func (w *bounded) Write(b []byte) (int, error) {
	n := min(len(b), MaxRunOutput-len(w.b))
	w.b = append(w.b, b[:n]...)
	w.cut = w.cut || n < len(b)
	return len(b), nil
}

// duplex is the body of a request that starts a command: the first frame, then
// the frames that Write sends.
type duplex struct {
	first *bytes.Reader
	rest  *io.PipeReader
}

func (d *duplex) Read(b []byte) (int, error) {
	if d.first.Len() > 0 {
		return d.first.Read(b)
	}
	return d.rest.Read(b)
}

// Close is called by the transport when it no longer reads the body. It makes
// Write fail.
func (d *duplex) Close() error { return d.rest.Close() }
