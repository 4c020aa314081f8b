package fake

import (
	"context"
	"sync"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Mode is what a Fault does to a call.
type Mode uint8

// The modes.
const (
	FailBefore Mode = iota + 1 // nothing is done and the call fails
	FailAfter                  // all is done and the reply is lost: the call fails
	Stall                      // the call waits for Until or its context, then goes on
	Die                        // all is done, the call succeeds, and the sandbox dies
)

// Fault makes calls of one method go wrong. It is a fail point: only tests
// script faults.
type Fault struct {
	Method  string            // as in driver.Driver and its optional interfaces: "Start", "ExportChanges", …
	Sandbox session.SandboxID // empty: any
	Skip    int               // calls let pass before
	Times   int               // calls affected; 0: one; negative: all
	Mode    Mode
	Err     error           // of FailBefore and FailAfter; nil: one of kind Unavailable
	Until   <-chan struct{} // of Stall; nil: until the call's context ends
	Deaf    bool            // of Stall: the call's context is ignored too
	Hit     chan<- struct{} // sent to, if it has room, each time the fault is played
}

// script is the faults still to come.
type script struct {
	mu     sync.Mutex
	faults []*Fault
}

func (s *script) add(faults ...Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range faults {
		if f.Times == 0 {
			f.Times = 1
		}
		s.faults = append(s.faults, &f)
	}
}

// next returns the fault that strikes this call, if any.
func (s *script) next(method string, id session.SandboxID) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range s.faults {
		if f.Method != method || (f.Sandbox != "" && f.Sandbox != id) {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.Times > 0 {
			if f.Times--; f.Times == 0 {
				s.faults = append(s.faults[:i:i], s.faults[i+1:]...)
			}
		}
		select {
		case f.Hit <- struct{}{}:
		default: // a nil channel, or a full one
		}
		return f
	}
	return nil
}

// Script adds faults to those to come.
func (d *Driver) Script(faults ...Fault) { d.faults.add(faults...) }

// play runs effect under the fault that strikes this call, if any.
func (d *Driver) play(ctx context.Context, method string, id session.SandboxID, effect func(context.Context) error) error {
	f := d.faults.next(method, id)
	if f == nil {
		return effect(ctx)
	}
	fail := f.Err
	if fail == nil {
		fail = kind.Errorf(kind.Unavailable, "scripted failure of %s of %s", method, id)
	}
	switch f.Mode {
	case FailBefore:
		return fail
	case FailAfter:
		if err := effect(ctx); err != nil {
			return err
		}
		return fail
	case Stall:
		done := ctx.Done()
		if f.Deaf {
			done = nil
		}
		select {
		case <-f.Until:
		case <-done:
			return ctx.Err()
		}
	case Die:
		err := effect(ctx)
		d.host().Kill(id, -1, 9)
		return err
	}
	return effect(ctx)
}
