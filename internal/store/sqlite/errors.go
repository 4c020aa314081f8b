package sqlite

import (
	"context"
	"errors"
	"syscall"

	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"bivy/internal/kind"
)

// classify gives an error of the database or of its files the kind that it
// has outside. Errors that have a kind already pass through.
func classify(err error) error {
	var known *kind.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return full(err)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return kind.Wrap(kind.Unavailable, err)
	}
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() & 0xff {
	case lib.SQLITE_FULL:
		return full(err)
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED, lib.SQLITE_INTERRUPT:
		return kind.Wrap(kind.Unavailable, err)
	case lib.SQLITE_NOTADB, lib.SQLITE_CORRUPT:
		return kind.Errorf(kind.Internal, "the database is damaged or is not a SQLite database: %w", err).
			WithHint("restore %s from a backup; exported records can still be verified", databaseFile)
	}
	return err
}

func full(err error) error {
	return kind.Errorf(kind.Exhausted, "the disk of the data directory is full: %w", err).
		WithHint("free space there; nothing was written")
}

func code(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code()
	}
	return 0
}

// taken reports whether err says that a key exists already.
func taken(err error) bool {
	switch code(err) {
	case lib.SQLITE_CONSTRAINT_UNIQUE, lib.SQLITE_CONSTRAINT_PRIMARYKEY, lib.SQLITE_CONSTRAINT_ROWID:
		return true
	}
	return false
}

// endsTransaction reports whether after err SQLite may have rolled back the
// whole transaction, not just the statement.
func endsTransaction(err error) bool {
	switch code(err) & 0xff {
	case lib.SQLITE_FULL, lib.SQLITE_IOERR, lib.SQLITE_NOMEM, lib.SQLITE_BUSY, lib.SQLITE_INTERRUPT,
		lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB, lib.SQLITE_READONLY:
		return true
	}
	return false
}
