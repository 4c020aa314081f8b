package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// fill sets every field of v to something that is not its zero value.
func fill(v reflect.Value, seed *int) {
	*seed++
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint("text ", *seed))
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*seed))
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*seed))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), seed)
		fill(v.Index(1), seed)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(k, seed)
		fill(e, seed)
		v.SetMapIndex(k, e)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.UnixMicro(int64(*seed) * 1_000_001).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), seed)
		}
	default:
		panic("a field of kind " + v.Kind().String() + ": teach fill about it")
	}
}

func TestNoFieldOfASessionIsForgotten(t *testing.T) {
	var want session.Session
	seed := 0
	fill(reflect.ValueOf(&want).Elem(), &seed)
	spec, rest, err := encode(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decode(spec, rest, want.Boot)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("encode and decode lose (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want, normal(want)); d != "" {
		t.Errorf("normal changes (-want +got):\n%s", d)
	}
}

func TestOneProcessPerDirectory(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	_, err := Open(t.Context(), dir, Options{})
	if !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) || kind.Hint(err) == "" {
		t.Errorf("second open: got %v, want a conflict that names process %d and a hint", err, os.Getpid())
	}
	storetest.Created(t, s) // the refused one did no harm
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
}

func TestDirectoriesThatAreRefused(t *testing.T) {
	raw := func(t *testing.T, dir string, statements ...string) {
		t.Helper()
		db, err := sql.Open("sqlite", dsn(filepath.Join(dir, databaseFile)))
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		for _, stmt := range statements {
			if _, err := db.ExecContext(t.Context(), stmt); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name string
		make func(t *testing.T, dir string)
		kind kind.Kind
		say  string
	}{
		{"newer", func(t *testing.T, dir string) {
			if err := open(t, dir).Close(); err != nil {
				t.Fatal(err)
			}
			raw(t, dir, "PRAGMA user_version = 999")
		}, kind.Conflict, "schema 999; this bivy knows schemas 1 to 1"},
		{"negative", func(t *testing.T, dir string) {
			if err := open(t, dir).Close(); err != nil {
				t.Fatal(err)
			}
			raw(t, dir, "PRAGMA user_version = -1")
		}, kind.Conflict, "schema -1, which no bivy writes"},
		{"another program's", func(t *testing.T, dir string) { raw(t, dir, "CREATE TABLE notes (text)") }, kind.Conflict, "another program"},
		{"no database", func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, databaseFile), bytes.Repeat([]byte("text\n"), 1000), 0o600); err != nil {
				t.Fatal(err)
			}
		}, kind.Internal, "damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			c.make(t, dir)
			before, err := os.ReadFile(filepath.Join(dir, databaseFile))
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // the refusal releases the lock
				_, err = Open(t.Context(), dir, Options{})
				if !kind.Is(err, c.kind) || !strings.Contains(err.Error(), c.say) || kind.Hint(err) == "" {
					t.Errorf("got %v (%s, hint %q), want %s that says %q", err, kind.Of(err), kind.Hint(err), c.kind, c.say)
				}
			}
			if c.name == "another program's" {
				return // asking for WAL is all that happens to it
			}
			if after, err := os.ReadFile(filepath.Join(dir, databaseFile)); err != nil || !bytes.Equal(before, after) {
				t.Errorf("the refused file was changed (%v)", err)
			}
		})
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), file, Options{}); err == nil {
		t.Error("a file was opened as a directory")
	}
}

func TestOddDirectoryNames(t *testing.T) {
	for _, name := range []string{"with space", "per%20cent", "que?stion=1", "ha#sh", "plus+", "uml\u00e4ut"} {
		dir := filepath.Join(t.TempDir(), name)
		s := open(t, dir)
		at := storetest.Created(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, databaseFile)); err != nil || info.Size() == 0 {
			t.Errorf("%q: no database where it should be: %v", name, err)
		}
		if _, err := open(t, dir).Get(t.Context(), at.ID); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestFilesArePrivate(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	dir := filepath.Join(t.TempDir(), "data")
	s := open(t, dir)
	storetest.Created(t, s)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, e.Name())
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", e.Name(), info.Mode())
		}
	}
	if len(names) != 4 {
		t.Errorf("files %v, want the database, its log and index, and the lock", names)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v %v", info.Mode(), err)
	}
}

func TestMigrate(t *testing.T) {
	ctx := t.Context()
	db, err := sql.Open("sqlite", dsn(filepath.Join(t.TempDir(), "m.db")))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	version := func() (v int) {
		if err := conn.QueryRowContext(ctx, "PRAGMA user_version").Scan(&v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	steps := []migration{
		{1, "one", "CREATE TABLE a (x); INSERT INTO a VALUES (1);"},
		{2, "two", "ALTER TABLE a ADD COLUMN y; CREATE TABLE b (x);"},
		{3, "bad", "CREATE TABLE c (x); INSERT INTO nowhere VALUES (1);"},
	}
	if err := migrate(ctx, conn, "d", steps[:1]); err != nil || version() != 1 {
		t.Fatalf("to 1: version %d, %v", version(), err)
	}
	if err := migrate(ctx, conn, "d", steps); err == nil || !strings.Contains(err.Error(), "schema 3 (bad)") {
		t.Errorf("got %v, want an error that names the step", err)
	}
	var left int
	if err := conn.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema WHERE name = 'c'").Scan(&left); err != nil || left != 0 {
		t.Errorf("a step that failed left %d tables, %v", left, err)
	}
	if version() != 2 {
		t.Errorf("version %d, want 2: what worked stays", version())
	}
	if err := migrate(ctx, conn, "d", steps[:2]); err != nil || version() != 2 {
		t.Errorf("again: version %d, %v", version(), err)
	}
	if err := migrate(ctx, conn, "d", steps[:1]); !kind.Is(err, kind.Conflict) {
		t.Errorf("back: got %v", err)
	}
}

// hold keeps the writer busy inside a transaction until release is called.
func hold(t *testing.T, s *Store) (release func()) {
	t.Helper()
	entered, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- s.write(context.Background(), func(b *batch) error {
			close(entered)
			<-leave
			return nil
		})
	}()
	<-entered
	return sync.OnceFunc(func() {
		close(leave)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// queued waits until n requests are in the queue.
func queued(t *testing.T, s *Store, n int) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for len(s.queue) < n {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests wait, want %d", len(s.queue), n)
		}
		runtime.Gosched()
	}
}

func TestConcurrentAppendsShareASync(t *testing.T) {
	s := open(t, t.TempDir())
	at := storetest.Created(t, s)
	release := hold(t, s)
	const n = 40
	errs := make(chan error, n)
	for range n {
		go func() { errs <- storetest.Append(context.Background(), s, at, storetest.Entry(audit.StepDone)) }()
	}
	queued(t, s, n)
	before := s.Stats()
	release()
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	after := s.Stats()
	if after.Commits-before.Commits != 2 || after.Requests-before.Requests != n+1 {
		t.Errorf("%d commits for %d requests, want 2 for %d", after.Commits-before.Commits, after.Requests-before.Requests, n+1)
	}
	if r := storetest.Verify(t, s, at.ID); r.Events != n+1 {
		t.Errorf("%d events", r.Events)
	}
}

func TestWaitingRequestIsWithdrawn(t *testing.T) {
	s := open(t, t.TempDir())
	at := storetest.Created(t, s)
	release := hold(t, s)
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 1)
	go func() { errs <- storetest.Append(ctx, s, at, storetest.Entry(audit.StepDone)) }()
	queued(t, s, 1)
	cancel()
	if err := <-errs; !kind.Is(err, kind.Unavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	release()
	if err := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepFailed)); err != nil {
		t.Fatal(err)
	}
	if r := storetest.Verify(t, s, at.ID); r.Events != 2 || r.Counts[audit.StepDone] != 0 {
		t.Errorf("the withdrawn event was written: %v", r.Counts)
	}
}

func TestClose(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := storetest.Created(t, s)
	release := hold(t, s)
	accepted := make(chan error, 1)
	go func() { accepted <- storetest.Append(context.Background(), s, at, storetest.Entry(audit.StepDone)) }()
	queued(t, s, 1)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	<-s.closing
	release()
	if err := errors.Join(<-accepted, <-closed); err != nil {
		t.Errorf("accepted before Close: %v", err)
	}
	if err := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepDone)); !kind.Is(err, kind.Unavailable) {
		t.Errorf("after Close: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	held, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range held {
		if path, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(path, dir) {
			t.Errorf("%s is still open after Close", path)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, databaseFile+"-wal")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the log was not folded into the database: %v", err)
	}
	if r := storetest.Verify(t, open(t, dir), at.ID); r.Events != 2 {
		t.Errorf("%d events after reopening, want 2", r.Events)
	}
}

// TestFullDisk: a write for which there is no room is refused as Exhausted and leaves
// nothing, and when there is room again the store goes on.
func TestFullDisk(t *testing.T) {
	s := open(t, t.TempDir())
	at := storetest.Created(t, s)
	limit := func(pages string) {
		t.Helper()
		var got int
		if err := s.write(t.Context(), func(b *batch) error {
			return b.conn.QueryRowContext(context.Background(), "PRAGMA max_page_count = "+pages).Scan(&got)
		}); err != nil {
			t.Fatal(err)
		}
	}
	limit("1") // that is: no more than there are
	fillUntilExhausted(t, s, at)
	before := storetest.Verify(t, s, at.ID).Events
	n := storetest.New()
	if _, _, err := s.Create(t.Context(), n, session.IdempotencyKey{}, big()); !kind.Is(err, kind.Exhausted) {
		t.Errorf("create: %v", err)
	}
	if _, err := s.Get(t.Context(), n.ID); !kind.Is(err, kind.NotFound) {
		t.Errorf("the session that was refused: %v", err)
	}
	moved := at
	moved.State = session.Running
	e := big()
	e.Action = audit.SessionRunning
	if _, err := storetest.Transition(t.Context(), s, moved, e); !kind.Is(err, kind.Exhausted) {
		t.Errorf("transition: %v", err)
	}
	if got, err := s.Get(t.Context(), at.ID); err != nil || cmp.Diff(at, got) != "" {
		t.Errorf("the session changed: %v\n%s", err, cmp.Diff(at, got))
	}
	if r := storetest.Verify(t, s, at.ID); r.Events != before {
		t.Errorf("%d events, want %d", r.Events, before)
	}
	limit("1000000")
	_, key := storetest.Sealed(t, s, storetest.Moved(t, s, at, session.Running))
	storetest.Verify(t, s, at.ID, key)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestFullDiskForReal is TestFullDisk on a file system that is full.
func TestFullDiskForReal(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("mount a small tmpfs: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	}()
	s, err := Open(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	at := storetest.Created(t, s)
	fillUntilExhausted(t, s, at)
	before := storetest.Verify(t, s, at.ID).Events
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=32m"); err != nil {
		t.Fatal(err)
	}
	_, key := storetest.Sealed(t, s, at)
	if r := storetest.Verify(t, s, at.ID, key); r.Events != before+2 {
		t.Errorf("%d events, want %d", r.Events, before+2)
	}
	if err := errors.Join(s.Check(t.Context()), s.Close()); err != nil {
		t.Error(err)
	}
}

func big() audit.Entry {
	e := storetest.Entry(audit.SessionCreated)
	e.Payload = strings.Repeat("x", 15<<10)
	return e
}

func fillUntilExhausted(t *testing.T, s *Store, at session.Session) {
	t.Helper()
	e := big()
	e.Action = audit.StepDone
	for i := range uint64(10000) {
		err := storetest.Append(t.Context(), s, at, e)
		if err == nil {
			continue
		}
		if !kind.Is(err, kind.Exhausted) || kind.Hint(err) == "" {
			t.Fatalf("a full disk: got %v (%s)", err, kind.Of(err))
		}
		if r := storetest.Verify(t, s, at.ID); r.Events != i+1 {
			t.Fatalf("%d events, want %d that were acknowledged", r.Events, i+1)
		}
		return
	}
	t.Fatal("the disk is never full")
}

// TestDatabaseRefuses: what the code promises holds against SQL as well.
func TestDatabaseRefuses(t *testing.T) {
	s := open(t, t.TempDir())
	live := storetest.Created(t, s)
	ended, key := storetest.Sealed(t, s, storetest.Created(t, s))
	number := func(id session.ID) string { return fmt.Sprintf("(SELECT record FROM session WHERE id = '%s')", id) }
	next := live
	next.State, next.Generation, next.Boot = session.Running, 1, "boot"
	if _, _, err := s.Transition(t.Context(), live.Fence(), next, storetest.Entry(audit.SessionRunning)); err != nil {
		t.Fatal(err)
	}
	signer := audit.GenerateSigner()
	storetest.AddTo(t, s, ended, signer, storetest.Entry(audit.StepDone))
	for range 2 {
		if _, _, err := s.AppendSystem(t.Context(), storetest.Node, storetest.Entry("server.started")); err != nil {
			t.Fatal(err)
		}
		if err := s.SealSegment(t.Context(), storetest.Node, storetest.SignSegment(signer), storetest.Entry(audit.SegmentClosed)); err != nil {
			t.Fatal(err)
		}
	}
	for _, stmt := range []string{
		"DELETE FROM event",
		"UPDATE event SET raw = raw || ' '",
		"UPDATE event SET seq = seq + 100",
		"UPDATE event SET payload = 'other'",
		"UPDATE event SET action = 'x'",
		"UPDATE event SET concludes = 1",
		"INSERT INTO event (record, seq, action, ref, concludes, raw, hash) VALUES ((SELECT record FROM segment WHERE number = 1), 99, 'a', '', 0, '', x'')",
		"UPDATE record SET id = id || 'x'",
		"DELETE FROM record",
		"UPDATE addenda_seal SET envelope = '{}'",
		"DELETE FROM addenda_seal",
		"DELETE FROM addenda",
		"UPDATE addenda SET session = 1",
		"INSERT INTO addenda (session, record) VALUES ((SELECT n FROM session WHERE id = '" + string(live.ID) + "'), " + number(live.ID) + ")",
		"DELETE FROM segment",
		"UPDATE segment SET sealed_at = 0",
		"INSERT INTO segment (node, number, record, events, bytes, opened_at, sealed_at) VALUES ('node-1', 5, " + number(live.ID) + ", 0, 0, 0, 0)",
		"UPDATE leaf SET seq = seq + 1",
		"DELETE FROM leaf",
		"INSERT INTO leaf (node, position, record, seq) VALUES ('node-1', 9, " + number(live.ID) + ", 1)",
		"UPDATE session SET generation = -1",
		"UPDATE session SET id = 'x' WHERE id = '" + string(live.ID) + "'",
		"DELETE FROM sandbox",
		"INSERT INTO event (record, seq, action, ref, concludes, raw, hash) VALUES (" + number(ended.ID) + ", 99, 'a', '', 0, '', x'')",
		"INSERT INTO event (record, seq, action, ref, concludes, raw, hash) VALUES (" + number(live.ID) + ", 1, 'a', '', 0, '', x'')",
		"INSERT INTO event (record, seq, action, ref, concludes, raw, hash) VALUES (12345, 1, 'a', '', 0, '', x'')",
		"UPDATE seal SET envelope = '{}'",
		"DELETE FROM seal",
		"UPDATE session SET state = 'running' WHERE id = '" + string(ended.ID) + "'",
		"UPDATE session SET state = 'ended' WHERE id = '" + string(live.ID) + "'",
		"DELETE FROM session",
	} {
		if err := s.write(t.Context(), func(b *batch) error {
			_, err := b.conn.ExecContext(context.Background(), stmt)
			return err
		}); err == nil {
			t.Errorf("the database let through: %s", stmt)
		}
	}
	storetest.Verify(t, s, live.ID)
	storetest.Verify(t, s, ended.ID, key, signer.Public())

	// Erasing payloads is allowed, and verifies where an event announces it.
	if err := s.write(t.Context(), func(b *batch) error {
		_, err := b.conn.ExecContext(context.Background(), "UPDATE event SET salt = NULL, payload = NULL WHERE record = "+number(ended.ID))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	check := func() (audit.Report, error) {
		return audit.Verify(bytes.NewReader(storetest.Export(t, s, ended.ID)), []audit.PublicKey{key, signer.Public()}, audit.VerifyOptions{AllowErased: true})
	}
	if _, err := check(); !kind.Is(err, kind.Invalid) {
		t.Errorf("payloads that are missing without a word: %v", err)
	}
	announce := storetest.Entry(audit.PayloadErased)
	announce.Object = audit.ErasedEvents(1, 3)
	storetest.AddTo(t, s, ended, signer, announce)
	if r, err := check(); err != nil || r.Erased != r.Events || r.Events != 3 {
		t.Errorf("%d of %d payloads erased, %v", r.Erased, r.Events, err)
	}
}

// TestSpecOfAnotherBuild: a stored spec with a field that this build does not
// write is neither changed nor in the way.
func TestSpecOfAnotherBuild(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := storetest.Created(t, s)
	stored := func() (spec string) {
		t.Helper()
		if err := s.readDB.QueryRowContext(t.Context(), "SELECT spec FROM session WHERE id = ?", string(at.ID)).Scan(&spec); err != nil {
			t.Fatal(err)
		}
		return spec
	}
	if err := s.write(t.Context(), func(b *batch) error {
		_, err := b.conn.ExecContext(context.Background(),
			"UPDATE session SET spec = json_set(spec, '$.egress', json('{\"allow\":[\"example.org\"]}')), body = json_set(body, '$.spec_digest', 'sha256:of-another-build')")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil { // what the writer remembers is not what is tested
		t.Fatal(err)
	}
	s = open(t, dir)
	before := stored()
	at, err := s.Get(t.Context(), at.ID)
	if err != nil || at.SpecDigest != "sha256:of-another-build" || !strings.Contains(before, "egress") {
		t.Fatalf("digest %s, spec %s, %v", at.SpecDigest, before, err)
	}
	other := at
	other.Spec.Hostname = "other"
	if _, err := storetest.Transition(t.Context(), s, other, storetest.Entry(audit.StepDone)); !kind.Is(err, kind.Invalid) {
		t.Errorf("another spec: %v", err)
	}
	ended, key := storetest.Sealed(t, s, storetest.Moved(t, s, at, session.Running))
	storetest.Verify(t, s, ended.ID, key)
	if after := stored(); after != before {
		t.Errorf("the stored spec was changed to %s", after)
	}
}

// TestSandboxRows: there is one row for each incarnation, with its times.
func TestSandboxRows(t *testing.T) {
	now := time.UnixMicro(1_000_000)
	s, err := Open(t.Context(), t.TempDir(), Options{Moment: func() audit.Moment { return audit.Moment{Now: now, Boot: "b"} }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	at := storetest.Created(t, s)
	for generation := uint32(1); generation <= 2; generation++ {
		for range 2 { // the second time nothing begins
			now = now.Add(time.Second)
			next := at
			next.State, next.Generation, next.Boot = session.Running, generation, fmt.Sprint("boot-", generation)
			if at, _, err = s.Transition(t.Context(), at.Fence(), next, storetest.Entry(audit.SessionRunning)); err != nil {
				t.Fatal(err)
			}
		}
	}
	now = now.Add(time.Second)
	ending := storetest.Moved(t, s, at, session.Ending)
	now = now.Add(time.Second)
	storetest.Sealed(t, s, ending)
	type row struct {
		generation, started, ended int64
		node, boot                 string
	}
	var got []row
	rows, err := s.readDB.QueryContext(t.Context(), "SELECT generation, started_at, ended_at, node, boot FROM sandbox ORDER BY generation")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var r row
		if err := rows.Scan(&r.generation, &r.started, &r.ended, &r.node, &r.boot); err != nil {
			t.Fatal(err)
		}
		got = append(got, r)
	}
	want := []row{{1, 2_000_000, 4_000_000, "node-1", "boot-1"}, {2, 4_000_000, 7_000_000, "node-1", "boot-2"}}
	if err := rows.Err(); err != nil || !slices.Equal(got, want) {
		t.Errorf("rows %v, %v; want %v", got, err, want)
	}
}

func TestIdempotencyKeysExpire(t *testing.T) {
	now := time.Now()
	s, err := Open(t.Context(), t.TempDir(), Options{Moment: func() audit.Moment { return audit.Moment{Now: now, Boot: "b"} }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	create := func(digest string) (session.ID, bool) {
		t.Helper()
		got, existed, err := s.Create(t.Context(), storetest.New(), session.IdempotencyKey{Scope: "s", Key: "k", Digest: digest}, storetest.Entry(audit.SessionCreated))
		if err != nil {
			t.Fatal(err)
		}
		return got.ID, existed
	}
	first, _ := create("1")
	now = now.Add(idempotencyLife - time.Second)
	if got, existed := create("1"); !existed || got != first {
		t.Error("the key was forgotten before its time")
	}
	now = now.Add(time.Second)
	if got, existed := create("2"); existed || got == first {
		t.Error("the key was not forgotten in time")
	}
	var rows int
	if err := s.readDB.QueryRowContext(t.Context(), "SELECT count(*) FROM idempotency").Scan(&rows); err != nil || rows != 1 {
		t.Errorf("%d keys are kept, %v", rows, err)
	}
}

func TestDamageIsFound(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := storetest.Created(t, s)
	for range 50 {
		if err := storetest.Append(t.Context(), s, at, func() audit.Entry { e := big(); e.Action = audit.StepDone; return e }()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, databaseFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Every page after the schema gets a broken header.
	for page := 8 * 4096; page < len(data); page += 4096 {
		copy(data[page:page+8], "\xff\xff\xff\xff\xff\xff\xff\xff")
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err = Open(t.Context(), dir, Options{})
	if err != nil {
		return // found at once
	}
	defer s.Close()
	if err := s.Check(t.Context()); !kind.Is(err, kind.Internal) || kind.Hint(err) == "" {
		t.Errorf("got %v, want the damage and what to do", err)
	}
}
