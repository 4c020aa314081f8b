package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// record is what the writer remembers of an open record, so that an append to
// it reads nothing.
type record struct {
	n       int64 // its row
	head    audit.Head
	intents audit.Intents
	counts  map[audit.Action]uint64
	sealed  bool // do not remember it

	session facts        // of a session's record
	segment segmentFacts // of a segment
}

// facts is what the writer remembers of a session.
type facts struct {
	n       int64 // its row
	version int64
	state   session.State
	fixed   [32]byte      // see fixed
	fence   session.Fence // what writers have to know
}

// check compares what a writer believes with what is true.
func (f facts) check(id session.ID, at session.Fence) error {
	if f.fence == at {
		return nil
	}
	return kind.Errorf(kind.Conflict, "session %s is on node %s at generation %d; this write is for node %s at generation %d: nothing was written",
		id, f.fence.Node, f.fence.Generation, at.Node, at.Generation).
		WithHint("read the session again; if another node has it, leave it to that node")
}

// copied returns an independent copy.
func (r *record) copied() *record {
	c := *r
	c.intents, c.counts = r.intents.Clone(), maps.Clone(r.counts)
	return &c
}

// prepare drafts the entries, of which there is at least one and none closes
// the record.
func prepare(entries []audit.Entry, closes audit.Action) ([]audit.Draft, error) {
	if len(entries) == 0 {
		return nil, kind.Errorf(kind.Invalid, "a write without an event")
	}
	drafts := make([]audit.Draft, len(entries))
	for i, e := range entries {
		if closes != "" && e.Action == closes {
			return nil, kind.Errorf(kind.Invalid, "%s is written with the seal and in no other way", closes)
		}
		var err error
		if drafts[i], err = audit.Prepare(e); err != nil {
			return nil, err
		}
	}
	return drafts, nil
}

// prepareLast drafts the entries, of which the last closes the record.
func prepareLast(entries []audit.Entry, closes audit.Action) ([]audit.Draft, error) {
	last := len(entries) - 1
	if last < 0 || entries[last].Action != closes {
		return nil, kind.Errorf(kind.Invalid, "the last event must be %s", closes)
	}
	end, err := audit.Prepare(entries[last])
	if err != nil || last == 0 {
		return []audit.Draft{end}, err
	}
	drafts, err := prepare(entries[:last], closes)
	return append(drafts, end), err
}

// newRecord makes the row of a record that has no event yet.
func (b *batch) newRecord(start audit.Head) (*record, error) {
	n, err := b.insert(b.stmt.recordInsert, string(start.Record))
	if err != nil {
		return nil, err
	}
	return &record{n: n, head: start, counts: make(map[audit.Action]uint64)}, nil
}

// remembered returns the record as it is within the transaction, as a copy that
// becomes true when the request succeeds, or nil when it has to be loaded.
func (b *batch) remembered(id audit.RecordID) *record {
	if rec := b.known(id); rec != nil {
		return rec.copied()
	}
	return nil
}

// known is remembered without the copy: the caller only reads it.
func (b *batch) known(id audit.RecordID) *record {
	for _, known := range [...]map[audit.RecordID]*record{b.mine, b.staged, b.open} {
		if rec, ok := known[id]; ok {
			return rec
		}
	}
	return nil
}

// sessionRecord returns the record of a session.
func (b *batch) sessionRecord(id session.ID) (*record, error) {
	name := audit.SessionRecord(id)
	if rec := b.remembered(name); rec != nil {
		return rec, nil
	}
	var n, recordN int64
	var spec, rest []byte
	err := b.stmt.sessionSelect.QueryRowContext(context.Background(), string(id)).Scan(&n, &recordN, &spec, &rest)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, errUnknown(id)
	}
	if err != nil {
		return nil, err
	}
	s, err := decode(spec, rest, "")
	if err != nil {
		return nil, err
	}
	rec := &record{n: recordN, head: audit.Start(name, ""), sealed: s.State.Terminal()}
	rec.session = facts{n: n, version: s.Version, state: s.State, fence: s.Fence()}
	if rec.session.fixed, err = fixed(s); err != nil {
		return nil, err
	}
	return rec, b.load(rec)
}

// load reads the events of a record: its head, its open intents and how often
// each action occurs.
func (b *batch) load(rec *record) error {
	rows, err := b.stmt.eventScan.QueryContext(context.Background(), rec.n)
	if err != nil {
		return err
	}
	defer rows.Close()
	rec.counts = make(map[audit.Action]uint64)
	for rows.Next() {
		var seq, concludes uint64
		var action, ref string
		if err := rows.Scan(&seq, &action, &ref, &concludes); err != nil {
			return err
		}
		if err := rec.intents.Add(seq, audit.Action(action), ref, concludes); err != nil {
			return kind.Errorf(kind.Internal, "stored event %d of %s: %w", seq, rec.head.Record, err)
		}
		rec.counts[audit.Action(action)]++
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return err
	}
	err = b.stmt.eventLast.QueryRowContext(context.Background(), rec.n).Scan(&rec.head.Seq, &rec.head.Hash)
	if errors.Is(err, sql.ErrNoRows) {
		return kind.Errorf(kind.Internal, "%s has no events", rec.head.Record)
	}
	return err
}

// append chains the drafts to the record, writes them and returns the number of
// the first.
func (b *batch) append(rec *record, at session.Fence, drafts []audit.Draft) (uint64, error) {
	first := rec.head.Seq + 1
	for _, d := range drafts {
		e, err := d.Chain(rec.head, at, b.moment)
		if err != nil {
			return 0, err
		}
		if err := rec.intents.Add(e.Event.Seq, d.Action(), d.Ref(), d.Concludes()); err != nil {
			return 0, kind.Wrap(kind.Invalid, err)
		}
		hash, err := hex.DecodeString(e.Hash)
		if err != nil {
			return 0, err
		}
		if err := b.exec(b.stmt.eventInsert, rec.n, int64(e.Event.Seq), string(e.Event.Action), e.Event.Ref, int64(e.Event.Concludes),
			string(e.Raw), hash, e.Salt, string(e.Payload)); err != nil {
			return 0, err
		}
		rec.counts[d.Action()]++
		rec.segment.bytes += int64(len(e.Raw) + len(e.Payload))
		rec.head = e.Head()
	}
	b.mine[rec.head.Record] = rec
	return first, nil
}

// seal appends the drafts, of which the last closes the record, after an
// intent.lost for every intent without an outcome, and stores the seal and its
// leaf.
func (b *batch) seal(rec *record, at session.Fence, sign func(audit.Head, audit.Heads) (audit.Seal, error), drafts []audit.Draft, actor session.Principal) error {
	// What the drafts leave open is known only by trying: their numbers follow
	// from their places.
	left := rec.intents.Clone()
	for i, d := range drafts {
		if err := left.Add(rec.head.Seq+uint64(i)+1, d.Action(), d.Ref(), d.Concludes()); err != nil {
			return kind.Wrap(kind.Invalid, err)
		}
	}
	last := len(drafts) - 1
	all := slices.Clone(drafts[:last])
	for _, i := range left.Open() {
		d, err := audit.Prepare(i.Lost(actor))
		if err != nil {
			return err
		}
		all = append(all, d)
	}
	if _, err := b.append(rec, at, append(all, drafts[last])); err != nil {
		return err
	}
	before, err := b.heads(at.Node, rec.head.Record)
	if err != nil {
		return err
	}
	head := rec.head
	head.Counts = rec.counts
	seal, err := sign(head, before)
	if err != nil {
		return fmt.Errorf("sign: %w", err)
	}
	envelope, err := json.Marshal(seal)
	if err != nil {
		return err
	}
	if err := b.exec(b.stmt.sealInsert, rec.n, string(envelope)); err != nil {
		return err
	}
	rec.sealed = true
	return b.addLeaf(at.Node, rec)
}

// addLeaf adds the seal over rec to the tree of the node.
func (b *batch) addLeaf(node session.NodeID, rec *record) error {
	tree, err := b.tree(node)
	if err != nil {
		return err
	}
	if err := b.exec(b.stmt.leafInsert, string(node), int64(tree.Size()), rec.n, int64(rec.head.Seq)); err != nil {
		return err
	}
	tree.Append(rec.head.Leaf())
	return b.exec(b.stmt.treePut, string(node), tree.Encode())
}

func (b *batch) tree(node session.NodeID) (audit.Tree, error) {
	return scanTree(b.stmt.treeSelect.QueryRowContext(context.Background(), string(node)))
}

func scanTree(row *sql.Row) (audit.Tree, error) {
	var data []byte
	err := row.Scan(&data)
	if errors.Is(err, sql.ErrNoRows) {
		return audit.Tree{}, nil
	}
	if err != nil {
		return audit.Tree{}, err
	}
	return audit.ParseTree(data)
}

// heads returns the state of the node's records within the transaction, without
// the record that is being sealed.
func (b *batch) heads(node session.NodeID, without audit.RecordID) (audit.Heads, error) {
	tree, err := b.tree(node)
	if err != nil {
		return audit.Heads{}, err
	}
	open, err := b.openHeads(node, without)
	if err != nil {
		return audit.Heads{}, err
	}
	system, err := scanSystemHead(b.stmt.systemHead.QueryRowContext(context.Background(), string(node)))
	if err != nil {
		return audit.Heads{}, err
	}
	if system.Record == without {
		system = audit.OpenHead{}
	}
	return audit.NewHeads(node, b.moment.Now, tree, open, system), nil
}

// openHeads returns the heads of the session records of a node that are open.
// It reads those that the writer does not remember.
func (b *batch) openHeads(node session.NodeID, without audit.RecordID) ([]audit.OpenHead, error) {
	rows, err := b.stmt.openRecords.QueryContext(context.Background(), string(node))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var open []audit.OpenHead
	var unknown []int // places in open whose heads have to be read
	for rows.Next() {
		var id session.ID
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		h := audit.OpenHead{Record: audit.SessionRecord(id)}
		if h.Record == without {
			continue
		}
		if rec := b.known(h.Record); rec != nil {
			h.Seq, h.Hash = rec.head.Seq, rec.head.Hash
		} else {
			unknown = append(unknown, len(open))
		}
		open = append(open, h)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, err
	}
	for _, i := range unknown {
		h := &open[i]
		if err := b.stmt.headSelect.QueryRowContext(context.Background(), string(h.Record)).Scan(&h.Seq, &h.Hash); err != nil {
			return nil, fmt.Errorf("head of %s: %w", h.Record, err)
		}
	}
	return open, nil
}

func scanHeads(rows *sql.Rows) ([]audit.OpenHead, error) {
	defer rows.Close()
	var all []audit.OpenHead
	for rows.Next() {
		var h audit.OpenHead
		if err := rows.Scan(&h.Record, &h.Seq, &h.Hash); err != nil {
			return nil, err
		}
		all = append(all, h)
	}
	return all, rows.Err()
}

func scanSystemHead(row *sql.Row) (audit.OpenHead, error) {
	var h audit.OpenHead
	err := row.Scan(&h.Record, &h.Seq, &h.Hash)
	if errors.Is(err, sql.ErrNoRows) {
		return audit.OpenHead{}, nil
	}
	return h, err
}

const (
	treeQuery = "SELECT subtrees FROM tree WHERE node = ?"

	// The session records of a node that are open, with their last events.
	openHeadsQuery = `SELECT r.id, e.seq, lower(hex(e.hash)) FROM session s JOIN record r ON r.n = s.record
		JOIN event e ON e.record = r.n AND e.seq = (SELECT max(seq) FROM event WHERE record = r.n)
		WHERE s.node = ? AND s.state <> 'ended'`

	// The last event of the newest segment of a node.
	systemHeadQuery = `SELECT r.id, e.seq, lower(hex(e.hash)) FROM segment g JOIN record r ON r.n = g.record JOIN event e ON e.record = r.n
		WHERE g.node = ? ORDER BY g.number DESC, e.seq DESC LIMIT 1`
)

// micros is the time as columns hold it; 0 for none.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}
