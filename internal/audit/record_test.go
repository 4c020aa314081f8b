package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/kind"
	"bivy/internal/session"
)

var (
	testActor  = session.Principal{Subject: "key:0badcafe", OnBehalfOf: "ada", Trigger: "ci"}
	testMoment = Moment{Now: time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.UTC), Boot: "boot-1", Uptime: 5 * time.Second}
)

var testFence = session.Fence{Node: "node-1", Generation: 1}

// builder makes records for tests to change.
type builder struct {
	t         testing.TB
	id        session.ID
	signer    *Signer
	rotations []Seal
	sections  map[string]Section
	head      Head
	events    []Stored
	counts    map[Action]uint64
	after     Head     // of the addenda
	addenda   []Stored // empty: none
}

func newBuilder(t testing.TB) *builder {
	id := session.NewID()
	return &builder{t: t, id: id, signer: GenerateSigner(), head: Start(SessionRecord(id), ""), counts: map[Action]uint64{}}
}

func testEntry(a Action, ref string, payload any) Entry {
	e := Entry{Action: a, Outcome: OK, Actor: testActor, Ref: ref, Payload: payload}
	if a.Intent() {
		e.Outcome = Pending
	}
	return e
}

func (b *builder) add(a Action, ref string, payload any) *builder {
	b.t.Helper()
	return b.entry(testEntry(a, ref, payload))
}

// conclude adds the outcome of intent seq.
func (b *builder) conclude(seq uint64, a Action, ref string, payload any) *builder {
	b.t.Helper()
	e := testEntry(a, ref, payload)
	e.Concludes = seq
	return b.entry(e)
}

func (b *builder) entry(e Entry) *builder {
	b.t.Helper()
	s, err := Next(b.head, testFence, e, testMoment)
	if err != nil {
		b.t.Fatal(err)
	}
	b.events, b.head = append(b.events, s), s.Head()
	b.counts[e.Action]++
	return b
}

// addendum adds an event after the seal.
func (b *builder) addendum(e Entry) *builder {
	b.t.Helper()
	if len(b.addenda) == 0 {
		b.after = Start(AddendaRecord(b.id), b.head.Root())
	}
	s, err := Next(b.after, testFence, e, testMoment)
	if err != nil {
		b.t.Fatal(err)
	}
	b.addenda, b.after = append(b.addenda, s), s.Head()
	return b
}

// life is an ordinary record of 8 events.
func (b *builder) life() *builder {
	return b.add(SessionCreated, "", map[string]string{"spec": "…"}).
		add(StepIntent, "start", nil).
		conclude(2, StepDone, "start", nil).
		add(SessionRunning, "", nil).
		add(CommandIntent, "c1", map[string]any{"argv": []string{"ls", "-l"}}).
		conclude(5, CommandEnded, "c1", map[string]int{"exit": 0}).
		add(SessionEnding, "", map[string]string{"reason": "requested"}).
		add(SessionEnded, "", nil)
}

// testHeads is the state of a node with three sealed records and an open one.
func testHeads() Heads {
	var tree Tree
	for range 3 {
		tree.Append([]byte("leaf"))
	}
	h := Start("session/aaaaaaaaaaaaaaaaaaaa", "")
	return NewHeads("node-1", testMoment.Now, tree, []OpenHead{{Record: h.Record, Seq: 7, Hash: h.Hash}}, OpenHead{Record: "system/node-1/2", Seq: 9, Hash: h.Hash})
}

func (b *builder) seal() Seal {
	b.t.Helper()
	h := b.head
	h.Counts = b.counts
	s, err := b.signer.Seal(h, testHeads(), Closeout{
		Session: b.id, Owner: testActor, Reason: session.Requested, SealedAt: testMoment.Now,
		CreatedAt: testMoment.Now, EndedAt: testMoment.Now, Residuals: []string{"a key that lives until noon"}, Sections: b.sections,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *builder) sealAddenda() Seal {
	b.t.Helper()
	h := b.after
	h.After = b.head.Root()
	s, err := b.signer.SealAddenda(h, testMoment.Now)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func each(all []Stored) Each {
	return func(yield func(Stored) error) error {
		for _, e := range all {
			if err := yield(e); err != nil {
				return err
			}
		}
		return nil
	}
}

func (b *builder) each(yield func(Stored) error) error { return each(b.events)(yield) }

// export exports the record, sealed or not.
func (b *builder) export(sealed bool) []byte {
	b.t.Helper()
	x := SessionExport{Session: b.id, Rotations: b.rotations, Events: b.each}
	if sealed {
		s := b.seal()
		x.Seal = &s
	}
	if len(b.addenda) > 0 {
		s := b.sealAddenda()
		x.Addenda, x.AddendaSeal = each(b.addenda), &s
	}
	var out bytes.Buffer
	if err := Export(&out, x); err != nil {
		b.t.Fatal(err)
	}
	return out.Bytes()
}

// lines is export as its lines without newlines.
func (b *builder) lines(sealed bool) []string {
	b.t.Helper()
	return strings.Split(strings.TrimSuffix(string(b.export(sealed)), "\n"), "\n")
}

func join(lines []string) string { return strings.Join(lines, "\n") + "\n" }

func TestVerify(t *testing.T) {
	b := newBuilder(t).life()
	r, err := Verify(strings.NewReader(join(b.lines(true))), []PublicKey{GenerateSigner().Public(), b.signer.Public()}, VerifyOptions{Session: b.id})
	if err != nil {
		t.Fatal(err)
	}
	key := b.signer.Public().Fingerprint()
	want := "verified: session " + string(b.id) + ", 8 events, 0 addenda, sealed 2026-01-02T03:04:05Z, key " + key +
		"\n1 residual: the end could not prove\n  a key that lives until noon"
	if r.String() != want {
		t.Errorf("got  %s\nwant %s", r, want)
	}
	if r.Key != key || r.Pinned != key || r.Residuals != 1 || r.Record != SessionRecord(b.id) {
		t.Errorf("report %+v", r)
	}
	if r.Session != b.id || !r.Sealed || r.Erased != 0 || r.Closeout.Result != ClosedWithResiduals || r.Closeout.Owner != testActor {
		t.Errorf("report %+v", r)
	}
	if d := cmp.Diff(b.counts, r.Counts); d != "" {
		t.Error(d)
	}
}

func TestVerifyOpenRecord(t *testing.T) {
	b := newBuilder(t).add(SessionCreated, "", nil).add(CommandIntent, "c", nil)
	text := join(b.lines(false))
	if _, err := Verify(strings.NewReader(text), nil, VerifyOptions{}); err == nil {
		t.Error("an open record passed without the option")
	}
	r, err := Verify(strings.NewReader(text), nil, VerifyOptions{AllowOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	if r.Sealed || strings.Contains(r.String(), "verified") || len(r.Open) != 1 || r.Open[0].Ref != "c" {
		t.Errorf("report %+v: %s", r, r)
	}
}

// edit changes the JSON of a line of an export.
func edit(t *testing.T, line string, change func(m map[string]any)) string {
	t.Helper()
	m := map[string]any{}
	if err := json.Unmarshal([]byte(line), &m); err != nil {
		t.Fatal(err)
	}
	change(m)
	out, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestVerifyRefuses is the list of what an attacker may try. Line 0 is the
// header, line n event n, line 9 the seal.
func TestVerifyRefuses(t *testing.T) {
	swap := func(l []string, i, j int) []string { l[i], l[j] = l[j], l[i]; return l }
	drop := func(l []string, i int) []string { return append(l[:i:i], l[i+1:]...) }
	rawEdit := func(t *testing.T, line, from, to string, rehash bool) string {
		return edit(t, line, func(m map[string]any) {
			raw := m["event"].(string)
			if !strings.Contains(raw, from) {
				t.Fatalf("%s does not hold %s", raw, from)
			}
			raw = strings.Replace(raw, from, to, 1)
			m["event"] = raw
			if rehash {
				m["hash"] = hashOf([]byte(raw))
			}
		})
	}
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, b *builder, l []string) string // the export
		want  string                                            // part of the message
	}{
		{"empty", func(*testing.T, *builder, []string) string { return "" }, "line 1: the export is empty"},
		{"a newline", func(*testing.T, *builder, []string) string { return "\n" }, "line 1: not the header"},
		{"header only", func(_ *testing.T, _ *builder, l []string) string { return join(l[:1]) }, "holds no events"},
		{"header and seal", func(_ *testing.T, _ *builder, l []string) string { return join([]string{l[0], l[9]}) }, "holds no events"},
		{"no header", func(_ *testing.T, _ *builder, l []string) string { return join(l[1:]) }, "line 1: not the header"},
		{"another format", func(_ *testing.T, _ *builder, l []string) string {
			l[0] = strings.Replace(l[0], `"bivy_record":1`, `"bivy_record":2,"more":1`, 1)
			return join(l)
		}, "the export format has version 2; this bivy reads version 1"},
		{"another session in the header", func(_ *testing.T, b *builder, l []string) string {
			l[0] = strings.Replace(l[0], string(b.id), string(session.NewID()), 1)
			return join(l)
		}, "event 1 (line 2): the event is of \"session/"},

		{"edited", func(t *testing.T, _ *builder, l []string) string {
			l[5] = rawEdit(t, l[5], `"subject":"key:0badcafe"`, `"subject":"key:ba5eba11"`, false)
			return join(l)
		}, "event 5 (line 6): the event was changed"},
		{"edited and hashed anew", func(t *testing.T, _ *builder, l []string) string {
			l[5] = rawEdit(t, l[5], `"subject":"key:0badcafe"`, `"subject":"key:ba5eba11"`, true)
			return join(l)
		}, "event 6 (line 7): it does not follow the event before"},
		{"the last edited and hashed anew", func(t *testing.T, _ *builder, l []string) string {
			l[8] = rawEdit(t, l[8], `"outcome":"ok"`, `"outcome":"failed"`, true)
			return join(l)
		}, "the seal is over another record"},
		{"a byte of white space", func(t *testing.T, _ *builder, l []string) string {
			l[3] = rawEdit(t, l[3], `"v":1,`, `"v":1, `, false)
			return join(l)
		}, "event 3 (line 4): the event was changed"},
		{"reordered", func(_ *testing.T, _ *builder, l []string) string { return join(swap(l, 3, 4)) }, "event 3 (line 4): event 4 is in its place"},
		{"dropped", func(_ *testing.T, _ *builder, l []string) string { return join(drop(l, 5)) }, "event 5 (line 6): event 6 is in its place"},
		{"duplicated", func(_ *testing.T, _ *builder, l []string) string {
			return join(append(l[:6:6], l[5:]...))
		}, "event 6 (line 7): event 5 is in its place"},
		{"head cut off", func(_ *testing.T, _ *builder, l []string) string { return join(append(l[:1:1], l[3:]...)) }, "event 1 (line 2): the record begins with event 3"},
		{"tail cut off", func(_ *testing.T, _ *builder, l []string) string { return join(l[:6]) }, "no seal after event 5"},
		{"seal cut off", func(_ *testing.T, _ *builder, l []string) string { return join(l[:9]) }, "no seal after event 8"},
		{"tail cut off before the seal", func(_ *testing.T, _ *builder, l []string) string { return join(append(l[:6:6], l[9])) }, "the seal is over 8 events, the record has 5"},
		{"cut in a line", func(_ *testing.T, _ *builder, l []string) string { s := join(l); return s[:len(s)/2] }, "cut off: the line has no end"},
		{"last newline missing", func(_ *testing.T, _ *builder, l []string) string { return strings.TrimSuffix(join(l), "\n") }, "line 10: cut off"},

		{"resealed with another key", func(t *testing.T, b *builder, l []string) string {
			b.signer = GenerateSigner()
			return join(b.lines(true))
		}, "not signed by a pinned key"},
		{"all of it made anew", func(t *testing.T, b *builder, l []string) string {
			other := newBuilder(t)
			other.id, other.head = b.id, Start(SessionRecord(b.id), "")
			return join(other.life().lines(true))
		}, "not signed by a pinned key"},
		{"resealed under the pinned key's name", func(t *testing.T, b *builder, l []string) string {
			name := b.signer.Public().Fingerprint()
			b.signer = GenerateSigner()
			forged := b.seal()
			forged.Signatures[0].KeyID = name
			out, err := json.Marshal(sealLine{&forged})
			if err != nil {
				t.Fatal(err)
			}
			return join(append(l[:9:9], string(out)))
		}, "not signed by a pinned key"},
		{"the statement changed", func(t *testing.T, b *builder, l []string) string {
			seal := b.seal()
			seal.Payload = bytes.Replace(seal.Payload, []byte("closed_with_residuals"), []byte("closed"), 1)
			out, err := json.Marshal(sealLine{&seal})
			if err != nil {
				t.Fatal(err)
			}
			return join(append(l[:9:9], string(out)))
		}, "not signed by a pinned key"},
		{"the payload type changed", func(t *testing.T, b *builder, l []string) string {
			return join(append(l[:9:9], strings.Replace(l[9], "vnd.in-toto", "vnd.other", 1)))
		}, "not signed by a pinned key"},
		{"no signature", func(t *testing.T, b *builder, l []string) string {
			return join(append(l[:9:9], edit(t, l[9], func(m map[string]any) { m["seal"].(map[string]any)["signatures"] = []any{} })))
		}, "not signed by a pinned key"},
		{"a null seal", func(t *testing.T, b *builder, l []string) string { return join(append(l[:9:9], `{"seal":null}`)) }, "the seal is missing"},
		{"the seal of another record", func(t *testing.T, b *builder, l []string) string {
			other := newBuilder(t)
			other.signer = b.signer
			return join(append(l[:9:9], other.life().lines(true)[9]))
		}, "the seal is of session"},
		{"the seal of an earlier end", func(t *testing.T, b *builder, l []string) string {
			other := newBuilder(t)
			other.signer, other.id, other.head = b.signer, b.id, Start(SessionRecord(b.id), "")
			return join(append(l[:9:9], other.life().lines(true)[9]))
		}, "the seal is over another record"},
		{"the seal counts something else", func(t *testing.T, b *builder, l []string) string {
			b.counts = map[Action]uint64{SessionCreated: 8}
			return join(b.lines(true))
		}, "counts other actions"},

		{"payload swapped", func(t *testing.T, _ *builder, l []string) string {
			l[5] = edit(t, l[5], func(m map[string]any) { m["payload"] = `{"argv":["true"]}` })
			return join(l)
		}, "event 5 (line 6): the payload or its salt was changed"},
		{"payloads exchanged", func(t *testing.T, _ *builder, l []string) string {
			var five, six map[string]any
			l[5] = edit(t, l[5], func(m map[string]any) { five = m })
			l[6] = edit(t, l[6], func(m map[string]any) { six = m })
			five["payload"], six["payload"] = six["payload"], five["payload"]
			five["salt"], six["salt"] = six["salt"], five["salt"]
			l[5] = edit(t, l[5], func(m map[string]any) { m["payload"], m["salt"] = five["payload"], five["salt"] })
			l[6] = edit(t, l[6], func(m map[string]any) { m["payload"], m["salt"] = six["payload"], six["salt"] })
			return join(l)
		}, "event 5 (line 6): the payload or its salt was changed"},
		{"salt swapped", func(t *testing.T, _ *builder, l []string) string {
			l[5] = edit(t, l[5], func(m map[string]any) { m["salt"] = strings.Repeat("ab", 32) })
			return join(l)
		}, "event 5 (line 6): the payload or its salt was changed"},
		{"a byte moved from payload to salt", func(t *testing.T, b *builder, l []string) string {
			l[5] = edit(t, l[5], func(m map[string]any) {
				p := m["payload"].(string)
				m["salt"] = m["salt"].(string) + "7b"
				m["payload"] = p[1:]
			})
			return join(l)
		}, "event 5 (line 6): the salt is not 32 bytes"},
		{"only the salt erased", func(t *testing.T, _ *builder, l []string) string {
			l[5] = edit(t, l[5], func(m map[string]any) { delete(m, "salt") })
			return join(l)
		}, "event 5 (line 6): the salt is not 32 bytes"},
		{"only the payload erased", func(t *testing.T, _ *builder, l []string) string {
			l[5] = edit(t, l[5], func(m map[string]any) { delete(m, "payload") })
			return join(l)
		}, "event 5 (line 6): the payload or its salt was changed"},

		{"two sessions spliced", func(t *testing.T, b *builder, l []string) string {
			other := newBuilder(t).life().lines(true)
			return join(append(l[:5:5], other[5:]...))
		}, "event 5 (line 6): the event is of \"session/"},
		{"two records in one", func(t *testing.T, b *builder, l []string) string {
			return join(l) + join(newBuilder(t).life().lines(true))
		}, "after the seal come addenda and nothing else"},
		{"trailing garbage", func(_ *testing.T, _ *builder, l []string) string { return join(l) + "x\n" }, "after the seal come addenda and nothing else"},
		{"trailing garbage without an end", func(_ *testing.T, _ *builder, l []string) string { return join(l) + "x" }, "line 11: cut off"},
		{"trailing newline", func(_ *testing.T, _ *builder, l []string) string { return join(l) + "\n" }, "after the seal come addenda and nothing else"},
		{"an empty line inside", func(_ *testing.T, _ *builder, l []string) string {
			return join(append(l[:3:3], append([]string{""}, l[3:]...)...))
		}, "event 3 (line 4): the line does not decode"},
		{"a huge line", func(_ *testing.T, _ *builder, l []string) string {
			return join(append(l[:3:3], strings.Repeat("x", maxLine+1)))
		}, "line 4: longer than"},
		{"an event after the end", func(t *testing.T, b *builder, l []string) string {
			return join(b.add(StepDone, "x", nil).lines(true))
		}, "event 9 (line 10): there is an event after session.ended"},
		{"no end", func(t *testing.T, b *builder, l []string) string {
			b.events, b.head = b.events[:7], b.events[6].Head()
			delete(b.counts, SessionEnded)
			return join(b.lines(true))
		}, "event 7 (line 9): the last event is session.ending, not session.ended"},
		{"an intent without an outcome", func(t *testing.T, b *builder, l []string) string {
			o := newBuilder(t)
			o.signer = b.signer
			return join(o.add(SessionCreated, "", nil).add(CommandIntent, "c", nil).add(CommandStarted, "c", nil).add(SessionEnded, "", nil).lines(true))
		}, `event 2 (line 6): command.intent "c" has no outcome`},
		{"an unknown field in an event", func(t *testing.T, _ *builder, l []string) string {
			l[2] = rawEdit(t, l[2], `{"v":1`, `{"x":1,"v":1`, true)
			return join(l)
		}, "event 2 (line 3): the event does not decode"},
		{"a field twice in an event", func(t *testing.T, _ *builder, l []string) string {
			l[2] = rawEdit(t, l[2], `{"v":1`, `{"seq":7,"v":1`, true)
			return join(l)
		}, `occurs twice`},
		{"a field in capitals", func(t *testing.T, _ *builder, l []string) string {
			l[2] = rawEdit(t, l[2], `"seq":`, `"SEQ":`, true)
			return join(l)
		}, `unexpected name "SEQ"`},
		{"a field twice in a line", func(t *testing.T, _ *builder, l []string) string {
			l[2] = `{"event":"",` + l[2][1:]
			return join(l)
		}, `occurs twice`},
		{"an event of a later version", func(t *testing.T, _ *builder, l []string) string {
			l[2] = rawEdit(t, l[2], `{"v":1`, `{"v":2`, true)
			return join(l)
		}, "the event has version 2; this bivy reads version 1"},
		{"an event of a later version with more fields", func(t *testing.T, _ *builder, l []string) string {
			l[2] = rawEdit(t, l[2], `{"v":1`, `{"v":2,"more":[{}]`, true)
			return join(l)
		}, "the event has version 2; this bivy reads version 1"},
		{"no event in a line", func(t *testing.T, _ *builder, l []string) string { l[2] = `{}`; return join(l) }, "event 2 (line 3): the line holds no event"},
		{"a line that is no object", func(t *testing.T, _ *builder, l []string) string { l[2] = `[]`; return join(l) }, "event 2 (line 3): the line does not decode"},
		{"deep nesting", func(t *testing.T, _ *builder, l []string) string {
			l[2] = strings.Repeat("[", 100000)
			return join(l)
		}, "nested deeper"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBuilder(t).life()
			pinned := []PublicKey{b.signer.Public()}
			text := c.spoil(t, b, b.lines(true))
			r, err := Verify(strings.NewReader(text), pinned, VerifyOptions{})
			var fault *Fault
			if !kind.Is(err, kind.Invalid) || !errors.As(err, &fault) {
				t.Fatalf("got %v (report %q), want a fault", err, r)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
			if !reflect.DeepEqual(r, Report{}) {
				t.Errorf("a report beside the error: %+v", r)
			}
			if !utf8.ValidString(err.Error()) || strings.ContainsFunc(err.Error(), unicode.IsControl) {
				t.Errorf("the message is not fit for a terminal: %q", err)
			}
		})
	}
}

func TestVerifyNeedsAPinnedKey(t *testing.T) {
	b := newBuilder(t).life()
	for _, keys := range [][]PublicKey{nil, {}, {{}}} {
		if _, err := Verify(strings.NewReader(join(b.lines(true))), keys, VerifyOptions{AllowOpen: true}); err == nil {
			t.Errorf("verified with keys %v", keys)
		}
	}
	// Taking the seal away does not help, not even where open records pass.
	if _, err := Verify(strings.NewReader(join(b.lines(false))), nil, VerifyOptions{AllowOpen: true}); err == nil {
		t.Error("an ended record without its seal passed as an open one")
	}
	other := session.NewID()
	if _, err := Verify(strings.NewReader(join(b.lines(true))), []PublicKey{b.signer.Public()}, VerifyOptions{Session: other}); err == nil || !strings.Contains(err.Error(), string(other)) {
		t.Errorf("another session's record: %v", err)
	}
}

// TestEveryByteCounts flips each byte of an export in turn.
func TestEveryByteCounts(t *testing.T) {
	b := newBuilder(t).add(SessionCreated, "", nil).add(FileIntent, "f", nil).conclude(2, FileDone, "f", nil).add(SessionEnded, "", nil).addendum(testEntry(StepDone, "", nil))
	text := []byte(join(b.lines(true)))
	keys := []PublicKey{b.signer.Public()}
	survived := 0
	for i := range text {
		text[i] ^= 1
		if _, err := Verify(bytes.NewReader(text), keys, VerifyOptions{}); err == nil {
			// The name of the key beside the signature is a hint, not a claim,
			// and base64 has bits after the end of its data.
			survived++
			if !bytes.Contains(text[max(0, i-150):i+1], []byte(`"keyid"`)) && !bytes.Contains(text[i:min(len(text), i+4)], []byte(`"`)) {
				t.Errorf("byte %d can be changed: …%s…", i, text[max(0, i-40):min(len(text), i+40)])
			}
		}
		text[i] ^= 1
	}
	t.Logf("%d of %d bytes carry no meaning", survived, len(text))
}

func TestVerifyIsStreaming(t *testing.T) {
	// Far more events than fit the buffers, in a reader of one byte at a time.
	b := newBuilder(t).add(SessionCreated, "", nil)
	for range 500 {
		b.add(StepDone, "x", strings.Repeat("y", 500))
	}
	b.add(SessionEnded, "", nil)
	r, err := Verify(&slow{strings.NewReader(join(b.lines(true)))}, []PublicKey{b.signer.Public()}, VerifyOptions{})
	if err != nil || r.Events != 502 {
		t.Errorf("%d events, %v", r.Events, err)
	}
}

type slow struct{ r *strings.Reader }

func (s *slow) Read(p []byte) (int, error) { return s.r.Read(p[:1]) }

func TestReadErrorIsNotAFault(t *testing.T) {
	boom := errors.New("the disk is gone")
	b := newBuilder(t).life()
	_, err := Verify(&failing{strings.NewReader(join(b.lines(true))[:900]), boom}, nil, VerifyOptions{})
	var fault *Fault
	if !errors.Is(err, boom) || errors.As(err, &fault) {
		t.Errorf("got %v, want the reader's error and no judgement of the record", err)
	}
}

type failing struct {
	r   *strings.Reader
	err error
}

func (f *failing) Read(p []byte) (int, error) {
	if f.r.Len() == 0 {
		return 0, f.err
	}
	return f.r.Read(p)
}

func TestExportStops(t *testing.T) {
	boom := errors.New("client gone")
	err := Export(&bytes.Buffer{}, SessionExport{Session: session.NewID(), Events: func(func(Stored) error) error { return boom }})
	if !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
}

func TestSigner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "keys")
	first, err := LoadSigner(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadSigner(dir, false)
	if err != nil || again.Public().Fingerprint() != first.Public().Fingerprint() {
		t.Fatalf("again: %v", err)
	}
	path := filepath.Join(dir, SigningKeyFile)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	text, err := os.ReadFile(filepath.Join(dir, PublicKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ParsePublicKeys(text)
	if err != nil || len(keys) != 1 || keys[0].Fingerprint() != first.Public().Fingerprint() {
		t.Errorf("public key file: %v", err)
	}
	if !strings.HasPrefix(keys[0].Fingerprint(), "ed25519:") || !bytes.Contains(text, []byte(keys[0].Fingerprint())) {
		t.Errorf("fingerprint %s in\n%s", keys[0].Fingerprint(), text)
	}
	// A lost public key is written anew, a wrong one put right.
	if err := os.WriteFile(filepath.Join(dir, PublicKeyFile), GenerateSigner().Public().Export(), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSigner(dir, false); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile(filepath.Join(dir, PublicKeyFile)); err != nil || !bytes.Equal(now, text) {
		t.Errorf("public key file is\n%s", now)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("left in the directory: %v", entries)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSigner(dir, false); !kind.Is(err, kind.Conflict) || kind.Hint(err) == "" {
		t.Errorf("a key that others can read: %v", err)
	}
	for _, broken := range []string{"x", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"} {
		if err := os.WriteFile(path, []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadSigner(dir, false); !kind.Is(err, kind.Conflict) {
			t.Errorf("%.10q: %v", broken, err)
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != broken {
			t.Error("a broken key was replaced")
		}
	}
}

func TestSignerRace(t *testing.T) {
	dir := t.TempDir()
	prints := make(chan string, 16)
	for range cap(prints) {
		go func() {
			s, err := LoadSigner(dir, false)
			if err != nil {
				prints <- err.Error()
				return
			}
			prints <- s.Public().Fingerprint()
		}()
	}
	seen := map[string]int{}
	for range cap(prints) {
		seen[<-prints]++
	}
	if len(seen) != 1 {
		t.Errorf("makers of one key got %v", seen)
	}
}

func TestParsePublicKeys(t *testing.T) {
	a, b := GenerateSigner().Public(), GenerateSigner().Public()
	both := append(append([]byte("# two keys\r\n\r\n"), a.Export()...), b.Export()...)
	keys, err := ParsePublicKeys(both)
	if err != nil || len(keys) != 2 || keys[0].Fingerprint() != a.Fingerprint() || keys[1].Fingerprint() != b.Fingerprint() {
		t.Errorf("got %v, %v", keys, err)
	}
	for _, bad := range []string{
		"", "# only a comment", "x", string(a.Export()) + "x", "x" + string(a.Export()),
		string(a.Export())[:120], strings.Replace(string(a.Export()), "PUBLIC", "PRIVATE", 2),
		"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
	} {
		if keys, err := ParsePublicKeys([]byte(bad)); !kind.Is(err, kind.Invalid) || keys != nil {
			t.Errorf("%.60q: %v, %v", bad, keys, err)
		}
	}
}

func TestSealBoundsItsLists(t *testing.T) {
	b := newBuilder(t).life()
	c := Closeout{Session: b.id, Owner: session.Principal{Subject: strings.Repeat("s", 10000)}}
	for range 5000 {
		c.Residuals = append(c.Residuals, strings.Repeat("\xffr", 10000))
	}
	seal, err := b.signer.Seal(b.head, testHeads(), c)
	if err != nil {
		t.Fatal(err)
	}
	p, err := seal.Closeout()
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Residuals) != MaxResiduals || p.ResidualCount != 5000 || len(p.Residuals[0]) > 3*MaxResidualLength || len(p.Owner.Subject) > MaxActor+4 {
		t.Errorf("%d residuals of %d, the first of %d bytes", len(p.Residuals), p.ResidualCount, len(p.Residuals[0]))
	}
	var out bytes.Buffer
	if err := Export(&out, SessionExport{Session: b.id, Events: b.each, Seal: &seal}); err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(&out, []PublicKey{b.signer.Public()}, VerifyOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := b.signer.Seal(Start(SessionRecord(b.id), ""), testHeads(), Closeout{Session: b.id}); err == nil {
		t.Error("an empty record was sealed")
	}
	if _, err := b.signer.Seal(b.head, testHeads(), Closeout{Session: session.NewID()}); err == nil {
		t.Error("another session's record was sealed")
	}
}

func TestActorIsBounded(t *testing.T) {
	for _, text := range []string{strings.Repeat("é", 5000), strings.Repeat("\xff", 5000), "a\nb\x1b[0m\x00", strings.Repeat("\U0001F600", 1000)} {
		s, err := Next(Start(SessionRecord(session.NewID()), ""), testFence, Entry{Action: SessionCreated, Outcome: OK, Actor: session.Principal{Subject: text, Trigger: text}}, testMoment)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Event.Actor.Subject) > MaxActor || !utf8.ValidString(s.Event.Actor.Subject) {
			t.Errorf("subject of %d bytes", len(s.Event.Actor.Subject))
		}
		checkPrintable(t, s.Raw)
		back, err := ParseStored(s.Raw, s.Hash, s.Salt, s.Payload)
		if err != nil || back.Event != s.Event {
			t.Errorf("reads back as %+v, %v", back.Event, err)
		}
	}
}

func checkPrintable(t testing.TB, b []byte) {
	t.Helper()
	if !utf8.Valid(b) || !json.Valid(b) {
		t.Errorf("not UTF-8 or not JSON: %.100q", b)
	}
	for _, r := range string(b) {
		if !unicode.IsPrint(r) {
			t.Errorf("%U in %.100q", r, b)
			return
		}
	}
}

// TestLostIntentIsAnEvent: the entry that says that an outcome is lost keeps the
// rules of entries, since it is written by the store and not by a caller.
func TestLostIntentIsAnEvent(t *testing.T) {
	i := Intent{Seq: 3, Action: StepIntent, Ref: "create.start"}
	if _, err := Prepare(i.Lost(session.Principal{Subject: "system:test"})); err != nil {
		t.Error(err)
	}
}
