package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"bivy/internal/kind"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// applicationID marks a SQLite file as bivy's: "bivy" in ASCII.
const applicationID = 0x62697679

// migration brings the schema from version-1 to version. Migrations only go
// forward, and one that was released is never edited.
type migration struct {
	version int
	name    string
	sql     string
}

// migrations reads the embedded files NNNN_name.sql, which must be numbered
// from 1 without gaps.
func migrations() ([]migration, error) {
	names, err := fs.Glob(migrationFiles, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var all []migration
	for i, name := range names {
		number, rest, _ := strings.Cut(strings.TrimPrefix(name, "migrations/"), "_")
		v, err := strconv.Atoi(number)
		if err != nil || v != i+1 {
			return nil, fmt.Errorf("migration %s: want number %04d", name, i+1)
		}
		text, err := migrationFiles.ReadFile(name)
		if err != nil {
			return nil, err
		}
		all = append(all, migration{version: v, name: strings.TrimSuffix(rest, ".sql"), sql: string(text)})
	}
	return all, nil
}

// migrate brings the database to the newest of steps, each in a transaction
// of its own. It refuses a database that is newer or is not bivy's.
func migrate(ctx context.Context, conn *sql.Conn, dir string, steps []migration) error {
	var version, app, tables int
	for pragma, into := range map[string]*int{
		"PRAGMA user_version":                &version,
		"PRAGMA application_id":              &app,
		"SELECT count(*) FROM sqlite_schema": &tables,
	} {
		if err := conn.QueryRowContext(ctx, pragma).Scan(into); err != nil {
			return fmt.Errorf("read the schema version: %w", classify(err))
		}
	}
	newest := len(steps)
	if tables > 0 && app != applicationID {
		return kind.Errorf(kind.Conflict, "%s in %s is a SQLite database of another program", databaseFile, dir).
			WithHint("choose another data directory")
	}
	if version < 0 {
		return kind.Errorf(kind.Conflict, "data directory %s has schema %d, which no bivy writes; this bivy knows schemas 1 to %d", dir, version, newest).
			WithHint("restore %s from a backup", databaseFile)
	}
	if version > newest {
		return kind.Errorf(kind.Conflict, "data directory %s has schema %d; this bivy knows schemas 1 to %d", dir, version, newest).
			WithHint("use the newer bivy that wrote it, or another data directory")
	}
	for _, m := range steps[version:] {
		if err := apply(ctx, conn, m); err != nil {
			return fmt.Errorf("migrate %s to schema %d (%s): %w", dir, m.version, m.name, classify(err))
		}
	}
	return nil
}

func apply(ctx context.Context, conn *sql.Conn, m migration) error {
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, stmt := range []string{
		m.sql,
		fmt.Sprintf("PRAGMA user_version = %d", m.version),
		fmt.Sprintf("PRAGMA application_id = %d", applicationID),
	} {
		if _, err := tx.ExecContext(ctx, stmt); err != nil {
			return err
		}
	}
	return tx.Commit()
}
