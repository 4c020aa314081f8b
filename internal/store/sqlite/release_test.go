package sqlite

import (
	"bivy/internal/access"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

var writeRelease = flag.Bool("write-release", false, "write the fixture of the newest schema into testdata/releases, once, when it is released")

const releaseToken = auth.TokenPrefix + "0123456789abcdef0123456789abcdef01234567"

func releaseFile(version int, suffix string) string {
	return filepath.Join("testdata", "releases", fmt.Sprintf("schema-%04d.%s", version, suffix))
}

// TestWriteRelease makes the fixture of a schema that is being released. A
// fixture is never written again: it stands for what users have.
func TestWriteRelease(t *testing.T) {
	if !*writeRelease {
		t.Skip("only with -write-release")
	}
	steps, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	target := releaseFile(len(steps), "db")
	if _, err := os.Stat(target); err == nil {
		t.Fatalf("%s is there already", target)
	}
	dir := t.TempDir()
	s := open(t, dir)
	_, key := storetest.Sealed(t, s, storetest.Moved(t, s, storetest.Created(t, s), session.Running))
	running := storetest.Moved(t, s, storetest.Created(t, s), session.Running)
	if err := storetest.Append(t.Context(), s, running, storetest.Entry(audit.CommandIntent)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Create(t.Context(), storetest.New(), session.IdempotencyKey{Scope: "s", Key: "k", Digest: "d"}, storetest.Entry(audit.SessionCreated)); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256([]byte(releaseToken))
	k := auth.Key{ID: hex.EncodeToString(hash[:4]), Hash: hash, Role: access.Admin, Label: "fixture", CreatedAt: time.Now(), CreatedBy: "test"}
	if err := s.PutKey(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, databaseFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{target: data, releaseFile(len(steps), "pub"): key.Export()} {
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReleases opens a data directory of every schema that was released and
// goes on with it.
func TestReleases(t *testing.T) {
	steps, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range steps {
		t.Run(fmt.Sprint(m.version), func(t *testing.T) {
			data, err := os.ReadFile(releaseFile(m.version, "db"))
			if err != nil {
				t.Fatalf("%v: write it with go test -run TestWriteRelease -write-release", err)
			}
			pinned, err := os.ReadFile(releaseFile(m.version, "pub"))
			if err != nil {
				t.Fatal(err)
			}
			keys, err := audit.ParsePublicKeys(pinned)
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, databaseFile), data, 0o600); err != nil {
				t.Fatal(err)
			}
			s := open(t, dir)
			openRelease(t, s, keys)
			if err := s.Check(t.Context()); err != nil {
				t.Error(err)
			}
			if after, err := os.ReadFile(releaseFile(m.version, "db")); err != nil || !bytes.Equal(data, after) {
				t.Errorf("the fixture was touched: %v", err)
			}
		})
	}
}

func openRelease(t *testing.T, s *Store, keys []audit.PublicKey) {
	all, next, err := s.List(context.Background(), session.Filter{}, "", 100)
	if err != nil || len(all) != 3 || next != "" {
		t.Fatalf("%d sessions, %v; want 3", len(all), err)
	}
	created, running, ended := all[0], all[1], all[2]
	if created.State != session.Creating || running.State != session.Running || ended.State != session.Ended {
		t.Fatalf("states %s %s %s", created.State, running.State, ended.State)
	}
	if running.Spec.Labels["team"] != "red" || running.Owner.Subject == "" || running.CreatedAt.IsZero() {
		t.Errorf("session %+v", running)
	}
	if r := storetest.Verify(t, s, ended.ID, keys...); r.Events != 4 {
		t.Errorf("%d events, want 4", r.Events)
	}
	if r := storetest.Verify(t, s, running.ID); r.Events != 3 || len(r.Open) != 1 {
		t.Errorf("%d events and open intents %v", r.Events, r.Open)
	}
	_, key := storetest.Sealed(t, s, running)
	storetest.Verify(t, s, running.ID, key)
	if err := storetest.Append(t.Context(), s, ended, storetest.Entry(audit.StepDone)); !kind.Is(err, kind.Conflict) {
		t.Errorf("append to a sealed record: %v", err)
	}
	ring, err := auth.Open(t.Context(), s, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := ring.Authenticate(t.Context(), releaseToken); err != nil || c.Role != access.Admin {
		t.Errorf("key: %+v, %v", c, err)
	}
}
