package sqlite

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// The golden database of a schema is what a build of that schema wrote. Later
// builds must open it. While a schema is not released yet,
//
//	go test ./internal/audit ./internal/store/sqlite -run 'Golden|FrozenVerifier' -update
//
// writes the golden files of both packages anew.
var update = flag.Bool("update", false, "write the golden database of the newest schema anew; never for a schema that was released")

const goldenToken = auth.TokenPrefix + "0123456789abcdef0123456789abcdef01234567"

func goldenFile(version int, suffix string) string {
	return filepath.Join("testdata", "golden", fmt.Sprintf("schema-%04d.%s", version, suffix))
}

// TestGolden opens a data directory of every schema and goes on with it.
func TestGolden(t *testing.T) {
	steps, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		writeGolden(t, len(steps))
	}
	for _, m := range steps {
		t.Run(fmt.Sprint(m.version), func(t *testing.T) {
			data, err := os.ReadFile(goldenFile(m.version, "db"))
			if err != nil {
				t.Fatalf("%v: see the comment at update", err)
			}
			pinned, err := os.ReadFile(goldenFile(m.version, "pub"))
			if err != nil {
				t.Fatal(err)
			}
			keys, err := audit.ParsePublicKeys(pinned)
			if err != nil {
				t.Fatal(err)
			}
			held, err := os.ReadFile(goldenFile(m.version, "heads"))
			if err != nil {
				t.Fatal(err)
			}
			heads, _, err := audit.OpenHeads(held, keys, nil)
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, databaseFile), data, 0o600); err != nil {
				t.Fatal(err)
			}
			s := open(t, dir)
			readGolden(t, s, keys, heads)
			if err := s.Check(t.Context()); err != nil {
				t.Error(err)
			}
			if after, err := os.ReadFile(goldenFile(m.version, "db")); err != nil || !bytes.Equal(data, after) {
				t.Errorf("the golden file was changed: %v", err)
			}
		})
	}
}

// writeGolden makes a store with everything in it that the schema can hold.
func writeGolden(t *testing.T, version int) {
	t.Helper()
	dir := t.TempDir()
	s := open(t, dir)
	signer := audit.GenerateSigner()
	if _, _, err := s.AppendSystem(t.Context(), storetest.Node, storetest.Entry("server.started")); err != nil {
		t.Fatal(err)
	}
	ended := storetest.Moved(t, s, goldenSession(t, s, session.IdempotencyKey{}), session.Ending)
	seal(t, s, signer, ended)
	ended, err := s.Get(t.Context(), ended.ID)
	if err != nil {
		t.Fatal(err)
	}
	storetest.AddTo(t, s, ended, signer, storetest.Entry(audit.StepIntent))
	storetest.AddTo(t, s, ended, signer, storetest.Concluding(audit.StepDone, 1))
	if err := s.SealSegment(t.Context(), storetest.Node, storetest.SignSegment(signer), storetest.Entry(audit.SegmentClosed)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.AppendSystem(t.Context(), storetest.Node, storetest.Entry("server.started")); err != nil {
		t.Fatal(err)
	}
	running := goldenSession(t, s, session.IdempotencyKey{})
	if err := storetest.Append(t.Context(), s, running, storetest.Entry(audit.CommandIntent)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Create(t.Context(), storetest.New(), session.IdempotencyKey{Scope: "s", Key: "k", Digest: "d"}, storetest.Entry(audit.SessionCreated)); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256([]byte(goldenToken))
	k := auth.Key{ID: hex.EncodeToString(hash[:4]), Hash: hash, Role: access.Admin, Label: "golden", CreatedAt: time.Now(), CreatedBy: "test"}
	if err := s.PutKey(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	heads, err := s.Heads(t.Context(), storetest.Node)
	if err != nil {
		t.Fatal(err)
	}
	held, err := signer.SignHeads(heads)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, databaseFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(goldenFile(version, "db")), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"db": data, "pub": signer.Public().Export(), "heads": marshal(t, held)} {
		if err := os.WriteFile(goldenFile(version, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// goldenSession returns a running session with a sandbox.
func goldenSession(t *testing.T, s *Store, key session.IdempotencyKey) session.Session {
	t.Helper()
	at, _, err := s.Create(t.Context(), storetest.New(), key, storetest.Entry(audit.SessionCreated))
	if err != nil {
		t.Fatal(err)
	}
	next := at
	next.State, next.Generation, next.Boot = session.Running, 1, "6cf7e7c0-0000-4000-8000-000000000000"
	next, _, err = s.Transition(t.Context(), at.Fence(), next, storetest.Entry(audit.SessionRunning))
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func readGolden(t *testing.T, s *Store, keys []audit.PublicKey, held audit.Heads) {
	all, next, err := s.List(context.Background(), session.Filter{}, "", 100)
	if err != nil || len(all) != 3 || next != "" {
		t.Fatalf("%d sessions, %v; want 3", len(all), err)
	}
	created, running, ended := all[0], all[1], all[2]
	if created.State != session.Creating || running.State != session.Running || ended.State != session.Ended {
		t.Fatalf("states %s %s %s", created.State, running.State, ended.State)
	}
	if running.Spec.Labels["team"] != "red" || running.Owner.Subject == "" || running.CreatedAt.IsZero() || running.Boot == "" || running.Generation != 1 {
		t.Errorf("session %+v", running)
	}
	if r := storetest.Verify(t, s, ended.ID, keys...); r.Events != 4 || r.Addenda != 2 {
		t.Errorf("%d events and %d addenda, want 4 and 2", r.Events, r.Addenda)
	}
	if r := storetest.Verify(t, s, running.ID); r.Events != 3 || len(r.Open) != 1 {
		t.Errorf("%d events and open intents %v", r.Events, r.Open)
	}
	checkHeads := func(since uint64, continued int) {
		t.Helper()
		r, err := audit.VerifyHeads(held, func(fn func(audit.ListedRecord) error) error { return s.Listing(t.Context(), storetest.Node, fn) })
		if err != nil || r.Sealed != 4 || r.Since != since || len(r.Continued) != continued {
			t.Errorf("held heads: %+v, %v", r, err)
		}
	}
	checkHeads(0, 0)
	system := storetest.ExportSystem(t, s, storetest.Node)
	if r, err := audit.VerifySystem(bytes.NewReader(system), keys, audit.VerifyOptions{}); err != nil || r.Segments != 2 || r.Events != 5 {
		t.Errorf("system record: %+v, %v", r, err)
	}
	// It goes on from there: two more seals, one of addenda.
	sealed, key := storetest.Sealed(t, s, running)
	storetest.AddTo(t, s, ended, audit.GenerateSigner(), storetest.Entry(audit.StepDone))
	storetest.Verify(t, s, sealed.ID, key)
	if segment, _, err := s.AppendSystem(t.Context(), storetest.Node, storetest.Entry("server.started")); err != nil || segment != 2 {
		t.Errorf("segment %d, %v", segment, err)
	}
	checkHeads(2, 2)
	if err := storetest.Append(t.Context(), s, ended, storetest.Entry(audit.StepDone)); !kind.Is(err, kind.Conflict) {
		t.Errorf("append to a sealed record: %v", err)
	}
	if again, existed, err := s.Create(t.Context(), storetest.New(), session.IdempotencyKey{Scope: "s", Key: "k", Digest: "d"}, storetest.Entry(audit.SessionCreated)); err != nil || existed && again.ID != created.ID {
		t.Errorf("the idempotency key: %s, %v", again.ID, err)
	}
	ring := keyring(t, s)
	if c, err := ring.Authenticate(t.Context(), goldenToken, "10.1.2.3"); err != nil || c.Role != access.Admin {
		t.Errorf("key: %+v, %v", c, err)
	}
}
