package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

const (
	// recoverWide is how many sandboxes are recovered at the same time.
	recoverWide = 8
	// rebindTime bounds reaching the agent of a sandbox whose connections
	// ended with the earlier process.
	rebindTime = 15 * time.Second
)

// Recover takes back the sandboxes of earlier processes: those with a handle
// that the driver still has. It is called once, before any Start.
//
// It returns those, and leftovers for the caller to destroy: starts that were
// cut short, and sandboxes without a handle file. Two kinds of leftovers it
// records and destroys by itself: sandboxes that have stopped meanwhile, and
// those whose handle file does not read. Where that fails, and where they
// belong to a pool, they are among what it returns.
func (n *Node) Recover(ctx context.Context) ([]sandbox.Recovered, error) {
	files, err := n.readAll()
	if err != nil {
		return nil, fmt.Errorf("handles: %w", err)
	}
	found, err := n.o.Driver.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("driver %s: list: %w", n.o.Driver.Name(), err)
	}
	here := map[session.SandboxID]driver.Found{}
	for _, f := range found {
		here[f.ID] = f
	}
	var (
		mu  sync.Mutex
		out []sandbox.Recovered
	)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(recoverWide)
	for _, file := range files {
		f, there := here[file.Sandbox]
		delete(here, file.Sandbox)
		if f.Owner != (driver.Owner{}) {
			file.Owner = f.Owner
		}
		g.Go(func() error {
			r, left, err := n.recover(ctx, file, there)
			if err != nil {
				return fmt.Errorf("sandbox %s: %w", file.Sandbox, err)
			}
			if left {
				mu.Lock()
				defer mu.Unlock()
				out = append(out, r)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for id, f := range here {
		// Without a handle it cannot be taken back.
		out = append(out, sandbox.Recovered{ID: id, Owner: f.Owner})
	}
	return out, nil
}

// recover takes back one sandbox; left is false when nothing of it is there,
// or not any more.
func (n *Node) recover(ctx context.Context, file saved, there bool) (r sandbox.Recovered, left bool, err error) {
	r.ID, r.Owner = file.Sandbox, file.Owner
	switch {
	case file.unreadable != "":
		n.log.Error("a handle file does not read", "sandbox", file.Sandbox, "error", file.unreadable)
		return n.clear(ctx, r, there, "its handle file does not read: "+file.unreadable)
	case file.Handle == nil && there:
		return r, true, nil
	case file.Handle == nil:
		return r, false, n.erase(file.Sandbox)
	}
	got, err := n.o.Driver.Recover(ctx, *file.Handle)
	switch {
	case kind.Is(err, kind.NotFound):
		return n.clear(ctx, r, there, "it stopped while no server ran")
	case ctx.Err() != nil:
		return r, false, ctx.Err()
	case err != nil:
		n.log.Error("recovering a sandbox", "sandbox", file.Sandbox, "error", err)
		return r, true, nil
	}
	e, fresh := n.claim(file.Sandbox)
	if !fresh {
		return r, false, errors.New("recovered twice: Recover is called once, before any Start")
	}
	e.mu.Lock()
	e.saved, e.up = file, true
	e.mu.Unlock()
	n.watch(e)
	n.checkSoon()
	// The agent of a paused sandbox cannot answer; it is bound at its resume.
	if got.Relinked && !got.Paused {
		bind, cancel := context.WithTimeout(ctx, rebindTime)
		defer cancel()
		if err := n.Bind(bind, file.Sandbox); err != nil {
			n.log.Error("the agent of a sandbox cannot be reached", "sandbox", file.Sandbox, "error", err)
			return r, true, nil
		}
	}
	r.Running, r.Relinked = true, got.Relinked
	return r, true, nil
}

// clear removes the handle file of a sandbox that cannot be taken back, and
// first, when something of it is there, the sandbox. left is true when the
// caller has to destroy it.
func (n *Node) clear(ctx context.Context, r sandbox.Recovered, there bool, why string) (_ sandbox.Recovered, left bool, _ error) {
	if !there {
		return r, false, n.erase(r.ID)
	}
	if r.Owner.Kind == driver.OwnedByPool {
		return r, true, nil
	}
	e, fresh := n.claim(r.ID)
	if !fresh {
		return r, false, errors.New("recovered twice: Recover is called once, before any Start")
	}
	if err := n.removeRecorded(ctx, e, why); err != nil {
		n.log.Error("destroying a sandbox that cannot be recovered", "sandbox", r.ID, "error", err)
		// It stays known, with its open intent, which its destroy concludes.
		return r, true, nil
	}
	return r, false, nil
}
