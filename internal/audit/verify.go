package audit

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// VerifyOptions narrows or widens what Verify and VerifySystem accept.
type VerifyOptions struct {
	Session     session.ID     // Verify: the session that the record must be of; empty: any
	Node        session.NodeID // VerifySystem: the node that the record must be of; empty: any
	AllowOpen   bool           // accept a session's record without a seal: the session has not ended
	AllowErased bool           // accept payloads that are missing because an event announces their erasure
	// Contains are heads from a signed statement, e.g. HeadsReport.Continued.
	// Those of records in this export must be in it; others are ignored.
	Contains []OpenHead
}

// Fault is why an export does not verify.
type Fault struct {
	Record RecordID // that the fault is in; empty when it is not in one record
	Seq    uint64   // the first bad event; 0 when the fault is not in one event
	Line   int      // of the export, from 1
	Why    string   // for people
}

// Error names the event, or else the line.
func (f *Fault) Error() string {
	switch {
	case f.Seq == 0:
		return fmt.Sprintf("line %d: %s", f.Line, f.Why)
	case f.Record.Addenda():
		return fmt.Sprintf("addendum %d (line %d): %s", f.Seq, f.Line, f.Why)
	}
	if _, n, ok := f.Record.Segment(); ok {
		return fmt.Sprintf("segment %d, event %d (line %d): %s", n, f.Seq, f.Line, f.Why)
	}
	return fmt.Sprintf("event %d (line %d): %s", f.Seq, f.Line, f.Why)
}

// Bounds of what an export can make a verifier remember.
const (
	maxOpenIntents = 1 << 16
	maxActions     = 1000 // kinds of action in one record
)

// Verify reads the export of a session and checks all of it: that it holds one
// session's events in order and without gap, from session.created to
// session.ended; that each skeleton has its hash and refers to the one before;
// that each payload is the one its skeleton commits to, or was erased and an
// event announces that; that every intent has an outcome; that the seal states
// this record; that addenda begin at the sealed root; and that the seal and the
// newest head of the addenda are signed by a pinned key, or by one that
// rotations signed by a pinned key lead to. Without a pinned key no seal
// verifies.
//
// It cannot tell that all addenda were removed from an export, or the last ones
// together with the newest head: a statement of heads can, see
// VerifyOptions.Contains and VerifyHeads.
//
// The error of an export that does not verify has kind Invalid and a Fault in
// its chain that names the first bad event. Verify needs no network, and no
// memory in proportion to the record.
func Verify(r io.Reader, pinned []PublicKey, o VerifyOptions) (Report, error) {
	v := newVerifier(r, pinned, o)
	report, err := v.session()
	if err != nil {
		return Report{}, verdict(err)
	}
	return report, nil
}

// VerifySystem reads the export of a node's system record and checks all of it
// by the rules of Verify: every segment, from the first, begins at the sealed
// root of the one before. The last one may be open.
func VerifySystem(r io.Reader, pinned []PublicKey, o VerifyOptions) (SystemReport, error) {
	v := newVerifier(r, pinned, o)
	report, err := v.system()
	if err != nil {
		return SystemReport{}, verdict(err)
	}
	return report, nil
}

func verdict(err error) error {
	var fault *Fault
	if errors.As(err, &fault) {
		return kind.Wrap(kind.Invalid, fmt.Errorf("the record does not verify: %w", err))
	}
	return fmt.Errorf("read the record: %w", err)
}

type verifier struct {
	pinned  []PublicKey
	options VerifyOptions
	lines   *bufio.Reader
	line    int

	keys      trusted
	wanted    map[RecordID]map[uint64]string // heads that must be found, by record and number
	contained int                            // of those, found
}

func newVerifier(r io.Reader, pinned []PublicKey, o VerifyOptions) *verifier {
	v := &verifier{pinned: pinned, options: o, lines: bufio.NewReaderSize(r, 64<<10), wanted: make(map[RecordID]map[uint64]string)}
	for _, h := range o.Contains {
		if v.wanted[h.Record] == nil {
			v.wanted[h.Record] = make(map[uint64]string)
		}
		v.wanted[h.Record][h.Seq] = h.Hash
	}
	return v
}

func (v *verifier) fault(format string, args ...any) error {
	return &Fault{Line: max(v.line, 1), Why: fmt.Sprintf(format, args...)}
}

// session checks the export of a session.
func (v *verifier) session() (Report, error) {
	record, line, err := v.header()
	if err != nil {
		return Report{}, err
	}
	id, ok := record.Session()
	switch {
	case !ok || record.Addenda():
		return Report{}, v.fault("the export is of %.80q, want one of a session", string(record))
	case v.options.Session != "" && id != v.options.Session:
		return Report{}, v.fault("the record is of session %s, not of %s", id, v.options.Session)
	}
	c := v.chain(Start(record, ""))
	if line, err = v.events(c, line); err != nil {
		return Report{}, err
	}
	report := Report{Record: record, Session: id, Events: c.head.Seq, Open: c.intents.Open(), Counts: c.counts, Cuts: c.counts[FileChangesCut]}
	if line == nil {
		if c.last == SessionEnded || !v.options.AllowOpen {
			return Report{}, v.fault("there is no seal after event %d: the session has not ended, or the end of the record is missing", c.head.Seq)
		}
		return v.qualify(report, c, nil)
	}
	seal, key, err := v.sealLine(line)
	if err != nil {
		return Report{}, err
	}
	closeout, about, err := open[Closeout](v, seal, CloseoutType)
	if err != nil {
		return Report{}, err
	}
	if closeout.Session != id {
		return Report{}, v.fault("the seal is of session %.64q, the record of %s", string(closeout.Session), id)
	}
	if err := v.sealed(c, about, closeout.Log, closeout.Sections); err != nil {
		return Report{}, err
	}
	report.Sealed, report.SealedAt, report.Key, report.Pinned = true, closeout.SealedAt, key.Fingerprint(), v.keys.by[key.Fingerprint()]
	report.Closeout, report.Residuals = closeout, closeout.ResidualCount

	if line, err = v.next(); err != nil && !errors.Is(err, io.EOF) {
		return Report{}, err
	}
	if line == nil {
		return v.qualify(report, c, nil)
	}
	added, err := v.addenda(&report, c, line)
	if err != nil {
		return Report{}, err
	}
	return v.qualify(report, c, added)
}

// addenda checks what follows the seal.
func (v *verifier) addenda(report *Report, c *chain, line []byte) (*chain, error) {
	if !bytes.HasPrefix(line, []byte(`{"event":`)) {
		return nil, v.fault("after the seal come addenda and nothing else")
	}
	root := c.head.Root()
	added := v.chain(Start(AddendaRecord(report.Session), root))
	line, err := v.events(added, line)
	if err != nil {
		return nil, err
	}
	var l addendaSealLine
	switch {
	case line == nil:
		return nil, v.fault("there is no signed head after addendum %d: the end of the addenda is missing", added.head.Seq)
	case strict(line, &l) != nil || l.Seal == nil:
		return nil, v.fault("the signed head of the addenda does not decode")
	}
	key, err := v.signer(*l.Seal, "the head of the addenda")
	if err != nil {
		return nil, err
	}
	head, about, err := open[AddendaHead](v, *l.Seal, AddendaHeadType)
	if err != nil {
		return nil, err
	}
	want := added.head.Root()
	switch {
	case head.Session != report.Session || head.Sealed != root:
		return nil, v.fault("the head of the addenda is signed for another record")
	case head.Count != added.head.Seq:
		return nil, v.fault("%d addenda are signed, the export has %d", head.Count, added.head.Seq)
	case head.Head != added.head.Hash || head.Root != want || !isSubject(about, added.head.Record, want):
		return nil, v.fault("the signed head is of other addenda: it is not the hash of addendum %d", added.head.Seq)
	}
	if err := v.end(); err != nil {
		return nil, err
	}
	report.Addenda, report.AddendaSignedAt, report.AddendaKey = added.head.Seq, head.SignedAt, key.Fingerprint()
	report.OpenAddenda = added.intents.Open()
	report.Cuts += added.counts[FileChangesCut]
	return added, nil
}

// qualify checks what is missing from the record and may be.
func (v *verifier) qualify(report Report, c, added *chain) (Report, error) {
	announced, announcedAddenda := c.announced, c.announcedAddenda
	chains := []*chain{c}
	if added != nil {
		chains = append(chains, added)
		for _, s := range added.announced {
			if err := announced.add(s.first, s.last); err != nil {
				return Report{}, v.fault("%v", err)
			}
		}
		for _, s := range added.announcedAddenda {
			if err := announcedAddenda.add(s.first, s.last); err != nil {
				return Report{}, v.fault("%v", err)
			}
		}
		if err := v.erasures(added, announcedAddenda); err != nil {
			return Report{}, err
		}
	}
	if err := v.erasures(c, announced); err != nil {
		return Report{}, err
	}
	for _, c := range chains {
		report.Erased += c.erased
	}
	if err := v.finish(report.Erased, chains...); err != nil {
		return Report{}, err
	}
	report.Contained = v.contained
	return report, nil
}

// erasures checks that the events announce every payload that is missing.
func (v *verifier) erasures(c *chain, announced spans) error {
	if seq := c.missing.missing(announced); seq > 0 {
		return v.faultAt(c, seq, "its payload is missing and no %s event announces that", PayloadErased)
	}
	return nil
}

// finish refuses erased payloads unless they are allowed, and an export that
// lacks a head that it must contain.
func (v *verifier) finish(erased uint64, chains ...*chain) error {
	if erased > 0 && !v.options.AllowErased {
		return kind.Errorf(kind.Invalid, "%w", v.fault("%s erased, as the record announces", count(erased, "payload"))).
			WithHint("to accept announced erasures: --allow-erased")
	}
	for _, c := range chains {
		for seq := range v.wanted[c.head.Record] {
			if seq > c.head.Seq {
				return v.fault("%s has %d events; a signed statement says that it had %d: the end is missing", c.head.Record, c.head.Seq, seq)
			}
		}
	}
	return nil
}

// system checks the export of a node's system record.
func (v *verifier) system() (SystemReport, error) {
	record, line, err := v.header()
	if err != nil {
		return SystemReport{}, err
	}
	node := session.NodeID(strings.TrimPrefix(string(record), systemPrefix))
	switch {
	case !strings.HasPrefix(string(record), systemPrefix) || checkNode(node) != nil:
		return SystemReport{}, v.fault("the export is of %.80q, want one of a node's system record", string(record))
	case v.options.Node != "" && node != v.options.Node:
		return SystemReport{}, v.fault("the record is of node %s, not of %s", node, v.options.Node)
	}
	report := SystemReport{Node: node, Counts: make(map[Action]uint64)}
	keys := make(map[string]bool)
	root := ""
	for line != nil || report.Segments == 0 {
		report.Segments++
		c := v.chain(Start(SystemRecord(node, report.Segments), root))
		if line, err = v.events(c, line); err != nil {
			return SystemReport{}, err
		}
		report.Events += c.head.Seq
		report.Erased += c.erased
		for a, n := range c.counts {
			report.Counts[a] += n
		}
		report.Last = OpenHead{Record: c.head.Record, Seq: c.head.Seq, Hash: c.head.Hash}
		if err := v.erasures(c, c.announced); err != nil {
			return SystemReport{}, err
		}
		if err := v.finish(report.Erased, c); err != nil {
			return SystemReport{}, err
		}
		if line == nil {
			if c.last == SegmentClosed {
				return SystemReport{}, v.fault("there is no seal after the end of segment %d", report.Segments)
			}
			report.Unsealed, report.Open = c.head.Seq, c.intents.Open()
			break
		}
		seal, key, err := v.sealLine(line)
		if err != nil {
			return SystemReport{}, err
		}
		closeout, about, err := open[SegmentCloseout](v, seal, SegmentCloseoutType)
		if err != nil {
			return SystemReport{}, err
		}
		if closeout.Node != node || closeout.Segment != report.Segments {
			return SystemReport{}, v.fault("the seal is of segment %d of node %.64q, the events are of segment %d of %s",
				closeout.Segment, string(closeout.Node), report.Segments, node)
		}
		if err := v.sealed(c, about, closeout.Log, closeout.Sections); err != nil {
			return SystemReport{}, err
		}
		root = c.head.Root()
		report.Sealed, report.SealedAt, report.Key, report.Closeout = report.Segments, closeout.SealedAt, key.Fingerprint(), closeout
		keys[report.Key] = true
		if line, err = v.next(); err != nil && !errors.Is(err, io.EOF) {
			return SystemReport{}, err
		}
	}
	for r, heads := range v.wanted {
		if n, number, ok := r.Segment(); ok && n == node && number > report.Segments {
			return SystemReport{}, v.fault("%s is missing; a signed statement says that it had %d events", r, slices.Max(slices.Collect(maps.Keys(heads))))
		}
	}
	report.Keys, report.Contained = len(keys), v.contained
	return report, nil
}

// next returns the next line without its newline. At the end it returns nil
// and io.EOF.
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
			return nil, v.fault("longer than %d bytes", maxLine)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case errors.Is(err, io.EOF):
			return nil, v.fault("cut off: the line has no end")
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

// header reads the header and the rotations and returns the line after them,
// nil at the end of the export.
func (v *verifier) header() (RecordID, []byte, error) {
	line, err := v.next()
	if errors.Is(err, io.EOF) {
		return "", nil, v.fault("the export is empty")
	}
	if err != nil {
		return "", nil, err
	}
	var h headerLine
	if err := strict(line, &h); err != nil {
		var format struct {
			Format int `json:"bivy_record"`
		}
		if json.Unmarshal(line, &format) == nil && format.Format > ExportFormat {
			return "", nil, v.fault("%v", newer("the export format", format.Format, ExportFormat))
		}
		return "", nil, v.fault("not the header of a bivy record: %v", err)
	}
	if h.Format != ExportFormat {
		return "", nil, v.fault("%v", newer("the export format", h.Format, ExportFormat))
	}
	if line, err = v.next(); err != nil && !errors.Is(err, io.EOF) {
		return "", nil, err
	}
	var rotations []Seal
	if bytes.HasPrefix(line, []byte(`{"rotations":`)) {
		var l rotationsLine
		if err := strict(line, &l); err != nil {
			return "", nil, v.fault("the rotations do not decode: %v", err)
		}
		rotations = l.Rotations
		if line, err = v.next(); err != nil && !errors.Is(err, io.EOF) {
			return "", nil, err
		}
	}
	if v.keys, err = trust(v.pinned, rotations); err != nil {
		return "", nil, v.fault("%v", err)
	}
	return h.Record, line, nil
}

// chain is one record while it is read.
type chain struct {
	head    Head
	last    Action // of the last event
	counts  map[Action]uint64
	intents Intents

	erased           uint64 // events without a payload
	missing          spans  // their numbers
	announced        spans  // events that payload.erased names
	announcedAddenda spans  // addenda that payload.erased names
}

func (v *verifier) chain(start Head) *chain {
	return &chain{head: start, counts: make(map[Action]uint64)}
}

func (v *verifier) faultAt(c *chain, seq uint64, format string, args ...any) error {
	return &Fault{Record: c.head.Record, Seq: seq, Line: max(v.line, 1), Why: fmt.Sprintf(format, args...)}
}

// events reads the events of one record, of which line is the first, and
// returns the line after them, nil at the end of the export.
func (v *verifier) events(c *chain, line []byte) ([]byte, error) {
	for line != nil && !bytes.HasPrefix(line, []byte(`{"seal":`)) && !bytes.HasPrefix(line, []byte(`{"addenda_seal":`)) {
		if err := v.event(c, line); err != nil {
			return nil, err
		}
		var err error
		if line, err = v.next(); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
	if c.head.Seq == 0 {
		return nil, v.fault("%s holds no events", c.head.Record)
	}
	return line, nil
}

func (v *verifier) event(c *chain, line []byte) error {
	seq := c.head.Seq + 1
	fail := func(format string, args ...any) error { return v.faultAt(c, seq, format, args...) }
	var l eventLine
	if err := strict(line, &l); err != nil {
		return fail("the line does not decode: %v", err)
	}
	if l.Event == nil {
		return fail("the line holds no event")
	}
	raw := []byte(*l.Event)
	if hashOf(raw) != l.Hash {
		return fail("the event was changed: it does not have the hash written beside it")
	}
	ev, err := parseEvent(raw)
	if err != nil {
		return fail("%v", err)
	}
	switch {
	case ev.Record != c.head.Record:
		return fail("the event is of %.80q, the record is %s", string(ev.Record), c.head.Record)
	case ev.Seq != seq && seq == 1:
		return fail("the record begins with event %d: its beginning is missing", ev.Seq)
	case ev.Seq != seq:
		return fail("event %d is in its place: events are missing, repeated or out of order", ev.Seq)
	case ev.Prev != c.head.Hash && seq == 1:
		return fail("it does not begin where it must: at the sealed root of the record before, or with zeros")
	case ev.Prev != c.head.Hash:
		return fail("it does not follow the event before: that one was changed or replaced")
	}
	if err := v.rules(c, ev); err != nil {
		return fail("%v", err)
	}
	if err := v.payload(c, ev, l); err != nil {
		return err
	}
	if want, ok := v.wanted[c.head.Record][seq]; ok {
		if want != l.Hash {
			return fail("it was replaced: a signed statement names another event in its place")
		}
		v.contained++
	}
	c.head.Seq, c.head.Hash, c.last = ev.Seq, l.Hash, ev.Action
	return nil
}

// rules checks what every event must keep in its place.
func (v *verifier) rules(c *chain, ev Event) error {
	opens, closes := c.head.Record.bounds()
	if closes != "" && c.last == closes {
		return fmt.Errorf("there is an event after %s", closes)
	}
	if opens != "" && (ev.Action == opens) != (ev.Seq == 1) {
		return fmt.Errorf("%s in this place: a record is opened by %s, which occurs only there", ev.Action, opens)
	}
	if err := checkNode(ev.Node); err != nil {
		return err
	}
	if err := checkRules(Entry{Action: ev.Action, Outcome: ev.Outcome, Actor: ev.Actor, Object: ev.Object, Ref: ev.Ref, Decision: ev.Decision, Trace: ev.Trace}); err != nil {
		return err
	}
	if err := c.intents.Add(ev.Seq, ev.Action, ev.Ref, ev.Concludes); err != nil {
		return err
	}
	if c.intents.Len() > maxOpenIntents {
		return fmt.Errorf("more than %d intents without an outcome", maxOpenIntents)
	}
	if c.counts[ev.Action]++; len(c.counts) > maxActions {
		return fmt.Errorf("more than %d kinds of action", maxActions)
	}
	if ev.Action != PayloadErased {
		return nil
	}
	s, err := parseErasure(ev.Object)
	switch {
	case err != nil:
		return err
	case s.addenda && !c.head.Record.Addenda():
		return fmt.Errorf("%s of %s in another record", ev.Action, ev.Object)
	case s.addenda:
		return c.announcedAddenda.add(s.first, s.last)
	}
	return c.announced.add(s.first, s.last)
}

func (v *verifier) payload(c *chain, ev Event, l eventLine) error {
	if l.Salt == "" && l.Payload == "" {
		c.erased++
		if err := c.missing.add(ev.Seq, ev.Seq); err != nil {
			return v.faultAt(c, ev.Seq, "%v", err)
		}
		return nil
	}
	salt, err := hex.DecodeString(l.Salt)
	if err != nil || len(salt) != saltSize {
		return v.faultAt(c, ev.Seq, "the salt is not %d bytes in hex", saltSize)
	}
	if commitment(salt, []byte(l.Payload)) != ev.Commit {
		return v.faultAt(c, ev.Seq, "the payload or its salt was changed: the event does not commit to them")
	}
	return nil
}

// end checks that the export has no further line.
func (v *verifier) end() error {
	switch _, err := v.next(); {
	case err == nil:
		return v.fault("there is more after the end of the export")
	case !errors.Is(err, io.EOF):
		return err
	}
	return nil
}

// sealLine decodes the line of a seal and finds the key that signed it.
func (v *verifier) sealLine(line []byte) (Seal, PublicKey, error) {
	var l sealLine
	if err := strict(line, &l); err != nil {
		return Seal{}, PublicKey{}, v.fault("the seal does not decode: %v", err)
	}
	if l.Seal == nil {
		return Seal{}, PublicKey{}, v.fault("the seal is missing from its line")
	}
	key, err := v.signer(*l.Seal, "the seal")
	return *l.Seal, key, err
}

func (v *verifier) signer(s Seal, what string) (PublicKey, error) {
	if len(v.pinned) == 0 {
		return PublicKey{}, v.fault("no public key was given to check %s against", what)
	}
	key, ok := s.signedBy(v.keys.all)
	if !ok {
		return PublicKey{}, v.fault("%s is not signed by a pinned key; it names %s", what, s.signers())
	}
	return key, nil
}

// open decodes the predicate of a seal whose signature was checked.
func open[T any](v *verifier, s Seal, predicateType string) (T, Subject, error) {
	var predicate T
	about, err := s.open(predicateType, &predicate)
	if err != nil {
		return predicate, about, v.fault("%v", err)
	}
	return predicate, about, nil
}

// sealed checks that a seal states the record c and that the record is
// complete.
func (v *verifier) sealed(c *chain, about Subject, log Log, sections map[string]Section) error {
	if log.Count != c.head.Seq || log.First != 1 || log.Last != c.head.Seq {
		return v.fault("the seal is over %d events, the record has %d", log.Count, c.head.Seq)
	}
	root := c.head.Root()
	if log.Head != c.head.Hash || log.Root != root || !isSubject(about, c.head.Record, root) {
		return v.fault("the seal is over another record: its head is not the hash of event %d", c.head.Seq)
	}
	if log.Counts != nil && !maps.Equal(log.Counts, c.counts) {
		return v.fault("the seal counts other actions than the record holds")
	}
	if err := checkSections(sections); err != nil {
		return v.fault("the seal: %v", err)
	}
	if _, closes := c.head.Record.bounds(); c.last != closes {
		return v.faultAt(c, c.head.Seq, "the last event is %s, not %s", c.last, closes)
	}
	if c.intents.Len() > 0 {
		first := c.intents.Open()[0]
		return v.faultAt(c, first.Seq, "%s %q has no outcome and is not recorded as lost", first.Action, first.Ref)
	}
	return nil
}

func isSubject(s Subject, r RecordID, root string) bool {
	return s.Name == string(r) && maps.Equal(s.Digest, map[string]string{"sha256": root})
}

// parseEvent decodes a skeleton, which has one meaning only.
func parseEvent(raw []byte) (Event, error) {
	var ev Event
	if !utf8.Valid(raw) {
		return ev, errors.New("the event is not UTF-8")
	}
	if err := strict(raw, &ev); err != nil {
		var version struct {
			Version int `json:"v"`
		}
		if json.Unmarshal(raw, &version) == nil && version.Version > EventVersion {
			return ev, newer("the event", version.Version, EventVersion)
		}
		return ev, fmt.Errorf("the event does not decode: %w", err)
	}
	if ev.Version != EventVersion {
		return ev, newer("the event", ev.Version, EventVersion)
	}
	for _, h := range []string{ev.Prev, ev.Commit} {
		if b, err := hex.DecodeString(h); err != nil || len(b) != sha256.Size {
			return ev, fmt.Errorf("%.64q is not a SHA-256 in hex", h)
		}
	}
	return ev, nil
}
