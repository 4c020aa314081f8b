package journal

import (
	"context"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// Store keeps the records of sessions. Its methods are safe for concurrent
// use.
//
// Errors: NotFound for an unknown session; Conflict for a write under a fence
// that is out of date, with the node and the generation that the writer should
// have known, and for a write to a sealed record. An error means that nothing
// was written, unless it is Unavailable: then the answer may have been lost.
type Store interface {
	// Append adds events to a record and returns the sequence number of the
	// first; the others follow without a gap. They are durable when it
	// returns. Every event carries the node and the generation of the fence.
	Append(ctx context.Context, id session.ID, at session.Fence, entries ...audit.Entry) (first uint64, err error)

	// Events calls fn for each event of a record with a sequence number above
	// after, in order, until fn fails or limit events (0: all) were given.
	Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error

	// Revision returns a number that differs from an earlier one whenever this
	// or another process has written in between.
	Revision(ctx context.Context) (int64, error)
}

// SystemStore keeps the record of a node, which is sealed in segments.
type SystemStore interface {
	// AppendSystem adds events to the open segment and returns its number and
	// the sequence number of the first event. Where no segment is open it
	// opens the next one first.
	AppendSystem(ctx context.Context, node session.NodeID, entries ...audit.Entry) (segment, first uint64, err error)

	// SealSegment appends the last events, of which the last is
	// segment.closed, and stores the seal over the segment, in one
	// transaction. sign is called inside it.
	SealSegment(ctx context.Context, node session.NodeID, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) error

	// Segments lists the segments, oldest first.
	Segments(ctx context.Context, node session.NodeID) ([]audit.Segment, error)

	// SegmentEvents is Store.Events for one segment.
	SegmentEvents(ctx context.Context, node session.NodeID, segment, after uint64, limit int, fn func(audit.Stored) error) error

	// SegmentSeal returns the seal of a segment; NotFound while it is open.
	SegmentSeal(ctx context.Context, node session.NodeID, segment uint64) (audit.Seal, error)

	// Heads returns the heads of all records of the node at one moment.
	Heads(ctx context.Context, node session.NodeID) (audit.Heads, error)

	// Listing calls fn for every record of the node: sealed ones in the order
	// of their sealing, then open ones.
	Listing(ctx context.Context, node session.NodeID, fn func(audit.ListedRecord) error) error
}
