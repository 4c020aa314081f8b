package audit

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// EventVersion is the version of the skeleton that this build writes.
const EventVersion = 1

// Bounds of the parts of a skeleton that callers choose.
const (
	MaxRef   = 128 // bytes, printable ASCII
	MaxActor = 256 // bytes of each of a Principal's fields; longer ones are cut
)

// saltSize is fixed: a salt of free length would let bytes move between salt
// and payload without changing the commitment.
const saltSize = 32

// hashPrefix keeps the hash of an event from being the hash of anything else.
const hashPrefix = "bivy/audit/event/v1\n"

const rootPrefix = "bivy/audit/record/v1\n"

// Head is the end of a record's chain: what the next event stands on.
type Head struct {
	Session session.ID
	Seq     uint64 // of the last event; 0 for a record without events
	Hash    string // of the last event; of 32 zero bytes for a record without events

	// Counts is how often each action occurs. It is filled where a record is
	// sealed and nil elsewhere.
	Counts map[Action]uint64
}

// Start returns the head of a record that has no event yet.
func Start(id session.ID) Head {
	return Head{Session: id, Hash: strings.Repeat("0", 2*sha256.Size)}
}

// Root is the digest that a seal signs: hex SHA-256 over the session, the
// number of events and the hash of the last one, which covers all others.
func (h Head) Root() string {
	var b []byte
	b = append(b, rootPrefix...)
	b = append(b, h.Session...)
	b = append(b, '\n')
	b = strconv.AppendUint(b, h.Seq, 10)
	b = append(b, '\n')
	b = append(b, h.Hash...)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Moment is when an event is written, by every clock that can tell.
type Moment struct {
	Now    time.Time     // wall clock
	Boot   string        // the host's boot id
	Uptime time.Duration // since that boot, sleep included
}

// Draft is an entry that has been checked and whose payload is encoded,
// bounded and committed to. Making one needs no lock and no head, so it is
// done before the single writer is asked.
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

// Chain makes the event that follows h. It fails with Conflict when the
// record cannot take it: a record is opened by session.created, exactly once.
func (d Draft) Chain(h Head, m Moment) (Stored, error) {
	e := d.entry
	if opens := e.Action == SessionCreated; opens != (h.Seq == 0) {
		return Stored{}, kind.Errorf(kind.Conflict, "%s as event %d of session %s: a record is opened by %s and by nothing else",
			e.Action, h.Seq+1, h.Session, SessionCreated)
	}
	if e.Sandbox != "" {
		if owner, _, err := e.Sandbox.Split(); err != nil || owner != h.Session {
			return Stored{}, kind.Errorf(kind.Invalid, "sandbox %.64q is not of session %s", string(e.Sandbox), h.Session)
		}
	}
	at := e.Time
	if at.IsZero() {
		at = m.Now
	}
	ev := Event{
		Version: EventVersion,
		Session: h.Session,
		Seq:     h.Seq + 1,
		Prev:    h.Hash,
		Time:    at.UTC().Truncate(time.Microsecond),
		Boot:    m.Boot,
		Uptime:  m.Uptime.Microseconds(),
		Action:  e.Action,
		Outcome: e.Outcome,
		Actor:   boundActor(e.Actor),
		Sandbox: e.Sandbox,
		Ref:     e.Ref,
		Commit:  d.commit,
	}
	raw, err := json.Marshal(ev)
	if err != nil {
		return Stored{}, kind.Errorf(kind.Invalid, "event %d of session %s: %w", ev.Seq, h.Session, err)
	}
	raw = printable(raw)
	return Stored{Event: ev, Raw: raw, Hash: hashOf(raw), Salt: d.salt, Payload: d.payload}, nil
}

// Next makes the event that follows h from e: Prepare and Chain in one.
func Next(h Head, e Entry, m Moment) (Stored, error) {
	d, err := Prepare(e)
	if err != nil {
		return Stored{}, err
	}
	return d.Chain(h, m)
}

// Head returns the head of the record that ends with s.
func (s Stored) Head() Head {
	return Head{Session: s.Event.Session, Seq: s.Event.Seq, Hash: s.Hash}
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

// Intent reports whether the action announces something that a later event
// must conclude.
func (a Action) Intent() bool { return strings.HasSuffix(string(a), ".intent") }

func checkEntry(e Entry) error {
	if !wellFormed(e.Action) {
		return kind.Errorf(kind.Invalid, "%.64q is not an action", string(e.Action))
	}
	switch e.Outcome {
	case OK, Failed, Refused, Pending:
	default:
		return kind.Errorf(kind.Invalid, "%s: %.64q is not an outcome", e.Action, string(e.Outcome))
	}
	if e.Action.Intent() != (e.Outcome == Pending) {
		return kind.Errorf(kind.Invalid, "%s: an intent is %s and nothing else is", e.Action, Pending)
	}
	if e.Action.Intent() && e.Ref == "" {
		return kind.Errorf(kind.Invalid, "%s: an intent needs a ref, which its outcome will carry", e.Action)
	}
	if e.Actor.Subject == "" {
		return kind.Errorf(kind.Invalid, "%s: the actor has no subject", e.Action)
	}
	if len(e.Ref) > MaxRef || !ascii(e.Ref) {
		return kind.Errorf(kind.Invalid, "%s: ref %.64q is not printable ASCII of at most %d bytes", e.Action, e.Ref, MaxRef)
	}
	return nil
}

// wellFormed: two or more words of a-z and _ with points between.
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
		Subject:    cut(p.Subject, MaxActor),
		OnBehalfOf: cut(p.OnBehalfOf, MaxActor),
		Trigger:    cut(p.Trigger, MaxActor),
	}
}

// cut makes s valid UTF-8 of at most limit bytes; what was cut ends in "…".
func cut(s string, limit int) string {
	whole := len(s) <= limit
	if !whole {
		n := limit - len("…")
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	s = strings.ToValidUTF8(s, "?")
	if !whole {
		s += "…"
	}
	return s
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
