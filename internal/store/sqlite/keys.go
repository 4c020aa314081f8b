package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"bivy/internal/auth"
	"bivy/internal/kind"
)

var _ auth.Store = (*Store)(nil)

// PutKey implements auth.Store.
func (s *Store) PutKey(ctx context.Context, k auth.Key) error {
	return s.write(ctx, func(b *batch) error {
		err := b.exec(b.stmt.keyInsert, k.ID, k.Hash[:], string(k.Role), k.Label, micros(k.CreatedAt), k.CreatedBy, micros(k.RevokedAt), micros(k.FirstUsedAt))
		if taken(err) {
			return kind.Errorf(kind.Conflict, "API key %s exists already", k.ID)
		}
		return err
	})
}

// Keys implements auth.Store.
func (s *Store) Keys(ctx context.Context) ([]auth.Key, error) {
	rows, err := s.readDB.QueryContext(ctx, "SELECT id, hash, role, label, created_at, created_by, revoked_at, first_used_at FROM api_key ORDER BY created_at, id")
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", classify(err))
	}
	defer rows.Close()
	var keys []auth.Key
	for rows.Next() {
		var k auth.Key
		var hash []byte
		var created, revoked, used int64
		if err := rows.Scan(&k.ID, &hash, &k.Role, &k.Label, &created, &k.CreatedBy, &revoked, &used); err != nil {
			return nil, fmt.Errorf("list API keys: %w", classify(err))
		}
		if copy(k.Hash[:], hash) != len(k.Hash) || len(hash) != len(k.Hash) {
			return nil, fmt.Errorf("stored API key %s: its hash has %d bytes", k.ID, len(hash))
		}
		k.CreatedAt, k.RevokedAt, k.FirstUsedAt = fromMicros(created), fromMicros(revoked), fromMicros(used)
		keys = append(keys, k)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list API keys: %w", classify(err))
	}
	return keys, nil
}

// RevokeKey implements auth.Store.
func (s *Store) RevokeKey(ctx context.Context, id string, at time.Time) error {
	_, err := s.stampKey(ctx, id, func(b *batch) (sql.Result, error) {
		return b.stmt.keyRevoke.ExecContext(context.Background(), micros(at), id)
	})
	return err
}

// MarkKeyUsed implements auth.Store.
func (s *Store) MarkKeyUsed(ctx context.Context, id string, at time.Time) (first bool, err error) {
	return s.stampKey(ctx, id, func(b *batch) (sql.Result, error) {
		return b.stmt.keyUse.ExecContext(context.Background(), micros(at), id)
	})
}

// stampKey runs a statement that sets a time of a key unless it is set
// already, and reports whether it was not.
func (s *Store) stampKey(ctx context.Context, id string, stamp func(*batch) (sql.Result, error)) (first bool, err error) {
	err = s.write(ctx, func(b *batch) error {
		first = false
		res, err := stamp(b)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil || n > 0 {
			first = n > 0
			return err
		}
		var one int
		err = b.conn.QueryRowContext(context.Background(), "SELECT 1 FROM api_key WHERE id = ?", id).Scan(&one)
		if errors.Is(err, sql.ErrNoRows) {
			return kind.Errorf(kind.NotFound, "API key %.64q does not exist", id).WithField("key")
		}
		return err // nil: it was set before
	})
	return first && err == nil, err
}

func fromMicros(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.UnixMicro(n).UTC()
}
