package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// AppendAddenda adds events to the addenda of a session that has ended, under
// the fence at, which is the one that the session ended with, and stores the
// signed head of them. sign is called inside the transaction with the head of
// the addenda, whose After is the root of the session's record. It fails with
// Conflict for a session that has not ended.
func (s *Store) AppendAddenda(ctx context.Context, id session.ID, at session.Fence, sign func(audit.Head) (audit.Seal, error), entries ...audit.Entry) (first uint64, err error) {
	drafts, err := prepare(entries, "")
	if err != nil {
		return 0, err
	}
	err = s.write(ctx, func(b *batch) error {
		main, err := b.sessionRecord(id)
		if err != nil {
			return err
		}
		if err := main.session.check(id, at); err != nil {
			return err
		}
		if !main.session.state.Terminal() {
			return kind.Errorf(kind.Conflict, "session %s has not ended: addenda follow its seal", id)
		}
		rec, err := b.addenda(id, main)
		if err != nil {
			return err
		}
		if first, err = b.append(rec, at, drafts); err != nil {
			return err
		}
		head := rec.head
		head.After, head.Counts = main.head.Root(), rec.counts
		seal, err := sign(head)
		if err != nil {
			return fmt.Errorf("sign: %w", err)
		}
		envelope, err := json.Marshal(seal)
		if err != nil {
			return err
		}
		if err := b.exec(b.stmt.addendaSealInsert, rec.n, int64(rec.head.Seq), string(envelope)); err != nil {
			return err
		}
		return b.addLeaf(at.Node, rec)
	})
	if err != nil {
		return 0, fmt.Errorf("append to the addenda of session %s: %w", id, err)
	}
	return first, nil
}

// addenda returns the addenda of a session whose record is main, and makes them
// when there are none. They are seldom, so the writer does not remember them.
func (b *batch) addenda(id session.ID, main *record) (*record, error) {
	start := audit.Start(audit.AddendaRecord(id), main.head.Root())
	if rec := b.remembered(start.Record); rec != nil {
		return rec, nil
	}
	var n int64
	err := b.stmt.addendaSelect.QueryRowContext(context.Background(), main.session.n).Scan(&n)
	if err == nil {
		rec := &record{n: n, head: start, sealed: true}
		return rec, b.load(rec)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return nil, err
	}
	rec, err := b.newRecord(start)
	if err != nil {
		return nil, err
	}
	rec.sealed = true
	return rec, b.exec(b.stmt.addendaInsert, main.session.n, rec.n)
}

// Addenda calls fn for each addendum of a session with a number above after, in
// order, until fn fails. A session without addenda gives none.
func (s *Store) Addenda(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error {
	if _, err := s.sessionRow(ctx, id); err != nil {
		return err
	}
	n, err := s.recordRow(ctx, audit.AddendaRecord(id))
	if kind.Is(err, kind.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.each(ctx, n, after, 0, fn)
}

// AddendaSeal returns the newest signed head of the addenda of a session;
// NotFound when there are none.
func (s *Store) AddendaSeal(ctx context.Context, id session.ID) (audit.Seal, error) {
	if _, err := s.sessionRow(ctx, id); err != nil {
		return audit.Seal{}, err
	}
	seal, err := s.envelope(ctx, `SELECT a.envelope FROM record r JOIN addenda_seal a ON a.record = r.n
		WHERE r.id = ? ORDER BY a.seq DESC LIMIT 1`, string(audit.AddendaRecord(id)))
	if errors.Is(err, sql.ErrNoRows) {
		return audit.Seal{}, kind.Errorf(kind.NotFound, "session %s has no addenda", id).WithField("session")
	}
	if err != nil {
		return audit.Seal{}, fmt.Errorf("read the head of the addenda of session %s: %w", id, classify(err))
	}
	return seal, nil
}
