// Package storetest is the contract of a store as tests: of the store of
// sessions, of their records and addenda, and of the system record. Every store
// runs all of it, with one handle and with two handles on the same data, as two
// processes have them.
package storetest

import (
	"context"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// Store is what the tests need: the interfaces of the packages that use a
// store, together. An error of any method means that nothing was written.
//
// Errors: NotFound for an unknown session or segment; Conflict for a wrong
// fence, an old version, a forbidden transition, an idempotency key that was
// used for another request, and a write to a sealed record; Invalid for entries
// and sessions that break a rule.
type Store interface {
	// Create writes a new session and the first events of its record.
	Create(ctx context.Context, s session.Session, key session.IdempotencyKey, entries ...audit.Entry) (stored session.Session, existed bool, err error)
	// Transition replaces a session and appends events.
	Transition(ctx context.Context, at session.Fence, s session.Session, entries ...audit.Entry) (stored session.Session, first uint64, err error)
	// Append adds events to the record of a session.
	Append(ctx context.Context, id session.ID, at session.Fence, entries ...audit.Entry) (first uint64, err error)
	// Seal ends a session with its last events and the seal of its record.
	Seal(ctx context.Context, at session.Fence, s session.Session, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) (session.Session, error)
	// Get returns a session.
	Get(ctx context.Context, id session.ID) (session.Session, error)
	// List returns a page of sessions, newest first.
	List(ctx context.Context, f session.Filter, cursor string, limit int) (page []session.Session, next string, err error)
	// Live returns the sessions of a node that have not ended.
	Live(ctx context.Context, node session.NodeID) ([]session.Session, error)
	// Events reads the record of a session.
	Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error
	// Revision differs whenever anything was written since.
	Revision(ctx context.Context) (int64, error)
	// SealOf returns the seal of a session that has ended.
	SealOf(ctx context.Context, id session.ID) (audit.Seal, error)

	// AppendAddenda adds events to the addenda of a session that has ended.
	AppendAddenda(ctx context.Context, id session.ID, at session.Fence, sign func(audit.Head) (audit.Seal, error), entries ...audit.Entry) (first uint64, err error)
	// Addenda reads the addenda of a session.
	Addenda(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error
	// AddendaSeal returns the newest signed head of the addenda of a session.
	AddendaSeal(ctx context.Context, id session.ID) (audit.Seal, error)

	// AppendSystem adds events to the system record of a node.
	AppendSystem(ctx context.Context, node session.NodeID, entries ...audit.Entry) (segment, first uint64, err error)
	// SealSegment ends the open segment of a node with its last events and its seal.
	SealSegment(ctx context.Context, node session.NodeID, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) error
	// Segments lists the segments of a node, oldest first.
	Segments(ctx context.Context, node session.NodeID) ([]audit.Segment, error)
	// SegmentEvents reads a segment.
	SegmentEvents(ctx context.Context, node session.NodeID, segment, after uint64, limit int, fn func(audit.Stored) error) error
	// SegmentSeal returns the seal of a segment.
	SegmentSeal(ctx context.Context, node session.NodeID, segment uint64) (audit.Seal, error)
	// Heads returns where the records of a node end.
	Heads(ctx context.Context, node session.NodeID) (audit.Heads, error)
	// Listing lists every record of a node, as audit.ListedRecord says.
	Listing(ctx context.Context, node session.NodeID, fn func(audit.ListedRecord) error) error
	// HasSeals reports whether any record was ever sealed.
	HasSeals(ctx context.Context) (bool, error)
}
