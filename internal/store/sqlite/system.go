package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// segmentFacts is what the writer remembers of a segment.
type segmentFacts struct {
	number uint64
	bytes  int64 // of skeletons and payloads
}

// AppendSystem adds events to the open segment of the system record of a node
// and returns its number and that of the first event. When there is no open
// segment it opens one, with a segment.opened event by the first entry's actor.
func (s *Store) AppendSystem(ctx context.Context, node session.NodeID, entries ...audit.Entry) (segment, first uint64, err error) {
	drafts, err := prepare(entries, audit.SegmentClosed)
	if err != nil {
		return 0, 0, err
	}
	err = s.write(ctx, func(b *batch) error {
		rec, err := b.segment(node)
		if err == nil && rec == nil {
			rec, err = b.openSegment(node, entries[0])
		}
		if err != nil {
			return err
		}
		if first, err = b.append(rec, session.Fence{Node: node}, drafts); err != nil {
			return err
		}
		segment = rec.segment.number
		return b.measure(node, rec)
	})
	if err != nil {
		return 0, 0, fmt.Errorf("append to the system record of node %s: %w", node, err)
	}
	return segment, first, nil
}

// SealSegment appends the last events, of which the last must be
// segment.closed, to the open segment of a node and stores the seal over it. An
// intent without an outcome gets an intent.lost first. It fails with Conflict
// when no segment is open.
func (s *Store) SealSegment(ctx context.Context, node session.NodeID, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) error {
	drafts, err := prepareLast(entries, audit.SegmentClosed)
	if err == nil {
		actor := entries[len(entries)-1].Actor
		err = s.write(ctx, func(b *batch) error {
			rec, err := b.segment(node)
			if err != nil {
				return err
			}
			if rec == nil {
				return kind.Errorf(kind.Conflict, "no segment is open")
			}
			if err := b.seal(rec, session.Fence{Node: node}, sign, drafts, actor); err != nil {
				return err
			}
			return b.measure(node, rec)
		})
	}
	if err != nil {
		return fmt.Errorf("seal the system record of node %s: %w", node, err)
	}
	return nil
}

// segment returns the open segment of a node, or nil when there is none.
func (b *batch) segment(node session.NodeID) (*record, error) {
	var number uint64
	var n, bytes, sealed int64
	err := b.stmt.segmentLast.QueryRowContext(context.Background(), string(node)).Scan(&number, &n, &bytes, &sealed)
	if errors.Is(err, sql.ErrNoRows) || err == nil && sealed != 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if rec := b.remembered(audit.SystemRecord(node, number)); rec != nil {
		return rec, nil
	}
	// The head of a record with events does not depend on what it continues.
	rec := &record{n: n, head: audit.Start(audit.SystemRecord(node, number), ""), segment: segmentFacts{number: number, bytes: bytes}}
	return rec, b.load(rec)
}

// openSegment makes the next segment of a node.
func (b *batch) openSegment(node session.NodeID, by audit.Entry) (*record, error) {
	number, root := uint64(1), ""
	last, err := scanSystemHead(b.stmt.systemHead.QueryRowContext(context.Background(), string(node)))
	if err != nil {
		return nil, err
	}
	if last.Record != "" {
		_, n, ok := last.Record.Segment()
		if !ok {
			return nil, kind.Errorf(kind.Internal, "stored segment %q has another node", last.Record)
		}
		number, root = n+1, audit.Head{Record: last.Record, Seq: last.Seq, Hash: last.Hash}.Root()
	}
	opened, err := audit.Prepare(audit.Entry{
		Action: audit.SegmentOpened, Outcome: audit.OK, Actor: by.Actor, Trace: by.Trace, Payload: map[string]any{"segment": number},
	})
	if err != nil {
		return nil, err
	}
	rec, err := b.newRecord(audit.Start(audit.SystemRecord(node, number), root))
	if err != nil {
		return nil, err
	}
	rec.segment.number = number
	if err := b.exec(b.stmt.segmentInsert, string(node), int64(number), rec.n, b.moment.Now.UnixMicro()); err != nil {
		return nil, err
	}
	_, err = b.append(rec, session.Fence{Node: node}, []audit.Draft{opened})
	return rec, err
}

// measure writes how large the segment is and whether it is sealed.
func (b *batch) measure(node session.NodeID, rec *record) error {
	sealed := int64(0)
	if rec.sealed {
		sealed = b.moment.Now.UnixMicro()
	}
	return b.exec(b.stmt.segmentUpdate, int64(rec.head.Seq), rec.segment.bytes, sealed, string(node), int64(rec.segment.number))
}

// Segments returns the segments of the system record of a node, oldest first.
func (s *Store) Segments(ctx context.Context, node session.NodeID) ([]audit.Segment, error) {
	rows, err := s.readDB.QueryContext(ctx, "SELECT number, events, bytes, opened_at, sealed_at FROM segment WHERE node = ? ORDER BY number", string(node))
	if err != nil {
		return nil, fmt.Errorf("list the segments of node %s: %w", node, classify(err))
	}
	defer rows.Close()
	var all []audit.Segment
	for rows.Next() {
		var g audit.Segment
		var opened, sealed int64
		if err := rows.Scan(&g.Number, &g.Events, &g.Bytes, &opened, &sealed); err != nil {
			return nil, fmt.Errorf("list the segments of node %s: %w", node, classify(err))
		}
		g.Opened, g.Sealed = fromMicros(opened), fromMicros(sealed)
		all = append(all, g)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list the segments of node %s: %w", node, classify(err))
	}
	return all, nil
}

// SegmentEvents calls fn for each event of a segment with a number above after,
// in order, until fn fails or limit events (0: all) were given.
func (s *Store) SegmentEvents(ctx context.Context, node session.NodeID, segment, after uint64, limit int, fn func(audit.Stored) error) error {
	n, err := s.recordRow(ctx, audit.SystemRecord(node, segment))
	if err != nil {
		return err
	}
	return s.each(ctx, n, after, limit, fn)
}

// SegmentSeal returns the seal of a segment; NotFound for the one that is open.
func (s *Store) SegmentSeal(ctx context.Context, node session.NodeID, segment uint64) (audit.Seal, error) {
	name := audit.SystemRecord(node, segment)
	if _, err := s.recordRow(ctx, name); err != nil {
		return audit.Seal{}, err
	}
	return s.sealOf(ctx, name)
}

// Heads returns where the records of a node end now.
func (s *Store) Heads(ctx context.Context, node session.NodeID) (audit.Heads, error) {
	heads, _, err := s.snapshot(ctx, node)
	if err != nil {
		return audit.Heads{}, fmt.Errorf("heads of node %s: %w", node, classify(err))
	}
	return heads, nil
}

// snapshot reads the heads of a node and whether its newest segment is open, as
// they are at one moment.
func (s *Store) snapshot(ctx context.Context, node session.NodeID) (h audit.Heads, segmentOpen bool, err error) {
	tx, err := s.readDB.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return h, false, err
	}
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	tree, err := scanTree(tx.QueryRowContext(ctx, treeQuery, string(node)))
	if err != nil {
		return h, false, err
	}
	rows, err := tx.QueryContext(ctx, openHeadsQuery, string(node))
	if err != nil {
		return h, false, err
	}
	open, err := scanHeads(rows)
	if err != nil {
		return h, false, err
	}
	system, err := scanSystemHead(tx.QueryRowContext(ctx, systemHeadQuery, string(node)))
	if err != nil {
		return h, false, err
	}
	if system.Record != "" {
		if err := tx.QueryRowContext(ctx, "SELECT sealed_at = 0 FROM segment WHERE node = ? ORDER BY number DESC LIMIT 1", string(node)).Scan(&segmentOpen); err != nil {
			return h, false, err
		}
	}
	return audit.NewHeads(node, s.moment().Now, tree, open, system), segmentOpen, nil
}

// leafPage is how many leaves are read at once.
const leafPage = 500

// Listing calls fn for every record of a node as audit.ListedRecord describes:
// the seals in order, then the records that are open. It lists one moment, also
// when records are sealed meanwhile.
func (s *Store) Listing(ctx context.Context, node session.NodeID, fn func(audit.ListedRecord) error) error {
	heads, segmentOpen, err := s.snapshot(ctx, node)
	if err != nil {
		return fmt.Errorf("list the records of node %s: %w", node, classify(err))
	}
	for from := uint64(0); from < heads.Sealed; from += leafPage {
		page, err := s.leaves(ctx, node, from, min(from+leafPage, heads.Sealed))
		if err != nil {
			return fmt.Errorf("list the records of node %s: %w", node, classify(err))
		}
		for _, l := range page {
			if err := fn(l); err != nil {
				return err
			}
		}
	}
	open := heads.Open
	if segmentOpen {
		open = append(open, heads.System)
	}
	for _, h := range open {
		if err := fn(audit.ListedRecord{Record: h.Record, Seq: h.Seq, Hash: h.Hash}); err != nil {
			return err
		}
	}
	return nil
}

// leaves reads leaves from to to-1. A leaf whose event is gone has no hash.
func (s *Store) leaves(ctx context.Context, node session.NodeID, from, to uint64) ([]audit.ListedRecord, error) {
	rows, err := s.readDB.QueryContext(ctx, `SELECT r.id, l.seq, ifnull(lower(hex(e.hash)), '') FROM leaf l
		JOIN record r ON r.n = l.record LEFT JOIN event e ON e.record = l.record AND e.seq = l.seq
		WHERE l.node = ? AND l.position >= ? AND l.position < ? ORDER BY l.position`, string(node), int64(from), int64(to))
	if err != nil {
		return nil, err
	}
	heads, err := scanHeads(rows)
	if err != nil {
		return nil, err
	}
	page := make([]audit.ListedRecord, len(heads))
	for i, h := range heads {
		page[i] = audit.ListedRecord{Record: h.Record, Seq: h.Seq, Hash: h.Hash, Sealed: true}
	}
	return page, nil
}

// HasSeals reports whether any record was ever sealed here.
func (s *Store) HasSeals(ctx context.Context) (bool, error) {
	var has bool
	if err := s.readDB.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM leaf)").Scan(&has); err != nil {
		return false, fmt.Errorf("look for seals: %w", classify(err))
	}
	return has, nil
}
