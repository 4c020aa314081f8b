package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
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

// sessionColumns selects what decode needs from session s.
const sessionColumns = "s.spec, s.body, ifnull((SELECT boot FROM sandbox x WHERE x.session = s.n AND x.generation = s.generation), '')"

// Get returns a session; NotFound when there is none of that id.
func (s *Store) Get(ctx context.Context, id session.ID) (session.Session, error) {
	var spec, rest []byte
	var boot string
	err := s.readDB.QueryRowContext(ctx, "SELECT "+sessionColumns+" FROM session s WHERE s.id = ?", string(id)).Scan(&spec, &rest, &boot)
	if errors.Is(err, sql.ErrNoRows) {
		return session.Session{}, errUnknown(id)
	}
	if err != nil {
		return session.Session{}, fmt.Errorf("read session %s: %w", id, classify(err))
	}
	return decode(spec, rest, boot)
}

// List returns sessions newest first, from after the cursor, at most limit (1
// to MaxPage), and the next cursor, empty when the list is complete. The cursor
// is the id of the last session of the page before.
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
	query := "SELECT " + sessionColumns + " FROM session s WHERE " + strings.Join(where, " AND ") + " ORDER BY n DESC LIMIT ?"
	page, err := s.sessions(ctx, query, append(args, limit+1)...)
	if err != nil {
		return nil, "", fmt.Errorf("list sessions: %w", classify(err))
	}
	if len(page) <= limit {
		return page, "", nil
	}
	return page[:limit], string(page[limit-1].ID), nil
}

// Live returns the sessions of a node that have not ended, newest first.
func (s *Store) Live(ctx context.Context, node session.NodeID) ([]session.Session, error) {
	live, err := s.sessions(ctx, "SELECT "+sessionColumns+" FROM session s WHERE s.node = ? AND s.state <> 'ended' ORDER BY s.n DESC", string(node))
	if err != nil {
		return nil, fmt.Errorf("list the live sessions of node %s: %w", node, classify(err))
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
		var boot string
		if err := rows.Scan(&spec, &rest, &boot); err != nil {
			return nil, err
		}
		one, err := decode(spec, rest, boot)
		if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	return found, rows.Err()
}

// Revision returns a number that differs whenever anything was written since
// the call before, also by another process. It says nothing across an Open.
func (s *Store) Revision(ctx context.Context) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, kind.Wrap(kind.Unavailable, err)
	}
	s.watch.Lock()
	defer s.watch.Unlock()
	// The number counts the writes of all connections but the one that asks,
	// which is kept for this purpose. The call is short: it is not cancelled.
	var n int64
	if err := s.watchConn.QueryRowContext(context.Background(), "PRAGMA data_version").Scan(&n); err != nil {
		return 0, fmt.Errorf("look for changes: %w", classify(err))
	}
	return n, nil
}

// Events calls fn for each event of a session's record with a number above
// after, in order, until fn fails or limit events (0: all) were given.
func (s *Store) Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error {
	n, err := s.sessionRow(ctx, id)
	if err != nil {
		return err
	}
	return s.each(ctx, n, after, limit, fn)
}

// sessionRow returns the row of the record of a session; NotFound when there is
// no such session.
func (s *Store) sessionRow(ctx context.Context, id session.ID) (int64, error) {
	n, err := s.recordRow(ctx, audit.SessionRecord(id))
	if kind.Is(err, kind.NotFound) {
		return 0, errUnknown(id)
	}
	return n, err
}

// recordRow returns the row of a record; NotFound when there is none.
func (s *Store) recordRow(ctx context.Context, id audit.RecordID) (int64, error) {
	var n int64
	err := s.readDB.QueryRowContext(ctx, "SELECT n FROM record WHERE id = ?", string(id)).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, kind.Errorf(kind.NotFound, "%s does not exist", id)
	}
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", id, classify(err))
	}
	return n, nil
}

// each calls fn for the events of record n, which it reads in pages.
func (s *Store) each(ctx context.Context, n int64, after uint64, limit int, fn func(audit.Stored) error) error {
	for given := 0; limit == 0 || given < limit; {
		want := eventPage
		if limit > 0 {
			want = min(want, limit-given)
		}
		page, err := s.events(ctx, n, after, want)
		if err != nil {
			return fmt.Errorf("read a record: %w", classify(err))
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
		"SELECT raw, lower(hex(hash)), salt, payload FROM event WHERE record = ? AND seq > ? ORDER BY seq LIMIT ?", n, int64(min(after, math.MaxInt64)), limit)
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

// SealOf returns the seal of a session that has ended; NotFound before.
func (s *Store) SealOf(ctx context.Context, id session.ID) (audit.Seal, error) {
	if _, err := s.sessionRow(ctx, id); err != nil {
		return audit.Seal{}, err
	}
	return s.sealOf(ctx, audit.SessionRecord(id))
}

// sealOf returns the seal of a record; NotFound when it is open.
func (s *Store) sealOf(ctx context.Context, id audit.RecordID) (audit.Seal, error) {
	seal, err := s.envelope(ctx, "SELECT seal.envelope FROM record r JOIN seal ON seal.record = r.n WHERE r.id = ?", string(id))
	if errors.Is(err, sql.ErrNoRows) {
		return audit.Seal{}, kind.Errorf(kind.NotFound, "%s has no seal: it is still open", id)
	}
	if err != nil {
		return audit.Seal{}, fmt.Errorf("read the seal of %s: %w", id, classify(err))
	}
	return seal, nil
}

// envelope reads one stored seal.
func (s *Store) envelope(ctx context.Context, query string, args ...any) (audit.Seal, error) {
	var text []byte
	if err := s.readDB.QueryRowContext(ctx, query, args...).Scan(&text); err != nil {
		return audit.Seal{}, err
	}
	var seal audit.Seal
	if err := json.Unmarshal(text, &seal); err != nil {
		return audit.Seal{}, fmt.Errorf("a stored seal: %w", err)
	}
	return seal, nil
}
