package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// SystemOptions are what a SystemRecord is made of. Store, Node, Signing and
// Access are required.
type SystemOptions struct {
	Store    SystemStore
	Node     session.NodeID
	Signing  *Signing
	Access   access.Decider
	Versions map[string]string // of bivy and its parts, for the seals
	Now      func() time.Time  // nil: time.Now
	Log      *slog.Logger      // nil: discard

	// A segment is sealed when one of these is reached.
	MaxEvents uint64        // 0: 10,000
	MaxBytes  int64         // of skeletons and payloads; 0: 8 MiB
	MaxAge    time.Duration // 0: 24 h

	HeadsEvery   time.Duration // between signed heads, when something was written; 0: 5 min
	RefusedEvery time.Duration // between events about refused requests; 0: 1 min
}

// SystemRecord writes the record of a node: what is about no single session.
// Its methods may be called from any goroutine.
type SystemRecord struct {
	o   SystemOptions
	log *slog.Logger

	mu sync.Mutex
	// open counts intents without an outcome: their segment is not sealed,
	// since an outcome concludes an intent of its own segment.
	open    int
	refused map[refusal]*refusals
	sealing chan struct{} // while a segment is being sealed, which new intents wait for; closed when it is
}

// refusal is what refused requests are counted by.
type refusal struct {
	action audit.Action
	reason string
	who    string // subject of the caller; empty when the caller is not known

	decision audit.Decision // empty where nothing decided, as for a login
}

type refusals struct {
	count       uint64
	first, last time.Time
}

// maxRefusals bounds the kinds of refusals that are counted apart between two
// events; the rest is counted together.
const maxRefusals = 64

// Node is who acts when the node itself writes into its record.
var Node = session.Principal{Subject: "system:node"}

// NewSystemRecord returns the record of a node.
func NewSystemRecord(o SystemOptions) *SystemRecord {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxEvents == 0 {
		o.MaxEvents = 10_000
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 8 << 20
	}
	if o.MaxAge == 0 {
		o.MaxAge = 24 * time.Hour
	}
	if o.HeadsEvery == 0 {
		o.HeadsEvery = 5 * time.Minute
	}
	if o.RefusedEvery == 0 {
		o.RefusedEvery = time.Minute
	}
	return &SystemRecord{o: o, log: o.Log, refused: map[refusal]*refusals{}}
}

// Record makes a fact durable.
func (s *SystemRecord) Record(ctx context.Context, e audit.Entry) error {
	if _, _, err := s.o.Store.AppendSystem(ctx, s.o.Node, Traced(ctx, []audit.Entry{fillActor(e)})...); err != nil {
		return fmt.Errorf("record of node %s: %w", s.o.Node, err)
	}
	return nil
}

func fillActor(e audit.Entry) audit.Entry {
	if e.Actor.Subject == "" {
		e.Actor = Node
	}
	return e
}

// writeTime bounds the writing of an outcome.
const writeTime = 10 * time.Second

// Begin makes an intent durable and returns how to conclude it, which must be
// called once. When Begin fails the effect must not happen. The outcome is
// written also when ctx has ended by then.
func (s *SystemRecord) Begin(ctx context.Context, intent audit.Entry) (conclude func(outcome audit.Entry) error, err error) {
	intent = fillActor(intent)
	intent.Outcome = audit.Pending
	if err := s.openIntent(ctx); err != nil {
		return nil, err
	}
	closed := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
	}
	entries := Traced(ctx, []audit.Entry{intent})
	_, seq, err := s.o.Store.AppendSystem(ctx, s.o.Node, entries...)
	if err != nil {
		closed()
		return nil, fmt.Errorf("refused, because it cannot be recorded: record of node %s: %w", s.o.Node, err)
	}
	return func(outcome audit.Entry) error {
		defer closed()
		outcome.Concludes, outcome.Ref, outcome.Actor, outcome.Trace = seq, intent.Ref, intent.Actor, entries[0].Trace
		if outcome.Object == "" {
			outcome.Object = intent.Object
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
		defer cancel()
		return s.Record(ctx, outcome)
	}, nil
}

// openIntent counts an intent as open, once no segment is being sealed.
func (s *SystemRecord) openIntent(ctx context.Context) error {
	for {
		s.mu.Lock()
		sealing := s.sealing
		if sealing == nil {
			s.open++
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		select {
		case <-sealing:
		case <-ctx.Done():
			return kind.Errorf(kind.Unavailable, "refused, because it cannot be recorded: a segment of the record of node %s is being sealed: %w", s.o.Node, ctx.Err())
		}
	}
}

// CountRefused counts a request that was refused. Refusals are told in one
// event for each kind and period, so that a caller who tries without end
// cannot fill the record.
func (s *SystemRecord) CountRefused(a audit.Action, reason, who string, d audit.Decision) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.o.Now()
	key := refusal{a, reason, who, d}
	r := s.refused[key]
	if r == nil {
		if len(s.refused) >= maxRefusals {
			key = refusal{action: a, reason: "more"}
		}
		if r = s.refused[key]; r == nil {
			r = &refusals{first: now}
			s.refused[key] = r
		}
	}
	r.count++
	r.last = now
}

// flushRefused records what was counted.
func (s *SystemRecord) flushRefused(ctx context.Context) error {
	s.mu.Lock()
	counted := s.refused
	s.refused = map[refusal]*refusals{}
	s.mu.Unlock()
	var errs []error
	for key, r := range counted {
		err := s.Record(ctx, audit.Entry{
			Action: key.action, Outcome: audit.Refused, Decision: key.decision,
			Payload: map[string]any{"reason": key.reason, "who": key.who, "count": r.count, "first": r.first.UTC(), "last": r.last.UTC()},
		})
		if err != nil {
			errs = append(errs, err)
			s.restore(key, r)
		}
	}
	return errors.Join(errs...)
}

// restore puts back a count that could not be recorded.
func (s *SystemRecord) restore(key refusal, r *refusals) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.refused[key]; now != nil {
		now.count += r.count
		now.first = r.first
		return
	}
	s.refused[key] = r
}

// Run seals segments, records refusals and signs heads until ctx ends. Then it
// records the refusals that were counted since.
func (s *SystemRecord) Run(ctx context.Context) {
	tick := time.NewTicker(min(s.o.RefusedEvery, s.o.HeadsEvery, s.o.MaxAge))
	defer tick.Stop()
	var headsAt time.Time
	var signed audit.Heads // as they are with the statement about them
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
			defer cancel()
			if err := s.flushRefused(last); err != nil {
				s.log.Error("recording refused requests", "error", err)
			}
			return
		}
		if err := s.flushRefused(ctx); err != nil && ctx.Err() == nil {
			s.log.Error("recording refused requests", "error", err)
		}
		if err := s.sealIfDue(ctx); err != nil && ctx.Err() == nil {
			s.log.Error("sealing a segment of the record of the node", "error", err)
		}
		if now := s.o.Now(); now.Sub(headsAt) >= s.o.HeadsEvery {
			headsAt = now
			next, err := s.recordHeads(ctx, signed)
			if err != nil && ctx.Err() == nil {
				s.log.Error("signing the heads of the records", "error", err)
			}
			if err == nil {
				signed = next
			}
		}
	}
}

// sealIfDue seals the open segment when it is large or old enough.
func (s *SystemRecord) sealIfDue(ctx context.Context) error {
	all, err := s.o.Store.Segments(ctx, s.o.Node)
	if err != nil || len(all) == 0 {
		return err
	}
	last := all[len(all)-1]
	if !last.Sealed.IsZero() || last.Events < s.o.MaxEvents && last.Bytes < s.o.MaxBytes && s.o.Now().Sub(last.Opened) < s.o.MaxAge {
		return nil
	}
	return s.sealSegment(ctx, last, "its size or age was reached")
}

// sealSegment seals the open segment, unless an intent in it has no outcome
// yet: then it is left for the next time.
func (s *SystemRecord) sealSegment(ctx context.Context, last audit.Segment, why string) error {
	s.mu.Lock()
	if open := s.open; open > 0 {
		s.mu.Unlock()
		s.log.Warn("a segment of the record of the node is due, but is not sealed while an intent has no outcome", "segment", last.Number, "open", open)
		return nil
	}
	done := make(chan struct{})
	s.sealing = done
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sealing = nil
		close(done)
	}()
	return s.o.Store.SealSegment(ctx, s.o.Node, func(h audit.Head, before audit.Heads) (audit.Seal, error) {
		return s.o.Signing.Signer().SealSegment(h, before, audit.SegmentCloseout{
			OpenedAt: last.Opened, SealedAt: s.o.Now(), Versions: s.o.Versions,
		})
	}, audit.Entry{
		Action: audit.SegmentClosed, Outcome: audit.OK, Actor: Node,
		Object: "segment/" + strconv.FormatUint(last.Number, 10), Payload: map[string]any{"why": why},
	})
}

// recordHeads signs the heads of all records of the node and records the
// statement, unless nothing was written since before, which is what an earlier
// call returned: the heads with its own statement. The statement in the
// event leaves out the list of open records, of which it has the digest.
func (s *SystemRecord) recordHeads(ctx context.Context, before audit.Heads) (audit.Heads, error) {
	h, err := s.o.Store.Heads(ctx, s.o.Node)
	if err != nil {
		return before, err
	}
	if h.TreeRoot == before.TreeRoot && h.OpenDigest == before.OpenDigest && h.System == before.System {
		return before, nil
	}
	compact := h
	compact.Open = nil
	statement, err := s.o.Signing.Signer().SignHeads(compact)
	if err != nil {
		return before, err
	}
	if err := s.Record(ctx, audit.Entry{Action: audit.HeadsSigned, Outcome: audit.OK, Payload: map[string]any{"statement": statement}}); err != nil {
		return before, err
	}
	// What else is written between the two looks is missing from the
	// statement, so the record of the node may only have grown by it.
	now, err := s.o.Store.Heads(ctx, s.o.Node)
	if err != nil || now.System.Seq != h.System.Seq+1 {
		return h, err
	}
	h.System = now.System
	return h, nil
}

// Head returns a signed statement of the heads of all records of the node, now.
func (s *SystemRecord) Head(ctx context.Context, who access.Caller) (audit.Seal, error) {
	if _, err := s.decide(ctx, who, access.AuditSystem); err != nil {
		return audit.Seal{}, err
	}
	h, err := s.o.Store.Heads(ctx, s.o.Node)
	if err != nil {
		return audit.Seal{}, err
	}
	return s.o.Signing.Signer().SignHeads(h)
}

// Listing calls fn for every record of the node, as SystemStore.Listing does.
func (s *SystemRecord) Listing(ctx context.Context, who access.Caller, fn func(audit.ListedRecord) error) error {
	if _, err := s.decide(ctx, who, access.AuditSystem); err != nil {
		return err
	}
	return s.o.Store.Listing(ctx, s.o.Node, fn)
}

// Export writes the record of the node in the export format of package audit.
func (s *SystemRecord) Export(ctx context.Context, who access.Caller, w io.Writer) error {
	if _, err := s.decide(ctx, who, access.AuditSystem); err != nil {
		return err
	}
	all, err := s.o.Store.Segments(ctx, s.o.Node)
	if err != nil {
		return err
	}
	x := audit.SystemExport{Node: s.o.Node, Rotations: s.o.Signing.Signer().Rotations()}
	for _, segment := range all {
		// The seal is asked for first: a segment that is sealed meanwhile is
		// then exported whole but unsealed, and is the last.
		seal, err := s.o.Store.SegmentSeal(ctx, s.o.Node, segment.Number)
		if err != nil && !kind.Is(err, kind.NotFound) {
			return err
		}
		part := audit.SegmentExport{Events: func(yield func(audit.Stored) error) error {
			return s.o.Store.SegmentEvents(ctx, s.o.Node, segment.Number, 0, 0, yield)
		}}
		if err == nil {
			part.Seal = &seal
		}
		x.Segments = append(x.Segments, part)
	}
	return audit.ExportSystem(w, x)
}

// RotateKey replaces the key that signs records by a new one, which the old
// one signs.
func (s *SystemRecord) RotateKey(ctx context.Context, who access.Caller) error {
	decision, err := s.decide(ctx, who, access.KeyManage)
	if err != nil {
		return err
	}
	old := s.o.Signing.Signer().Public().Fingerprint()
	conclude, err := s.Begin(ctx, audit.Entry{
		Action: audit.SigningKeyIntent, Actor: who.Principal, Decision: decision, Ref: "signing-key", Object: "signing-key/" + old,
	})
	if err != nil {
		return err
	}
	if err := s.o.Signing.rotate(); err != nil {
		return errors.Join(err, conclude(audit.Entry{Action: audit.SigningKeyFailed, Outcome: audit.Failed, Payload: map[string]any{"error": err.Error()}}))
	}
	next := s.o.Signing.Signer().Public().Fingerprint()
	return conclude(audit.Entry{
		Action: audit.SigningKeyReplaced, Outcome: audit.OK, Object: "signing-key/" + next, Payload: map[string]any{"old": old, "new": next},
	})
}

func (s *SystemRecord) decide(ctx context.Context, who access.Caller, a access.Action) (audit.Decision, error) {
	return s.o.Access.Decide(ctx, access.Request{Caller: who, Action: a})
}
