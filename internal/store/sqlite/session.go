package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// body is the stored JSON of a session without its spec and boot id. The names
// are part of the schema: adding a field is free, renaming one needs a
// migration.
type body struct {
	ID         session.ID        `json:"id"`
	Version    int64             `json:"version"`
	State      session.State     `json:"state"`
	Reason     session.Reason    `json:"reason,omitempty"`
	Detail     string            `json:"detail,omitempty"`
	SpecDigest string            `json:"spec_digest"`
	Owner      session.Principal `json:"owner"`
	Node       session.NodeID    `json:"node"`
	Generation uint32            `json:"generation"`
	Template   string            `json:"template,omitempty"`
	CreatedAt  time.Time         `json:"created_at"`
	StartedAt  time.Time         `json:"started_at,omitzero"`
	EndedAt    time.Time         `json:"ended_at,omitzero"`
	Deadline   time.Time         `json:"deadline,omitzero"`
	Residuals  []string          `json:"residuals,omitempty"`
}

// encode returns the two columns that hold s. Its boot id is in the sandbox's
// row.
func encode(s session.Session) (spec, rest []byte, err error) {
	if spec, err = json.Marshal(s.Spec); err != nil {
		return nil, nil, err
	}
	rest, err = json.Marshal(body{
		ID: s.ID, Version: s.Version, State: s.State, Reason: s.Reason, Detail: s.Detail,
		SpecDigest: s.SpecDigest, Owner: s.Owner, Node: s.Node, Generation: s.Generation,
		Template: s.Template, CreatedAt: s.CreatedAt, StartedAt: s.StartedAt, EndedAt: s.EndedAt,
		Deadline: s.Deadline, Residuals: s.Residuals,
	})
	return spec, rest, err
}

// decode reads what encode wrote. Fields of the spec that a newer build added
// are left out; they stay in the database, where the spec is written once.
func decode(spec, rest []byte, boot string) (session.Session, error) {
	var b body
	if err := json.Unmarshal(rest, &b); err != nil {
		return session.Session{}, fmt.Errorf("stored session: %w", err)
	}
	s := session.Session{
		ID: b.ID, Version: b.Version, State: b.State, Reason: b.Reason, Detail: b.Detail,
		SpecDigest: b.SpecDigest, Owner: b.Owner, Node: b.Node, Generation: b.Generation, Boot: boot,
		Template: b.Template, CreatedAt: b.CreatedAt, StartedAt: b.StartedAt, EndedAt: b.EndedAt,
		Deadline: b.Deadline, Residuals: b.Residuals,
	}
	if err := json.Unmarshal(spec, &s.Spec); err != nil {
		return session.Session{}, fmt.Errorf("stored spec of session %s: %w", b.ID, err)
	}
	return s, nil
}

// normal gives s the form in which it comes back from the database.
func normal(s session.Session) session.Session {
	for _, t := range []*time.Time{&s.CreatedAt, &s.StartedAt, &s.EndedAt, &s.Deadline} {
		if *t = t.UTC().Truncate(time.Microsecond); t.IsZero() {
			*t = time.Time{}
		}
	}
	if len(s.Residuals) == 0 {
		s.Residuals = nil
	}
	if len(s.Spec.Env) == 0 {
		s.Spec.Env = nil
	}
	if len(s.Spec.Labels) == 0 {
		s.Spec.Labels = nil
	}
	return s
}

// fixed digests what a session is created with and keeps. Of the spec it takes
// Spec.Digest as this build computes it: stored and given specs are compared as
// values of this build, so that a field which only another build writes does
// not make them differ.
func fixed(s session.Session) ([32]byte, error) {
	spec, err := s.Spec.Digest()
	if err != nil {
		return [32]byte{}, fmt.Errorf("spec of session %s: %w", s.ID, err)
	}
	return sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s\n%q\n%d\n", s.ID, s.SpecDigest, spec,
		[]string{s.Owner.Subject, s.Owner.OnBehalfOf, s.Owner.Trigger}, s.CreatedAt.UnixMicro())), nil
}

// valid checks what must hold of every session that is written.
func valid(s session.Session) error {
	if _, err := session.ParseID(string(s.ID)); err != nil {
		return err
	}
	switch s.State {
	case session.Ending, session.Ended:
		if s.Reason == "" {
			return kind.Errorf(kind.Invalid, "session %s is %s without a reason", s.ID, s.State)
		}
	case session.Creating, session.Running, session.Pausing, session.Standby, session.Resuming, session.Quarantined:
	default:
		return kind.Errorf(kind.Invalid, "session %s: %.64q is not a state", s.ID, string(s.State))
	}
	if s.Owner.Subject == "" {
		return kind.Errorf(kind.Invalid, "session %s has no owner", s.ID)
	}
	if s.Node == "" {
		return kind.Errorf(kind.Invalid, "session %s has no node", s.ID)
	}
	if s.Boot != "" && s.Generation == 0 {
		return kind.Errorf(kind.Invalid, "session %s has a boot id and no sandbox: its generation is 0", s.ID)
	}
	return nil
}

func errUnknown(id session.ID) error {
	return kind.Errorf(kind.NotFound, "session %s does not exist", id).WithField("session")
}

// Create writes a new session, whose Version becomes 1, and the first events of
// its record, numbered from 1. With a key that was used before for the same
// digest it returns that earlier session and existed=true and writes nothing;
// with another digest it fails with Conflict.
func (s *Store) Create(ctx context.Context, want session.Session, key session.IdempotencyKey, entries ...audit.Entry) (stored session.Session, existed bool, err error) {
	want = normal(want)
	want.Version = 1
	if err := valid(want); err != nil {
		return session.Session{}, false, err
	}
	if want.State != session.Creating {
		return session.Session{}, false, kind.Errorf(kind.Invalid, "session %s begins as %s, want %s", want.ID, want.State, session.Creating)
	}
	if len(key.Key) > session.MaxIdempotencyKey {
		return session.Session{}, false, kind.Errorf(kind.Invalid, "%d bytes, at most %d", len(key.Key), session.MaxIdempotencyKey).WithField("idempotency_key")
	}
	drafts, err := prepare(entries, audit.SessionEnded)
	if err != nil {
		return session.Session{}, false, err
	}
	keeps, err := fixed(want)
	if err != nil {
		return session.Session{}, false, err
	}
	spec, rest, err := encode(want)
	if err != nil {
		return session.Session{}, false, fmt.Errorf("session %s: %w", want.ID, err)
	}
	stored = want
	err = s.write(ctx, func(b *batch) error {
		if key.Key != "" {
			earlier, found, err := b.earlier(key)
			if err != nil || found {
				stored, existed = earlier, found
				return err
			}
		}
		rec, err := b.newRecord(audit.Start(audit.SessionRecord(want.ID), ""))
		if taken(err) {
			return kind.Errorf(kind.Conflict, "session %s exists already", want.ID)
		}
		if err != nil {
			return err
		}
		n, err := b.insert(b.stmt.sessionInsert, string(want.ID), rec.n, want.Version, string(want.State), want.Owner.Subject,
			string(want.Node), want.Generation, want.CreatedAt.UnixMicro(), micros(want.EndedAt), string(spec), string(rest))
		if err != nil {
			return err
		}
		for k, v := range want.Spec.Labels {
			if err := b.exec(b.stmt.labelInsert, k, v, n); err != nil {
				return err
			}
		}
		if key.Key != "" {
			if err := b.exec(b.stmt.idempotencyPut, key.Scope, key.Key, key.Digest, n, b.moment.Now.Add(idempotencyLife).UnixMicro()); err != nil {
				return err
			}
		}
		rec.session = facts{n: n, version: 1, state: want.State, fixed: keeps, fence: want.Fence()}
		if err := b.sandbox(rec.session, want); err != nil {
			return err
		}
		_, err = b.append(rec, want.Fence(), drafts)
		return err
	})
	if err != nil {
		return session.Session{}, false, fmt.Errorf("create session %s: %w", want.ID, err)
	}
	return stored, existed, nil
}

// idempotencyLife is how long a repeated create finds the first one's session.
const idempotencyLife = 24 * time.Hour

// earlier returns the session that key made before, and deletes keys that have
// expired.
func (b *batch) earlier(key session.IdempotencyKey) (session.Session, bool, error) {
	if err := b.exec(b.stmt.idempotencyExpire, b.moment.Now.UnixMicro()); err != nil {
		return session.Session{}, false, err
	}
	var digest, boot string
	var spec, rest []byte
	err := b.stmt.idempotencySelect.QueryRowContext(context.Background(), key.Scope, key.Key).Scan(&digest, &spec, &rest, &boot)
	if errors.Is(err, sql.ErrNoRows) {
		return session.Session{}, false, nil
	}
	if err != nil {
		return session.Session{}, false, err
	}
	if digest != key.Digest {
		return session.Session{}, false, kind.Errorf(kind.Conflict, "the idempotency key %.64q was used for another request", key.Key).
			WithField("idempotency_key").WithHint("repeat the request unchanged, or use a new key")
	}
	s, err := decode(spec, rest, boot)
	return s, err == nil, err
}

// sandbox writes the row of the incarnation that next has and ends the row of
// the one before it. old is the session as it is stored.
func (b *batch) sandbox(old facts, next session.Session) error {
	now := b.moment.Now.UnixMicro()
	if old.fence.Generation != 0 && (old.fence.Generation != next.Generation || next.State.Terminal()) {
		if err := b.exec(b.stmt.sandboxEnd, now, old.n, old.fence.Generation); err != nil {
			return err
		}
	}
	if next.Generation == 0 || next.State.Terminal() && old.fence.Generation == next.Generation {
		return nil
	}
	return b.exec(b.stmt.sandboxPut, old.n, next.Generation, string(next.Node), next.Boot, now)
}

// Transition replaces the session if the fence at is right, its stored version
// is want.Version and its stored state can become want.State, and appends at
// least one entry, under the fence at. want may name another node and a higher
// generation. It returns the session with the next version and the number of
// the first event.
func (s *Store) Transition(ctx context.Context, at session.Fence, want session.Session, entries ...audit.Entry) (stored session.Session, first uint64, err error) {
	if want.State == session.Ended {
		return session.Session{}, 0, kind.Errorf(kind.Conflict, "session %s ends by its seal and in no other way", want.ID)
	}
	drafts, err := prepare(entries, audit.SessionEnded)
	if err != nil {
		return session.Session{}, 0, err
	}
	stored, err = s.replace(ctx, at, want, func(b *batch, rec *record) error {
		first, err = b.append(rec, at, drafts)
		return err
	})
	if err != nil {
		return session.Session{}, 0, err
	}
	return stored, first, nil
}

// replace writes want over the stored session by compare-and-swap and has more
// write the events of the change.
func (s *Store) replace(ctx context.Context, at session.Fence, want session.Session, more func(*batch, *record) error) (session.Session, error) {
	want = normal(want)
	if err := valid(want); err != nil {
		return session.Session{}, err
	}
	next := want
	next.Version++
	_, rest, err := encode(next)
	if err != nil {
		return session.Session{}, fmt.Errorf("session %s: %w", want.ID, err)
	}
	keeps, err := fixed(want)
	if err != nil {
		return session.Session{}, err
	}
	err = s.write(ctx, func(b *batch) error {
		rec, err := b.sessionRecord(want.ID)
		if err != nil {
			return err
		}
		old := rec.session
		if err := old.check(want.ID, at); err != nil {
			return err
		}
		switch {
		case old.state.Terminal():
			return kind.Errorf(kind.Conflict, "session %s has ended", want.ID)
		case old.version != want.Version:
			return kind.Errorf(kind.Conflict, "session %s is at version %d, not %d: another writer changed it", want.ID, old.version, want.Version)
		case !old.state.CanBecome(want.State):
			return kind.Errorf(kind.Conflict, "session %s is %s and cannot become %s", want.ID, old.state, want.State)
		case old.fixed != keeps:
			return kind.Errorf(kind.Invalid, "session %s: its spec, owner and time of creation never change", want.ID)
		case want.Generation < old.fence.Generation:
			return kind.Errorf(kind.Invalid, "session %s is at generation %d: generation %d is older", want.ID, old.fence.Generation, want.Generation)
		}
		rec.session.version, rec.session.state, rec.session.fence = next.Version, next.State, next.Fence()
		// The events first: a seal has to be there before the session ends.
		if err := more(b, rec); err != nil {
			return err
		}
		if err := b.sandbox(old, next); err != nil {
			return err
		}
		return b.exec(b.stmt.sessionUpdate, next.Version, string(next.State), string(next.Node), next.Generation, micros(next.EndedAt), string(rest), old.n)
	})
	if err != nil {
		return session.Session{}, fmt.Errorf("change session %s: %w", want.ID, err)
	}
	return next, nil
}

// Append adds events to the record of a session, under the fence at, without
// changing the session. They are durable when it returns. It returns the number
// of the first; the others follow it.
func (s *Store) Append(ctx context.Context, id session.ID, at session.Fence, entries ...audit.Entry) (first uint64, err error) {
	drafts, err := prepare(entries, audit.SessionEnded)
	if err != nil {
		return 0, err
	}
	err = s.write(ctx, func(b *batch) error {
		rec, err := b.sessionRecord(id)
		if err != nil {
			return err
		}
		if err := rec.session.check(id, at); err != nil {
			return err
		}
		if rec.session.state.Terminal() {
			return kind.Errorf(kind.Conflict, "the record of session %s is sealed", id)
		}
		first, err = b.append(rec, at, drafts)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("append to the record of session %s: %w", id, err)
	}
	return first, nil
}

// Seal moves the session to Ended under the fence at, appends the last events
// and stores the seal over the whole record, all in one transaction. The last
// entry must be session.ended; before it the store writes an intent.lost for
// every intent that has no outcome. sign is called inside the transaction with
// the head of the record and with the heads of the node's other records.
func (s *Store) Seal(ctx context.Context, at session.Fence, want session.Session, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) (session.Session, error) {
	if want.State != session.Ended {
		return session.Session{}, kind.Errorf(kind.Invalid, "seal of session %s as %s, want %s", want.ID, want.State, session.Ended)
	}
	drafts, err := prepareLast(entries, audit.SessionEnded)
	if err != nil {
		return session.Session{}, fmt.Errorf("seal of session %s: %w", want.ID, err)
	}
	actor := entries[len(entries)-1].Actor
	return s.replace(ctx, at, want, func(b *batch, rec *record) error {
		return b.seal(rec, at, sign, drafts, actor)
	})
}
