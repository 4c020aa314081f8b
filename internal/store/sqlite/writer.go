package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"

	lib "modernc.org/sqlite/lib"

	"bivy/internal/audit"
	"bivy/internal/kind"
)

// maxBatch bounds how many requests share one transaction.
const maxBatch = 256

// request is one caller's write. The writer takes it up or a caller that gives
// up withdraws it: the first of the two to change state decides.
type request struct {
	do    func(*batch) error
	state atomic.Int32
	done  chan error
}

const (
	waiting int32 = iota
	takenUp
	withdrawn
)

// write has the writer run do and returns when its effect is durable, or with
// an error when there is none. A caller that gives up while its request waits
// withdraws it; once it is being written the answer is waited for, because
// without it the caller would not know whether the write happened.
func (s *Store) write(ctx context.Context, do func(*batch) error) error {
	r := &request{do: do, done: make(chan error, 1)}
	select {
	case <-s.closing:
		return errClosed()
	default:
	}
	select {
	case s.queue <- r:
	case <-s.closing:
		return errClosed()
	case <-ctx.Done():
		return kind.Wrap(kind.Unavailable, ctx.Err())
	}
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
		if r.state.CompareAndSwap(waiting, withdrawn) {
			return kind.Wrap(kind.Unavailable, ctx.Err())
		}
		return <-r.done
	case <-s.stopped:
		// It may have been answered before the writer stopped.
		select {
		case err := <-r.done:
			return err
		default:
			return errClosed()
		}
	}
}

func errClosed() error { return kind.Errorf(kind.Unavailable, "the store is closing") }

// writer owns the one connection that writes. Only its goroutine touches it.
type writer struct {
	store    *Store
	conn     *sql.Conn
	stmt     statements
	prepared []*sql.Stmt                // all of stmt, to be closed
	open     map[audit.RecordID]*record // as committed; records that are not sealed
	version  int64                      // of the database when open was last known to be right
	broken   error                      // why nothing can be written any more
}

type statements struct {
	begin, commit, rollback, savepoint, release, undo, version *sql.Stmt

	recordInsert, eventInsert, eventLast, eventScan, sealInsert *sql.Stmt
	sessionInsert, sessionUpdate, sessionSelect, labelInsert    *sql.Stmt
	sandboxPut, sandboxEnd                                      *sql.Stmt
	addendaInsert, addendaSelect, addendaSealInsert             *sql.Stmt
	segmentInsert, segmentUpdate, segmentLast                   *sql.Stmt
	leafInsert, treeSelect, treePut                             *sql.Stmt
	openRecords, headSelect, systemHead                         *sql.Stmt
	idempotencySelect, idempotencyPut, idempotencyExpire        *sql.Stmt
	keyInsert, keyRevoke, keyUse                                *sql.Stmt
}

func newWriter(ctx context.Context, s *Store, conn *sql.Conn) (*writer, error) {
	w := &writer{store: s, conn: conn, open: make(map[audit.RecordID]*record)}
	for into, text := range map[**sql.Stmt]string{
		&w.stmt.begin:     "BEGIN IMMEDIATE",
		&w.stmt.commit:    "COMMIT",
		&w.stmt.rollback:  "ROLLBACK",
		&w.stmt.savepoint: "SAVEPOINT request",
		&w.stmt.release:   "RELEASE request",
		&w.stmt.undo:      "ROLLBACK TO request",
		&w.stmt.version:   "PRAGMA data_version",

		&w.stmt.recordInsert: "INSERT INTO record (id) VALUES (?)",
		&w.stmt.eventInsert:  "INSERT INTO event (record, seq, action, ref, concludes, raw, hash, salt, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
		&w.stmt.eventLast:    "SELECT seq, lower(hex(hash)) FROM event WHERE record = ? ORDER BY seq DESC LIMIT 1",
		&w.stmt.eventScan:    "SELECT seq, action, ref, concludes FROM event WHERE record = ? ORDER BY seq",
		&w.stmt.sealInsert:   "INSERT INTO seal (record, envelope) VALUES (?, ?)",

		&w.stmt.sessionInsert: "INSERT INTO session (id, record, version, state, owner, node, generation, created_at, ended_at, spec, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
		&w.stmt.sessionUpdate: "UPDATE session SET version = ?, state = ?, node = ?, generation = ?, ended_at = ?, body = ? WHERE n = ?",
		&w.stmt.sessionSelect: "SELECT n, record, spec, body FROM session WHERE id = ?",
		&w.stmt.labelInsert:   "INSERT INTO label (key, value, session) VALUES (?, ?, ?)",

		&w.stmt.sandboxPut: `INSERT INTO sandbox (session, generation, node, boot, started_at, ended_at) VALUES (?, ?, ?, ?, ?, 0)
			ON CONFLICT (session, generation) DO UPDATE SET node = excluded.node, boot = excluded.boot
			WHERE node <> excluded.node OR boot <> excluded.boot`,
		&w.stmt.sandboxEnd: "UPDATE sandbox SET ended_at = ? WHERE session = ? AND generation = ? AND ended_at = 0",

		&w.stmt.addendaInsert:     "INSERT INTO addenda (session, record) VALUES (?, ?)",
		&w.stmt.addendaSelect:     "SELECT record FROM addenda WHERE session = ?",
		&w.stmt.addendaSealInsert: "INSERT INTO addenda_seal (record, seq, envelope) VALUES (?, ?, ?)",

		&w.stmt.segmentInsert: "INSERT INTO segment (node, number, record, events, bytes, opened_at, sealed_at) VALUES (?, ?, ?, 0, 0, ?, 0)",
		&w.stmt.segmentUpdate: "UPDATE segment SET events = ?, bytes = ?, sealed_at = ? WHERE node = ? AND number = ?",
		&w.stmt.segmentLast:   "SELECT number, record, bytes, sealed_at FROM segment WHERE node = ? ORDER BY number DESC LIMIT 1",

		&w.stmt.leafInsert: "INSERT INTO leaf (node, position, record, seq) VALUES (?, ?, ?, ?)",
		&w.stmt.treeSelect: treeQuery,
		&w.stmt.treePut:    "INSERT INTO tree (node, subtrees) VALUES (?, ?) ON CONFLICT (node) DO UPDATE SET subtrees = excluded.subtrees",

		&w.stmt.openRecords: "SELECT id FROM session WHERE node = ? AND state <> 'ended'",
		&w.stmt.headSelect:  "SELECT e.seq, lower(hex(e.hash)) FROM record r JOIN event e ON e.record = r.n WHERE r.id = ? ORDER BY e.seq DESC LIMIT 1",
		&w.stmt.systemHead:  systemHeadQuery,

		&w.stmt.idempotencySelect: "SELECT i.digest, " + sessionColumns + " FROM idempotency i JOIN session s ON s.n = i.session WHERE i.scope = ? AND i.key = ?",
		&w.stmt.idempotencyPut:    "INSERT OR REPLACE INTO idempotency (scope, key, digest, session, expires_at) VALUES (?, ?, ?, ?, ?)",
		&w.stmt.idempotencyExpire: "DELETE FROM idempotency WHERE expires_at <= ?",

		&w.stmt.keyInsert: "INSERT INTO api_key (id, hash, role, label, created_at, created_by, revoked_at, first_used_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		&w.stmt.keyRevoke: "UPDATE api_key SET revoked_at = ? WHERE id = ? AND revoked_at = 0",
		&w.stmt.keyUse:    "UPDATE api_key SET first_used_at = ? WHERE id = ? AND first_used_at = 0",
	} {
		var err error
		if *into, err = conn.PrepareContext(ctx, text); err != nil {
			return nil, errors.Join(fmt.Errorf("prepare %q: %w", text, classify(err)), w.close())
		}
		w.prepared = append(w.prepared, *into)
	}
	return w, nil
}

// close gives the connection back. SQLite keeps a database open, and does not
// move its log into it, as long as one statement is left.
func (w *writer) close() error {
	var errs []error
	for _, stmt := range w.prepared {
		errs = append(errs, stmt.Close())
	}
	return errors.Join(append(errs, w.conn.Close())...)
}

// run serves requests until the store closes and the queue is empty.
func (w *writer) run() {
	defer close(w.store.stopped)
	requests := make([]*request, 0, maxBatch)
	for {
		select {
		case r := <-w.store.queue:
			requests = append(requests[:0], r)
		case <-w.store.closing:
			select {
			case r := <-w.store.queue:
				requests = append(requests[:0], r)
			default:
				return
			}
		}
	gather:
		for len(requests) < maxBatch {
			select {
			case r := <-w.store.queue:
				requests = append(requests, r)
			default:
				break gather
			}
		}
		w.serve(requests)
	}
}

// serve runs the requests in one transaction and answers each.
func (w *writer) serve(requests []*request) {
	accepted := requests[:0]
	for _, r := range requests {
		if r.state.CompareAndSwap(waiting, takenUp) {
			accepted = append(accepted, r)
		}
	}
	if len(accepted) == 0 {
		return
	}
	results := make([]error, len(accepted))
	if err := w.transact(accepted, results); err != nil {
		for i := range results {
			if results[i] == nil {
				results[i] = err
			}
		}
	}
	for i, r := range accepted {
		r.done <- results[i]
	}
}

// transact fills results with the errors of single requests and returns the
// error that undid all of them, if there was one.
func (w *writer) transact(requests []*request, results []error) error {
	if w.broken != nil {
		return w.broken
	}
	if err := w.exec(w.stmt.begin); err != nil {
		return classify(err)
	}
	if err := w.refresh(); err != nil {
		return errors.Join(classify(err), w.abandon())
	}
	b := &batch{writer: w, moment: w.store.moment(), staged: make(map[audit.RecordID]*record)}
	succeeded := 0
	for i, r := range requests {
		err := w.attempt(b, r, len(requests) > 1)
		var broken *transactionError
		if err != nil && (endsTransaction(err) || errors.As(err, &broken)) {
			return errors.Join(classify(err), w.abandon())
		}
		if results[i] = classify(err); err == nil {
			succeeded++
		}
	}
	if succeeded == 0 {
		return w.abandon()
	}
	if err := w.exec(w.stmt.commit); err != nil {
		if code(err)&0xff == lib.SQLITE_IOERR {
			// The log may or may not be on the disk, and after a sync that
			// failed no later one can be believed.
			w.broken = kind.Errorf(kind.Unavailable, "the record cannot be written since the disk failed: %w", err).
				WithHint("repair the disk, then restart bivy")
			w.store.log.Error("the store is read-only from now on", "error", err)
		}
		return errors.Join(classify(err), w.abandon())
	}
	for id, rec := range b.staged {
		if rec.sealed {
			delete(w.open, id)
		} else {
			w.open[id] = rec
		}
	}
	w.store.commits.Add(1)
	w.store.requests.Add(uint64(succeeded))
	return nil
}

// refresh forgets the remembered records when another connection has written
// since the transaction before. It is called inside a transaction, during which
// no other connection can write.
func (w *writer) refresh() error {
	var version int64
	if err := w.stmt.version.QueryRowContext(context.Background()).Scan(&version); err != nil {
		return err
	}
	if version != w.version {
		clear(w.open)
		w.version = version
	}
	return nil
}

// attempt runs one request. With guard a failure undoes that request alone;
// without, the caller undoes the transaction, in which nothing else is.
func (w *writer) attempt(b *batch, r *request, guard bool) error {
	if guard {
		if err := w.exec(w.stmt.savepoint); err != nil {
			return &transactionError{err}
		}
	}
	b.mine = make(map[audit.RecordID]*record, 1)
	if err := r.do(b); err != nil {
		if guard && !endsTransaction(err) {
			if undo := errors.Join(w.exec(w.stmt.undo), w.exec(w.stmt.release)); undo != nil {
				return &transactionError{undo}
			}
		}
		return err
	}
	if guard {
		if err := w.exec(w.stmt.release); err != nil {
			return &transactionError{err}
		}
	}
	maps.Copy(b.staged, b.mine)
	return nil
}

// transactionError is a failure after which the transaction may hold part of
// a request, so that all of it must be undone.
type transactionError struct{ err error }

func (e *transactionError) Error() string { return "keep one write from another: " + e.err.Error() }
func (e *transactionError) Unwrap() error { return e.err }

// abandon rolls back, whether or not SQLite did so itself already.
func (w *writer) abandon() error {
	err := w.exec(w.stmt.rollback)
	if code(err) == lib.SQLITE_ERROR { // no transaction is active
		return nil
	}
	return classify(err)
}

func (w *writer) exec(s *sql.Stmt, args ...any) error {
	_, err := s.ExecContext(context.Background(), args...)
	return err
}

// insert runs s and returns the row that it made.
func (w *writer) insert(s *sql.Stmt, args ...any) (int64, error) {
	res, err := s.ExecContext(context.Background(), args...)
	if err != nil {
		return 0, err
	}
	return res.LastInsertId()
}

// batch is the transaction that requests are written in.
type batch struct {
	*writer
	moment audit.Moment
	staged map[audit.RecordID]*record // by requests of this transaction that succeeded
	mine   map[audit.RecordID]*record // by the request that runs
}
