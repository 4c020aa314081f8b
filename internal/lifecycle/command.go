package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"bivy/internal/audit"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/session"
)

const (
	// startedDelay is how long the start of a command waits for its end, so
	// that a short command costs one write instead of two.
	startedDelay = 25 * time.Millisecond

	// maxKept bounds the ended commands that can be attached to.
	maxKept = 1024

	// maxReaders bounds those attached to one command.
	maxReaders = 64

	// attachPause is between tries to reach a command whose stream broke off.
	attachPause = 100 * time.Millisecond
)

// command is a process in a session, followed until it ends whether or not
// anybody reads its output.
type command struct {
	m         *Manager
	a         *active
	debt      *debt
	info      CommandInfo // Exit is in exit
	actor     session.Principal
	recovered bool
	oomBefore int64

	in, out, err atomic.Int64

	started *startNote

	mu      sync.Mutex
	readers []*Process
	holders map[session.Principal]bool // who the record says has hold of it
	exit    *CommandExit
	broken  error         // it is not followed any more, and may still run
	over    chan struct{} // closes when exit or broken is set
	overAt  time.Time
}

// Process is one caller's hold on a command. Next must be called by one
// goroutine at a time, the rest may be called by any. Detach must be called.
type Process struct {
	ID  string // of the command, 20 characters
	PID uint32 // inside the session

	c      *command
	actor  session.Principal
	events chan Event
	gone   chan struct{}
	leave  func()
	told   bool
}

// Start runs a command in a session. Its intent is in the record before the
// session hears of it; its end will be too, also when the caller is gone by
// then. ctx bounds the starting alone: a command that runs goes on.
func (m *Manager) Start(ctx context.Context, id session.ID, actor session.Principal, cmd Command) (*Process, error) {
	if err := checkCommand(cmd); err != nil {
		return nil, err
	}
	a, leave, err := m.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	c, err := m.admitCommand(a, actor, cmd)
	if err != nil {
		leave()
		return nil, err
	}
	forget := func() { a.forget(c); leave() }
	m.hook("exec.intent")
	c.debt, err = m.owe(ctx, a, audit.Entry{
		Action: audit.CommandIntent, Ref: c.info.ID, Actor: actor, Payload: intentPayload(cmd),
	}, audit.Entry{
		Action:  audit.CommandEnded,
		Payload: commandEndedPayload{Command: c.info.ID, Exit: -1, Error: "the session ended and the command's fate is not known"},
	})
	if err != nil {
		forget()
		return nil, err
	}
	p, err := c.attach(actor)
	if err != nil {
		forget()
		return nil, err
	}
	began := make(chan error, 1)
	if !m.spawn(func() { defer leave(); c.supervise(cmd, began) }) {
		forget()
		return nil, stoppingError() // the next process finds the intent, and no command
	}
	select {
	case err = <-began:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		p.Detach()
		return nil, err
	}
	p.PID = c.pid()
	return p, nil
}

// Attach takes hold of a command that runs, or that ended a moment ago. It
// gets the output from now on. The record says who did, once for each caller:
// input may come in a thousand requests.
func (m *Manager) Attach(ctx context.Context, id session.ID, actor session.Principal, commandID string) (*Process, error) {
	a, leave, err := m.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	a.mu.Lock()
	c := a.commands[commandID]
	a.mu.Unlock()
	if c == nil {
		return nil, kind.Errorf(kind.NotFound, "session %s has no command %.64q that runs or just ended", id, commandID)
	}
	if !c.holds(actor) {
		if err := m.note(ctx, a, audit.Entry{
			Action: audit.CommandAttached, Ref: c.info.ID, Actor: actor, Payload: attachedPayload{Command: c.info.ID},
		}); err != nil {
			return nil, err
		}
		c.holdBy(actor)
	}
	return c.attach(actor)
}

// maxHolders bounds the callers that are remembered of one command; of one
// more, every hold is recorded.
const maxHolders = 64

func (c *command) holds(actor session.Principal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.holders[actor]
}

func (c *command) holdBy(actor session.Principal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders == nil {
		c.holders = map[session.Principal]bool{}
	}
	if len(c.holders) < maxHolders {
		c.holders[actor] = true
	}
}

// Commands lists what runs or ended a moment ago, oldest first.
func (m *Manager) Commands(ctx context.Context, id session.ID) ([]CommandInfo, error) {
	a, leave, err := m.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	a.mu.Lock()
	a.pruneLocked(m)
	all := slices.Collect(maps.Values(a.commands))
	a.mu.Unlock()
	infos := make([]CommandInfo, 0, len(all))
	for _, c := range all {
		c.mu.Lock()
		info := c.info
		info.Exit = c.exit
		c.mu.Unlock()
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(x, y CommandInfo) int {
		if n := x.StartedAt.Compare(y.StartedAt); n != 0 {
			return n
		}
		return strings.Compare(x.ID, y.ID)
	})
	return infos, nil
}

func checkCommand(cmd Command) error {
	if len(cmd.Argv) == 0 || cmd.Argv[0] == "" {
		return kind.Errorf(kind.Invalid, "no command was given").WithField("argv")
	}
	if err := session.ValidateEnv("env", cmd.Env); err != nil {
		return err
	}
	if m := wire.CheckCommand(cmd.Argv[0], cmd.Argv[1:], cmd.Env, cmd.Cwd); m != nil {
		return refusedCommand(m)
	}
	if cmd.Timeout < 0 {
		return kind.Errorf(kind.Invalid, "%s is negative", cmd.Timeout).WithField("timeout")
	}
	if cmd.PTY != nil && (cmd.PTY.Cols == 0 || cmd.PTY.Rows == 0) {
		return kind.Errorf(kind.Invalid, "a terminal of %d columns and %d rows has no room", cmd.PTY.Cols, cmd.PTY.Rows).WithField("pty")
	}
	return nil
}

func intentPayload(cmd Command) commandPayload {
	p := commandPayload{
		Argv: make([]string, 0, len(cmd.Argv)), Cwd: wire.Escape(cmd.Cwd), User: cmd.User, Env: slices.Sorted(maps.Keys(cmd.Env)),
		Stdin: cmd.Stdin, PTY: cmd.PTY != nil, Millis: cmd.Timeout.Milliseconds(), Tag: cmd.Tag,
	}
	plain := utf8.ValidString(cmd.Cwd)
	for _, s := range cmd.Argv {
		plain = plain && utf8.ValidString(s)
		p.Argv = append(p.Argv, wire.Escape(s))
	}
	if !plain {
		p.Encoding = "escaped"
	}
	return p
}

// admitCommand makes room for a command and registers it.
func (m *Manager) admitCommand(a *active, actor session.Principal, cmd Command) (*command, error) {
	c := &command{
		m: m, a: a, actor: actor, over: make(chan struct{}),
		info: CommandInfo{
			ID: string(session.NewID()), Argv: cmd.Argv, Cwd: cmd.Cwd, User: cmd.User, PTY: cmd.PTY != nil, Tag: cmd.Tag, StartedAt: m.o.Now(),
		},
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pruneLocked(m)
	if a.commandsBusy >= m.b.Commands {
		return nil, kind.Errorf(kind.Exhausted, "session %s runs %d commands already", a.id, a.commandsBusy).
			WithHint("wait for one to end, or run several from one shell")
	}
	a.commandsBusy++
	a.commands[c.info.ID] = c
	c.oomBefore = a.killsLocked()
	return c, nil
}

// forget takes back admitCommand for a command that never was.
func (a *active) forget(c *command) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.commandsBusy--
	delete(a.commands, c.info.ID)
}

// pruneLocked drops commands that ended too long ago, and the oldest when
// there are too many.
func (a *active) pruneLocked(m *Manager) {
	kept := len(a.commands) - a.commandsBusy
	if kept == 0 {
		return
	}
	old := time.Now().Add(-m.b.Keep)
	var oldest *command
	for id, c := range a.commands {
		switch at := c.endedAt(); {
		case at.IsZero():
		case at.Before(old):
			delete(a.commands, id)
			kept--
		case oldest == nil || at.Before(oldest.endedAt()):
			oldest = c
		}
	}
	if kept > maxKept && oldest != nil {
		delete(a.commands, oldest.info.ID)
	}
}

func (c *command) pid() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.info.PID
}

func (c *command) endedAt() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.overAt
}

// supervise starts the command and follows it to its end.
func (c *command) supervise(cmd Command, began chan<- error) {
	m, a := c.m, c.a
	m.hook("exec.do")
	client, err := m.guest(a.ctx, a)
	var p *guestclient.Process
	if err == nil {
		p, err = client.Exec(a.ctx, guestCommand(c.info.ID, cmd))
		if err != nil && kind.Is(err, kind.Unavailable) && a.ctx.Err() == nil {
			// The reply was lost: the command may run.
			var again error
			if p, again = client.AttachTag(a.ctx, c.info.ID); again == nil {
				err = nil
			} else if !kind.Is(again, kind.NotFound) {
				err = errors.Join(err, again)
			}
		}
	}
	if err != nil {
		c.refuse(err, began)
		return
	}
	m.hook("exec.done")
	c.mu.Lock()
	c.info.PID = p.PID
	c.mu.Unlock()
	c.started = c.noteStart()
	began <- nil
	c.pump(p)
}

// refuse ends a command that did not come to run.
func (c *command) refuse(err error, began chan<- error) {
	c.a.forget(c)
	told := func(err error) {
		c.mu.Lock()
		c.broken, c.overAt, c.readers = err, time.Now(), nil
		c.mu.Unlock()
		close(c.over)
		began <- err
	}
	if c.a.ctx.Err() != nil {
		if !errors.Is(context.Cause(c.a.ctx), errEnding) {
			told(stoppingError())
			return // whether it runs is for the next process to find out
		}
		err = kind.Wrap(kind.Conflict, errEnding)
	}
	refused := refusedCommand(err)
	recorded := c.m.settle(c.a, c.debt, audit.Entry{
		Action: audit.CommandRefused, Outcome: audit.Refused,
		Payload: map[string]any{"command": c.info.ID, "error": clip(refused.Error(), maxErrorText)},
	})
	if recorded != nil {
		c.m.log.Error("recording a refused command", "session", c.a.id, "error", recorded)
	}
	told(refused)
}

func guestCommand(tag string, cmd Command) guestclient.Command {
	g := guestclient.Command{
		Argv: cmd.Argv, Env: cmd.Env, Cwd: cmd.Cwd, User: cmd.User, Tag: tag, Stdin: cmd.Stdin, Timeout: cmd.Timeout,
	}
	if cmd.PTY != nil {
		g.PTY = &guestclient.Size{Cols: uint32(cmd.PTY.Cols), Rows: uint32(cmd.PTY.Rows)}
	}
	return g
}

// refusedCommand says which part of a command the agent did not accept.
func refusedCommand(err error) error {
	field := func(name string) error { return invalidField(name, err) }
	switch wire.ReasonOf(err) {
	case wire.ReasonCommandNotFound:
		return &commandError{code: ExitNotFound, err: field("argv")}
	case wire.ReasonCommandNotExecutable:
		return &commandError{code: ExitNotExecutable, err: field("argv")}
	case wire.ReasonArgs:
		return field("argv")
	case wire.ReasonCwd:
		return field("cwd")
	case wire.ReasonUser:
		return field("user")
	case wire.ReasonEnv:
		return field("env")
	}
	return err
}

func invalidField(name string, err error) error {
	return kind.Errorf(kind.Invalid, "%w", err).WithField(name)
}

// pump hands on what the command puts out until it ends, attaching again
// when the stream breaks off before.
func (c *command) pump(p *guestclient.Process) {
	for {
		exit, err := c.drain(p)
		p.Close() // what ended it has been seen; closing tells nothing more
		if err == nil {
			c.finish(exit)
			return
		}
		next, lost := c.reattach()
		if lost != nil {
			c.finish(*lost)
			return
		}
		if next == nil {
			c.abandon()
			return
		}
		p = next
	}
}

// drain reads the stream to the end of the command.
func (c *command) drain(p *guestclient.Process) (CommandExit, error) {
	for {
		ev, err := p.Next()
		if err != nil {
			return CommandExit{}, err
		}
		switch ev.Kind {
		case guestclient.Stdout:
			c.out.Add(int64(len(ev.Data)))
			c.deliver(Event{Kind: Stdout, Data: ev.Data})
		case guestclient.Stderr:
			c.err.Add(int64(len(ev.Data)))
			c.deliver(Event{Kind: Stderr, Data: ev.Data})
		case guestclient.Terminal:
			c.out.Add(int64(len(ev.Data)))
			c.deliver(Event{Kind: PTY, Data: ev.Data})
		case guestclient.End:
			exit := CommandExit{Code: ev.Exit.Code, Signal: ev.Exit.Signal}
			if ev.Exit.TimedOut {
				exit.Error = timedOut
			}
			return exit, nil
		}
	}
}

// timedOut is CommandExit.Error of a command that ran into its time limit.
const timedOut = "its time limit was reached"

// reattach finds a command again whose stream broke off. It returns how it
// ended when it is gone, and neither when this process is to stop.
func (c *command) reattach() (*guestclient.Process, *CommandExit) {
	ctx := c.a.ctx
	for {
		if ctx.Err() == nil {
			client, err := c.m.guest(ctx, c.a)
			var p *guestclient.Process
			if err == nil {
				p, err = client.AttachTag(ctx, c.info.ID)
			}
			if err == nil {
				return p, nil
			}
			if kind.Is(err, kind.NotFound) && client != nil {
				return nil, &CommandExit{Code: -1, Error: lostText}
			}
		}
		timer := time.NewTimer(attachPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			if errors.Is(context.Cause(ctx), errEnding) {
				return nil, &CommandExit{Code: -1, Error: "the session ended"}
			}
			return nil, nil
		}
	}
}

// deliver hands output to everyone attached. It waits for each: a slow reader
// makes the command wait, and nothing piles up in between.
func (c *command) deliver(ev Event) {
	c.mu.Lock()
	readers := slices.Clone(c.readers)
	c.mu.Unlock()
	for _, r := range readers {
		select {
		case r.events <- ev:
		case <-r.gone:
		case <-c.a.ctx.Done():
		}
	}
}

// finish records the command's end, then tells it.
func (c *command) finish(exit CommandExit) {
	m, a := c.m, c.a
	ended := time.Now()
	if exit.Error == "" && (exit.Signal == int(syscall.SIGKILL) || exit.Code == 128+int(syscall.SIGKILL)) {
		exit.OOM = c.killedByLimit()
	}
	payload := commandEndedPayload{
		Command: c.info.ID, Exit: exit.Code, Signal: exit.Signal, Millis: millis(ended.Sub(c.info.StartedAt)),
		Stdin: c.in.Load(), Stdout: c.out.Load(), Stderr: c.err.Load(), OOM: exit.OOM,
		TimedOut: exit.Error == timedOut, Error: exit.Error, Recovered: c.recovered,
	}
	outcome := audit.OK
	if exit.Error != "" || exit.Signal != 0 || exit.Code != 0 {
		outcome = audit.Failed
	}
	entries := append(c.started.take(), audit.Entry{Action: audit.CommandEnded, Outcome: outcome, Payload: payload})
	m.hook("exec.end.intent")
	if err := m.settle(a, c.debt, entries...); err != nil {
		// The debt stands: the sweep or the end of the session pays it.
		m.log.Error("recording the end of a command", "session", a.id, "command", c.info.ID, "error", err)
	}
	m.hook("exec.end.done")
	c.close(&exit, nil)
}

// abandon stops following a command that runs on; the next process will.
func (c *command) abandon() {
	c.started.take()
	c.close(nil, stoppingError())
}

func (c *command) close(exit *CommandExit, broken error) {
	c.a.mu.Lock()
	c.a.commandsBusy--
	c.a.mu.Unlock()
	c.mu.Lock()
	c.exit, c.broken, c.overAt, c.readers = exit, broken, time.Now(), nil
	c.mu.Unlock()
	close(c.over)
}

// killedByLimit reports whether the session's memory limit killed something
// since the command started, and records it.
func (c *command) killedByLimit() bool {
	ctx, cancel := context.WithTimeout(c.a.ctx, time.Second)
	defer cancel()
	s, err := c.m.o.Node.Stats(ctx, c.a.sandbox)
	if err != nil || s.OOMKills <= c.oomBefore {
		return false
	}
	c.m.recordOOM(c.a, s.OOMKills)
	return true
}

// startNote writes command.started once a command has run for a moment,
// beside whatever else happens; a command that is over sooner takes the note
// along with its end.
type startNote struct {
	entry   audit.Entry
	timer   *time.Timer
	written chan bool
}

func (c *command) noteStart() *startNote {
	n := &startNote{
		entry: audit.Entry{
			Action: audit.CommandStarted, Outcome: audit.OK, Actor: c.actor, Sandbox: c.a.sandbox, Ref: c.info.ID, Time: c.m.o.Now(),
			Payload: startedPayload{Command: c.info.ID, PID: c.info.PID},
		},
		written: make(chan bool, 1),
	}
	n.timer = time.AfterFunc(startedDelay, func() { // take waits for it
		ctx, cancel := context.WithTimeout(c.m.ends, c.m.b.Settle)
		defer cancel()
		err := c.m.append(ctx, c.a.id, n.entry)
		if err != nil {
			c.m.log.Warn("recording the start of a command; its end will tell", "session", c.a.id, "error", err)
		}
		n.written <- err == nil
	})
	return n
}

// take returns the note if it still has to be written.
func (n *startNote) take() []audit.Entry {
	if n == nil || (!n.timer.Stop() && <-n.written) {
		return nil
	}
	return []audit.Entry{n.entry}
}

// follow takes up a command that an earlier process was following.
func (m *Manager) follow(a *active, id string, past *aside) {
	c := &command{
		m: m, a: a, actor: past.actor, recovered: true, over: make(chan struct{}),
		info: CommandInfo{
			ID: id, PID: past.pid, Argv: past.payload.Argv, Cwd: past.payload.Cwd, User: past.payload.User,
			PTY: past.payload.PTY, Tag: past.payload.Tag, StartedAt: past.at,
		},
	}
	c.debt = &debt{ref: id, lost: audit.Entry{
		Action: audit.CommandEnded, Outcome: audit.Failed, Ref: id, Actor: past.actor, Sandbox: a.sandbox,
		Payload: commandEndedPayload{Command: id, Exit: -1, Error: lostText, Recovered: true},
	}}
	a.mu.Lock()
	if a.fenced || !m.track() {
		a.mu.Unlock()
		return
	}
	a.inside++
	a.commandsBusy++
	a.commands[id] = c
	a.owing[id] = c.debt
	c.oomBefore = a.killsLocked()
	a.mu.Unlock()
	go func() {
		defer m.work.Done()
		defer a.leave()
		p, lost := c.reattach()
		switch {
		case lost != nil:
			c.finish(*lost)
		case p == nil:
			c.abandon()
		default:
			c.mu.Lock()
			c.info.PID = p.PID
			c.mu.Unlock()
			c.pump(p)
		}
	}()
}

// attach adds a reader.
func (c *command) attach(actor session.Principal) (*Process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &Process{ID: c.info.ID, PID: c.info.PID, c: c, actor: actor, events: make(chan Event), gone: make(chan struct{})}
	p.leave = sync.OnceFunc(func() { close(p.gone); c.detach(p) })
	if len(c.readers) >= maxReaders {
		return nil, kind.Errorf(kind.Exhausted, "%d callers are attached to command %s already", maxReaders, c.info.ID)
	}
	if c.exit == nil && c.broken == nil {
		c.readers = append(c.readers, p)
	}
	return p, nil
}

func (c *command) detach(p *Process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readers = slices.DeleteFunc(c.readers, func(r *Process) bool { return r == p })
}

// Identity is the command's id and its pid inside the session.
func (p *Process) Identity() (id string, pid uint32) { return p.ID, p.PID }

// Next waits for output or the end; after the end it returns io.EOF. The
// command makes no progress in its output while nobody calls Next.
func (p *Process) Next(ctx context.Context) (Event, error) {
	if p.told {
		return Event{}, io.EOF
	}
	select {
	case ev := <-p.events:
		return ev, nil
	case <-ctx.Done():
		return Event{}, ctx.Err()
	case <-p.gone:
		return Event{}, io.EOF
	case <-p.c.over:
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	if p.c.broken != nil {
		return Event{}, p.c.broken
	}
	p.told = true
	return Event{Kind: End, Exit: *p.c.exit}, nil
}

// Write feeds the command's standard input or terminal. It returns when the
// session has taken all of it.
func (p *Process) Write(ctx context.Context, data []byte) error {
	return p.call(ctx, func(ctx context.Context, g *guestclient.Client) error {
		if err := g.SendInput(ctx, p.c.pid(), p.c.info.PTY, data); err != nil {
			return err
		}
		p.c.in.Add(int64(len(data)))
		return nil
	})
}

// CloseStdin ends the command's standard input.
func (p *Process) CloseStdin(ctx context.Context) error {
	return p.call(ctx, func(ctx context.Context, g *guestclient.Client) error { return g.CloseStdin(ctx, p.c.pid()) })
}

// Resize changes the size of the command's terminal.
func (p *Process) Resize(ctx context.Context, s Size) error {
	return p.call(ctx, func(ctx context.Context, g *guestclient.Client) error {
		return g.Resize(ctx, p.c.pid(), guestclient.Size{Cols: uint32(s.Cols), Rows: uint32(s.Rows)})
	})
}

// Signal sends a signal to the command's process group; SIGKILL ends the
// whole tree. The record says so first.
func (p *Process) Signal(ctx context.Context, n int) error {
	if n < 1 || n > 64 {
		return kind.Errorf(kind.Invalid, "%d is not a signal", n).WithField("signal")
	}
	return p.call(ctx, func(ctx context.Context, g *guestclient.Client) error {
		p.c.m.hook("exec.signal.intent")
		if err := p.c.m.note(ctx, p.c.a, audit.Entry{
			Action: audit.CommandSignalled, Ref: p.ID, Actor: p.actor, Payload: signalledPayload{Command: p.ID, Signal: n},
		}); err != nil {
			return err
		}
		return g.Signal(ctx, p.c.pid(), syscall.Signal(n))
	})
}

// Detach lets go of the command, which runs on. It may be repeated.
func (p *Process) Detach() { p.leave() }

func (p *Process) call(ctx context.Context, do func(context.Context, *guestclient.Client) error) error {
	select {
	case <-p.c.over:
		return kind.Errorf(kind.Conflict, "command %s has ended", p.ID)
	default:
	}
	if p.c.pid() == 0 {
		return kind.Errorf(kind.Unavailable, "command %s is still starting", p.ID)
	}
	ctx, cancel := p.c.a.within(ctx)
	defer cancel()
	g, err := p.c.m.guest(ctx, p.c.a)
	if err != nil {
		return err
	}
	if err := do(ctx, g); err != nil {
		return fmt.Errorf("command %s: %w", p.ID, p.c.a.cutError(err))
	}
	return nil
}

// within returns a context that ends with ctx and when the session's gates
// shut.
func (a *active) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(a.ctx, func() { cancel(context.Cause(a.ctx)) })
	return ctx, func() { stop(); cancel(nil) }
}

// cutError explains err when the session's end is its cause.
func (a *active) cutError(err error) error {
	if errors.Is(context.Cause(a.ctx), errEnding) {
		return kind.Errorf(kind.Conflict, "session %s is ending (%w)", a.id, err)
	}
	return err
}
