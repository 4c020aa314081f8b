package workload

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/guest/guestclient"
	"bivy/internal/kind"
)

// Process is one caller's hold on a command. Next must be called by one
// goroutine at a time, the rest may be called by any. Detach must be called.
type Process struct {
	ID  string // of the command, 20 characters
	PID uint32 // inside the session

	c        *command
	who      access.Caller
	decision audit.Decision // on the request that took hold
	events   chan Event
	gone     chan struct{} // closes when the caller lets go
	leave    func()
	told     bool // the end was returned by Next
}

// attach adds a reader.
func (c *command) attach(who access.Caller, decision audit.Decision) (*Process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &Process{ID: c.info.ID, PID: c.info.PID, c: c, who: who, decision: decision, events: make(chan Event), gone: make(chan struct{})}
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
// command makes no progress in its output until Next is called.
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
		p.c.i.s.failPoint("exec.signal.intent")
		if err := p.c.i.log.Note(ctx, audit.Entry{
			Action: audit.CommandSignalled, Ref: p.ID, Object: commandObject(p.ID), Actor: p.who.Principal, Decision: p.decision,
			Payload: signalledPayload{Command: p.ID, Signal: n},
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
	ctx, cancel := p.c.i.within(ctx)
	defer cancel()
	g, err := p.c.i.guest(ctx)
	if err != nil {
		return err
	}
	if err := do(ctx, g); err != nil {
		return fmt.Errorf("command %s: %w", p.ID, p.c.i.cutError(err))
	}
	return nil
}
