package workload

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"bivy/internal/access"
	"bivy/internal/argv"
	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/session"
	"bivy/internal/workgroup"
)

const (
	// startedDelay is how long the start of a command waits for its end, so
	// that a short command costs one write instead of two.
	startedDelay = 25 * time.Millisecond

	// maxKept bounds the ended commands that can be attached to.
	maxKept = 1024

	// maxReaders bounds those attached to one command.
	maxReaders = 64

	// maxHolders bounds the callers that are remembered of one command; of one
	// more, every attachment is recorded.
	maxHolders = 64

	// attachPause is between tries to reach a command whose stream broke off.
	attachPause = 100 * time.Millisecond
)

// command is a process in a session, followed until it ends, also when its
// output is not read.
type command struct {
	i         *Incarnation
	pending   *journal.Pending
	info      CommandInfo // Exit is in exit
	actor     session.Principal
	recovered bool // an earlier process started it
	oomBefore int64

	in, out, err atomic.Int64 // bytes

	started *startNote

	mu      sync.Mutex
	readers []*Process
	holders map[session.Principal]bool // who the record says is attached
	exit    *Exit
	broken  error         // it is not followed any more, and may still run
	over    chan struct{} // closes when exit or broken is set
	overAt  time.Time
}

// Start runs a command in a session. Its intent is in the record before it is
// sent into the sandbox; its end will be too, also when the caller has gone by
// then. ctx bounds the starting alone: a command that runs goes on.
//
// Errors: NotFound, Denied and the session's own state; Invalid with the field
// at fault for a command that cannot be started (see ExitCodeOf); Exhausted
// for one command too many.
func (s *Service) Start(ctx context.Context, who access.Caller, id session.ID, cmd Command) (*Process, error) {
	if err := checkCommand(cmd); err != nil {
		return nil, err
	}
	e, err := s.enter(ctx, who, access.CommandRun, id)
	if err != nil {
		return nil, err
	}
	c, err := e.admit(who.Principal, cmd)
	if err != nil {
		e.leave()
		return nil, err
	}
	forget := func() { e.forget(c); e.leave() }
	s.failPoint("exec.intent")
	c.pending, err = e.log.Begin(ctx, audit.Entry{
		Action: audit.CommandIntent, Ref: c.info.ID, Object: commandObject(c.info.ID), Actor: who.Principal, Decision: e.decision,
		Payload: intentPayload(cmd),
	}, audit.Entry{
		Action: audit.CommandEnded, Object: commandObject(c.info.ID),
		Payload: endedPayload{Command: c.info.ID, Exit: -1, Error: "the session ended before the end of the command was known"},
	})
	if err != nil {
		forget()
		return nil, err
	}
	p, err := c.attach(who, e.decision)
	if err != nil {
		forget()
		return nil, err
	}
	began := make(chan error, 1)
	if !s.o.Work.Go(func() { defer e.leave(); c.supervise(cmd, began) }) {
		forget()
		return nil, workgroup.StoppingError() // the next process finds the intent, and no command
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
func (s *Service) Attach(ctx context.Context, who access.Caller, id session.ID, commandID string) (*Process, error) {
	e, err := s.enter(ctx, who, access.CommandRun, id)
	if err != nil {
		return nil, err
	}
	defer e.leave()
	e.mu.Lock()
	c := e.commands[commandID]
	e.mu.Unlock()
	if c == nil {
		return nil, kind.Errorf(kind.NotFound, "session %s has no command %.64q that runs or just ended", id, commandID)
	}
	if !c.heldBy(who.Principal) {
		if err := e.log.Note(ctx, audit.Entry{
			Action: audit.CommandAttached, Ref: c.info.ID, Object: commandObject(c.info.ID), Actor: who.Principal, Decision: e.decision,
			Payload: attachedPayload{Command: c.info.ID},
		}); err != nil {
			return nil, err
		}
		c.addHolder(who.Principal)
	}
	return c.attach(who, e.decision)
}

func (c *command) heldBy(p session.Principal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.holders[p]
}

func (c *command) addHolder(p session.Principal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders == nil {
		c.holders = map[session.Principal]bool{}
	}
	if len(c.holders) < maxHolders {
		c.holders[p] = true
	}
}

// Commands lists what runs or ended a moment ago, oldest first.
func (s *Service) Commands(ctx context.Context, who access.Caller, id session.ID) ([]CommandInfo, error) {
	return s.listCommands(ctx, who, access.CommandRead, id)
}

// Describe returns what is known of a command that who has started.
func (s *Service) Describe(ctx context.Context, who access.Caller, id session.ID, commandID string) (CommandInfo, error) {
	all, err := s.listCommands(ctx, who, access.CommandRun, id)
	if err != nil {
		return CommandInfo{}, err
	}
	for _, info := range all {
		if info.ID == commandID {
			return info, nil
		}
	}
	return CommandInfo{}, kind.Errorf(kind.NotFound, "session %s has no command %.64q that runs or just ended", id, commandID)
}

func (s *Service) listCommands(ctx context.Context, who access.Caller, action access.Action, id session.ID) ([]CommandInfo, error) {
	e, err := s.enter(ctx, who, action, id)
	if err != nil {
		return nil, err
	}
	defer e.leave()
	e.mu.Lock()
	e.pruneLocked()
	all := slices.Collect(maps.Values(e.commands))
	e.mu.Unlock()
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

// process is what the agent is asked to start.
func (c Command) process() argv.Command { return argv.Command{Argv: c.Argv, Env: c.Env, Dir: c.Cwd} }

func checkCommand(cmd Command) error {
	if err := cmd.process().Check(); err != nil {
		return err
	}
	if cmd.Timeout < 0 {
		return kind.Errorf(kind.Invalid, "%s is negative", cmd.Timeout).WithField("timeout")
	}
	if cmd.PTY != nil && (cmd.PTY.Cols == 0 || cmd.PTY.Rows == 0) {
		return kind.Errorf(kind.Invalid, "a terminal needs at least one column and one row, not %d by %d", cmd.PTY.Cols, cmd.PTY.Rows).WithField("pty")
	}
	return nil
}

func intentPayload(cmd Command) commandPayload {
	shown, escaped := wire.EscapeCommand(cmd.process())
	p := commandPayload{
		Argv: shown.Argv, Cwd: shown.Dir, User: cmd.User, Env: slices.Sorted(maps.Keys(cmd.Env)),
		Stdin: cmd.Stdin, PTY: cmd.PTY != nil, Millis: cmd.Timeout.Milliseconds(), Tag: cmd.Tag,
	}
	if escaped {
		p.Encoding = "escaped"
	}
	return p
}

// admit makes room for a command and registers it.
func (i *Incarnation) admit(actor session.Principal, cmd Command) (*command, error) {
	c := &command{
		i: i, actor: actor, over: make(chan struct{}),
		info: CommandInfo{
			ID: string(session.NewID()), Argv: cmd.Argv, Cwd: cmd.Cwd, User: cmd.User, PTY: cmd.PTY != nil, Tag: cmd.Tag, StartedAt: i.s.o.Now(),
		},
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.pruneLocked()
	if i.running >= i.s.b.Commands {
		return nil, kind.Errorf(kind.Exhausted, "session %s runs %d commands already", i.session, i.running).
			WithHint("wait for one to end, or run several from one shell")
	}
	i.running++
	i.commands[c.info.ID] = c
	c.oomBefore = i.killsLocked()
	return c, nil
}

// forget takes back admit for a command that never was.
func (i *Incarnation) forget(c *command) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.running--
	delete(i.commands, c.info.ID)
}

// pruneLocked drops commands that ended too long ago, and the oldest when
// there are too many.
func (i *Incarnation) pruneLocked() {
	kept := len(i.commands) - i.running
	if kept == 0 {
		return
	}
	old := time.Now().Add(-i.s.b.Keep)
	var oldest *command
	for id, c := range i.commands {
		switch at := c.endedAt(); {
		case at.IsZero():
		case at.Before(old):
			delete(i.commands, id)
			kept--
		case oldest == nil || at.Before(oldest.endedAt()):
			oldest = c
		}
	}
	if kept > maxKept && oldest != nil {
		delete(i.commands, oldest.info.ID)
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
	i := c.i
	i.s.failPoint("exec.do")
	client, err := i.guest(i.ctx)
	var p *guestclient.Process
	if err == nil {
		p, err = client.Exec(i.ctx, guestCommand(c.info.ID, cmd))
		if err != nil && kind.Is(err, kind.Unavailable) && i.ctx.Err() == nil {
			// The reply was lost: the command may run.
			var again error
			if p, again = client.AttachTag(i.ctx, c.info.ID); again == nil {
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
	i.s.failPoint("exec.done")
	c.mu.Lock()
	c.info.PID = p.PID
	c.mu.Unlock()
	c.started = c.noteStart()
	began <- nil
	c.pump(p)
}

// refuse ends a command that did not come to run.
func (c *command) refuse(err error, began chan<- error) {
	i := c.i
	i.forget(c)
	tell := func(err error) {
		c.mu.Lock()
		c.broken, c.overAt, c.readers = err, time.Now(), nil
		c.mu.Unlock()
		close(c.over)
		began <- err
	}
	if i.ctx.Err() != nil {
		if !errors.Is(context.Cause(i.ctx), ErrEnding) {
			tell(workgroup.StoppingError())
			return // whether it runs is for the next process to find out
		}
		err = kind.Wrap(kind.Conflict, ErrEnding)
	}
	refused := refusedCommand(err)
	recorded := i.log.Conclude(c.pending, audit.Entry{
		Action: audit.CommandRefused, Outcome: audit.Refused, Object: commandObject(c.info.ID),
		Payload: refusedPayload{Command: c.info.ID, Error: clip.Counted(refused.Error(), journal.MaxErrorText)},
	})
	if recorded != nil {
		i.s.log.Error("recording a refused command", "session", i.session, "error", recorded)
	}
	tell(refused)
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
		p.Close() // the result is known; the error of Close adds nothing
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
func (c *command) drain(p *guestclient.Process) (Exit, error) {
	for {
		ev, err := p.Next()
		if err != nil {
			return Exit{}, err
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
			exit := Exit{Code: ev.Exit.Code, Signal: ev.Exit.Signal}
			if ev.Exit.TimedOut {
				exit.Error = timedOut
			}
			return exit, nil
		}
	}
}

// timedOut is Exit.Error of a command that reached its time limit.
const timedOut = "its time limit was reached"

// reattach finds a command again whose stream broke off. It returns how it
// ended when it is gone, and neither when this process is to stop.
func (c *command) reattach() (*guestclient.Process, *Exit) {
	ctx := c.i.ctx
	for {
		if ctx.Err() == nil {
			client, err := c.i.guest(ctx)
			var p *guestclient.Process
			if err == nil {
				p, err = client.AttachTag(ctx, c.info.ID)
			}
			if err == nil {
				return p, nil
			}
			if kind.Is(err, kind.NotFound) && client != nil {
				return nil, &Exit{Code: -1, Error: lostText}
			}
		}
		if err := poll.Sleep(ctx, attachPause); err != nil {
			if errors.Is(err, ErrEnding) {
				return nil, &Exit{Code: -1, Error: "the session ended"}
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
		case <-c.i.ctx.Done():
		}
	}
}

// finish records the command's end, then tells it.
func (c *command) finish(exit Exit) {
	i := c.i
	ended := time.Now()
	if exit.Error == "" && (exit.Signal == int(syscall.SIGKILL) || exit.Code == 128+int(syscall.SIGKILL)) {
		exit.OOM = c.killedByLimit()
	}
	payload := endedPayload{
		Command: c.info.ID, Exit: exit.Code, Signal: exit.Signal, Millis: journal.Millis(ended.Sub(c.info.StartedAt)),
		Stdin: c.in.Load(), Stdout: c.out.Load(), Stderr: c.err.Load(), OOM: exit.OOM,
		TimedOut: exit.Error == timedOut, Error: exit.Error, Recovered: c.recovered,
	}
	outcome := audit.OK
	if exit.Error != "" || exit.Signal != 0 || exit.Code != 0 {
		outcome = audit.Failed
	}
	entries := append(c.started.take(), audit.Entry{
		Action: audit.CommandEnded, Outcome: outcome, Object: commandObject(c.info.ID), Payload: payload,
	})
	i.s.failPoint("exec.end.intent")
	if err := i.log.Conclude(c.pending, entries...); err != nil {
		// The outcome stays pending: the sweep or the end of the session
		// writes it.
		i.s.log.Error("recording the end of a command", "session", i.session, "command", c.info.ID, "error", err)
	}
	i.s.failPoint("exec.end.done")
	c.close(&exit, nil)
}

// abandon stops following a command that runs on; the next process will.
func (c *command) abandon() {
	c.started.take()
	c.close(nil, workgroup.StoppingError())
}

func (c *command) close(exit *Exit, broken error) {
	c.i.mu.Lock()
	c.i.running--
	c.i.mu.Unlock()
	c.mu.Lock()
	c.exit, c.broken, c.overAt, c.readers = exit, broken, time.Now(), nil
	c.mu.Unlock()
	close(c.over)
}

// killedByLimit reports whether the session's memory limit killed something
// since the command started, and records it.
func (c *command) killedByLimit() bool {
	ctx, cancel := context.WithTimeout(c.i.ctx, time.Second)
	defer cancel()
	s, err := c.i.s.o.Node.Stats(ctx, c.i.id)
	if err != nil || s.OOMKills <= c.oomBefore {
		return false
	}
	c.i.RecordOOM(s.OOMKills)
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
	i := c.i
	n := &startNote{
		entry: c.pending.Fact(audit.Entry{
			Action: audit.CommandStarted, Outcome: audit.OK, Object: commandObject(c.info.ID), Time: i.s.o.Now(),
			Payload: startedPayload{Command: c.info.ID, PID: c.info.PID},
		}),
		written: make(chan bool, 1),
	}
	n.timer = time.AfterFunc(startedDelay, func() { // take waits for it
		err := i.log.Append(n.entry)
		if err != nil {
			i.s.log.Warn("recording the start of a command; its end will tell", "session", i.session, "error", err)
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
func (i *Incarnation) follow(id string, earlier *openCommand) {
	c := &command{
		i: i, actor: earlier.actor, recovered: true, over: make(chan struct{}),
		info: CommandInfo{
			ID: id, PID: earlier.pid, Argv: earlier.payload.Argv, Cwd: earlier.payload.Cwd, User: earlier.payload.User,
			PTY: earlier.payload.PTY, Tag: earlier.payload.Tag, StartedAt: earlier.at,
		},
	}
	leave, ok := i.enter()
	if !ok {
		return // the session ends, and the end tells what became of its commands
	}
	if c.pending, ok = i.log.Resume(earlier.intent, earlier.actor, audit.Entry{
		Action: audit.CommandEnded, Object: commandObject(id), Payload: endedPayload{Command: id, Exit: -1, Error: lostText, Recovered: true},
	}); !ok {
		leave()
		return
	}
	i.mu.Lock()
	i.running++
	i.commands[id] = c
	c.oomBefore = i.killsLocked()
	i.mu.Unlock()
	began := i.s.o.Work.Go(func() {
		defer leave()
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
	})
	if !began {
		c.abandon()
		leave()
	}
}
