package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"bivy/internal/clip"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Result is how a session's end came out.
type Result string

// Results.
const (
	Closed              Result = "closed"
	ClosedWithResiduals Result = "closed_with_residuals"
)

// Bounds of what a closeout holds. Residuals beyond the bound are counted.
const (
	MaxResiduals      = 1000
	MaxResidualLength = 512      // bytes
	MaxSections       = 16       // of one closeout
	MaxSection        = 64 << 10 // bytes of JSON of one section
)

// HeadsSection is the name of the section that Signer.Seal and
// Signer.SealSegment add: the heads of all records of the node at the moment of
// the seal, as Heads without the list of open records.
const HeadsSection = "heads"

// Closeout is what a seal states about a session. Its fields are fixed by the
// version; everything else goes into sections. Nothing in a
// closeout can be erased later, so it holds no payload of an event.
type Closeout struct {
	Version       int                `json:"version"`               // StatementVersion; filled in by Seal
	Session       session.ID         `json:"session"`               // which session
	Owner         session.Principal  `json:"owner"`                 // whose it was
	CreatedAt     time.Time          `json:"created_at"`            // when it was created
	StartedAt     time.Time          `json:"started_at,omitzero"`   // when it first ran; zero: never
	EndedAt       time.Time          `json:"ended_at"`              // when it ended
	SealedAt      time.Time          `json:"sealed_at"`             // when the seal was made
	Reason        session.Reason     `json:"reason"`                // why it ended
	Result        Result             `json:"result"`                // filled in by Seal
	Residuals     []string           `json:"residuals"`             // what the end could not prove, at most MaxResiduals
	ResidualCount int                `json:"residual_count"`        // all of them, also those beyond the bound; filled in by Seal
	SpecDigest    string             `json:"spec_digest,omitempty"` // of the spec without the values of its environment
	Template      string             `json:"template,omitempty"`    // digest of the image it ran
	Versions      map[string]string  `json:"versions,omitempty"`    // of bivy and its parts
	Log           Log                `json:"log"`                   // ties the closeout to the record; filled in by Seal
	Sections      map[string]Section `json:"sections,omitempty"`    // open part, by name
}

// Section is one open part of a closeout. A verifier checks its digest and
// shows its content, whether it knows the section or not; fields that a reader
// of a section does not know are ignored.
type Section struct {
	Digest  string          `json:"digest"`  // "sha256:" and the hex SHA-256 of the bytes of content
	Content json.RawMessage `json:"content"` // a JSON object of at most MaxSection bytes
}

// NewSection encodes v, which must be a JSON object whose names are ASCII in
// lower case.
func NewSection(v any) (Section, error) {
	content, err := json.Marshal(v)
	if err != nil {
		return Section{}, fmt.Errorf("section: %w", err)
	}
	s := Section{Content: printable(content)}
	s.Digest = s.digest()
	if err := s.check(); err != nil {
		return Section{}, kind.Errorf(kind.Invalid, "section: %w", err)
	}
	return s, nil
}

func (s Section) digest() string {
	sum := sha256.Sum256(s.Content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (s Section) check() error {
	if len(s.Content) > MaxSection {
		return fmt.Errorf("it has %d bytes, at most %d", len(s.Content), MaxSection)
	}
	if !bytes.HasPrefix(s.Content, []byte("{")) {
		return fmt.Errorf("it is not a JSON object")
	}
	if err := checkNames(s.Content); err != nil {
		return err
	}
	if s.Digest != s.digest() {
		return fmt.Errorf("its content does not have the digest beside it")
	}
	return nil
}

func checkSections(all map[string]Section) error {
	if len(all) > MaxSections {
		return fmt.Errorf("%d sections, at most %d", len(all), MaxSections)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].check(); err != nil {
			return fmt.Errorf("section %.64q: %w", name, err)
		}
	}
	return nil
}

// Heads returns the heads of the node's records at the moment of the seal. ok is
// false when the closeout has no such section.
func (c Closeout) Heads() (h Heads, ok bool, err error) { return headsOf(c.Sections) }

func headsOf(all map[string]Section) (h Heads, ok bool, err error) {
	s, ok := all[HeadsSection]
	if !ok {
		return h, false, nil
	}
	if err := json.Unmarshal(s.Content, &h); err != nil {
		return Heads{}, false, fmt.Errorf("section %s: %w", HeadsSection, err)
	}
	return h, true, h.check()
}

// withHeads returns sections with the section of heads, whose list of open
// records is left out: the digest stands for it.
func withHeads(sections map[string]Section, h Heads) (map[string]Section, error) {
	h.Open, h.Time = nil, micro(h.Time)
	s, err := NewSection(h)
	if err != nil {
		return nil, err
	}
	all := maps.Clone(sections)
	if all == nil {
		all = make(map[string]Section, 1)
	}
	all[HeadsSection] = s
	if err := checkSections(all); err != nil {
		return nil, kind.Wrap(kind.Invalid, err)
	}
	return all, nil
}

// Seal signs that the session's record that ends at h is complete and that c is
// the outcome of the session. before is the state of the node's records before
// this seal. Seal fills in the fields of c that depend on the record.
func (s *Signer) Seal(h Head, before Heads, c Closeout) (Seal, error) {
	if h.Seq == 0 || h.Record != SessionRecord(c.Session) {
		return Seal{}, kind.Errorf(kind.Invalid, "seal of session %s over %s with %d events", c.Session, h.Record, h.Seq)
	}
	var err error
	if c.Sections, err = withHeads(c.Sections, before); err != nil {
		return Seal{}, fmt.Errorf("seal of session %s: %w", c.Session, err)
	}
	c.Version = StatementVersion
	c.CreatedAt, c.StartedAt, c.EndedAt, c.SealedAt = micro(c.CreatedAt), micro(c.StartedAt), micro(c.EndedAt), micro(c.SealedAt)
	c.Owner = boundActor(c.Owner)
	c.ResidualCount, c.Result = len(c.Residuals), Closed
	if len(c.Residuals) > 0 {
		c.Result = ClosedWithResiduals
	}
	listed := make([]string, 0, min(len(c.Residuals), MaxResiduals))
	for _, r := range c.Residuals[:min(len(c.Residuals), MaxResiduals)] {
		listed = append(listed, clip.Text(r, MaxResidualLength))
	}
	c.Residuals = listed
	c.Log = logOf(h)
	return s.envelope(CloseoutType, subject(h.Record, c.Log.Root), c)
}

// Closeout decodes the seal of a session. It does not check the signature.
func (s Seal) Closeout() (Closeout, error) {
	var c Closeout
	_, err := s.open(CloseoutType, &c)
	return c, err
}

// SegmentCloseout is what a seal states about a segment of a system record.
type SegmentCloseout struct {
	Version  int                `json:"version"`            // StatementVersion; filled in by SealSegment
	Node     session.NodeID     `json:"node"`               // whose record it is; filled in by SealSegment
	Segment  uint64             `json:"segment"`            // its number, from 1; filled in by SealSegment
	OpenedAt time.Time          `json:"opened_at"`          // when the segment was opened
	SealedAt time.Time          `json:"sealed_at"`          // when the seal was made
	Versions map[string]string  `json:"versions,omitempty"` // of bivy and its parts
	Log      Log                `json:"log"`                // ties the closeout to the segment; filled in by SealSegment
	Sections map[string]Section `json:"sections,omitempty"` // open part, by name
}

// Heads returns the heads of the node's records at the moment of the seal. ok is
// false when the closeout has no such section.
func (c SegmentCloseout) Heads() (h Heads, ok bool, err error) { return headsOf(c.Sections) }

// SealSegment signs that the segment that ends at h is complete. before is the
// state of the node's records before this seal.
func (s *Signer) SealSegment(h Head, before Heads, c SegmentCloseout) (Seal, error) {
	node, number, ok := h.Record.Segment()
	if !ok || h.Seq == 0 {
		return Seal{}, kind.Errorf(kind.Invalid, "seal of a segment: %s with %d events is not a segment", h.Record, h.Seq)
	}
	var err error
	if c.Sections, err = withHeads(c.Sections, before); err != nil {
		return Seal{}, fmt.Errorf("seal of %s: %w", h.Record, err)
	}
	c.Version, c.Node, c.Segment = StatementVersion, node, number
	c.OpenedAt, c.SealedAt, c.Log = micro(c.OpenedAt), micro(c.SealedAt), logOf(h)
	return s.envelope(SegmentCloseoutType, subject(h.Record, c.Log.Root), c)
}

// SegmentCloseout decodes the seal of a segment. It does not check the
// signature.
func (s Seal) SegmentCloseout() (SegmentCloseout, error) {
	var c SegmentCloseout
	_, err := s.open(SegmentCloseoutType, &c)
	return c, err
}
