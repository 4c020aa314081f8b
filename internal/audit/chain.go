package audit

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"bivy/internal/clip"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// EventVersion is the version of the skeleton that this build reads and writes.
const EventVersion = 1

// Bounds of the parts of a skeleton that callers choose.
const (
	MaxObject = 128 // bytes, printable ASCII
	MaxRef    = 128 // bytes, printable ASCII
	MaxActor  = 256 // bytes of each of a Principal's fields; longer ones are cut
	MaxPolicy = 128 // bytes of a Decision's policy, printable ASCII
)

// saltSize is fixed: a salt of any length would let bytes move between salt
// and payload without changing the commitment.
const saltSize = 32

// The prefixes keep the hash of one thing from being the hash of another.
const (
	hashPrefix = "bivy/audit/event/v1\n"
	rootPrefix = "bivy/audit/record/v1\n"
)

// Head is the end of a record's chain, which the next event refers to.
type Head struct {
	Record RecordID // which record
	Seq    uint64   // of the last event; 0 for a record without events
	Hash   string   // of the last event; what the first event refers to for a record without events

	// Counts is how often each action occurs. It is filled where a record is
	// sealed and nil elsewhere.
	Counts map[Action]uint64
	// After is the root of the sealed record that this one continues, if any. It
	// is filled where a record is sealed and empty elsewhere.
	After string
}

// Start returns the head of a record that has no event yet. after is the root
// of the sealed record that it continues: the session's record for addenda,
// the segment before for a segment. It is empty for a session's record and for
// segment 1, which begin with zeros.
func Start(record RecordID, after string) Head {
	if after == "" {
		after = strings.Repeat("0", 2*sha256.Size)
	}
	return Head{Record: record, Hash: after}
}

// Root is the digest that a seal signs: hex SHA-256 over the name of the
// record, the number of events and the hash of the last one, which covers all
// others.
func (h Head) Root() string {
	var b []byte
	b = append(b, rootPrefix...)
	b = append(b, h.Record...)
	b = append(b, '\n')
	b = strconv.AppendUint(b, h.Seq, 10)
	b = append(b, '\n')
	b = append(b, h.Hash...)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Moment is when an event is written, by each of the host's clocks.
type Moment struct {
	Now    time.Time     // wall clock
	Boot   string        // the host's boot id
	Uptime time.Duration // since that boot, sleep included
}

// Draft is an entry that has been checked and whose payload is encoded,
// bounded and committed to. Making one needs no lock and no head, so callers do
// it before they ask the store's only writer.
type Draft struct {
	entry   Entry
	payload []byte
	salt    []byte
	commit  string
}

// Prepare makes a Draft of e. It fails with Invalid for an entry that breaks
// the rules of the record and for a payload that JSON cannot carry; a payload
// that is too long is cut, as Bounded says, and never a reason to fail.
func Prepare(e Entry) (Draft, error) {
	if err := checkEntry(e); err != nil {
		return Draft{}, err
	}
	payload, err := Bounded(e.Payload, MaxPayload)
	if err != nil {
		return Draft{}, kind.Errorf(kind.Invalid, "payload of %s: %w", e.Action, err)
	}
	e.Payload = nil
	salt := make([]byte, saltSize)
	rand.Read(salt)
	return Draft{entry: e, payload: payload, salt: salt, commit: commitment(salt, payload)}, nil
}

// Action returns the action of the entry that the draft was made from.
func (d Draft) Action() Action { return d.entry.Action }

// Ref returns the reference of the entry that the draft was made from.
func (d Draft) Ref() string { return d.entry.Ref }

// Concludes returns the number of the intent that the entry concludes, or 0.
func (d Draft) Concludes() uint64 { return d.entry.Concludes }

// Chain makes the event that follows h, written under the fence at. It fails
// with Conflict when the record cannot take it: the opening action comes first
// and only there.
func (d Draft) Chain(h Head, at session.Fence, m Moment) (Stored, error) {
	e := d.entry
	if opens, _ := h.Record.bounds(); opens != "" && (e.Action == opens) != (h.Seq == 0) {
		return Stored{}, kind.Errorf(kind.Conflict, "%s as event %d of %s: a record is opened by %s, which occurs only there",
			e.Action, h.Seq+1, h.Record, opens)
	}
	if err := checkNode(at.Node); err != nil {
		return Stored{}, err
	}
	when := e.Time
	if when.IsZero() {
		when = m.Now
	}
	ev := Event{
		Version:    EventVersion,
		Record:     h.Record,
		Seq:        h.Seq + 1,
		Prev:       h.Hash,
		Time:       when.UTC().Truncate(time.Microsecond),
		Boot:       m.Boot,
		Uptime:     m.Uptime.Microseconds(),
		Node:       at.Node,
		Generation: at.Generation,
		Trace:      e.Trace,
		Action:     e.Action,
		Outcome:    e.Outcome,
		Actor:      boundActor(e.Actor),
		Object:     e.Object,
		Concludes:  e.Concludes,
		Decision:   e.Decision,
		Ref:        e.Ref,
		Commit:     d.commit,
	}
	raw, err := json.Marshal(ev)
	if err != nil {
		return Stored{}, kind.Errorf(kind.Invalid, "event %d of %s: %w", ev.Seq, h.Record, err)
	}
	raw = printable(raw)
	return Stored{Event: ev, Raw: raw, Hash: hashOf(raw), Salt: d.salt, Payload: d.payload}, nil
}

// Head returns the head of the record that ends with s.
func (s Stored) Head() Head {
	return Head{Record: s.Event.Record, Seq: s.Event.Seq, Hash: s.Hash}
}

// Erased reports whether the payload was deleted; the skeleton still commits
// to what it was.
func (s Stored) Erased() bool { return len(s.Payload) == 0 && len(s.Salt) == 0 }

// ParseStored rebuilds an event from what a store keeps of it. It decodes and
// does not verify.
func ParseStored(raw []byte, hash string, salt, payload []byte) (Stored, error) {
	ev, err := parseEvent(raw)
	if err != nil {
		return Stored{}, err
	}
	return Stored{Event: ev, Raw: raw, Hash: hash, Salt: salt, Payload: payload}, nil
}

// Intent reports whether the action announces an effect that a later event
// concludes.
func (a Action) Intent() bool { return strings.HasSuffix(string(a), ".intent") }

// checkEntry is what a writer must keep: the rules of the format and a
// reference for every intent, by which it is found after a lost reply.
func checkEntry(e Entry) error {
	if err := checkRules(e); err != nil {
		return kind.Wrap(kind.Invalid, err)
	}
	if e.Action.Intent() && e.Ref == "" {
		return kind.Errorf(kind.Invalid, "%s: an intent needs a ref, which its outcome carries too", e.Action)
	}
	return nil
}

// checkRules is what holds for every event of this version, also for actions
// that this build does not know.
func checkRules(e Entry) error {
	if !wellFormed(e.Action) {
		return fmt.Errorf("%.64q is not an action", string(e.Action))
	}
	switch e.Outcome {
	case OK, Failed, Refused, Pending:
	default:
		return fmt.Errorf("%s: %.64q is not an outcome", e.Action, string(e.Outcome))
	}
	if e.Action.Intent() != (e.Outcome == Pending) {
		return fmt.Errorf("%s: the outcome is %s: an intent, and only an intent, is %s", e.Action, e.Outcome, Pending)
	}
	if e.Actor.Subject == "" {
		return fmt.Errorf("%s: the actor has no subject", e.Action)
	}
	if len(e.Object) > MaxObject || !ascii(e.Object) {
		return fmt.Errorf("%s: object %.64q is not printable ASCII of at most %d bytes", e.Action, e.Object, MaxObject)
	}
	if len(e.Ref) > MaxRef || !ascii(e.Ref) {
		return fmt.Errorf("%s: ref %.64q is not printable ASCII of at most %d bytes", e.Action, e.Ref, MaxRef)
	}
	if e.Trace != "" && !e.Trace.Valid() {
		return fmt.Errorf("%s: %.64q is not a trace id", e.Action, string(e.Trace))
	}
	switch d := e.Decision; d.Verdict {
	case "":
		if d.Policy != "" {
			return fmt.Errorf("%s: a decision without a verdict", e.Action)
		}
	case Allow, Deny, Held:
		if len(d.Policy) > MaxPolicy || !ascii(d.Policy) {
			return fmt.Errorf("%s: policy %.64q is not printable ASCII of at most %d bytes", e.Action, d.Policy, MaxPolicy)
		}
	default:
		return fmt.Errorf("%s: %.64q is not a verdict", e.Action, string(d.Verdict))
	}
	if e.Action == PayloadErased {
		if _, err := parseErasure(e.Object); err != nil {
			return fmt.Errorf("%s: %w", e.Action, err)
		}
	}
	return nil
}

// wellFormed reports whether a is two or more words of a-z and _ with points
// between them, at most 64 bytes.
func wellFormed(a Action) bool {
	if len(a) > 64 || !strings.Contains(string(a), ".") {
		return false
	}
	for word := range strings.SplitSeq(string(a), ".") {
		if word == "" || strings.Trim(word, "abcdefghijklmnopqrstuvwxyz_") != "" {
			return false
		}
	}
	return true
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func boundActor(p session.Principal) session.Principal {
	return session.Principal{
		Subject:    clip.Text(p.Subject, MaxActor),
		OnBehalfOf: clip.Text(p.OnBehalfOf, MaxActor),
		Trigger:    clip.Text(p.Trigger, MaxActor),
	}
}

func commitment(salt, payload []byte) string {
	h := sha256.New()
	h.Write(salt)
	h.Write(payload)
	return hex.EncodeToString(h.Sum(nil))
}

func hashOf(raw []byte) string {
	h := sha256.New()
	h.Write([]byte(hashPrefix))
	h.Write(raw)
	return hex.EncodeToString(h.Sum(nil))
}
