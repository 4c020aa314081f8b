package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bivy/client"
)

// TestRecordOfAGuestThatHides: root inside can mount over everything; its files
// are in the record or are named as residuals. A guest that hides nothing has
// none, also when it is root for a moment.
func TestRecordOfAGuestThatHides(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	run := func(line string) *client.Session {
		t.Helper()
		x := s.create(t, client.Spec{})
		if r := sh(t, x, "user", line); r.Exit.Code != 0 {
			t.Fatalf("%s: %+v", line, r)
		}
		s.end(t, x)
		return x
	}
	verify := func(args ...string) result { return s.cli(t, append([]string{"audit", "verify"}, args...)...) }

	plain := run("echo mine > ~/mine && sudo true")
	if r := verify(plain.ID); r.code != 0 || strings.Contains(r.out, "not listed") || !strings.Contains(r.out, plain.ID) {
		t.Errorf("of a session that hides nothing: %s", r)
	}
	hidden := run("echo evidence > ~/evidence && echo x > /dev/shm/x && sudo python3 -c \"" +
		"import ctypes; libc = ctypes.CDLL(None); assert libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0; open('/hidden', 'w').write('x')\"")
	r := verify(hidden.ID)
	if r.code != 0 || !strings.Contains(r.out, "/dev/shm") {
		t.Errorf("the verdict does not name what is outside the layer: %s", r)
	}
	if show := s.cli(t, "audit", "show", hidden.ID); !strings.Contains(show.out, "/home/user/evidence") {
		t.Errorf("the file is not in the record: %s", show)
	}

	// The record of one session is not accepted as that of another.
	file := filepath.Join(t.TempDir(), "record.jsonl")
	if r := s.cli(t, "audit", "export", hidden.ID); r.code != 0 {
		t.Fatal(r)
	} else if err := os.WriteFile(file, []byte(strings.ReplaceAll(r.out, hidden.ID, plain.ID)), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := verify(file); r.code != 1 {
		t.Errorf("a record under another name: %s", r)
	}
	s.stop(t)
}

// TestRecordsPutBack: who holds a head finds that an older copy of the database
// took the place of the current one, and a server does not start without the
// key that sealed its records.
func TestRecordsPutBack(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	store := filepath.Join(h.data, "store")
	old := filepath.Join(t.TempDir(), "old")
	if err := os.CopyFS(old, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	s := h.serve(t)
	s.end(t, s.create(t, client.Spec{}))
	r := s.cli(t, "audit", "head")
	head := filepath.Join(t.TempDir(), "head.json")
	if err := os.WriteFile(head, []byte(r.out), 0o600); err != nil || r.code != 0 {
		t.Fatal(r, err)
	}
	if r := s.cli(t, "audit", "verify", "--system", "--head", head); r.code != 0 {
		t.Errorf("with the records as they were: %s", r)
	}
	s.stop(t)

	current := filepath.Join(t.TempDir(), "current")
	if err := os.CopyFS(current, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	replace := func(from string) {
		t.Helper()
		if err := os.RemoveAll(store); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(store, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(store, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	replace(old)
	t.Cleanup(func() { replace(current) })
	s = h.serve(t)
	if r := s.cli(t, "audit", "verify", "--system", "--head", head); r.code != 1 || !strings.Contains(r.err, "the records of node") {
		t.Errorf("with an older database: %s", r)
	}
	s.stop(t)

	key := filepath.Join(h.data, "signing.key")
	text, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.WriteFile(key, text, 0o600); err != nil {
			t.Error(err)
		}
	}()
	if r := h.bivy(t, "ls"); r.code == 0 || !strings.Contains(r.err, "audit key rotate --lost") {
		t.Errorf("without the key: %s", r)
	}
	if _, err := os.Lstat(key); err == nil {
		t.Error("a new key took the place of the lost one")
	}
}
