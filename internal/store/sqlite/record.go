package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// record is what the writer remembers of a session, so that an append to it
// reads nothing.
type record struct {
	n       int64
	version int64
	state   session.State
	fixed   [32]byte // digest of what no transition changes
	head    audit.Head
}

// body is the stored JSON of a session without its spec. The names are part of
// the schema: adding a field is free, renaming one needs a migration.
type body struct {
	ID         session.ID        `json:"id"`
	Version    int64             `json:"version"`
	State      session.State     `json:"state"`
	Reason     session.Reason    `json:"reason,omitempty"`
	Detail     string            `json:"detail,omitempty"`
	SpecDigest string            `json:"spec_digest"`
	Owner      session.Principal `json:"owner"`
	Node       session.NodeID    `json:"node,omitempty"`
	Generation uint32            `json:"generation"`
	Template   string            `json:"template,omitempty"`
	CreatedAt  time.Time         `json:"created_at"`
	StartedAt  time.Time         `json:"started_at,omitzero"`
	EndedAt    time.Time         `json:"ended_at,omitzero"`
	Deadline   time.Time         `json:"deadline,omitzero"`
	Residuals  []string          `json:"residuals,omitempty"`
}

// encode returns the two columns that hold s.
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

func decode(spec, rest []byte) (session.Session, error) {
	var b body
	if err := json.Unmarshal(rest, &b); err != nil {
		return session.Session{}, fmt.Errorf("stored session: %w", err)
	}
	s := session.Session{
		ID: b.ID, Version: b.Version, State: b.State, Reason: b.Reason, Detail: b.Detail,
		SpecDigest: b.SpecDigest, Owner: b.Owner, Node: b.Node, Generation: b.Generation,
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

// fixed digests what a session is created with and keeps.
func fixed(s session.Session, spec []byte) [32]byte {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%q\n%d\n", s.ID, s.SpecDigest, []string{s.Owner.Subject, s.Owner.OnBehalfOf, s.Owner.Trigger}, s.CreatedAt.UnixMicro())
	h.Write(spec)
	return [32]byte(h.Sum(nil))
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
	return nil
}

func prepare(entries []audit.Entry) ([]audit.Draft, error) {
	if len(entries) == 0 {
		return nil, kind.Errorf(kind.Invalid, "a write without an event")
	}
	drafts := make([]audit.Draft, len(entries))
	for i, e := range entries {
		var err error
		if drafts[i], err = audit.Prepare(e); err != nil {
			return nil, err
		}
	}
	return drafts, nil
}

func errUnknown(id session.ID) error {
	return kind.Errorf(kind.NotFound, "session %s does not exist", id).WithField("session")
}

// Create implements lifecycle.Store.
func (s *Store) Create(ctx context.Context, want session.Session, key session.IdempotencyKey, entries ...audit.Entry) (session.Session, bool, error) {
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
	drafts, err := prepare(entries)
	if err != nil {
		return session.Session{}, false, err
	}
	spec, rest, err := encode(want)
	if err != nil {
		return session.Session{}, false, fmt.Errorf("session %s: %w", want.ID, err)
	}
	stored, existed := want, false
	err = s.write(ctx, func(b *batch) error {
		if key.Key != "" {
			earlier, found, err := b.earlier(key)
			if err != nil || found {
				stored, existed = earlier, found
				return err
			}
		}
		res, err := b.stmt.sessionInsert.ExecContext(context.Background(), string(want.ID), want.Version, string(want.State),
			want.Owner.Subject, want.CreatedAt.UnixMicro(), micros(want.EndedAt), string(spec), string(rest))
		if taken(err) {
			return kind.Errorf(kind.Conflict, "session %s exists already", want.ID)
		}
		if err != nil {
			return err
		}
		n, err := res.LastInsertId()
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
		rec := &record{n: n, version: 1, state: want.State, fixed: fixed(want, spec), head: audit.Start(want.ID)}
		return b.append(rec, drafts)
	})
	if err != nil {
		return session.Session{}, false, fmt.Errorf("create session %s: %w", want.ID, err)
	}
	return stored, existed, nil
}

// idempotencyLife is how long a repeated create finds the first one's session.
const idempotencyLife = 24 * time.Hour

// earlier returns the session that key made before, and forgets keys whose
// time is over.
func (b *batch) earlier(key session.IdempotencyKey) (session.Session, bool, error) {
	if err := b.exec(b.stmt.idempotencyExpire, b.moment.Now.UnixMicro()); err != nil {
		return session.Session{}, false, err
	}
	var digest string
	var expires int64
	var spec, rest []byte
	err := b.stmt.idempotencySelect.QueryRowContext(context.Background(), key.Scope, key.Key).Scan(&digest, &expires, &spec, &rest)
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
	s, err := decode(spec, rest)
	return s, err == nil, err
}

// Transition implements lifecycle.Store.
func (s *Store) Transition(ctx context.Context, want session.Session, entries ...audit.Entry) (session.Session, error) {
	if want.State == session.Ended {
		return session.Session{}, kind.Errorf(kind.Conflict, "session %s ends by its seal and in no other way", want.ID)
	}
	drafts, err := prepare(entries)
	if err != nil {
		return session.Session{}, err
	}
	if err := checkActions(drafts); err != nil {
		return session.Session{}, err
	}
	return s.replace(ctx, want, func(b *batch, rec *record) error { return b.append(rec, drafts) })
}

// replace writes want over the stored session by compare-and-swap and has more
// write the events of the change.
func (s *Store) replace(ctx context.Context, want session.Session, more func(*batch, *record) error) (session.Session, error) {
	want = normal(want)
	if err := valid(want); err != nil {
		return session.Session{}, err
	}
	next := want
	next.Version++
	spec, rest, err := encode(next)
	if err != nil {
		return session.Session{}, fmt.Errorf("session %s: %w", want.ID, err)
	}
	keeps := fixed(want, spec)
	err = s.write(ctx, func(b *batch) error {
		rec, err := b.record(want.ID)
		if err != nil {
			return err
		}
		switch {
		case rec.state.Terminal():
			return kind.Errorf(kind.Conflict, "session %s has ended", want.ID)
		case rec.version != want.Version:
			return kind.Errorf(kind.Conflict, "session %s is at version %d, not %d: it changed meanwhile", want.ID, rec.version, want.Version)
		case !rec.state.CanBecome(want.State):
			return kind.Errorf(kind.Conflict, "session %s is %s and cannot become %s", want.ID, rec.state, want.State)
		case rec.fixed != keeps:
			return kind.Errorf(kind.Invalid, "session %s: its spec, owner and time of creation never change", want.ID)
		}
		rec.version, rec.state = next.Version, next.State
		// The events first: a seal has to be there before the session ends.
		if err := more(b, rec); err != nil {
			return err
		}
		return b.exec(b.stmt.sessionUpdate, next.Version, string(next.State), micros(next.EndedAt), string(rest), rec.n)
	})
	if err != nil {
		return session.Session{}, fmt.Errorf("change session %s: %w", want.ID, err)
	}
	return next, nil
}

// Append implements lifecycle.Store.
func (s *Store) Append(ctx context.Context, id session.ID, entries ...audit.Entry) error {
	drafts, err := prepare(entries)
	if err != nil {
		return err
	}
	if err := checkActions(drafts); err != nil {
		return err
	}
	err = s.write(ctx, func(b *batch) error {
		rec, err := b.record(id)
		if err != nil {
			return err
		}
		if rec.state.Terminal() {
			return kind.Errorf(kind.Conflict, "the record of session %s is sealed", id)
		}
		return b.append(rec, drafts)
	})
	if err != nil {
		return fmt.Errorf("append to the record of session %s: %w", id, err)
	}
	return nil
}

// checkActions keeps the end of a record for Seal.
func checkActions(drafts []audit.Draft) error {
	for _, d := range drafts {
		if d.Action() == audit.SessionEnded {
			return kind.Errorf(kind.Invalid, "%s is written with the seal and in no other way", audit.SessionEnded)
		}
	}
	return nil
}

// Seal implements lifecycle.Store. Before the last entry, which must be
// session.ended, it writes intent.lost for every intent that neither the
// record nor the entries give an outcome.
func (s *Store) Seal(ctx context.Context, want session.Session, sign func(audit.Head) (audit.Seal, error), entries ...audit.Entry) (session.Session, error) {
	if want.State != session.Ended {
		return session.Session{}, kind.Errorf(kind.Invalid, "seal of session %s as %s, want %s", want.ID, want.State, session.Ended)
	}
	drafts, err := prepare(entries)
	if err != nil {
		return session.Session{}, err
	}
	last := len(drafts) - 1
	if err := checkActions(drafts[:last]); err != nil {
		return session.Session{}, err
	}
	if drafts[last].Action() != audit.SessionEnded {
		return session.Session{}, kind.Errorf(kind.Invalid, "the last event of session %s is %s, want %s", want.ID, drafts[last].Action(), audit.SessionEnded)
	}
	// Most of the record is read here, where nobody waits; the writer reads
	// what was added since.
	t := newTally()
	if err := t.read(ctx, s.readDB.QueryContext, want.ID); err != nil {
		return session.Session{}, fmt.Errorf("seal session %s: %w", want.ID, classify(err))
	}
	return s.replace(ctx, want, func(b *batch, rec *record) error {
		return b.seal(rec, t, sign, drafts, entries[last].Actor)
	})
}

func (b *batch) seal(rec *record, t *tally, sign func(audit.Head) (audit.Seal, error), drafts []audit.Draft, actor session.Principal) error {
	query := func(ctx context.Context, _ string, args ...any) (*sql.Rows, error) {
		return b.stmt.eventActions.QueryContext(ctx, args...)
	}
	if err := t.read(context.Background(), query, rec.head.Session); err != nil {
		return err
	}
	last := len(drafts) - 1
	open := t.intents.Clone()
	for _, d := range drafts {
		open.Add(rec.head.Seq+1, d.Action(), d.Ref())
	}
	all := slices.Clone(drafts[:last])
	for _, i := range open.Open() {
		d, err := audit.Prepare(i.Lost(actor))
		if err != nil {
			return err
		}
		all = append(all, d)
	}
	all = append(all, drafts[last])
	if err := b.append(rec, all); err != nil {
		return err
	}
	for _, d := range all {
		t.counts[d.Action()]++
	}
	head := rec.head
	head.Counts = t.counts
	seal, err := sign(head)
	if err != nil {
		return fmt.Errorf("sign: %w", err)
	}
	envelope, err := json.Marshal(seal)
	if err != nil {
		return err
	}
	return b.exec(b.stmt.sealInsert, rec.n, string(envelope))
}

// record returns what is known of the session within the transaction, as a
// copy that becomes true when the request succeeds.
func (b *batch) record(id session.ID) (*record, error) {
	rec, ok := b.staged[id]
	if !ok {
		rec, ok = b.live[id]
	}
	if ok {
		copied := *rec
		b.mine[id] = &copied
		return &copied, nil
	}
	var n int64
	var spec, rest []byte
	err := b.stmt.sessionSelect.QueryRowContext(context.Background(), string(id)).Scan(&n, &spec, &rest)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, errUnknown(id)
	}
	if err != nil {
		return nil, err
	}
	s, err := decode(spec, rest)
	if err != nil {
		return nil, err
	}
	loaded := &record{n: n, version: s.Version, state: s.State, fixed: fixed(s, spec), head: audit.Start(id)}
	err = b.stmt.eventLast.QueryRowContext(context.Background(), n).Scan(&loaded.head.Seq, &loaded.head.Hash)
	if err != nil {
		return nil, fmt.Errorf("last event of session %s: %w", id, err)
	}
	b.mine[id] = loaded
	return loaded, nil
}

// append chains the drafts to the record and writes them.
func (b *batch) append(rec *record, drafts []audit.Draft) error {
	for _, d := range drafts {
		e, err := d.Chain(rec.head, b.moment)
		if err != nil {
			return err
		}
		hash, err := hex.DecodeString(e.Hash)
		if err != nil {
			return err
		}
		if err := b.exec(b.stmt.eventInsert, rec.n, int64(e.Event.Seq), string(e.Event.Action), e.Event.Ref,
			string(e.Raw), hash, e.Salt, string(e.Payload)); err != nil {
			return err
		}
		rec.head = e.Head()
	}
	b.mine[rec.head.Session] = rec
	return nil
}

// tally counts a record's actions and follows its intents.
type tally struct {
	seq     uint64 // of the last event taken into account
	counts  map[audit.Action]uint64
	intents audit.Intents
}

func newTally() *tally { return &tally{counts: make(map[audit.Action]uint64)} }

const eventActionsQuery = `SELECT e.seq, e.action, e.ref FROM event e JOIN session s ON s.n = e.session WHERE s.id = ? AND e.seq > ? ORDER BY e.seq`

// read takes the events after those already read into account.
func (t *tally) read(ctx context.Context, query func(context.Context, string, ...any) (*sql.Rows, error), id session.ID) error {
	rows, err := query(ctx, eventActionsQuery, string(id), int64(t.seq))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var seq uint64
		var action, ref string
		if err := rows.Scan(&seq, &action, &ref); err != nil {
			return err
		}
		t.intents.Add(seq, audit.Action(action), ref)
		t.seq = seq
		t.counts[audit.Action(action)]++
	}
	return rows.Err()
}

// micros is the time as columns hold it; 0 for none.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}
