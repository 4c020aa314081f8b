package audit

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/trace"
)

// check verifies an export and compares part of the error, empty for none.
func check(t *testing.T, what string, export []byte, keys []PublicKey, o VerifyOptions, want string) Report {
	t.Helper()
	r, err := Verify(bytes.NewReader(export), keys, o)
	if want == "" {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		return r
	}
	if !kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: got %v, want %s", what, err, want)
	}
	return r
}

// future is a record as a later bivy of the same format may write it: actions,
// sections, fields of sections and versions of parts that this code has never
// heard of.
func future(t testing.TB) *builder {
	b := newBuilder(t)
	section, err := NewSection(map[string]any{"leases": []any{map[string]any{"provider": "x", "revoked": true}}, "count": 1})
	if err != nil {
		t.Fatal(err)
	}
	b.sections = map[string]Section{"credentials": section}
	e := testEntry("egress.connect.intent", "flow-1", map[string]any{"host": "example.org", "rule": map[string]any{"nested": []int{1}}})
	e.Object, e.Trace, e.Decision = "flow/1", "4bf92f3577b34da6a3ce929d0e0e4736", Decision{Verdict: Held, Policy: "sha256:abc"}
	b.add(SessionCreated, "", nil).entry(e).
		add("credential.lease.intent", "lease-1", nil).
		conclude(2, "egress.connected", "flow-1", nil).
		add("budget.spent", "", map[string]any{"tokens": 12}).
		conclude(3, "credential.revoked", "lease-1", nil).
		add(SessionEnded, "", nil)
	late := testEntry("provider.confirmed.intent", "lease-1", nil)
	b.addendum(late)
	done := testEntry("provider.confirmed", "lease-1", nil)
	done.Concludes = 1
	return b.addendum(done)
}

func TestUnknownKindsVerify(t *testing.T) {
	b := future(t)
	r := check(t, "future", b.export(true), []PublicKey{b.signer.Public()}, VerifyOptions{Session: b.id}, "")
	if r.Events != 7 || r.Addenda != 2 || r.Counts["egress.connected"] != 1 || string(r.Closeout.Sections["credentials"].Content) == "" {
		t.Errorf("report %+v", r)
	}
	h, ok, err := r.Closeout.Heads()
	if err != nil || !ok || h.Sealed != 3 || h.OpenCount != 1 || h.Open != nil || h.System.Seq != 9 {
		t.Errorf("heads %+v, %v, %v", h, ok, err)
	}
	// A field of a section that this build does not know changes nothing.
	content := bytes.Replace(r.Closeout.Sections[HeadsSection].Content, []byte("{"), []byte(`{"more":{"x":[1]},`), 1)
	s := Section{Content: content}
	s.Digest = s.digest()
	if h, ok, err := headsOf(map[string]Section{HeadsSection: s}); err != nil || !ok || h.Sealed != 3 {
		t.Errorf("with an unknown field: %+v, %v, %v", h, ok, err)
	}
}

// TestUnknownKindsAreHeldToTheRules: an intent of an unknown kind without an
// outcome is a fault, and so is an outcome without an intent.
func TestUnknownKindsAreHeldToTheRules(t *testing.T) {
	b := newBuilder(t).add(SessionCreated, "", nil).add("egress.connect.intent", "f", nil).add("egress.connected", "f", nil).add(SessionEnded, "", nil)
	check(t, "no outcome", b.export(true), []PublicKey{b.signer.Public()}, VerifyOptions{}, `event 2 (line 6): egress.connect.intent "f" has no outcome`)
	b = newBuilder(t).add(SessionCreated, "", nil).conclude(1, "egress.connected", "f", nil).add(SessionEnded, "", nil)
	check(t, "no intent", b.export(true), []PublicKey{b.signer.Public()}, VerifyOptions{}, "event 2 (line 3): egress.connected concludes event 1, which is not an open intent")
	b = newBuilder(t).add(SessionCreated, "", nil).add("x.y.intent", "f", nil).conclude(2, "x.y", "f", nil).conclude(2, "x.y", "f", nil).add(SessionEnded, "", nil)
	check(t, "two outcomes", b.export(true), []PublicKey{b.signer.Public()}, VerifyOptions{}, "event 4 (line 5): x.y concludes event 2")
}

func TestVerifyReport(t *testing.T) {
	b := newBuilder(t).life()
	b.events, b.head, b.counts = nil, Start(SessionRecord(b.id), ""), map[Action]uint64{}
	b.add(SessionCreated, "", nil).add(FileChangesCut, "", nil).add(SessionEnded, "", nil)
	b.addendum(testEntry("late.thing.intent", "r", nil)).addendum(testEntry("late.thing", "r", nil))
	erase := testEntry(PayloadErased, "", nil)
	erase.Object = ErasedEvents(1, 2)
	b.addendum(erase)
	b.events[0].Salt, b.events[0].Payload = nil, nil
	keys := []PublicKey{b.signer.Public()}
	_, err := Verify(bytes.NewReader(b.export(true)), keys, VerifyOptions{})
	if !kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), "1 payload erased, as the record announces") || !strings.Contains(kind.Hint(err), "--allow-erased") {
		t.Errorf("erased: %v, hint %q", err, kind.Hint(err))
	}
	text := check(t, "allowed", b.export(true), keys, VerifyOptions{AllowErased: true}, "").String()
	for _, want := range []string{
		"verified: session " + string(b.id), "3 events, 3 addenda", "addenda last signed 2026-01-02T03:04:05Z", "1 intent without an outcome, the first: event 1, late.thing.intent",
		"1 residual: ", "a key that lives until noon", "1 event of file.changes_cut", "1 payload erased",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// TestErasure: only what an event announces may be missing.
func TestErasure(t *testing.T) {
	erase := func(b *builder, from, to int) *builder {
		for i := from - 1; i < to; i++ {
			b.events[i].Salt, b.events[i].Payload = nil, nil
		}
		return b
	}
	announce := func(object string) Entry {
		e := testEntry(PayloadErased, "", nil)
		e.Object = object
		return e
	}
	allow := VerifyOptions{AllowErased: true}
	for _, c := range []struct {
		what string
		make func(b *builder) *builder
		want string
	}{
		{"all of it, in silence", func(b *builder) *builder { return erase(b, 1, 8) }, "event 1 (line 10): its payload is missing and no payload.erased event announces that"},
		{"one, in silence", func(b *builder) *builder { return erase(b, 5, 5) }, "event 5 "},
		{"announced in the addenda", func(b *builder) *builder { return erase(b, 2, 5).addendum(announce("events/2-5")) }, ""},
		{"announced in two parts", func(b *builder) *builder {
			return erase(b, 2, 5).addendum(announce("events/4-5")).addendum(announce("events/2-3"))
		}, ""},
		{"one more than announced", func(b *builder) *builder { return erase(b, 2, 6).addendum(announce("events/2-5")) }, "event 6 "},
		{"a gap in what is announced", func(b *builder) *builder {
			return erase(b, 2, 6).addendum(announce("events/2-3")).addendum(announce("events/5-6"))
		}, "event 4 "},
		{"announced and still there", func(b *builder) *builder { return b.addendum(announce("events/2-5")) }, ""},
		{"an addendum", func(b *builder) *builder {
			b.addendum(testEntry(StepDone, "", nil)).addendum(announce("addenda/1-1"))
			b.addenda[0].Salt, b.addenda[0].Payload = nil, nil
			return b
		}, ""},
		{"an addendum, in silence", func(b *builder) *builder {
			b.addendum(testEntry(StepDone, "", nil)).addendum(announce("events/1-1"))
			b.addenda[0].Salt, b.addenda[0].Payload = nil, nil
			return b
		}, "addendum 1 "},
	} {
		b := c.make(newBuilder(t).life())
		check(t, c.what, b.export(true), []PublicKey{b.signer.Public()}, allow, c.want)
	}
	for _, bad := range []string{"", "events/", "events/0-1", "events/2-1", "events/1", "events/01-2", "events/1-2 ", "other/1-2", "events/1-99999999999999999999"} {
		if _, err := Prepare(announce(bad)); !kind.Is(err, kind.Invalid) {
			t.Errorf("object %q: %v", bad, err)
		}
	}
	// In the record itself, before the seal.
	b := newBuilder(t).add(SessionCreated, "", "secret").entry(announce("events/1-1"))
	erase(b, 1, 1)
	check(t, "open record", b.export(false), nil, VerifyOptions{AllowOpen: true, AllowErased: true}, "")
	check(t, "open record, not allowed", b.export(false), nil, VerifyOptions{AllowOpen: true}, "1 payload erased")
}

func TestSpans(t *testing.T) {
	var s spans
	for _, p := range [][2]uint64{{5, 6}, {1, 1}, {3, 3}, {10, 20}, {2, 2}, {7, 9}, {15, 16}} {
		if err := s.add(p[0], p[1]); err != nil {
			t.Fatal(err)
		}
	}
	if got := fmt.Sprint(s); got != "[{1 3 false} {5 20 false}]" {
		t.Errorf("ranges %s", got)
	}
	for _, c := range []struct {
		covers spans
		want   uint64
	}{{nil, 1}, {spans{{first: 1, last: 3}}, 5}, {spans{{first: 1, last: 2}, {first: 5, last: 20}}, 3}, {spans{{first: 1, last: 30}}, 0}} {
		if got := s.missing(c.covers); got != c.want {
			t.Errorf("not in %v: %d, want %d", c.covers, got, c.want)
		}
	}
}

func TestAddenda(t *testing.T) {
	b := newBuilder(t).life().addendum(testEntry("credential.revoked", "", nil)).addendum(testEntry("export.done", "", nil))
	keys := []PublicKey{b.signer.Public()}
	if r := check(t, "two addenda", b.export(true), keys, VerifyOptions{}, ""); r.Addenda != 2 || r.AddendaSignedAt.IsZero() {
		t.Errorf("report %+v", r)
	}
	l := b.lines(true) // header, 8 events, seal, 2 addenda, signed head
	without := func(i int) []byte { return []byte(join(append(append([]string{}, l[:i]...), l[i+1:]...))) }
	check(t, "the first removed", without(10), keys, VerifyOptions{}, "addendum 1 (line 11): the record begins with event 2")
	check(t, "the last removed", without(11), keys, VerifyOptions{}, "2 addenda are signed, the export has 1")
	check(t, "the signed head removed", without(12), keys, VerifyOptions{}, "no signed head after addendum 2")
	check(t, "the seal removed", without(9), keys, VerifyOptions{}, `event 9 (line 10): the event is of "addenda/`)
	check(t, "more after the end", []byte(join(l)+"{}\n"), keys, VerifyOptions{}, "there is more after the end")
	other := newBuilder(t).life().addendum(testEntry("credential.revoked", "", nil))
	other.signer = b.signer
	o := other.lines(true)
	check(t, "addenda of another session", []byte(join(append(append([]string{}, l[:10]...), o[10:]...))), keys, VerifyOptions{}, `the event is of "addenda/`)
	twin := newBuilder(t)
	twin.id, twin.signer, twin.head = b.id, b.signer, Start(SessionRecord(b.id), "")
	twin.life().addendum(testEntry("credential.revoked", "", nil))
	w := twin.lines(true)
	check(t, "addenda of another end", []byte(join(append(append([]string{}, l[:10]...), w[10:]...))), keys, VerifyOptions{}, "it does not begin where it must")
	stranger := *b
	stranger.signer = GenerateSigner()
	s := stranger.lines(true)
	check(t, "signed by another key", []byte(join(append(append([]string{}, l[:12]...), s[12]))), keys, VerifyOptions{}, "the head of the addenda is not signed by a pinned key")
	// The head of fewer addenda, signed earlier, hides the last one, unless a
	// later statement is held against it.
	short := *b
	short.addenda, short.after = b.addenda[:1], b.addenda[0].Head()
	check(t, "an earlier end", short.export(true), keys, VerifyOptions{}, "")
	held := OpenHead{Record: AddendaRecord(b.id), Seq: 2, Hash: b.addenda[1].Hash}
	check(t, "an earlier end against a statement", short.export(true), keys, VerifyOptions{Contains: []OpenHead{held}}, "a signed statement says that it had 2")
	if r := check(t, "against a statement", b.export(true), keys, VerifyOptions{Contains: []OpenHead{held, {Record: "session/aaaaaaaaaaaaaaaaaaaa", Seq: 9}}}, ""); r.Contained != 1 {
		t.Errorf("%d heads found, want 1", r.Contained)
	}
	held.Hash = b.addenda[0].Hash
	check(t, "against another event", b.export(true), keys, VerifyOptions{Contains: []OpenHead{held}}, "it was replaced")
	if _, err := b.signer.SealAddenda(b.head, testMoment.Now); !kind.Is(err, kind.Invalid) {
		t.Errorf("a session's record signed as addenda: %v", err)
	}
}

func TestSections(t *testing.T) {
	b := future(t)
	keys := []PublicKey{b.signer.Public()}
	change := func(edit func(c *Closeout)) []byte {
		t.Helper()
		seal := b.seal()
		c, err := seal.Closeout()
		if err != nil {
			t.Fatal(err)
		}
		edit(&c)
		if seal, err = b.signer.envelope(CloseoutType, subject(b.head.Record, b.head.Root()), c); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := Export(&out, SessionExport{Session: b.id, Events: b.each, Seal: &seal}); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	check(t, "as it is", change(func(*Closeout) {}), keys, VerifyOptions{}, "")
	check(t, "a changed section", change(func(c *Closeout) {
		c.Sections["credentials"] = Section{Digest: c.Sections["credentials"].Digest, Content: json.RawMessage(`{"leases":[]}`)}
	}), keys, VerifyOptions{}, `section "credentials": its content does not have the digest`)
	check(t, "not an object", change(func(c *Closeout) { c.Sections["x"] = Section{Content: json.RawMessage(`[]`)} }), keys, VerifyOptions{}, "not a JSON object")
	check(t, "a newer closeout", change(func(c *Closeout) { c.Version = 2 }), keys, VerifyOptions{}, "session-closeout has version 2; this bivy reads version 1")
	check(t, "no version", change(func(c *Closeout) { c.Version = 0 }), keys, VerifyOptions{}, "session-closeout has version 0; this bivy reads version 1")
	for _, bad := range []any{[]int{1}, map[string]any{"Upper": 1}, map[string]string{"x": strings.Repeat("y", MaxSection)}, "text"} {
		if _, err := NewSection(bad); !kind.Is(err, kind.Invalid) {
			t.Errorf("section %.20v: %v", bad, err)
		}
	}
	c := Closeout{Session: b.id, Sections: map[string]Section{}}
	for i := range MaxSections {
		c.Sections[fmt.Sprint("s", i)] = b.sections["credentials"]
	}
	if _, err := b.signer.Seal(b.head, testHeads(), c); !kind.Is(err, kind.Invalid) {
		t.Errorf("too many sections: %v", err)
	}
	seal, err := b.signer.envelope("https://bivy.dev/session-closeout/v3", subject(b.head.Record, b.head.Root()), c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := seal.Closeout(); err == nil || !strings.Contains(err.Error(), "version 3; this bivy reads version 1") {
		t.Errorf("a newer type: %v", err)
	}
	if _, err := seal.Rotation(); err == nil {
		t.Error("a closeout was read as a rotation")
	}
}

// TestNoDigestOfSecrets: nothing in a record or seal is a digest over what is
// not in it, so that values cannot be guessed back.
func TestNoDigestOfSecrets(t *testing.T) {
	pin := session.Spec{Env: map[string]string{"PIN": "4711"}}.WithDefaults()
	other := session.Spec{Env: map[string]string{"PIN": "0815"}}.WithDefaults()
	a, err := pin.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := other.Digest(); err != nil || a != b {
		t.Errorf("digests %s and %s tell values apart, %v", a, b, err)
	}
}

func TestEventSkeleton(t *testing.T) {
	id := session.NewID()
	e := testEntry("egress.connect.intent", "r", nil)
	e.Object, e.Trace, e.Decision = "flow/1", trace.ID("4bf92f3577b34da6a3ce929d0e0e4736"), Decision{Verdict: Allow, Policy: "sha256:0"}
	h := Start(SessionRecord(id), "")
	h.Seq = 3
	s, err := Next(h, session.Fence{Node: "n1", Generation: 4}, e, testMoment)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"v":1,"record":"session/` + string(id) + `","seq":4,"prev":"` + strings.Repeat("0", 64) + `","time":"2026-01-02T03:04:05.678901Z",` +
		`"boot":"boot-1","uptime_us":5000000,"node":"n1","generation":4,"trace":"4bf92f3577b34da6a3ce929d0e0e4736","action":"egress.connect.intent",` +
		`"outcome":"pending","actor":{"subject":"key:0badcafe","on_behalf_of":"ada","trigger":"ci"},"object":"flow/1",` +
		`"decision":{"verdict":"allow","policy":"sha256:0"},"ref":"r","commit":"` + s.Event.Commit + `"}`
	if string(s.Raw) != want {
		t.Errorf("got  %s\nwant %s", s.Raw, want)
	}
	if got, ok := s.Event.Session(); !ok || got != id || s.Event.SandboxID() != id.Sandbox(4) {
		t.Errorf("session %s, sandbox %s", got, s.Event.SandboxID())
	}
	for what, change := range map[string]func(*Entry){
		"an object with a control character": func(e *Entry) { e.Object = "a\x1bb" },
		"a long ref":                         func(e *Entry) { e.Ref = strings.Repeat("x", MaxRef+1) },
		"a trace id of zeros":                func(e *Entry) { e.Trace = trace.ID(strings.Repeat("0", 32)) },
		"an unknown verdict":                 func(e *Entry) { e.Decision.Verdict = "maybe" },
		"a policy without verdict":           func(e *Entry) { e.Decision.Verdict = "" },
		"an action of one word":              func(e *Entry) { e.Action, e.Outcome = "word", OK },
		"an outcome of an intent":            func(e *Entry) { e.Outcome = OK },
	} {
		bad := e
		change(&bad)
		if _, err := Prepare(bad); !kind.Is(err, kind.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Next(h, session.Fence{Node: "a/b"}, e, testMoment); !kind.Is(err, kind.Invalid) {
		t.Errorf("a node that is none: %v", err)
	}
}

func TestRecordID(t *testing.T) {
	id := session.NewID()
	for _, good := range []RecordID{SessionRecord(id), AddendaRecord(id), SystemRecord("node-1", 1), SystemRecord("n", 1<<62)} {
		if got, err := ParseRecordID(string(good)); err != nil || got != good {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{"", "session/", "session/x", "other/" + string(id), "system/n", "system/n/0", "system/n/01", "system/n/x", "system//1", "system/a b/1", "system/n/1/2", "system/n/-1", "session/" + string(id) + "/1"} {
		if _, err := ParseRecordID(bad); !kind.Is(err, kind.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestRotation(t *testing.T) {
	dir := t.TempDir()
	first, err := LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	second, err := first.Rotate(dir)
	if err != nil {
		t.Fatal(err)
	}
	third, err := second.Rotate(dir)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := LoadSigner(dir, true)
	if err != nil || loaded.Public().Fingerprint() != third.Public().Fingerprint() || len(loaded.Rotations()) != 2 {
		t.Fatalf("loaded %v, %v", loaded, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, PublicKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ParsePublicKeys(text)
	if err != nil || len(keys) != 3 || keys[0].Fingerprint() != third.Public().Fingerprint() || keys[2].Fingerprint() != first.Public().Fingerprint() {
		t.Errorf("public keys %v, %v", keys, err)
	}
	b := newBuilder(t).life()
	b.signer, b.rotations = loaded, loaded.Rotations()
	r := check(t, "first key pinned", b.export(true), []PublicKey{first.Public()}, VerifyOptions{}, "")
	if r.Key != third.Public().Fingerprint() || r.Pinned != first.Public().Fingerprint() || !strings.Contains(r.String(), "by rotation") {
		t.Errorf("key %s from %s:\n%s", r.Key, r.Pinned, r)
	}
	check(t, "another key pinned", b.export(true), []PublicKey{GenerateSigner().Public()}, VerifyOptions{}, "not signed by a pinned key")
	b.rotations = loaded.Rotations()[1:]
	check(t, "a rotation missing", b.export(true), []PublicKey{first.Public()}, VerifyOptions{}, "not signed by a pinned key")
	// A statement that the new key signs itself extends no trust.
	self := GenerateSigner()
	forged, err := self.envelope(RotationType, Subject{Name: "key"}, Rotation{Version: 1, Old: first.Public().Fingerprint(), New: self.Public().Fingerprint(), NewKey: self.Public().key})
	if err != nil {
		t.Fatal(err)
	}
	b.signer, b.rotations = self, []Seal{forged}
	check(t, "a forged rotation", b.export(true), []PublicKey{first.Public()}, VerifyOptions{}, "not signed by a pinned key")
	b.rotations = []Seal{{PayloadType: PayloadType, Payload: []byte("{}")}}
	check(t, "no rotation", b.export(true), []PublicKey{first.Public()}, VerifyOptions{}, "rotation 1")
}

func TestLostKey(t *testing.T) {
	dir := t.TempDir()
	if _, err := LoadSigner(dir, true); !kind.Is(err, kind.Conflict) || !strings.Contains(kind.Hint(err), "bivy audit key rotate --lost") {
		t.Errorf("no key although there are seals: %v, hint %q", err, kind.Hint(err))
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("the refusal left %v", entries)
	}
	first, err := LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := RotateLost(dir); !kind.Is(err, kind.Conflict) {
		t.Errorf("a key that is there: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, SigningKeyFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSigner(dir, true); !kind.Is(err, kind.Conflict) {
		t.Errorf("a lost key: %v", err)
	}
	if _, err := LoadSigner(dir, false); !kind.Is(err, kind.Conflict) {
		t.Errorf("a lost key that was published, without seals: %v", err)
	}
	next, err := RotateLost(dir)
	if err != nil {
		t.Fatal(err)
	}
	r, err := next.Rotations()[0].Rotation()
	if err != nil || !r.Lost || r.Old != first.Public().Fingerprint() || r.New != next.Public().Fingerprint() {
		t.Errorf("rotation %+v, %v", r, err)
	}
	if loaded, err := LoadSigner(dir, true); err != nil || loaded.Public().Fingerprint() != next.Public().Fingerprint() {
		t.Errorf("after the replacement: %v", err)
	}
	b := newBuilder(t).life()
	b.signer, b.rotations = next, next.Rotations()
	check(t, "the old key pinned", b.export(true), []PublicKey{first.Public()}, VerifyOptions{}, "not signed by a pinned key")
	check(t, "the new key pinned", b.export(true), []PublicKey{next.Public()}, VerifyOptions{}, "")
}

// TestRotationInterrupted: whatever part of a rotation is on the disk, the
// signer that is loaded is one that the history knows.
func TestRotationInterrupted(t *testing.T) {
	dir := t.TempDir()
	first, err := LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string, data []byte, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, mode); err != nil {
			t.Fatal(err)
		}
	}
	other, err := GenerateSigner().private()
	if err != nil {
		t.Fatal(err)
	}
	// The new key is there, the history does not name it.
	put(nextKeyFile, other, 0o600)
	if s, err := LoadSigner(dir, true); err != nil || s.Public().Fingerprint() != first.Public().Fingerprint() {
		t.Errorf("before the history was written: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, nextKeyFile)); err == nil {
		t.Error("the unused key is still there")
	}
	// The history names it, and the old key is still in place.
	old, err := os.ReadFile(filepath.Join(dir, SigningKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	second, err := first.Rotate(dir)
	if err != nil {
		t.Fatal(err)
	}
	current, err := second.private()
	if err != nil {
		t.Fatal(err)
	}
	put(nextKeyFile, current, 0o600)
	put(SigningKeyFile, old, 0o600)
	if s, err := LoadSigner(dir, true); err != nil || s.Public().Fingerprint() != second.Public().Fingerprint() {
		t.Errorf("after the history was written: %v", err)
	}
	put(RotationsFile, []byte("{}\n"), 0o644)
	if _, err := LoadSigner(dir, true); !kind.Is(err, kind.Invalid) {
		t.Errorf("a broken history: %v", err)
	}
}

// chainOf makes a sealed or open segment.
func chainOf(t testing.TB, signer *Signer, node session.NodeID, number uint64, root string, sealed bool, entries ...Entry) (SegmentExport, Head) {
	t.Helper()
	h := Start(SystemRecord(node, number), root)
	counts := map[Action]uint64{}
	var all []Stored
	entries = append([]Entry{testEntry(SegmentOpened, "", nil)}, entries...)
	if sealed {
		entries = append(entries, testEntry(SegmentClosed, "", nil))
	}
	for _, e := range entries {
		s, err := Next(h, session.Fence{Node: node}, e, testMoment)
		if err != nil {
			t.Fatal(err)
		}
		all, h = append(all, s), s.Head()
		counts[e.Action]++
	}
	x := SegmentExport{Events: each(all)}
	if sealed {
		end := h
		end.Counts = counts
		seal, err := signer.SealSegment(end, testHeads(), SegmentCloseout{OpenedAt: testMoment.Now, SealedAt: testMoment.Now})
		if err != nil {
			t.Fatal(err)
		}
		x.Seal = &seal
	}
	return x, h
}

func systemExport(t testing.TB, node session.NodeID, segments ...SegmentExport) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := ExportSystem(&out, SystemExport{Node: node, Segments: segments}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestVerifySystem(t *testing.T) {
	signer := GenerateSigner()
	keys := []PublicKey{signer.Public()}
	one, h1 := chainOf(t, signer, "n", 1, "", true, testEntry("server.started", "", nil), testEntry("future.thing", "", nil))
	two, h2 := chainOf(t, signer, "n", 2, h1.Root(), true, testEntry("key.created", "", nil))
	three, h3 := chainOf(t, signer, "n", 3, h2.Root(), false, testEntry("template.build.intent", "t", nil))
	verify := func(what string, data []byte, o VerifyOptions, want string) SystemReport {
		t.Helper()
		r, err := VerifySystem(bytes.NewReader(data), keys, o)
		if want == "" && err != nil || want != "" && (!kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", what, err, want)
		}
		return r
	}
	r := verify("all", systemExport(t, "n", one, two, three), VerifyOptions{Node: "n"}, "")
	if r.Segments != 3 || r.Sealed != 2 || r.Events != 4+3+2 || r.Unsealed != 2 || len(r.Open) != 1 || r.Last != (OpenHead{h3.Record, h3.Seq, h3.Hash}) || r.Closeout.Segment != 2 {
		t.Errorf("report %+v", r)
	}
	for _, want := range []string{"verified: system record of node n, 9 events in 3 segments, 2 sealed", "the last 2 events", "1 intent without an outcome"} {
		if !strings.Contains(r.String(), want) {
			t.Errorf("no %q in\n%s", want, r)
		}
	}
	if r := verify("all sealed", systemExport(t, "n", one, two), VerifyOptions{}, ""); r.Unsealed != 0 || strings.Contains(r.String(), "not sealed") {
		t.Errorf("report %s", r)
	}
	if r := verify("first, open", systemExport(t, "n", SegmentExport{Events: one.Events}), VerifyOptions{}, "no seal after the end of segment 1"); r.Segments != 0 {
		t.Errorf("a report beside the error: %+v", r)
	}
	verify("of another node", systemExport(t, "n", one), VerifyOptions{Node: "m"}, "the record is of node n, not of m")
	verify("the first missing", systemExport(t, "n", two), VerifyOptions{}, `the event is of "system/n/2", the record is system/n/1`)
	verify("one missing", systemExport(t, "n", one, three), VerifyOptions{}, `the event is of "system/n/3"`)
	verify("swapped", systemExport(t, "n", two, one), VerifyOptions{}, `the event is of "system/n/2"`)
	other, _ := chainOf(t, signer, "n", 1, "", true)
	verify("the first replaced", systemExport(t, "n", other, two), VerifyOptions{}, "segment 2, event 1 (line 5): it does not begin where it must")
	verify("of two nodes", systemExport(t, "m", one), VerifyOptions{}, `the event is of "system/n/1"`)
	verify("a node that is none", systemExport(t, "a b", one), VerifyOptions{}, "want one of a node's system record")
	verify("nothing", systemExport(t, "n"), VerifyOptions{}, "holds no events")
	stranger, _ := chainOf(t, GenerateSigner(), "n", 1, "", true)
	verify("another key", systemExport(t, "n", stranger), VerifyOptions{}, "not signed by a pinned key")
	verify("held head", systemExport(t, "n", one, two), VerifyOptions{Contains: []OpenHead{{h3.Record, h3.Seq, h3.Hash}}}, "system/n/3 is missing")
	verify("held head of more events", systemExport(t, "n", one, two), VerifyOptions{Contains: []OpenHead{{h2.Record, h2.Seq + 1, h2.Hash}}}, "the end is missing")
	if r := verify("held heads", systemExport(t, "n", one, two, three), VerifyOptions{Contains: []OpenHead{{h2.Record, h2.Seq, h2.Hash}, {h3.Record, h3.Seq, h3.Hash}}}, ""); r.Contained != 2 {
		t.Errorf("%d heads found", r.Contained)
	}
	if _, err := Verify(bytes.NewReader(systemExport(t, "n", one)), keys, VerifyOptions{}); err == nil {
		t.Error("a system record passed as a session's")
	}
	b := newBuilder(t).life()
	verify("a session's record", b.export(true), VerifyOptions{}, "want one of a node's system record")
	open, _ := chainOf(t, signer, "n", 1, "", true, testEntry("x.y.intent", "r", nil))
	verify("an intent without an outcome", systemExport(t, "n", open), VerifyOptions{}, "segment 1, event 2")
}

// TestTree compares roots with those of RFC 6962's reference implementation
// (github.com/google/certificate-transparency, merkletree tests).
func TestTree(t *testing.T) {
	leaves := []string{"", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"}
	roots := []string{
		"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		"6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
		"fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
		"aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
		"d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
		"4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
		"76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
		"ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
		"5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
	}
	var tree Tree
	for i, want := range roots {
		if tree.Size() != uint64(i) || tree.Root() != want {
			t.Errorf("%d leaves: root %s, want %s", tree.Size(), tree.Root(), want)
		}
		back, err := ParseTree(tree.Encode())
		if err != nil || back.Root() != want || back.Size() != tree.Size() {
			t.Errorf("%d leaves read back: %s, %v", i, back.Root(), err)
		}
		if i < len(leaves) {
			data, err := hex.DecodeString(leaves[i])
			if err != nil {
				t.Fatal(err)
			}
			before := tree
			root := before.Root()
			tree.Append(data)
			if before.Root() != root || before.Size() != uint64(i) {
				t.Error("a copy of the tree changed with it")
			}
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, 7), make([]byte, 9), append([]byte{0, 0, 0, 0, 0, 0, 0, 3}, make([]byte, 32)...)} {
		if _, err := ParseTree(bad); err == nil {
			t.Errorf("%d bytes were read as a tree", len(bad))
		}
	}
}

func TestVerifyHeads(t *testing.T) {
	head := func(r RecordID, seq uint64, sealed bool) ListedRecord {
		return ListedRecord{Record: r, Seq: seq, Hash: hashOf([]byte(fmt.Sprint(r, seq))), Sealed: sealed}
	}
	session := func(i int) RecordID { return RecordID(fmt.Sprintf("session/%020d", i)) }
	var list []ListedRecord
	var tree Tree
	for i := range 5 {
		l := head(session(i), 3, true)
		list = append(list, l)
		tree.Append(Head{Record: l.Record, Seq: l.Seq, Hash: l.Hash}.Leaf())
	}
	open := func(l ListedRecord) OpenHead { return OpenHead{l.Record, l.Seq, l.Hash} }
	list = append(list, head(session(7), 4, false), head(session(8), 4, false), head("system/n/2", 6, false))
	held := NewHeads("n", time.Now(), tree, []OpenHead{open(list[6]), open(list[5])}, open(list[7]))
	clone := func() []ListedRecord { return append([]ListedRecord{}, list...) }
	for _, c := range []struct {
		what string
		now  func() []ListedRecord
		want string // empty: agrees
	}{
		{"the same", clone, ""},
		{"more of each", func() []ListedRecord {
			l := append(clone()[:5:5], head(session(7), 9, true), head("addenda/00000000000000000001", 1, true), head(session(8), 5, false), head(session(9), 1, false), head("system/n/2", 7, false))
			return l
		}, ""},
		{"a sealed record removed", func() []ListedRecord { l := clone(); return append(l[:2:2], l[3:]...) }, "5 records were sealed by then, the listing has 4"},
		{"a sealed record replaced", func() []ListedRecord { l := clone(); l[2].Hash = l[3].Hash; return l }, "one of the 5 records"},
		{"sealed records reordered", func() []ListedRecord { l := clone(); l[2], l[3] = l[3], l[2]; return l }, "one of the 5 records"},
		{"an open record removed", func() []ListedRecord { l := clone(); return append(l[:5:5], l[6:]...) }, "session/00000000000000000007 is missing"},
		{"an open record cut", func() []ListedRecord { l := clone(); l[5].Seq = 2; return l }, "had 4 events and has 2"},
		{"an open record replaced", func() []ListedRecord { l := clone(); l[5].Hash = l[6].Hash; return l }, "event 4 of session/00000000000000000007 was replaced"},
		{"the system record cut", func() []ListedRecord { l := clone(); l[7].Seq = 5; return l }, "system/n/2 had 6 events and has 5"},
		{"the system record removed", func() []ListedRecord { l := clone(); return l[:7] }, "system/n/2 is missing"},
		{"everything removed", func() []ListedRecord { return nil }, "5 records were sealed by then, the listing has 0"},
		{"an open one before a sealed one", func() []ListedRecord { l := clone(); return append(l[5:], l[:5]...) }, "sealed record after an open one"},
	} {
		now := c.now()
		r, err := VerifyHeads(held, func(fn func(ListedRecord) error) error {
			for _, l := range now {
				if err := fn(l); err != nil {
					return err
				}
			}
			return nil
		})
		if c.want == "" && err != nil || c.want != "" && (!kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.what, err, c.want)
		}
		if c.what == "more of each" && (r.Sealed != 5 || r.Since != 2 || len(r.Continued) != 3) {
			t.Errorf("%s: %+v", c.what, r)
		}
	}
	boom := errors.New("gone")
	if _, err := VerifyHeads(held, func(func(ListedRecord) error) error { return boom }); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
}

func TestOpenHeads(t *testing.T) {
	signer := GenerateSigner()
	held := testHeads()
	seal, err := signer.SignHeads(held)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(seal)
	if err != nil {
		t.Fatal(err)
	}
	got, key, err := OpenHeads(data, []PublicKey{signer.Public()}, nil)
	if err != nil || key != signer.Public().Fingerprint() || got.TreeRoot != held.TreeRoot || len(got.Open) != 1 || got.System != held.System {
		t.Errorf("%+v, %v", got, err)
	}
	if _, _, err := OpenHeads(data, []PublicKey{GenerateSigner().Public()}, nil); !kind.Is(err, kind.Invalid) {
		t.Errorf("another key: %v", err)
	}
	// The statements within a record of a node have the digest of the list only.
	compact := held
	compact.Open = nil
	if seal, err = signer.SignHeads(compact); err != nil {
		t.Fatal(err)
	}
	if data, err = json.Marshal(seal); err != nil {
		t.Fatal(err)
	}
	if got, _, err := OpenHeads(data, []PublicKey{signer.Public()}, nil); err != nil || len(got.Open) != 0 || got.OpenCount != 1 {
		t.Errorf("a statement without its list: %+v, %v", got, err)
	}
	for what, change := range map[string]func(*Heads){
		"a record replaced":   func(h *Heads) { h.Open[0].Seq++ },
		"a newer version":     func(h *Heads) { h.Version = 2 },
		"a root that is none": func(h *Heads) { h.TreeRoot = "x" },
		"a node that is none": func(h *Heads) { h.Node = "" },
		"a head of nothing":   func(h *Heads) { h.System.Seq = 0 },
	} {
		bad := testHeads()
		change(&bad)
		seal, err := signer.envelope(HeadsType, Subject{Name: "heads/" + string(bad.Node)}, bad)
		if err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(seal)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := OpenHeads(data, []PublicKey{signer.Public()}, nil); !kind.Is(err, kind.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
