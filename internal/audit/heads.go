package audit

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"bivy/internal/kind"
	"bivy/internal/session"
)

// Heads is where all records of a node end at one moment.
//
// Every seal of the node, and every signed head of addenda, is a leaf of a
// Merkle tree in the order in which they were made. The tree's root and its
// number of leaves fix all of them; the list of open records fixes the rest.
type Heads struct {
	Version    int            `json:"version"`         // StatementVersion; filled in by SignHeads and NewHeads
	Node       session.NodeID `json:"node"`            // whose records they are
	Time       time.Time      `json:"time"`            // when
	Sealed     uint64         `json:"sealed"`          // leaves of the tree
	TreeRoot   string         `json:"tree_root"`       // hex root of the tree, see Tree
	OpenCount  uint64         `json:"open_count"`      // session records without a seal
	OpenDigest string         `json:"open_digest"`     // "sha256:…" over the list of their heads
	Open       []OpenHead     `json:"open,omitempty"`  // that list, by name of the record; absent from a section
	System     OpenHead       `json:"system,omitzero"` // the newest segment of the system record, sealed or not; absent when there is none or the seal is over it
}

// OpenHead is the last event of a record at some moment.
type OpenHead struct {
	Record RecordID `json:"record"` // which record
	Seq    uint64   `json:"seq"`    // number of the event
	Hash   string   `json:"hash"`   // hex hash of the event
}

// NewHeads fills in what follows from the list of open records, which it sorts.
func NewHeads(node session.NodeID, at time.Time, sealed Tree, open []OpenHead, system OpenHead) Heads {
	slices.SortFunc(open, func(a, b OpenHead) int { return cmp.Compare(a.Record, b.Record) })
	return Heads{
		Version: StatementVersion, Node: node, Time: micro(at), Sealed: sealed.Size(), TreeRoot: sealed.Root(),
		OpenCount: uint64(len(open)), OpenDigest: openDigest(open), Open: open, System: system,
	}
}

// Leaf is the leaf of the tree for the sealed record that ends at h.
func (h Head) Leaf() []byte { return leaf(h.Record, h.Root()) }

func leaf(r RecordID, root string) []byte { return []byte(string(r) + "\n" + root) }

func openDigest(open []OpenHead) string {
	b := []byte("bivy/audit/open/v1\n")
	for _, o := range open {
		b = append(b, o.Record...)
		b = append(b, '\n')
		b = strconv.AppendUint(b, o.Seq, 10)
		b = append(b, '\n')
		b = append(b, o.Hash...)
		b = append(b, '\n')
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (h Heads) check() error {
	if err := checkNode(h.Node); err != nil {
		return err
	}
	if !isDigest(h.TreeRoot) || !isDigest(strings.TrimPrefix(h.OpenDigest, "sha256:")) {
		return errors.New("its digests are not SHA-256 in hex")
	}
	for _, o := range append(h.Open[:len(h.Open):len(h.Open)], h.System) {
		if o == (OpenHead{}) {
			continue // a node without a system record yet
		}
		if _, err := ParseRecordID(string(o.Record)); err != nil {
			return err
		}
		if o.Seq == 0 || !isDigest(o.Hash) {
			return fmt.Errorf("the head of %s is not a number and a hash", o.Record)
		}
	}
	return nil
}

// SignHeads signs h, with its list of open records.
func (s *Signer) SignHeads(h Heads) (Seal, error) {
	h.Version, h.Time = StatementVersion, micro(h.Time)
	return s.envelope(HeadsType, Subject{Name: "heads/" + string(h.Node), Digest: map[string]string{"sha256": h.TreeRoot}}, h)
}

// OpenHeads reads a statement that SignHeads made, as JSON, checks that it is
// signed by a key that is pinned or reached from a pinned one through
// rotations, and returns it with the fingerprint of that key. It fails with
// Invalid for every other text.
func OpenHeads(data []byte, pinned []PublicKey, rotations []Seal) (Heads, string, error) {
	fail := func(err error) (Heads, string, error) {
		return Heads{}, "", kind.Wrap(kind.Invalid, fmt.Errorf("the statement of heads does not verify: %w", err))
	}
	if len(data) > maxLine {
		return fail(fmt.Errorf("longer than %d bytes", maxLine))
	}
	var seal Seal
	if err := strict(data, &seal); err != nil {
		return fail(err)
	}
	keys, err := trust(pinned, rotations)
	if err != nil {
		return fail(err)
	}
	key, ok := seal.signedBy(keys.all)
	if !ok {
		return fail(fmt.Errorf("it is not signed by a pinned key; it names %s", seal.signers()))
	}
	var h Heads
	about, err := seal.open(HeadsType, &h)
	if err != nil {
		return fail(err)
	}
	if err := h.check(); err != nil {
		return fail(err)
	}
	if about.Name != "heads/"+string(h.Node) {
		return fail(fmt.Errorf("it is about %s, and its node is %s", about.Name, h.Node))
	}
	// A statement within a record leaves the list out. Nobody can take the list
	// out of another one, which is signed.
	if len(h.Open) > 0 && (uint64(len(h.Open)) != h.OpenCount || openDigest(h.Open) != h.OpenDigest) {
		return fail(errors.New("its list of open records does not have the digest beside it"))
	}
	return h, key.Fingerprint(), nil
}

// ListedRecord is one entry of a listing of a node's records: first all leaves
// of the tree, in the order in which they were sealed, then the session records
// and the segment that are open. A session with addenda is listed once with
// its seal and once for each signed head of its addenda.
type ListedRecord struct {
	Record RecordID `json:"record"` // which record
	Seq    uint64   `json:"seq"`    // number of the last event; of addenda: at that signed head
	Hash   string   `json:"hash"`   // hex hash of that event, as computed from what is stored
	Sealed bool     `json:"sealed"` // whether the tree has a leaf for it
}

// HeadsReport is what VerifyHeads found.
type HeadsReport struct {
	Sealed uint64 // seals that the held statement covers; all are still there
	Since  uint64 // seals that were made since
	// Continued are records that have more events now than in the held
	// statement. Their exports must contain these heads: pass them to Verify or
	// VerifySystem as VerifyOptions.Contains.
	Continued []OpenHead
	// Unlisted says that the statement was of a seal or within a record: it has
	// the digest of the open records and not their list.
	Unlisted bool
}

// VerifyHeads checks what a node said earlier about its records against a later
// listing of them. list calls its argument for each record in order and stops
// when that fails. The error has kind Invalid when the listing lacks a seal or
// an event that the statement covers: records were deleted, cut short or
// replaced, or an older copy of the database was put back.
//
// It needs memory for the open records of the statement only.
func VerifyHeads(held Heads, list func(fn func(ListedRecord) error) error) (HeadsReport, error) {
	bad := func(format string, args ...any) error {
		at := held.Time.UTC().Format(time.RFC3339)
		return kind.Errorf(kind.Invalid, "the records of node %s are not those of %s: %w", held.Node, at, fmt.Errorf(format, args...))
	}
	report := HeadsReport{Unlisted: held.OpenCount > 0 && len(held.Open) == 0}
	wanted := make(map[RecordID]OpenHead, len(held.Open)+1)
	for _, o := range held.Open {
		wanted[o.Record] = o
	}
	if held.System.Record != "" {
		wanted[held.System.Record] = held.System
	}
	var tree Tree
	matched := held.Sealed == 0 && tree.Root() == held.TreeRoot
	open := false
	err := list(func(r ListedRecord) error {
		if r.Sealed && open {
			return bad("the listing has a sealed record after an open one: %s", r.Record)
		}
		open = open || !r.Sealed
		if r.Sealed {
			tree.Append(leaf(r.Record, Head{Record: r.Record, Seq: r.Seq, Hash: r.Hash}.Root()))
			if tree.Size() == held.Sealed {
				if tree.Root() != held.TreeRoot {
					return bad("one of the %d records that were sealed by then was changed, removed or reordered", held.Sealed)
				}
				matched = true
			}
		}
		o, ok := wanted[r.Record]
		if !ok {
			return nil
		}
		// Only the newest segment of the system record may be sealed itself.
		if r.Sealed && tree.Size() <= held.Sealed && o != held.System {
			return bad("%s was open and is now listed among the records sealed before", r.Record)
		}
		delete(wanted, r.Record)
		switch {
		case r.Seq < o.Seq:
			return bad("%s had %d events and has %d", r.Record, o.Seq, r.Seq)
		case r.Seq == o.Seq && r.Hash != o.Hash:
			return bad("event %d of %s was replaced", o.Seq, r.Record)
		case r.Seq > o.Seq:
			report.Continued = append(report.Continued, o)
		}
		return nil
	})
	switch {
	case err != nil:
		return HeadsReport{}, err
	case !matched:
		return HeadsReport{}, bad("%d records were sealed by then, the listing has %d sealed records", held.Sealed, tree.Size())
	case len(wanted) > 0:
		first := ""
		for r := range wanted {
			if first == "" || string(r) < first {
				first = string(r)
			}
		}
		return HeadsReport{}, bad("%s is missing", first)
	}
	report.Sealed, report.Since = held.Sealed, tree.Size()-held.Sealed
	return report, nil
}

// String says in one line what was found.
func (r HeadsReport) String() string {
	text := fmt.Sprintf("all %d seals are still there, %d were made since", r.Sealed, r.Since)
	if r.Unlisted {
		text += "; the statement does not list the records that were open then"
	}
	if n := len(r.Continued); n > 0 {
		text += fmt.Sprintf("; %d records have more events since", n)
	}
	return text
}

func isDigest(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == sha256.Size && strings.ToLower(s) == s
}

// Segment describes one segment of a node's system record.
type Segment struct {
	Number uint64    // from 1
	Events uint64    // in it
	Bytes  int64     // of skeletons and payloads
	Opened time.Time // when it was opened
	Sealed time.Time // when it was sealed; zero: it is the open one
}
