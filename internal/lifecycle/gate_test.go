package lifecycle_test

import (
	"context"
	"sync"
	"testing"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// An operation that was admitted before the end was asked for begins nothing
// after it.
func TestAdmittedBeforeTheEnd(t *testing.T) {
	w := newWorld(t)
	var d *daemon
	var id session.ID
	ended := make(chan error, 1)
	end := sync.OnceFunc(func() {
		go func() {
			_, err := d.End(context.Background(), lifecycle.EndRequest{Caller: alice, ID: id})
			ended <- err
		}()
		waitFor(t, func() bool {
			_, current, _, err := d.Current(context.Background(), id)
			return err == nil && current == nil
		})
	})
	d = w.start(func(o *lifecycle.Options) {
		o.FailPoint = func(point string) {
			if point == "exec.intent" {
				end()
			}
		}
	})
	id = d.create().ID
	if _, err := d.Start(t.Context(), alice, id, workload.Command{Argv: []string{"true"}}); !kind.Is(err, kind.Conflict) {
		t.Errorf("a command while the session ends: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("end: %v", err)
	}
	if n := w.count(id, audit.CommandIntent); n != 0 {
		t.Errorf("%d commands began\n%s", n, w.story(id))
	}
	w.checkEnded(d, id, session.Requested)
	w.checkNothingLeft()
}

// What happened to a sandbox is told once, also when the reply to the change
// of state that carries it is lost.
func TestExitIsToldOnce(t *testing.T) {
	w := newWorld(t)
	d := w.start()
	s := d.create()
	d.f.add(rule{call: "Store.Transition.ending", after: true})
	w.host.Kill(s.SandboxID(), 1, 0)
	d.awaitState(s.ID, session.Ended)
	w.checkEnded(d, s.ID, session.Crashed)
	if n := w.count(s.ID, audit.SandboxExited); n != 1 {
		t.Errorf("the exit is told %d times\n%s", n, w.story(s.ID))
	}
	if n := w.count(s.ID, audit.SessionEnding); n != 1 {
		t.Errorf("the end begins %d times\n%s", n, w.story(s.ID))
	}
}

// exposed is a node whose sandboxes are not isolated as they must be.
type exposed struct{ lifecycle.Node }

func (exposed) Inspect(context.Context, session.SandboxID) (driver.Posture, error) {
	return driver.Posture{Checks: []driver.Check{
		{Name: "uid", Want: "nobody", Got: "nobody", OK: true}, {Name: "seccomp", Want: "on", Got: "off"},
	}}, nil
}

// A sandbox that is not isolated as it must be never runs a session.
func TestBadPostureFailsTheCreate(t *testing.T) {
	w := newWorld(t)
	w.wrap = func(n lifecycle.Node) lifecycle.Node { return exposed{n} }
	d := w.start()
	s, _, err := d.Create(t.Context(), lifecycle.CreateRequest{Caller: alice})
	if err == nil || s.State != session.Ended || !s.StartedAt.IsZero() {
		t.Errorf("created: %s, %v", s.State, err)
	}
	w.checkEnded(d, s.ID, session.CreateFailed)
	w.checkNothingLeft()
}
