package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// MaxPage is the longest page of List.
const MaxPage = 1000

// eventPage is how many events are read at once: few enough to hold, and no
// read transaction stays open while their reader does something slow, which
// would keep the log from being folded back into the database.
const eventPage = 64

// Get implements lifecycle.Store.
func (s *Store) Get(ctx context.Context, id session.ID) (session.Session, error) {
	var spec, rest []byte
	err := s.readDB.QueryRowContext(ctx, "SELECT spec, body FROM session WHERE id = ?", string(id)).Scan(&spec, &rest)
	if errors.Is(err, sql.ErrNoRows) {
		return session.Session{}, errUnknown(id)
	}
	if err != nil {
		return session.Session{}, fmt.Errorf("read session %s: %w", id, classify(err))
	}
	return decode(spec, rest)
}

// List implements lifecycle.Store. The cursor is the id of the last session of
// the page before.
func (s *Store) List(ctx context.Context, f session.Filter, cursor string, limit int) ([]session.Session, string, error) {
	if limit < 1 || limit > MaxPage {
		return nil, "", kind.Errorf(kind.Invalid, "%d is outside 1 to %d", limit, MaxPage).WithField("limit")
	}
	where := []string{"1"}
	var args []any
	add := func(condition string, values ...any) {
		where = append(where, condition)
		args = append(args, values...)
	}
	if cursor != "" {
		var n int64
		err := s.readDB.QueryRowContext(ctx, "SELECT n FROM session WHERE id = ?", cursor).Scan(&n)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, "", kind.Errorf(kind.Invalid, "%.64q is not a cursor that a list gave", cursor).WithField("cursor")
		}
		if err != nil {
			return nil, "", fmt.Errorf("list sessions: %w", classify(err))
		}
		add("n < ?", n)
	}
	if len(f.States) > 0 {
		marks := make([]string, len(f.States))
		values := make([]any, len(f.States))
		for i, state := range f.States {
			if !slices.Contains(session.States(), state) {
				return nil, "", kind.Errorf(kind.Invalid, "%.64q is not a state", string(state)).WithField("state")
			}
			marks[i], values[i] = "?", string(state)
		}
		add("state IN ("+strings.Join(marks, ", ")+")", values...)
		if !slices.Contains(f.States, session.Ended) {
			add("state <> 'ended'") // makes the index of live sessions usable
		}
	}
	if f.Owner != "" {
		add("owner = ?", f.Owner)
	}
	for _, k := range slices.Sorted(maps.Keys(f.Labels)) {
		add("n IN (SELECT session FROM label WHERE key = ? AND value = ?)", k, f.Labels[k])
	}
	query := "SELECT spec, body FROM session WHERE " + strings.Join(where, " AND ") + " ORDER BY n DESC LIMIT ?"
	page, err := s.sessions(ctx, query, append(args, limit+1)...)
	if err != nil {
		return nil, "", fmt.Errorf("list sessions: %w", classify(err))
	}
	if len(page) <= limit {
		return page, "", nil
	}
	return page[:limit], string(page[limit-1].ID), nil
}

// Live implements lifecycle.Store.
func (s *Store) Live(ctx context.Context) ([]session.Session, error) {
	live, err := s.sessions(ctx, "SELECT spec, body FROM session WHERE state <> 'ended' ORDER BY n DESC")
	if err != nil {
		return nil, fmt.Errorf("list live sessions: %w", classify(err))
	}
	return live, nil
}

func (s *Store) sessions(ctx context.Context, query string, args ...any) ([]session.Session, error) {
	rows, err := s.readDB.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var found []session.Session
	for rows.Next() {
		var spec, rest sql.RawBytes
		if err := rows.Scan(&spec, &rest); err != nil {
			return nil, err
		}
		one, err := decode(spec, rest)
		if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	return found, rows.Err()
}

// Events implements lifecycle.Store.
func (s *Store) Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error {
	var n int64
	err := s.readDB.QueryRowContext(ctx, "SELECT n FROM session WHERE id = ?", string(id)).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return errUnknown(id)
	}
	if err != nil {
		return fmt.Errorf("read the record of session %s: %w", id, classify(err))
	}
	for given := 0; limit == 0 || given < limit; {
		want := eventPage
		if limit > 0 {
			want = min(want, limit-given)
		}
		page, err := s.events(ctx, n, after, want)
		if err != nil {
			return fmt.Errorf("read the record of session %s: %w", id, classify(err))
		}
		for _, e := range page {
			if err := fn(e); err != nil {
				return err
			}
			after = e.Event.Seq
		}
		if given += len(page); len(page) < want {
			return nil
		}
	}
	return nil
}

func (s *Store) events(ctx context.Context, n int64, after uint64, limit int) ([]audit.Stored, error) {
	rows, err := s.readDB.QueryContext(ctx,
		"SELECT raw, lower(hex(hash)), salt, payload FROM event WHERE session = ? AND seq > ? ORDER BY seq LIMIT ?", n, int64(after), limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	page := make([]audit.Stored, 0, limit)
	for rows.Next() {
		var raw, salt, payload []byte
		var hash string
		if err := rows.Scan(&raw, &hash, &salt, &payload); err != nil {
			return nil, err
		}
		e, err := audit.ParseStored(raw, hash, salt, payload)
		if err != nil {
			return nil, err
		}
		page = append(page, e)
	}
	return page, rows.Err()
}

// SealOf implements lifecycle.Store.
func (s *Store) SealOf(ctx context.Context, id session.ID) (audit.Seal, error) {
	var envelope []byte
	err := s.readDB.QueryRowContext(ctx,
		"SELECT seal.envelope FROM session JOIN seal ON seal.session = session.n WHERE session.id = ?", string(id)).Scan(&envelope)
	if errors.Is(err, sql.ErrNoRows) {
		if _, err := s.Get(ctx, id); err != nil {
			return audit.Seal{}, err
		}
		return audit.Seal{}, kind.Errorf(kind.NotFound, "session %s has no seal: it has not ended", id).WithField("session")
	}
	if err != nil {
		return audit.Seal{}, fmt.Errorf("read the seal of session %s: %w", id, classify(err))
	}
	var seal audit.Seal
	if err := json.Unmarshal(envelope, &seal); err != nil {
		return audit.Seal{}, fmt.Errorf("stored seal of session %s: %w", id, err)
	}
	return seal, nil
}
