package sqlite

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// The variables that make this test binary a child that is going to die.
const (
	crashDir  = "BIVY_TEST_CRASH_DIR"
	brokenDir = "BIVY_TEST_BROKEN_DISK_DIR"
)

// TestCrashChild is the child of TestSIGKILL: it writes until it is killed
// and reports what was acknowledged, one line each.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashDir)
	if dir == "" {
		t.Skip("only as a child of TestSIGKILL")
	}
	s, err := Open(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	signer, err := audit.LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for {
				if err := crashLife(s, signer); err != nil {
					fmt.Println("failed", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// crashLife is one session's life, each step reported after it was
// acknowledged.
func crashLife(s *Store, signer *audit.Signer) error {
	ctx := context.Background()
	at, _, err := s.Create(ctx, storetest.New(), session.IdempotencyKey{}, storetest.Entry(audit.SessionCreated))
	if err != nil {
		return err
	}
	fmt.Println("events", at.ID, 1)
	for i := range 12 {
		e := storetest.Entry(audit.StepDone)
		e.Payload = strings.Repeat("payload ", i*40)
		if err := storetest.Append(ctx, s, at, e); err != nil {
			return err
		}
		fmt.Println("events", at.ID, i+2)
	}
	at.State, at.Reason = session.Ending, session.Requested
	if at, err = storetest.Transition(ctx, s, at, storetest.Entry(audit.SessionEnding)); err != nil {
		return err
	}
	fmt.Println("ending", at.ID, 14)
	at.State = session.Ended
	if _, err = s.Seal(ctx, at.Fence(), at, storetest.SignWith(signer, at), storetest.Entry(audit.SessionEnded)); err != nil {
		return err
	}
	fmt.Println("sealed", at.ID, 15)
	return nil
}

// TestSIGKILL kills a writing process at arbitrary moments; what
// was acknowledged is there afterwards and every record verifies.
func TestSIGKILL(t *testing.T) {
	dir := t.TempDir()
	acknowledged := map[session.ID]int{}
	last := map[session.ID]string{}
	for _, lines := range []int{1, 40, 333, 150, 77} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCrashChild$", "-test.v")
		cmd.Env = append(os.Environ(), crashDir+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		seen := 0
		for scan := bufio.NewScanner(out); scan.Scan(); {
			var what string
			var id session.ID
			var n int
			if strings.HasPrefix(scan.Text(), "failed") {
				t.Error(scan.Text())
			}
			if _, err := fmt.Sscan(scan.Text(), &what, &id, &n); err != nil || len(id) != 20 {
				continue // of the test framework
			}
			acknowledged[id], last[id] = n, what
			if seen++; seen == lines {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil || seen < lines {
			t.Fatalf("the child ended by itself after %d lines: %v", seen, err)
		}
		checkAfterCrash(t, dir, acknowledged, last)
	}
	t.Logf("%d sessions, of which every acknowledged event survived 5 kills", len(acknowledged))
}

func checkAfterCrash(t *testing.T, dir string, acknowledged map[session.ID]int, last map[session.ID]string) {
	t.Helper()
	s, err := Open(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
	signer, err := audit.LoadSigner(dir, true)
	if err != nil {
		t.Fatal(err)
	}
	for id, n := range acknowledged {
		at, err := s.Get(t.Context(), id)
		if err != nil {
			t.Errorf("%s was acknowledged: %v", id, err)
			continue
		}
		var keys []audit.PublicKey
		if at.State == session.Ended {
			keys = append(keys, signer.Public())
		} else if last[id] == "sealed" {
			t.Errorf("%s was sealed and is %s", id, at.State)
		}
		// What was not acknowledged may be there too, but at most the one
		// write that was on its way.
		if r := storetest.Verify(t, s, id, keys...); r.Events < uint64(n) || r.Events > uint64(n)+1 {
			t.Errorf("%s: %d events, %d were acknowledged", id, r.Events, n)
		}
	}
	// And it goes on from there.
	live, err := s.Live(t.Context(), storetest.Node)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range live {
		if err := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepDone)); err != nil {
			t.Error(err)
		}
		if n, ok := acknowledged[at.ID]; ok {
			r := storetest.Verify(t, s, at.ID)
			acknowledged[at.ID] = max(n, int(r.Events))
		}
	}
}

// TestLogCutAnywhere copies the files of a store in the middle of a
// transaction, as a machine that loses power leaves them, and cuts the log at
// many places, as a disk leaves it that confirms writes it did not make. Every copy opens and
// every record in it verifies.
func TestLogCutAnywhere(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := storetest.Created(t, s)
	sealed, key := storetest.Sealed(t, s, storetest.Created(t, s))
	for range 30 {
		if err := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepDone)); err != nil {
			t.Fatal(err)
		}
	}
	var db, wal []byte
	if err := s.write(t.Context(), func(b *batch) error {
		rec, err := b.sessionRecord(at.ID)
		if err != nil {
			return err
		}
		d, err := audit.Prepare(storetest.Entry(audit.StepFailed))
		if err != nil {
			return err
		}
		if _, err := b.append(rec, at.Fence(), []audit.Draft{d}); err != nil {
			return err
		}
		if db, err = os.ReadFile(filepath.Join(dir, databaseFile)); err != nil {
			return err
		}
		wal, err = os.ReadFile(filepath.Join(dir, databaseFile+"-wal"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	const header, frame = 32, 24 + 4096
	frames := (len(wal) - header) / frame
	if frames < 30 {
		t.Fatalf("the log holds %d pages; the test is about more", frames)
	}
	most := uint64(0)
	for i := 0; i < frames+5; i += 5 { // the last one is the whole log
		for _, more := range []int{0, 1, 2000} {
			cut := wal[:min(len(wal), header+i*frame+more)]
			copied := t.TempDir()
			for name, data := range map[string][]byte{databaseFile: db, databaseFile + "-wal": cut} {
				if err := os.WriteFile(filepath.Join(copied, name), data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			c := open(t, copied)
			if err := c.Check(t.Context()); err != nil {
				t.Errorf("cut at %d: %v", len(cut), err)
			}
			if _, err := c.Get(t.Context(), at.ID); err == nil {
				most = max(most, storetest.Verify(t, c, at.ID).Events)
			} else if !kind.Is(err, kind.NotFound) {
				t.Errorf("cut at %d: %v", len(cut), err)
			}
			if got, err := c.Get(t.Context(), sealed.ID); err == nil && got.State == session.Ended {
				storetest.Verify(t, c, sealed.ID, key)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	// The whole log holds all that was acknowledged and nothing of the
	// transaction that was open.
	if most != 31 {
		t.Errorf("the most complete copy has %d events, want 31", most)
	}
}

// TestBrokenDiskChild is the child of TestBrokenDisk. Its disk breaks: no
// file may grow any more, which SQLite is told as an input/output error.
func TestBrokenDiskChild(t *testing.T) {
	dir := os.Getenv(brokenDir)
	if dir == "" {
		t.Skip("only as a child of TestBrokenDisk")
	}
	signal.Ignore(unix.SIGXFSZ)
	s, err := Open(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	at := storetest.Created(t, s)
	info, err := os.Stat(filepath.Join(dir, databaseFile+"-wal"))
	if err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	small := old
	small.Cur = uint64(info.Size())
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &small); err != nil {
		t.Fatal(err)
	}
	first := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepDone))
	if first == nil {
		t.Error("an append that the disk did not take was acknowledged")
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	// The disk works again, but what it did with the failed write is not
	// known: the store stays read-only until it is opened anew.
	if err := storetest.Append(t.Context(), s, at, storetest.Entry(audit.StepDone)); !kind.Is(err, kind.Unavailable) || kind.Hint(err) == "" {
		t.Errorf("after %v: got %v, want Unavailable with a hint", first, err)
	}
	if _, err := s.Get(t.Context(), at.ID); err != nil {
		t.Errorf("reading: %v", err)
	}
	out, err := json.Marshal(at)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "session.json"), out, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestBrokenDisk(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestBrokenDiskChild$")
	cmd.Env = append(os.Environ(), brokenDir+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(filepath.Join(dir, "session.json"))
	if err != nil {
		t.Fatal(err)
	}
	var at session.Session
	if err := json.Unmarshal(data, &at); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
	_, key := storetest.Sealed(t, s, at)
	storetest.Verify(t, s, at.ID, key)
}
