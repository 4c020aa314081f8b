package journal

import (
	"context"
	"errors"
	"sync"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Recorder writes what a node does by itself, synchronously: into the record
// of the node, and into the record of the session whose sandbox it is about,
// as long as that is not sealed. It implements node.Recorder.
type Recorder struct {
	journal *Journal
	system  *SystemRecord
	node    session.NodeID

	mu   sync.Mutex
	last uint64
	open map[uint64]func(audit.Entry) error // by the number given to the node
}

// NewRecorder returns the Recorder of a node.
func NewRecorder(j *Journal, s *SystemRecord, node session.NodeID) *Recorder {
	return &Recorder{journal: j, system: s, node: node, open: map[uint64]func(audit.Entry) error{}}
}

// Record makes an event durable. For an intent it returns a number by which
// the outcome names it in Concludes; for everything else 0. When it fails the
// effect must not happen.
func (r *Recorder) Record(ctx context.Context, id session.SandboxID, e audit.Entry) (number uint64, err error) {
	owner, generation, err := id.Split()
	if err != nil {
		return 0, err
	}
	if e.Ref == "" {
		e.Ref = string(id)
	}
	if e.Action.Intent() {
		conclude, err := r.begin(ctx, owner, generation, e)
		if err != nil {
			return 0, err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.last++
		r.open[r.last] = conclude
		return r.last, nil
	}
	if e.Concludes != 0 {
		r.mu.Lock()
		conclude := r.open[e.Concludes]
		delete(r.open, e.Concludes)
		r.mu.Unlock()
		if conclude == nil {
			return 0, kind.Errorf(kind.Invalid, "%s of sandbox %s concludes an intent that is not open", e.Action, id)
		}
		return 0, conclude(e)
	}
	if err := r.system.Record(ctx, e); err != nil {
		return 0, err
	}
	_, err = r.append(ctx, owner, generation, e)
	return 0, err
}

// begin makes an intent durable in both records.
func (r *Recorder) begin(ctx context.Context, owner session.ID, generation uint32, e audit.Entry) (conclude func(audit.Entry) error, err error) {
	system, err := r.system.Begin(ctx, e)
	if err != nil {
		return nil, err
	}
	e.Outcome = audit.Pending
	seq, err := r.append(ctx, owner, generation, e)
	if err != nil {
		if bad := system(audit.Entry{Action: audit.IntentLost, Outcome: audit.Refused, Payload: map[string]any{"action": e.Action, "error": err.Error()}}); bad != nil {
			r.journal.log.Error("concluding an intent of the node", "sandbox", owner.Sandbox(generation), "error", bad)
		}
		return nil, err
	}
	return func(outcome audit.Entry) error {
		err := system(outcome)
		if seq != 0 {
			outcome.Concludes, outcome.Ref = seq, e.Ref
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
			defer cancel()
			_, inSession := r.append(late, owner, generation, outcome)
			err = errors.Join(err, inSession)
		}
		return err
	}, nil
}

// append writes into the record of the session. The number is 0 where there is
// none to write into: the session has ended, is not known, or has another
// sandbox by now.
func (r *Recorder) append(ctx context.Context, id session.ID, generation uint32, e audit.Entry) (uint64, error) {
	seq, err := r.journal.Append(ctx, id, session.Fence{Node: r.node, Generation: generation}, e)
	if kind.Is(err, kind.NotFound) || kind.Is(err, kind.Conflict) {
		return 0, nil
	}
	return seq, err
}
