package audit

import (
	"bytes"
	"crypto/ed25519"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var writeRelease = flag.Bool("write-release", false, "write the export of this format into testdata/releases, once, when it is released")

const (
	releaseRecord = "testdata/releases/record-1.jsonl"
	releaseKey    = "testdata/releases/record-1.pub"
)

// TestReleasedFormat: an export that was made once verifies for ever.
func TestReleasedFormat(t *testing.T) {
	if *writeRelease {
		b := newBuilder(t)
		b.signer = &Signer{key: ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))}
		b.life()
		b.events[1].Salt, b.events[1].Payload = nil, nil
		if err := os.MkdirAll(filepath.Dir(releaseRecord), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, data := range map[string]string{releaseRecord: join(b.lines(true)), releaseKey: string(b.signer.Public().Export())} {
			if _, err := os.Stat(name); err == nil {
				t.Fatalf("%s is there already", name)
			}
			if err := os.WriteFile(name, []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	record, keys := released(t)
	r, err := Verify(bytes.NewReader(record), keys, VerifyOptions{})
	if err != nil || r.Events != 8 || r.Erased != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if want := "verified: 8 events, sealed 2026-01-02T03:04:05Z, key ed25519:"; !strings.HasPrefix(r.String(), want) {
		t.Errorf("got %s", r)
	}
}

func released(t testing.TB) ([]byte, []PublicKey) {
	t.Helper()
	record, err := os.ReadFile(releaseRecord)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(releaseKey)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ParsePublicKeys(text)
	if err != nil {
		t.Fatal(err)
	}
	return record, keys
}

// FuzzVerify: no input panics, and none verifies but the released record
// itself, with more or fewer of its payloads erased.
func FuzzVerify(f *testing.F) {
	record, keys := released(f)
	genuine, err := Verify(bytes.NewReader(record), keys, VerifyOptions{})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(record)
	lines := bytes.SplitAfter(record, []byte("\n"))
	for i := range lines {
		f.Add(bytes.Join(append(lines[:i:i], lines[min(i+1, len(lines)):]...), nil))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Verify(bytes.NewReader(data), keys, VerifyOptions{})
		if err == nil && (r.Session != genuine.Session || r.Events != genuine.Events || r.SealedAt != genuine.SealedAt) {
			t.Errorf("a forgery verifies: %+v", r)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("a message of several lines: %q", err)
		}
		if _, err := Verify(bytes.NewReader(data), nil, VerifyOptions{AllowOpen: true}); err == nil && bytes.Contains(data, []byte(`{"seal":`)) {
			t.Error("a seal passed without a key")
		}
	})
}

// FuzzBounded: whatever text a guest chooses, the payload is one printable
// line within its bound.
func FuzzBounded(f *testing.F) {
	f.Add("ls -l", "x", 500)
	f.Add("\x1b[2J\x00\xff\u202e", "\u0085", 64<<10)
	f.Fuzz(func(t *testing.T, text, name string, repeat int) {
		long := strings.Repeat(text, max(0, min(repeat, 1+(40<<10)/(len(text)+1))))
		got, err := Bounded(map[string]any{"argv": []string{text, long}, name: long, "names": map[string]string{long: text}}, MaxPayload)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) > MaxPayload {
			t.Errorf("%d bytes", len(got))
		}
		checkPrintable(t, got)
	})
}

// FuzzParsePublicKeys: no key file panics, and what is read can be written and
// read again.
func FuzzParsePublicKeys(f *testing.F) {
	_, keys := released(f)
	f.Add(keys[0].Export())
	f.Fuzz(func(t *testing.T, data []byte) {
		keys, err := ParsePublicKeys(data)
		if err != nil {
			return
		}
		for _, k := range keys {
			again, err := ParsePublicKeys(k.Export())
			if err != nil || len(again) != 1 || again[0].Fingerprint() != k.Fingerprint() {
				t.Errorf("%s does not read back: %v", k.Fingerprint(), err)
			}
		}
	})
}
