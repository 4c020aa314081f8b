package node

import (
	"context"
	"fmt"
	"slices"

	"bivy/internal/audit"
	"bivy/internal/sandbox"
	"bivy/internal/session"
)

// byNode is the actor of what the node does by itself.
var byNode = session.Principal{Subject: "system:node"}

// destruction is the payload of the events about what the node destroys.
type destruction struct {
	Why   string `json:"why"`
	By    string `json:"by"`              // "node"
	Found bool   `json:"found,omitempty"` // the node removed it
	Error string `json:"error,omitempty"` // why the node did not
}

// Destroy kills the sandbox, proves its death and removes all of it from the
// host. It may be repeated, also for a sandbox that the node does not know.
// It reports what it found, so that the caller can distinguish a sandbox
// that it ended from one that was gone before.
func (n *Node) Destroy(ctx context.Context, id session.SandboxID) (sandbox.Removal, error) {
	if _, _, err := id.Split(); err != nil {
		return sandbox.Removal{}, err
	}
	e, fresh := n.claim(id)
	e.close()
	if err := e.hold(ctx); err != nil {
		return sandbox.Removal{}, fmt.Errorf("sandbox %s: waiting for a start or another destroy: %w", id, err)
	}
	defer e.release()
	var out sandbox.Removal
	switch now, err := n.entry(id); {
	case err != nil || now != e:
		// Another Destroy came first.
	case fresh:
		found, err := n.o.Driver.List(ctx)
		if err != nil {
			return sandbox.Removal{}, fmt.Errorf("sandbox %s: destroy: %w", id, err)
		}
		for _, f := range found {
			out.Found = out.Found || f.ID == id
		}
	default:
		out.Found = true
	}
	if err := n.discard(ctx, e); err != nil {
		return out, fmt.Errorf("sandbox %s: destroy: %w", id, err)
	}
	if !out.Found {
		out.Earlier = n.removedBefore(id)
	}
	e.mu.Lock()
	intent, why := e.intent, e.why
	e.intent = 0
	e.mu.Unlock()
	if intent != 0 {
		// The node had announced it, and its own tries failed.
		n.conclude(ctx, id, intent, audit.Failed, destruction{Why: why, By: "node", Error: "destroyed at a caller's request"})
	}
	return out, nil
}

// close makes an entry refuse new work and closes its connections.
func (e *entry) close() {
	e.mu.Lock()
	e.destroying = true
	e.mu.Unlock()
	e.cut(true)
}

// removeRecorded destroys a sandbox by the node's own decision: the intent is
// recorded first, and nothing is destroyed when that fails. The intent of a
// try that failed stays open and serves the next one.
func (n *Node) removeRecorded(ctx context.Context, e *entry, why string) error {
	if err := e.hold(ctx); err != nil {
		return err
	}
	defer e.release()
	if now, err := n.entry(e.id); err != nil || now != e {
		return nil // destroyed at a caller's request meanwhile
	}
	e.mu.Lock()
	intent := e.intent
	e.mu.Unlock()
	payload := destruction{Why: why, By: "node"}
	if intent == 0 {
		seq, err := n.o.Recorder.Record(ctx, e.id, audit.Entry{
			Action: audit.SandboxDestroyIntent, Outcome: audit.Pending, Actor: byNode, Object: object(e.id), Time: n.o.Now(), Payload: payload,
		})
		if err != nil {
			return fmt.Errorf("not destroyed, because it cannot be recorded: %w", err)
		}
		intent = seq
		e.mu.Lock()
		e.intent, e.why = seq, why
		e.mu.Unlock()
	}
	e.close()
	if err := n.discard(ctx, e); err != nil {
		e.mu.Lock()
		e.destroying = false // so that the next check tries again
		e.mu.Unlock()
		return err
	}
	n.noteRemoval(e.id, "node: "+why)
	payload.Found = true
	n.conclude(ctx, e.id, intent, audit.OK, payload)
	return nil
}

// conclude records how a destruction by the node went. That it cannot be
// recorded changes nothing about the sandbox, and leaves the intent open.
func (n *Node) conclude(ctx context.Context, id session.SandboxID, intent uint64, outcome audit.Outcome, payload destruction) {
	_, err := n.o.Recorder.Record(context.WithoutCancel(ctx), id, audit.Entry{
		Action: audit.SandboxDestroyed, Outcome: outcome, Actor: byNode, Object: object(id), Concludes: intent, Time: n.o.Now(), Payload: payload,
	})
	if err != nil {
		n.log.Error("recording that a sandbox was destroyed", "sandbox", id, "error", err)
	}
}

func object(id session.SandboxID) string { return "sandbox/" + string(id) }

// maxRemovals bounds how many removals a node remembers.
const maxRemovals = 1024

// removals are the sandboxes that this node destroyed by itself, oldest first.
type removals []removal

type removal struct {
	id  session.SandboxID
	why string
}

func (n *Node) noteRemoval(id session.SandboxID, why string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.removals = append(n.removals, removal{id, why})
	if len(n.removals) > maxRemovals {
		n.removals = slices.Delete(n.removals, 0, len(n.removals)-maxRemovals)
	}
}

func (n *Node) removedBefore(id session.SandboxID) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.removals {
		if r.id == id {
			return r.why
		}
	}
	return ""
}

// discard makes the driver destroy a sandbox and removes its handle file and
// entry. The caller holds the entry.
func (n *Node) discard(ctx context.Context, e *entry) error {
	if err := n.o.Driver.Destroy(ctx, e.id); err != nil {
		return err
	}
	if err := n.erase(e.id); err != nil {
		return err
	}
	n.forget(e)
	return nil
}
