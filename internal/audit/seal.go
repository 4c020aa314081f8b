package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Types that a seal names, as DSSE and in-toto ask.
const (
	PayloadType   = "application/vnd.in-toto+json"
	StatementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://bivy.dev/session-closeout/v1"
)

// Seal is a DSSE envelope over a Statement. Its JSON encoding is the one that
// DSSE defines, so that other tools can check it too.
type Seal struct {
	PayloadType string      `json:"payloadType"`
	Payload     []byte      `json:"payload"` // the statement's exact bytes
	Signatures  []Signature `json:"signatures"`
}

// Signature is one signature of a Seal.
type Signature struct {
	KeyID string `json:"keyid"`
	Sig   []byte `json:"sig"`
}

// Statement is the in-toto statement inside a Seal. Its only subject is the
// record, by Head.Root.
type Statement struct {
	Type          string    `json:"_type"`
	Subject       []Subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     Closeout  `json:"predicate"`
}

// Subject is what a Statement speaks about.
type Subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

// Result is how a session's end came out.
type Result string

// Results.
const (
	Closed              Result = "closed"
	ClosedWithResiduals Result = "closed_with_residuals"
)

// Bounds of what a Closeout lists; what is beyond them is counted.
const (
	MaxResiduals      = 1000
	MaxResidualLength = 512
)

// Closeout is what a seal states about a session. Nothing in it can be erased
// later, so it carries no payload of an event.
type Closeout struct {
	Session   session.ID        `json:"session"`
	Owner     session.Principal `json:"owner"`
	CreatedAt time.Time         `json:"created_at"`
	StartedAt time.Time         `json:"started_at,omitzero"`
	EndedAt   time.Time         `json:"ended_at"`
	SealedAt  time.Time         `json:"sealed_at"`
	Reason    session.Reason    `json:"reason"`
	Result    Result            `json:"result"`
	// Residuals is what the end could not prove; ResidualCount counts all of
	// them, also those that the list has no room for.
	Residuals     []string          `json:"residuals"`
	ResidualCount int               `json:"residual_count"`
	SpecDigest    string            `json:"spec_digest,omitempty"`
	Template      string            `json:"template,omitempty"`
	Versions      map[string]string `json:"versions,omitempty"` // of bivy and what it is made of
	Log           Log               `json:"log"`
}

// Log is the part of a Closeout that ties it to the record.
type Log struct {
	First  uint64            `json:"first"`
	Last   uint64            `json:"last"`
	Count  uint64            `json:"count"`
	Head   string            `json:"head"` // hex hash of the last event
	Root   string            `json:"root"` // Head.Root
	Counts map[Action]uint64 `json:"counts,omitempty"`
}

// Seal signs that the record ending at h is complete and that c is what
// became of the session. It fills in c's Log, Result and ResidualCount.
func (s *Signer) Seal(h Head, c Closeout) (Seal, error) {
	if h.Seq == 0 || c.Session != h.Session {
		return Seal{}, kind.Errorf(kind.Invalid, "seal of session %s: the record is of session %s and has %d events", c.Session, h.Session, h.Seq)
	}
	for _, t := range []*time.Time{&c.CreatedAt, &c.StartedAt, &c.EndedAt, &c.SealedAt} {
		*t = t.UTC().Truncate(time.Microsecond)
	}
	c.Owner = boundActor(c.Owner)
	c.ResidualCount, c.Result = len(c.Residuals), Closed
	if len(c.Residuals) > 0 {
		c.Result = ClosedWithResiduals
	}
	listed := make([]string, 0, min(len(c.Residuals), MaxResiduals))
	for _, r := range c.Residuals[:min(len(c.Residuals), MaxResiduals)] {
		listed = append(listed, cut(r, MaxResidualLength))
	}
	c.Residuals = listed
	root := h.Root()
	c.Log = Log{First: 1, Last: h.Seq, Count: h.Seq, Head: h.Hash, Root: root, Counts: h.Counts}
	payload, err := json.Marshal(Statement{
		Type:          StatementType,
		Subject:       []Subject{{Name: "session/" + string(h.Session), Digest: map[string]string{"sha256": root}}},
		PredicateType: PredicateType,
		Predicate:     c,
	})
	if err != nil {
		return Seal{}, fmt.Errorf("seal of session %s: %w", h.Session, err)
	}
	payload = printable(payload)
	return Seal{
		PayloadType: PayloadType,
		Payload:     payload,
		Signatures:  []Signature{{KeyID: s.Public().Fingerprint(), Sig: s.sign(pae(PayloadType, payload))}},
	}, nil
}

// Statement decodes what the seal says. It does not check the signature; only
// Verify does, and only what it returns may be believed.
func (s Seal) Statement() (Statement, error) {
	var st Statement
	if s.PayloadType != PayloadType {
		return st, fmt.Errorf("payload type %.64q, want %s", s.PayloadType, PayloadType)
	}
	if err := strict(s.Payload, &st); err != nil {
		return st, fmt.Errorf("statement: %w", err)
	}
	if st.Type != StatementType || st.PredicateType != PredicateType {
		return st, fmt.Errorf("statement of type %.64q about %.64q, want %s about %s", st.Type, st.PredicateType, StatementType, PredicateType)
	}
	return st, nil
}

// signedBy returns the first of keys whose signature the seal carries.
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

// pae is DSSE's pre-authentication encoding: what is signed.
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
