package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite" // the driver

	"bivy/internal/audit"
	"bivy/internal/dirlock"
	"bivy/internal/hostclock"
	"bivy/internal/kind"
)

const databaseFile = "bivy.db"

// Options are what Open may be told. The zero value is right outside of tests.
type Options struct {
	// Moment reads the clocks; nil: the host's.
	Moment func() audit.Moment
	// Log gets errors that no caller waits for; nil: they are dropped.
	Log *slog.Logger
}

// Store is an open data directory. It implements lifecycle.Store,
// journal.SystemStore and auth.Store and is safe for concurrent use.
type Store struct {
	dir     string
	log     *slog.Logger
	moment  func() audit.Moment
	schema  int // version of the database's schema
	lock    *dirlock.Lock
	writeDB *sql.DB
	readDB  *sql.DB
	writer  *writer

	watch     sync.Mutex // for watchConn
	watchConn *sql.Conn  // counts what other connections write, see Revision

	queue   chan *request
	closing chan struct{} // closed when Close begins
	stopped chan struct{} // closed when the writer has stopped
	once    sync.Once
	close   error

	commits  atomic.Uint64
	requests atomic.Uint64
}

// Stats counts what the writer did since Open.
type Stats struct {
	Requests uint64 // that were committed
	Commits  uint64 // transactions, each with one sync of the log
}

// Stats returns the counters.
func (s *Store) Stats() Stats {
	return Stats{Requests: s.requests.Load(), Commits: s.commits.Load()}
}

// Open takes the data directory for this process, making it where it is
// missing, and brings its schema up to date. It fails with Conflict when
// another process has the directory, when a newer bivy wrote it, and when the
// database in it is another program's.
func Open(ctx context.Context, dir string, o Options) (*Store, error) {
	return openStore(ctx, dir, o, true)
}

// openStore opens the data directory. Without exclusive it takes no lock, so
// that several stores can write to one directory.
func openStore(ctx context.Context, dir string, o Options, exclusive bool) (_ *Store, err error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Moment == nil {
		if o.Moment, err = hostMoment(); err != nil {
			return nil, err
		}
	}
	steps, err := migrations()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	s := &Store{
		dir:     dir,
		log:     o.Log,
		moment:  o.Moment,
		schema:  len(steps),
		queue:   make(chan *request, maxBatch),
		closing: make(chan struct{}),
		stopped: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if exclusive {
		if s.lock, err = dirlock.Acquire(dir); err != nil {
			return nil, kind.Errorf(kind.Of(err), "the database is not available: %w", err).
				WithHint("stop that process, talk to it through its API, or choose another data directory")
		}
	}
	path := filepath.Join(dir, databaseFile)
	// Made here, because SQLite would give it, and the log beside it, the
	// mode that the umask leaves.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if s.writeDB, err = sql.Open("sqlite", dsn(path,
		"busy_timeout(5000)", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)",
		"cache_size(-4096)", "temp_store(MEMORY)", "trusted_schema(0)", "journal_size_limit(67108864)")); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	s.writeDB.SetMaxOpenConns(1)
	conn, err := s.writeDB.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, classify(err))
	}
	if err := migrate(ctx, conn, dir, steps); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if s.writer, err = newWriter(ctx, s, conn); err != nil {
		return nil, err
	}
	if s.readDB, err = sql.Open("sqlite", dsn(path,
		"busy_timeout(5000)", "query_only(1)", "cache_size(-1024)", "temp_store(MEMORY)", "trusted_schema(0)")); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), s.writer.close())
	}
	s.readDB.SetMaxOpenConns(5)
	s.readDB.SetMaxIdleConns(3)
	s.readDB.SetConnMaxIdleTime(time.Minute)
	if s.watchConn, err = s.readDB.Conn(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, classify(err)), s.writer.close())
	}
	go s.writer.run() // ends when closing is closed; Close waits for it
	return s, nil
}

// Close finishes the writes that were accepted, then releases the directory.
// Later calls return what the first one did.
func (s *Store) Close() error {
	s.once.Do(func() {
		close(s.closing)
		<-s.stopped
		s.close = errors.Join(s.writer.close(), s.release())
	})
	return s.close
}

func (s *Store) release() error {
	var errs []error
	// Readers first: the last connection to close writes the log back into
	// the database, and readers may not write.
	if s.watchConn != nil {
		s.watch.Lock()
		errs = append(errs, s.watchConn.Close())
		s.watch.Unlock()
	}
	if s.readDB != nil {
		errs = append(errs, s.readDB.Close())
	}
	if s.writeDB != nil {
		errs = append(errs, s.writeDB.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}

// Schema is the version of the schema that every open Store has.
func (s *Store) Schema() int { return s.schema }

// Check asks SQLite whether the database is whole.
func (s *Store) Check(ctx context.Context) error {
	for _, pragma := range []string{"quick_check", "foreign_key_check"} {
		found, err := s.pragma(ctx, pragma)
		if err != nil {
			return fmt.Errorf("%s: %w", pragma, classify(err))
		}
		if found != "" && found != "ok" {
			return kind.Errorf(kind.Internal, "the database is damaged: %s: %s", pragma, found).
				WithHint("restore %s from a backup; exported records can still be verified", databaseFile)
		}
	}
	return nil
}

// pragma returns the first column of what a check found, at most ten rows.
func (s *Store) pragma(ctx context.Context, name string) (string, error) {
	rows, err := s.readDB.QueryContext(ctx, "SELECT * FROM pragma_"+name+" LIMIT 10")
	if err != nil {
		return "", err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return "", err
	}
	var found []string
	for rows.Next() {
		row := make([]any, len(columns))
		row[0] = new(sql.NullString)
		for i := range row[1:] {
			row[i+1] = new(any)
		}
		if err := rows.Scan(row...); err != nil {
			return "", err
		}
		found = append(found, row[0].(*sql.NullString).String)
	}
	return strings.Join(found, "; "), rows.Err()
}

func dsn(path string, pragmas ...string) string {
	q := url.Values{"_txlock": {"immediate"}, "_pragma": pragmas}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}).String()
}

// hostMoment returns a function that reads the host's clocks.
func hostMoment() (func() audit.Moment, error) {
	id, err := hostclock.BootID()
	if err != nil {
		return nil, err
	}
	return func() audit.Moment {
		return audit.Moment{Now: time.Now(), Boot: id, Uptime: hostclock.Uptime()}
	}, nil
}
