package audit

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bivy/internal/kind"
)

// without adds an export to the corpus, and the export without each of its
// lines.
func without(f *testing.F, export []byte) {
	f.Add(export)
	lines := bytes.SplitAfter(export, []byte("\n"))
	for i := range lines {
		f.Add(bytes.Join(append(lines[:i:i], lines[min(i+1, len(lines)):]...), nil))
	}
}

// FuzzVerify: no input panics, and none verifies but the golden record itself,
// with more or fewer of its addenda and payloads.
func FuzzVerify(f *testing.F) {
	keys := goldenKeys(f)
	genuine, err := Verify(bytes.NewReader(golden(f, "session.jsonl")), keys, VerifyOptions{AllowErased: true})
	if err != nil {
		f.Fatal(err)
	}
	without(f, golden(f, "session.jsonl"))
	without(f, golden(f, "system.jsonl"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Verify(bytes.NewReader(data), keys, VerifyOptions{AllowErased: true})
		if err == nil && (r.Session != genuine.Session || r.Events != genuine.Events || r.SealedAt != genuine.SealedAt || r.Addenda > genuine.Addenda) {
			t.Errorf("a forgery verifies: %+v", r)
		}
		if err != nil && (strings.Contains(err.Error(), "\n") || !kind.Is(err, kind.Invalid)) {
			t.Errorf("message %q of kind %s", err, kind.Of(err))
		}
		if _, err := Verify(bytes.NewReader(data), nil, VerifyOptions{AllowOpen: true, AllowErased: true}); err == nil && bytes.Contains(data, []byte(`{"seal":`)) {
			t.Error("a seal passed without a key")
		}
	})
}

// FuzzVerifySystem: no input panics, and none verifies but the golden system
// record itself, with more or fewer of the events that no seal covers.
func FuzzVerifySystem(f *testing.F) {
	keys := goldenKeys(f)
	genuine, err := VerifySystem(bytes.NewReader(golden(f, "system.jsonl")), keys, VerifyOptions{})
	if err != nil {
		f.Fatal(err)
	}
	without(f, golden(f, "system.jsonl"))
	without(f, golden(f, "session.jsonl"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := VerifySystem(bytes.NewReader(data), keys, VerifyOptions{})
		if err == nil && r.Sealed > 0 && (r.Node != genuine.Node || r.SealedAt != genuine.SealedAt || r.Key != genuine.Key) {
			t.Errorf("a forgery verifies: %+v", r)
		}
		if err != nil && (strings.Contains(err.Error(), "\n") || !kind.Is(err, kind.Invalid)) {
			t.Errorf("message %q of kind %s", err, kind.Of(err))
		}
	})
}

// FuzzOpenHeads: no statement panics, and none but the golden one verifies.
func FuzzOpenHeads(f *testing.F) {
	keys := goldenKeys(f)
	rotations, err := ParseRotations(golden(f, "signing.rotations"))
	if err != nil {
		f.Fatal(err)
	}
	genuine, _, err := OpenHeads(golden(f, "heads.json"), keys, rotations)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden(f, "heads.json"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, _, err := OpenHeads(data, keys, rotations)
		if err == nil && (h.TreeRoot != genuine.TreeRoot || h.OpenDigest != genuine.OpenDigest || h.Time != genuine.Time) {
			t.Errorf("a forgery verifies: %+v", h)
		}
		if err != nil && !kind.Is(err, kind.Invalid) {
			t.Errorf("%v has kind %s", err, kind.Of(err))
		}
	})
}

// FuzzSeal: no seal panics, whatever it states.
func FuzzSeal(f *testing.F) {
	for line := range bytes.Lines(golden(f, "session.jsonl")) {
		var l struct {
			Seal      *Seal  `json:"seal"`
			Addenda   *Seal  `json:"addenda_seal"`
			Rotations []Seal `json:"rotations"`
		}
		if err := json.Unmarshal(line, &l); err != nil {
			f.Fatal(err)
		}
		for _, s := range append(l.Rotations, deref(l.Seal), deref(l.Addenda)) {
			f.Add(s.Payload)
		}
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		s := Seal{PayloadType: PayloadType, Payload: payload}
		if c, err := s.Closeout(); err == nil {
			_, _, err := c.Heads()
			t.Log(checkSections(c.Sections), err)
		}
		if c, err := s.SegmentCloseout(); err == nil {
			_, _, err := c.Heads()
			t.Log(err)
		}
		if r, err := s.Rotation(); err == nil && (r.Version != StatementVersion || r.New == "") {
			t.Errorf("rotation %+v", r)
		}
		if a, err := s.AddendaHead(); err == nil && a.Version != StatementVersion {
			t.Errorf("head of addenda %+v", a)
		}
	})
}

func deref(s *Seal) Seal {
	if s == nil {
		return Seal{}
	}
	return *s
}

// FuzzRotations: no history of a key panics, and it extends trust only by the
// signature of a trusted key.
func FuzzRotations(f *testing.F) {
	keys := goldenKeys(f)
	f.Add(golden(f, "signing.rotations"))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := ParseRotations(data)
		if err != nil {
			if !kind.Is(err, kind.Invalid) {
				t.Errorf("%v has kind %s", err, kind.Of(err))
			}
			return
		}
		if k, err := trust(keys, all); err != nil || len(k.all) > 2 {
			t.Errorf("%d trusted keys, %v", len(k.all), err)
		}
	})
}

// FuzzSigningKey: no file that stands for the signing key panics or is
// replaced.
func FuzzSigningKey(f *testing.F) {
	text, err := GenerateSigner().private()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		path := filepath.Join(dir, SigningKeyFile)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := LoadSigner(dir, false); err == nil && len(s.key) == 0 {
			t.Error("a signer without a key")
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, data) {
			t.Error("the file was replaced")
		}
	})
}

// FuzzBounded: for every text that a guest chooses, the payload is one printable
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
	keys := goldenKeys(f)
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
