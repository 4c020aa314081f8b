package apitest

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"

	"bivy/internal/api"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

// process is one command and everybody attached to it. Output goes to all of
// them and waits for the slowest; without anybody it is dropped.
type process struct {
	info lifecycle.CommandInfo
	cmd  *exec.Cmd
	in   io.WriteCloser // nil: none
	tty  *os.File       // nil: pipes
	done chan struct{}  // closed once the end is known

	mu   sync.Mutex
	subs map[*hold]bool
}

// hold implements api.Process.
type hold struct {
	p      *process
	events chan lifecycle.Event
	gone   chan struct{}
	once   sync.Once
	ended  bool
}

// Start implements api.Commands.
func (b *Backend) Start(_ context.Context, id session.ID, actor session.Principal, c lifecycle.Command) (api.Process, error) {
	b.mu.Lock()
	st, err := b.liveLocked(id)
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := session.ValidateEnv("env", c.Env); err != nil {
		return nil, err
	}
	for _, a := range c.Argv {
		if strings.ContainsRune(a, 0) {
			return nil, kind.Errorf(kind.Invalid, "an argument holds a NUL").WithField("argv")
		}
	}
	cmd := exec.Command(c.Argv[0], c.Argv[1:]...) //nolint:gosec // running what a test asks for is its purpose
	cmd.Dir = st.dir
	if c.Cwd != "" {
		cmd.Dir = b.hostPath(st, c.Cwd)
		if _, err := os.Stat(cmd.Dir); err != nil {
			return nil, kind.Errorf(kind.Invalid, "%s does not exist", c.Cwd).WithField("cwd")
		}
	}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + st.dir, "TERM=xterm"}
	for _, env := range []map[string]string{st.s.Spec.Env, c.Env} {
		for k, v := range env {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	cmdID := strings.ToLower(rand.Text())[:20]
	if err := b.record(id, audit.Entry{Action: audit.CommandIntent, Outcome: audit.Pending, Actor: actor, Ref: cmdID,
		Payload: map[string]any{"argv": c.Argv, "cwd": c.Cwd, "user": c.User}}); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{}), subs: map[*hold]bool{}}
	h := p.attach()
	wait, err := p.start(c)
	if err != nil {
		refused := errors.Join(b.record(id, audit.Entry{Action: audit.CommandRefused, Outcome: audit.Refused, Actor: actor, Ref: cmdID,
			Payload: map[string]any{"error": err.Error()}}))
		return nil, errors.Join(startError(c.Argv[0], err), refused)
	}
	p.info = lifecycle.CommandInfo{ID: cmdID, PID: uint32(cmd.Process.Pid), Argv: c.Argv, Cwd: c.Cwd, User: c.User,
		PTY: c.PTY != nil, Tag: c.Tag, StartedAt: time.Now().UTC()}
	b.mu.Lock()
	st.procs[cmdID] = p
	b.mu.Unlock()
	if err := b.record(id, audit.Entry{Action: audit.CommandStarted, Outcome: audit.OK, Actor: actor, Ref: cmdID}); err != nil {
		return nil, err
	}
	go func() { // waited for by stop, through done
		exit := wait()
		// End waits for done, so the record is still open.
		_ = b.record(id, audit.Entry{Action: audit.CommandEnded, Outcome: audit.OK, Actor: actor, Ref: cmdID,
			Payload: map[string]any{"command": cmdID, "exit": exit.Code, "signal": exit.Signal}})
		p.mu.Lock()
		p.info.Exit = &exit
		p.mu.Unlock()
		close(p.done)
		p.publish(lifecycle.Event{Kind: lifecycle.End, Exit: exit})
	}()
	return h, nil
}

// notStarted is a refused command with the exit code a shell would give.
type notStarted struct {
	error
	code int
}

func (e notStarted) ExitCode() int { return e.code }
func (e notStarted) Unwrap() error { return e.error }

func startError(name string, err error) error {
	switch {
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist):
		return notStarted{kind.Errorf(kind.Invalid, "%s does not exist in the session", name).WithField("argv"), lifecycle.ExitNotFound}
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOEXEC):
		return notStarted{kind.Errorf(kind.Invalid, "%s cannot be executed", name).WithField("argv"), lifecycle.ExitNotExecutable}
	}
	return err
}

func (p *process) start(c lifecycle.Command) (wait func() lifecycle.CommandExit, err error) {
	var readers sync.WaitGroup
	read := func(r io.Reader, k lifecycle.EventKind) {
		readers.Go(func() {
			for {
				buf := make([]byte, 32<<10)
				n, err := r.Read(buf)
				if n > 0 {
					p.publish(lifecycle.Event{Kind: k, Data: buf[:n]})
				}
				if err != nil {
					return
				}
			}
		})
	}
	if c.PTY != nil {
		tty, err := pty.StartWithSize(p.cmd, &pty.Winsize{Cols: c.PTY.Cols, Rows: c.PTY.Rows})
		if err != nil {
			return nil, err
		}
		p.tty, p.in = tty, tty
		read(tty, lifecycle.PTY)
		return func() lifecycle.CommandExit {
			readers.Wait()
			exit := exitOf(p.cmd.Wait())
			tty.Close()
			return exit
		}, nil
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if c.Stdin {
		if p.in, err = p.cmd.StdinPipe(); err != nil {
			return nil, err
		}
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	read(stdout, lifecycle.Stdout)
	read(stderr, lifecycle.Stderr)
	return func() lifecycle.CommandExit {
		readers.Wait()
		return exitOf(p.cmd.Wait())
	}, nil
}

func exitOf(err error) lifecycle.CommandExit {
	var ee *exec.ExitError
	if !errors.As(err, &ee) {
		return lifecycle.CommandExit{}
	}
	if ws, ok := ee.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return lifecycle.CommandExit{Code: -1, Signal: int(ws.Signal())}
	}
	return lifecycle.CommandExit{Code: ee.ExitCode()}
}

func (p *process) attach() *hold {
	h := &hold{p: p, events: make(chan lifecycle.Event), gone: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subs[h] = true
	return h
}

func (p *process) publish(ev lifecycle.Event) {
	p.mu.Lock()
	var subs []*hold
	for h := range p.subs {
		subs = append(subs, h)
	}
	p.mu.Unlock()
	for _, h := range subs {
		select {
		case h.events <- ev:
		case <-h.gone:
		}
	}
}

// stop kills the command and waits for its end.
func (p *process) stop() {
	if p.cmd.Process != nil {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
	}
	<-p.done
}

func (b *Backend) process(id session.ID, command string) (*process, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.liveLocked(id)
	if err != nil {
		return nil, err
	}
	p := st.procs[command]
	if p == nil {
		return nil, kind.Errorf(kind.NotFound, "session %s has no command %.64q", id, command)
	}
	return p, nil
}

// Attach implements api.Commands.
func (b *Backend) Attach(_ context.Context, id session.ID, _ session.Principal, command string) (api.Process, error) {
	p, err := b.process(id, command)
	if err != nil {
		return nil, err
	}
	return p.attach(), nil
}

// Commands implements api.Commands.
func (b *Backend) Commands(_ context.Context, id session.ID) ([]lifecycle.CommandInfo, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.liveLocked(id)
	if err != nil {
		return nil, err
	}
	var out []lifecycle.CommandInfo
	for _, p := range st.procs {
		p.mu.Lock()
		out = append(out, p.info)
		p.mu.Unlock()
	}
	return out, nil
}

// Identity implements api.Process.
func (h *hold) Identity() (string, uint32) { return h.p.info.ID, h.p.info.PID }

// Next implements api.Process.
func (h *hold) Next(ctx context.Context) (lifecycle.Event, error) {
	if h.ended {
		return lifecycle.Event{}, io.EOF
	}
	select {
	case ev := <-h.events:
		h.ended = ev.Kind == lifecycle.End
		return ev, nil
	case <-ctx.Done():
		return lifecycle.Event{}, ctx.Err()
	}
}

// Write implements api.Process.
func (h *hold) Write(_ context.Context, b []byte) error {
	if h.p.in == nil {
		return kind.Errorf(kind.Conflict, "the command takes no input")
	}
	_, err := h.p.in.Write(b)
	return kind.Wrap(kind.Conflict, err)
}

// CloseStdin implements api.Process.
func (h *hold) CloseStdin(context.Context) error {
	if h.p.in == nil {
		return nil
	}
	if h.p.tty != nil {
		_, err := h.p.tty.Write([]byte{4})
		return kind.Wrap(kind.Conflict, err)
	}
	return kind.Wrap(kind.Conflict, h.p.in.Close())
}

// Resize implements api.Process.
func (h *hold) Resize(_ context.Context, size lifecycle.Size) error {
	if h.p.tty == nil {
		return kind.Errorf(kind.Conflict, "the command has no terminal")
	}
	return kind.Wrap(kind.Conflict, pty.Setsize(h.p.tty, &pty.Winsize{Cols: size.Cols, Rows: size.Rows}))
}

// Signal implements api.Process; like a terminal's it goes to the whole group.
func (h *hold) Signal(_ context.Context, n int) error {
	if err := syscall.Kill(-h.p.cmd.Process.Pid, syscall.Signal(n)); err != nil {
		return kind.Errorf(kind.NotFound, "signal: %w", err)
	}
	return nil
}

// Detach implements api.Process.
func (h *hold) Detach() {
	h.once.Do(func() { close(h.gone) })
	h.p.mu.Lock()
	defer h.p.mu.Unlock()
	delete(h.p.subs, h)
}

// hostPath is where a path of a session is on this host. Tests trust theirs.
func (b *Backend) hostPath(st *state, path string) string {
	return filepath.Join(st.dir, filepath.Clean("/"+path))
}
