package audit

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"time"
	"unicode/utf8"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// VerifyOptions narrows or widens what Verify accepts.
type VerifyOptions struct {
	Session   session.ID // the session that the record must be of; empty: any
	AllowOpen bool       // accept a record without a seal, of a session that has not ended
}

// Report is what a verified record is known to say.
type Report struct {
	Session  session.ID
	Events   uint64
	Erased   uint64 // events whose payload was erased; their skeletons verified
	Open     []Intent
	Counts   map[Action]uint64
	Sealed   bool
	SealedAt time.Time
	Key      string   // fingerprint of the pinned key that signed the seal
	Closeout Closeout // what the seal states; zero unless Sealed
}

// String returns the one line that says what was verified.
func (r Report) String() string {
	if !r.Sealed {
		return fmt.Sprintf("chain intact: %d events, not sealed: the session has not ended", r.Events)
	}
	return fmt.Sprintf("verified: %d events, sealed %s, key %s", r.Events, r.SealedAt.UTC().Format(time.RFC3339), r.Key)
}

// Fault is why a record does not verify.
type Fault struct {
	Seq  uint64 // the first bad event; 0 when the fault is not one event's
	Line int    // of the export, from 1
	Why  string
}

// Error names the event or else the line.
func (f *Fault) Error() string {
	if f.Seq > 0 {
		return fmt.Sprintf("event %d (line %d): %s", f.Seq, f.Line, f.Why)
	}
	return fmt.Sprintf("line %d: %s", f.Line, f.Why)
}

// maxOpenIntents bounds what a hostile export can make Verify remember.
const maxOpenIntents = 1 << 16

// Verify reads an export and checks all of it: that it holds one session's
// events in order and without gap, from session.created to session.ended;
// that each skeleton has its hash and stands on the one before; that each
// payload is the one its skeleton commits to, or was erased; that every intent
// has an outcome or is recorded as lost; and that the seal states this record
// and is signed by one of the pinned keys. Keys inside the export count for
// nothing, and without a pinned key no seal verifies.
//
// The error of a record that does not verify has kind Invalid and a Fault in
// its chain that names the first bad event. Verify needs no network and no
// memory in proportion to the record.
func Verify(r io.Reader, pinned []PublicKey, o VerifyOptions) (Report, error) {
	v := verifier{pinned: pinned, options: o, lines: bufio.NewReaderSize(r, 64<<10)}
	report, err := v.run()
	var fault *Fault
	switch {
	case errors.As(err, &fault):
		return Report{}, kind.Wrap(kind.Invalid, fmt.Errorf("the record does not verify: %w", err))
	case err != nil:
		return Report{}, fmt.Errorf("read the record: %w", err)
	}
	return report, nil
}

type verifier struct {
	pinned  []PublicKey
	options VerifyOptions
	lines   *bufio.Reader
	line    int

	head    Head
	last    Action
	counts  map[Action]uint64
	erased  uint64
	intents Intents
}

func (v *verifier) fault(seq uint64, format string, args ...any) error {
	return &Fault{Seq: seq, Line: max(v.line, 1), Why: fmt.Sprintf(format, args...)}
}

func (v *verifier) run() (Report, error) {
	if err := v.header(); err != nil {
		return Report{}, err
	}
	for {
		line, err := v.next()
		if errors.Is(err, io.EOF) {
			return v.finish(nil)
		}
		if err != nil {
			return Report{}, err
		}
		if bytes.HasPrefix(line, []byte(`{"seal":`)) {
			var s sealLine
			if err := strict(line, &s); err != nil {
				return Report{}, v.fault(0, "the seal does not decode: %v", err)
			}
			if s.Seal == nil {
				return Report{}, v.fault(0, "the seal is missing from its line")
			}
			return v.finish(s.Seal)
		}
		if err := v.event(line); err != nil {
			return Report{}, err
		}
	}
}

// next returns the next line without its newline, or io.EOF at the end.
func (v *verifier) next() ([]byte, error) {
	var line []byte
	for {
		part, err := v.lines.ReadSlice('\n')
		if len(line) == 0 && len(part) == 0 && errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		if len(line) == 0 {
			v.line++
		}
		if len(line)+len(part) > maxLine {
			return nil, v.fault(0, "longer than %d bytes", maxLine)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case errors.Is(err, io.EOF):
			return nil, v.fault(0, "cut off: the line has no end")
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

func (v *verifier) header() error {
	line, err := v.next()
	if errors.Is(err, io.EOF) {
		return v.fault(0, "the export is empty")
	}
	if err != nil {
		return err
	}
	var h headerLine
	if err := strict(line, &h); err != nil {
		return v.fault(0, "not the header of a bivy record: %v", err)
	}
	if h.Format != ExportFormat {
		return v.fault(0, "format %d; this bivy reads format %d", h.Format, ExportFormat)
	}
	id, err := session.ParseID(string(h.Session))
	if err != nil {
		return v.fault(0, "%v", err)
	}
	if v.options.Session != "" && id != v.options.Session {
		return v.fault(0, "the record is of session %s, not of %s", id, v.options.Session)
	}
	v.head = Start(id)
	v.counts = make(map[Action]uint64)
	return nil
}

func (v *verifier) event(line []byte) error {
	seq := v.head.Seq + 1
	var l eventLine
	if err := strict(line, &l); err != nil {
		return v.fault(seq, "the line does not decode: %v", err)
	}
	if l.Event == nil {
		return v.fault(seq, "the line holds no event")
	}
	raw := []byte(*l.Event)
	if hashOf(raw) != l.Hash {
		return v.fault(seq, "the event was changed: it does not have the hash written beside it")
	}
	ev, err := parseEvent(raw)
	if err != nil {
		return v.fault(seq, "%v", err)
	}
	switch {
	case ev.Session != v.head.Session:
		return v.fault(seq, "the event is of session %.64q, the record of %s", string(ev.Session), v.head.Session)
	case ev.Seq != seq && seq == 1:
		return v.fault(seq, "the record begins with event %d: its beginning is missing", ev.Seq)
	case ev.Seq != seq:
		return v.fault(seq, "event %d is in its place: events are missing, repeated or out of order", ev.Seq)
	case ev.Prev != v.head.Hash:
		return v.fault(seq, "it does not follow the event before: that one was changed or replaced")
	}
	if err := v.rules(ev); err != nil {
		return err
	}
	if err := v.payload(ev, l); err != nil {
		return err
	}
	v.intents.Add(ev.Seq, ev.Action, ev.Ref)
	if v.intents.Len() > maxOpenIntents {
		return v.fault(seq, "more than %d intents without an outcome", maxOpenIntents)
	}
	if v.counts[ev.Action]++; len(v.counts) > 1000 {
		return v.fault(seq, "more than 1000 kinds of action")
	}
	v.head.Seq, v.head.Hash, v.last = ev.Seq, l.Hash, ev.Action
	return nil
}

// rules checks what an event means in its place.
func (v *verifier) rules(ev Event) error {
	if v.last == SessionEnded {
		return v.fault(ev.Seq, "there is an event after %s", SessionEnded)
	}
	if opens := ev.Action == SessionCreated; opens != (ev.Seq == 1) {
		return v.fault(ev.Seq, "%s in this place: a record is opened by %s and by nothing else", ev.Action, SessionCreated)
	}
	if ev.Sandbox != "" {
		if owner, _, err := ev.Sandbox.Split(); err != nil || owner != ev.Session {
			return v.fault(ev.Seq, "sandbox %.64q is not of this session", string(ev.Sandbox))
		}
	}
	if err := checkEntry(Entry{Action: ev.Action, Outcome: ev.Outcome, Actor: ev.Actor, Ref: ev.Ref}); err != nil {
		return v.fault(ev.Seq, "%v", err)
	}
	return nil
}

func (v *verifier) payload(ev Event, l eventLine) error {
	if l.Salt == "" && l.Payload == "" {
		v.erased++
		return nil
	}
	salt, err := hex.DecodeString(l.Salt)
	if err != nil || len(salt) != saltSize {
		return v.fault(ev.Seq, "the salt is not %d bytes in hex", saltSize)
	}
	if commitment(salt, []byte(l.Payload)) != ev.Commit {
		return v.fault(ev.Seq, "the payload or its salt was changed: the event does not commit to them")
	}
	return nil
}

// finish checks the end: what the last line was, the seal, and that nothing
// comes after it.
func (v *verifier) finish(seal *Seal) (Report, error) {
	if v.head.Seq == 0 {
		return Report{}, v.fault(0, "the record holds no events")
	}
	report := Report{
		Session: v.head.Session,
		Events:  v.head.Seq,
		Erased:  v.erased,
		Open:    v.intents.Open(),
		Counts:  v.counts,
	}
	if seal == nil {
		if v.last == SessionEnded || !v.options.AllowOpen {
			return Report{}, v.fault(0, "there is no seal after event %d: the session has not ended, or the end of the record is missing", v.head.Seq)
		}
		return report, nil
	}
	key, statement, err := v.seal(seal)
	if err != nil {
		return Report{}, err
	}
	if v.last != SessionEnded {
		return Report{}, v.fault(v.head.Seq, "the last event is %s, not %s", v.last, SessionEnded)
	}
	if len(report.Open) > 0 {
		first := report.Open[0]
		return Report{}, v.fault(first.Seq, "%s %q has no outcome and is not recorded as lost", first.Action, first.Ref)
	}
	switch _, err := v.next(); {
	case err == nil:
		return Report{}, v.fault(0, "there is more after the seal")
	case !errors.Is(err, io.EOF):
		return Report{}, err
	}
	report.Sealed, report.SealedAt, report.Key, report.Closeout = true, statement.Predicate.SealedAt, key.Fingerprint(), statement.Predicate
	return report, nil
}

func (v *verifier) seal(seal *Seal) (PublicKey, Statement, error) {
	var none Statement
	fail := func(format string, args ...any) (PublicKey, Statement, error) {
		return PublicKey{}, none, v.fault(0, format, args...)
	}
	if len(v.pinned) == 0 {
		return fail("no public key was given to check the seal against")
	}
	key, ok := seal.signedBy(v.pinned)
	if !ok {
		var signers []string
		for _, s := range seal.Signatures[:min(len(seal.Signatures), 4)] {
			signers = append(signers, fmt.Sprintf("%.64q", s.KeyID))
		}
		return fail("the seal is not signed by a pinned key; it names %s", strings.Join(signers, ", "))
	}
	st, err := seal.Statement()
	if err != nil {
		return fail("%v", err)
	}
	c := st.Predicate
	if c.Session != v.head.Session {
		return fail("the seal is of session %s, the record of %s", c.Session, v.head.Session)
	}
	if c.Log.Count != v.head.Seq || c.Log.First != 1 || c.Log.Last != v.head.Seq {
		return fail("the seal is over %d events, the record has %d", c.Log.Count, v.head.Seq)
	}
	root := v.head.Root()
	if c.Log.Head != v.head.Hash || c.Log.Root != root ||
		len(st.Subject) != 1 || !maps.Equal(st.Subject[0].Digest, map[string]string{"sha256": root}) {
		return fail("the seal is over another record: its head is not the hash of event %d", v.head.Seq)
	}
	if c.Log.Counts != nil && !maps.Equal(c.Log.Counts, v.counts) {
		return fail("the seal counts other actions than the record holds")
	}
	return key, st, nil
}

// parseEvent decodes a skeleton, which has one reading only.
func parseEvent(raw []byte) (Event, error) {
	var ev Event
	if !utf8.Valid(raw) {
		return ev, errors.New("the event is not UTF-8")
	}
	if err := strict(raw, &ev); err != nil {
		return ev, fmt.Errorf("the event does not decode: %w", err)
	}
	if ev.Version != EventVersion {
		return ev, fmt.Errorf("event of version %d; this bivy reads version %d", ev.Version, EventVersion)
	}
	for _, h := range []string{ev.Prev, ev.Commit} {
		if b, err := hex.DecodeString(h); err != nil || len(b) != sha256.Size {
			return ev, fmt.Errorf("%.64q is not a SHA-256 in hex", h)
		}
	}
	return ev, nil
}
