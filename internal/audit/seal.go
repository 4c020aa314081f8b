package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Types that a seal names, as DSSE and in-toto require.
const (
	PayloadType   = "application/vnd.in-toto+json"
	StatementType = "https://in-toto.io/Statement/v1"
)

// Predicate types: what a statement is about. The number at the end is the
// version.
const (
	CloseoutType        = "https://bivy.dev/session-closeout/v1" // Closeout
	SegmentCloseoutType = "https://bivy.dev/segment-closeout/v1" // SegmentCloseout
	AddendaHeadType     = "https://bivy.dev/addenda-head/v1"     // AddendaHead
	HeadsType           = "https://bivy.dev/record-heads/v1"     // Heads
	RotationType        = "https://bivy.dev/key-rotation/v1"     // Rotation
)

// StatementVersion is the version of every predicate that this build reads and
// writes.
const StatementVersion = 1

// Seal is a signed statement: a DSSE envelope over an in-toto statement. Its
// JSON encoding is the one that DSSE defines, so that other tools can check it.
//
// The methods that decode a Seal do not check its signature. Verify,
// VerifySystem and OpenHeads do.
type Seal struct {
	PayloadType string      `json:"payloadType"` // PayloadType
	Payload     []byte      `json:"payload"`     // the statement's exact bytes
	Signatures  []Signature `json:"signatures"`  // one is enough
}

// Signature is one signature of a Seal.
type Signature struct {
	KeyID string `json:"keyid"` // fingerprint of the key; a hint that is not signed
	Sig   []byte `json:"sig"`   // Ed25519 over DSSE's pre-authentication encoding
}

// Subject is what a statement is about.
type Subject struct {
	Name   string            `json:"name"`   // of the record or key
	Digest map[string]string `json:"digest"` // "sha256": Head.Root of a record
}

type statement struct {
	Type          string          `json:"_type"`
	Subject       []Subject       `json:"subject"`
	PredicateType string          `json:"predicateType"`
	Predicate     json.RawMessage `json:"predicate"`
}

// envelope signs a statement about subject.
func (s *Signer) envelope(predicateType string, subject Subject, predicate any) (Seal, error) {
	seal, err := unsigned(predicateType, subject, predicate)
	if err != nil {
		return Seal{}, err
	}
	seal.Signatures = []Signature{{KeyID: s.Public().Fingerprint(), Sig: s.sign(pae(seal.PayloadType, seal.Payload))}}
	return seal, nil
}

func unsigned(predicateType string, subject Subject, predicate any) (Seal, error) {
	content, err := json.Marshal(predicate)
	if err != nil {
		return Seal{}, fmt.Errorf("statement about %s: %w", subject.Name, err)
	}
	payload, err := json.Marshal(statement{Type: StatementType, Subject: []Subject{subject}, PredicateType: predicateType, Predicate: content})
	if err != nil {
		return Seal{}, fmt.Errorf("statement about %s: %w", subject.Name, err)
	}
	if payload = printable(payload); len(payload) > maxStatement {
		return Seal{}, kind.Errorf(kind.Invalid, "the statement about %s has %d bytes, at most %d", subject.Name, len(payload), maxStatement)
	}
	return Seal{PayloadType: PayloadType, Payload: payload, Signatures: []Signature{}}, nil
}

// open decodes the statement of a predicate type into predicate and returns its
// subject. It does not check the signature.
func (s Seal) open(predicateType string, predicate any) (Subject, error) {
	var st statement
	if s.PayloadType != PayloadType {
		return Subject{}, fmt.Errorf("payload type %.64q, want %s", s.PayloadType, PayloadType)
	}
	if len(s.Payload) > maxStatement {
		return Subject{}, fmt.Errorf("a statement of %d bytes, at most %d", len(s.Payload), maxStatement)
	}
	if err := strict(s.Payload, &st); err != nil {
		return Subject{}, fmt.Errorf("statement: %w", err)
	}
	if st.Type != StatementType {
		return Subject{}, fmt.Errorf("statement of type %.64q, want %s", st.Type, StatementType)
	}
	if st.PredicateType != predicateType {
		name := strings.TrimSuffix(predicateType, "/v1")
		if v, ok := strings.CutPrefix(st.PredicateType, name+"/v"); ok && number(v) > StatementVersion {
			return Subject{}, newer("statement "+name, number(v), StatementVersion)
		}
		return Subject{}, fmt.Errorf("statement about %.64q, want %s", st.PredicateType, predicateType)
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(st.Predicate, &version); err == nil && version.Version != StatementVersion {
		return Subject{}, newer("statement "+strings.TrimSuffix(predicateType, "/v1"), version.Version, StatementVersion)
	}
	if err := strict(st.Predicate, predicate); err != nil {
		return Subject{}, fmt.Errorf("statement: %w", err)
	}
	if len(st.Subject) != 1 {
		return Subject{}, fmt.Errorf("a statement about %d subjects, want 1", len(st.Subject))
	}
	return st.Subject[0], nil
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0
	}
	return n
}

// newer is the refusal of a version that this build does not read.
func newer(what string, have, want int) error {
	return fmt.Errorf("%s has version %d; this bivy reads version %d: use the bivy that wrote it, or a newer one", what, have, want)
}

// maxStatement bounds a statement in bytes. The longest has every residual
// listed in escaped form and all sections.
const maxStatement = 5 << 20

// signedBy returns the first of keys that made one of the seal's signatures.
func (s Seal) signedBy(keys []PublicKey) (PublicKey, bool) {
	message := pae(s.PayloadType, s.Payload)
	for _, k := range keys {
		for _, sig := range s.Signatures {
			if k.verify(message, sig.Sig) {
				return k, true
			}
		}
	}
	return PublicKey{}, false
}

// signers names the keys that the seal says it is signed by.
func (s Seal) signers() string {
	if len(s.Signatures) == 0 {
		return "no key"
	}
	var names []string
	for _, sig := range s.Signatures[:min(len(s.Signatures), 4)] {
		names = append(names, fmt.Sprintf("%.64q", sig.KeyID))
	}
	return strings.Join(names, ", ")
}

// pae is DSSE's pre-authentication encoding, the bytes that are signed.
func pae(payloadType string, payload []byte) []byte {
	var b bytes.Buffer
	b.WriteString("DSSEv1 ")
	b.WriteString(strconv.Itoa(len(payloadType)))
	b.WriteByte(' ')
	b.WriteString(payloadType)
	b.WriteByte(' ')
	b.WriteString(strconv.Itoa(len(payload)))
	b.WriteByte(' ')
	b.Write(payload)
	return b.Bytes()
}

// Log is the part of a closeout that ties it to the record.
type Log struct {
	First  uint64            `json:"first"`            // 1
	Last   uint64            `json:"last"`             // number of the last event
	Count  uint64            `json:"count"`            // events
	Head   string            `json:"head"`             // hex hash of the last event
	Root   string            `json:"root"`             // Head.Root
	Counts map[Action]uint64 `json:"counts,omitempty"` // how often each action occurs
}

func logOf(h Head) Log {
	return Log{First: 1, Last: h.Seq, Count: h.Seq, Head: h.Hash, Root: h.Root(), Counts: h.Counts}
}

// micro is how a statement carries times: UTC, in microseconds.
func micro(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// AddendaHead is what is signed after each addition to the addenda of a
// session: how far they reach.
type AddendaHead struct {
	Version  int        `json:"version"`   // StatementVersion
	Session  session.ID `json:"session"`   // whose addenda they are
	Sealed   string     `json:"sealed"`    // root of the session's record, where they begin
	Count    uint64     `json:"count"`     // addenda so far
	Head     string     `json:"head"`      // hex hash of the last one
	Root     string     `json:"root"`      // Head.Root
	SignedAt time.Time  `json:"signed_at"` // when
}

// SealAddenda signs that the addenda of a session reach as far as h, whose After
// is the root of the session's record.
func (s *Signer) SealAddenda(h Head, at time.Time) (Seal, error) {
	id, ok := h.Record.Session()
	if !ok || !h.Record.Addenda() || h.Seq == 0 || !isDigest(h.After) {
		return Seal{}, kind.Errorf(kind.Invalid, "seal of addenda: %s with %d events after root %.64q is not the addenda of a session", h.Record, h.Seq, h.After)
	}
	root := h.Root()
	return s.envelope(AddendaHeadType, subject(h.Record, root), AddendaHead{
		Version: StatementVersion, Session: id, Sealed: h.After, Count: h.Seq, Head: h.Hash, Root: root, SignedAt: micro(at),
	})
}

// AddendaHead decodes a seal of addenda. It does not check the signature.
func (s Seal) AddendaHead() (AddendaHead, error) {
	var a AddendaHead
	_, err := s.open(AddendaHeadType, &a)
	return a, err
}

func subject(r RecordID, root string) Subject {
	return Subject{Name: string(r), Digest: map[string]string{"sha256": root}}
}
