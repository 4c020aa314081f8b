package audit

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The golden files are what the build wrote that introduced the format. Later
// builds must read them, and the verifier of that build, which is kept under
// testdata/verifier-v1, must accept what later builds write. Until the format
// is released,
//
//	go test ./internal/audit ./internal/store/sqlite -run 'Golden|FrozenVerifier' -update
//
// writes the golden files of both packages and the copy of the verifier anew.
var update = flag.Bool("update", false, "write the golden files and the copy of the verifier anew; never once the format is released")

const (
	goldenDir   = "testdata/golden"
	verifierDir = "testdata/verifier-v1"
)

// golden reads a golden file.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(goldenDir, name))
	if err != nil {
		t.Fatalf("%v: see the comment at update", err)
	}
	return data
}

func goldenKeys(t testing.TB) []PublicKey {
	t.Helper()
	keys, err := ParsePublicKeys(golden(t, "keys.pub"))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// writeGolden writes a record with addenda whose second payload was erased, a
// system record and a statement of heads, signed by a key that replaced the
// pinned one.
func writeGolden(t *testing.T) {
	t.Helper()
	first := &Signer{key: ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))}
	second, err := first.Rotate(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b := newBuilder(t)
	b.signer, b.rotations = second, second.Rotations()
	b.add(SessionCreated, "", map[string]string{"spec": "…"}).
		add(CommandIntent, "c1", map[string]any{"argv": []string{"ls", "-l"}}).
		add(CommandStarted, "c1", nil).
		conclude(2, CommandEnded, "c1", map[string]int{"exit": 0}).
		add(FileChangesCut, "", nil).
		add(SessionEnded, "", nil)
	erase := testEntry(PayloadErased, "", nil)
	erase.Object = ErasedEvents(2, 2)
	b.addendum(erase).addendum(testEntry("credential.revoked", "lease-1", map[string]string{"provider": "x"}))
	b.events[1].Salt, b.events[1].Payload = nil, nil

	one, h1 := chainOf(t, second, "node-1", 1, "", true, testEntry("server.started", "", nil), testEntry("template.build.intent", "t", nil), concluded("template.built", 3))
	two, _ := chainOf(t, second, "node-1", 2, h1.Root(), false, testEntry("server.started", "", nil))
	heads, err := second.SignHeads(testHeads())
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(heads)
	if err != nil {
		t.Fatal(err)
	}
	rotations, err := json.Marshal(second.Rotations()[0])
	if err != nil {
		t.Fatal(err)
	}
	var system bytes.Buffer
	if err := ExportSystem(&system, SystemExport{Node: "node-1", Rotations: second.Rotations(), Segments: []SegmentExport{one, two}}); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(goldenDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"keys.pub": first.Public().Export(), "session.jsonl": b.export(true), "system.jsonl": system.Bytes(),
		"heads.json": text, "signing.rotations": append(rotations, '\n'),
	} {
		if err := os.WriteFile(filepath.Join(goldenDir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func concluded(a Action, seq uint64) Entry {
	e := testEntry(a, "t", nil)
	e.Concludes = seq
	return e
}

// TestGolden reads what the build wrote that introduced the format.
func TestGolden(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	keys := goldenKeys(t)
	r, err := Verify(bytes.NewReader(golden(t, "session.jsonl")), keys, VerifyOptions{AllowErased: true})
	if err != nil || r.Events != 6 || r.Addenda != 2 || r.Erased != 1 || r.Cuts != 1 || r.Residuals != 1 || r.Pinned != keys[0].Fingerprint() || r.Key == r.Pinned {
		t.Errorf("session: %+v, %v", r, err)
	}
	if h, ok, err := r.Closeout.Heads(); err != nil || !ok || h.Sealed != 3 {
		t.Errorf("heads of the session's seal: %+v, %v, %v", h, ok, err)
	}
	s, err := VerifySystem(bytes.NewReader(golden(t, "system.jsonl")), keys, VerifyOptions{Node: "node-1"})
	if err != nil || s.Segments != 2 || s.Sealed != 1 || s.Events != 7 {
		t.Errorf("system: %+v, %v", s, err)
	}
	rotations, err := ParseRotations(golden(t, "signing.rotations"))
	if err != nil || len(rotations) != 1 {
		t.Errorf("rotations: %v, %v", rotations, err)
	}
	h, key, err := OpenHeads(golden(t, "heads.json"), keys, rotations)
	if err != nil || h.Sealed != 3 || len(h.Open) != 1 || key != r.Key {
		t.Errorf("heads: %+v, %v", h, err)
	}
}

// TestFrozenVerifier runs the verifier of the build that introduced the format
// against what this build writes, with kinds of events that it does not know.
func TestFrozenVerifier(t *testing.T) {
	if *update {
		copyVerifier(t)
	}
	dir := t.TempDir()
	verifier := filepath.Join(dir, "verifier")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", verifier, ".")
	build.Dir = verifierDir
	build.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "GOTOOLCHAIN=local", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the verifier: %v\n%s", err, out)
	}
	run := func(what string, keys, export []byte) (string, error) {
		t.Helper()
		for name, data := range map[string][]byte{"keys": keys, "export": export} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		out, err := exec.CommandContext(t.Context(), verifier, what, filepath.Join(dir, "keys"), filepath.Join(dir, "export")).CombinedOutput()
		return string(out), err
	}
	b := future(t)
	erase := testEntry(PayloadErased, "", nil)
	erase.Object = ErasedEvents(2, 2)
	b.addendum(erase)
	b.events[1].Salt, b.events[1].Payload = nil, nil
	key := b.signer.Public().Export()
	out, err := run("session", key, b.export(true))
	if err != nil || !strings.Contains(out, "verified: session "+string(b.id)+", 7 events, 3 addenda") || !strings.Contains(out, "1 payload erased") {
		t.Errorf("session: %v\n%s", err, out)
	}
	bad := bytes.Replace(b.export(true), []byte("egress.connected"), []byte("egress.conquered"), 1)
	if out, err := run("session", key, bad); err == nil || !strings.Contains(out, "event 4 (line 5): the event was changed") {
		t.Errorf("a changed event: %v\n%s", err, out)
	}
	if out, err := run("session", GenerateSigner().Public().Export(), b.export(true)); err == nil {
		t.Errorf("another key passes:\n%s", out)
	}
	one, head := chainOf(t, b.signer, "node-1", 1, "", true, testEntry("pool.filled.intent", "p", nil), concluded("pool.filled", 2))
	two, _ := chainOf(t, b.signer, "node-1", 2, head.Root(), false, testEntry("lease.swept", "", nil))
	if out, err := run("system", key, systemExport(t, "node-1", one, two)); err != nil || !strings.Contains(out, "verified: system record of node node-1") {
		t.Errorf("system: %v\n%s", err, out)
	}
	for _, what := range []string{"session", "system"} {
		if out, err := run(what, golden(t, "keys.pub"), golden(t, what+".jsonl")); err != nil || !strings.HasPrefix(out, "verified: "+what) {
			t.Errorf("golden %s: %v\n%s", what, err, out)
		}
	}
}

// copyVerifier copies the sources that verify, as they are.
func copyVerifier(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(verifierDir, "internal")); err != nil {
		t.Fatal(err)
	}
	for _, pkg := range []string{"audit", "session", "argv", "trace", "clip", "durable", "kind"} {
		names, err := filepath.Glob(filepath.Join("..", pkg, "*.go"))
		if err != nil || len(names) == 0 {
			t.Fatalf("package %s: %v", pkg, err)
		}
		to := filepath.Join(verifierDir, "internal", pkg)
		if err := os.MkdirAll(to, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(to, filepath.Base(name)), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
