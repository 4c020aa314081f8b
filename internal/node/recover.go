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
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

const (
	// recoverWide is how many sandboxes are taken back at the same time.
	recoverWide = 8
	// rebindTime bounds reaching the agent of a sandbox whose wire was re-made.
	rebindTime = 15 * time.Second
)

// Recover takes back the sandboxes of earlier processes: those with a handle
// that the driver still has. Everything else on the host is reported as
// leftovers, and files without a sandbox are removed.
func (n *Node) Recover(ctx context.Context) ([]lifecycle.Recovered, error) {
	records, err := n.readAll()
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
		out []lifecycle.Recovered
	)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(recoverWide)
	for _, rec := range records {
		_, there := here[rec.Sandbox]
		delete(here, rec.Sandbox)
		g.Go(func() error {
			r, left, err := n.takeBack(ctx, rec, there)
			if err != nil {
				return fmt.Errorf("sandbox %s: %w", rec.Sandbox, err)
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
	for id := range here {
		// Whoever started it died before its handle was written, or its file
		// is lost: without a handle it cannot be taken back.
		out = append(out, lifecycle.Recovered{ID: id})
	}
	return out, nil
}

// takeBack recovers one sandbox; left is false when nothing of it is there.
func (n *Node) takeBack(ctx context.Context, rec record, there bool) (r lifecycle.Recovered, left bool, err error) {
	r.ID = rec.Sandbox
	if rec.Handle == nil {
		if there {
			return r, true, nil
		}
		return r, false, n.erase(rec.Sandbox)
	}
	got, err := n.o.Driver.Recover(ctx, *rec.Handle)
	switch {
	case kind.Is(err, kind.NotFound):
		return r, false, n.erase(rec.Sandbox)
	case ctx.Err() != nil:
		return r, false, ctx.Err()
	case err != nil:
		// It is there and cannot be had: whoever asked has to destroy it.
		n.log.Error("a sandbox cannot be taken back", "sandbox", rec.Sandbox, "error", err)
		return r, true, nil
	}
	e, fresh := n.claim(rec.Sandbox)
	if !fresh {
		return r, false, errors.New("recovered twice: Recover is called once, before any Start")
	}
	e.mu.Lock()
	e.rec, e.up = rec, true
	e.mu.Unlock()
	n.watch(e)
	n.nudge()
	// A frozen guest answers nobody; whoever wakes it binds it.
	if got.Relinked && !got.Paused {
		bind, cancel := context.WithTimeout(ctx, rebindTime)
		defer cancel()
		if err := n.Bind(bind, rec.Sandbox); err != nil {
			n.log.Error("the agent of a sandbox cannot be reached", "sandbox", rec.Sandbox, "error", err)
			return r, true, nil
		}
	}
	r.Running, r.Relinked = true, got.Relinked
	return r, true, nil
}
