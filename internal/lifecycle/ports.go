package lifecycle

import (
	"context"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/journal"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/workload"
)

// Store keeps sessions and their records. There is no way to change a session
// without its event, and none to write an event outside the chain.
//
// Every write is made under a fence: what the writer believes about the node
// that has the session and its current sandbox. Errors: NotFound for an
// unknown session; Conflict for a stale version or fence (with what the writer
// should have known), a forbidden transition, a reused idempotency key with
// another request, or a write to a sealed record. An error means that nothing
// was written, unless it is Unavailable: then the answer may have been lost.
type Store interface {
	journal.Store

	// Create writes a new session (Version becomes 1) and the first events of
	// its record, numbered from 1. With a key that was used before for the
	// same digest it returns that earlier session and existed=true and writes
	// nothing.
	Create(ctx context.Context, s session.Session, key session.IdempotencyKey, entries ...audit.Entry) (stored session.Session, existed bool, err error)

	// Transition replaces the session if its stored version is s.Version and
	// the stored state CanBecome s.State, appends the entries (at least one),
	// and returns it with the next version, and the sequence number of the
	// first entry. The spec is written once: s.Spec is not looked at.
	Transition(ctx context.Context, at session.Fence, s session.Session, entries ...audit.Entry) (stored session.Session, first uint64, err error)

	// Seal moves the session to Ended, appends the last events and stores the
	// signed seal over the whole record, all in one transaction. sign is
	// called inside it with the head of the record and the heads of the node's
	// other records.
	Seal(ctx context.Context, at session.Fence, s session.Session, sign func(audit.Head, audit.Heads) (audit.Seal, error), entries ...audit.Entry) (session.Session, error)

	// Get returns one session, ended ones too.
	Get(ctx context.Context, id session.ID) (session.Session, error)

	// List returns sessions newest first, from after the cursor, at most
	// limit (1 to 1000), and the next cursor, empty when the list is complete.
	List(ctx context.Context, f session.Filter, cursor string, limit int) (page []session.Session, next string, err error)

	// Live returns every session of a node that is not Ended.
	Live(ctx context.Context, node session.NodeID) ([]session.Session, error)

	// SealOf returns the seal of an ended session; NotFound before.
	SealOf(ctx context.Context, id session.ID) (audit.Seal, error)

	// AppendAddenda adds events to the addenda of a sealed record and has
	// their new head signed; Conflict before the seal.
	AppendAddenda(ctx context.Context, id session.ID, at session.Fence, sign func(audit.Head) (audit.Seal, error), entries ...audit.Entry) (first uint64, err error)

	// Addenda calls fn for each addendum with a sequence number above after.
	Addenda(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error

	// AddendaSeal returns the newest signature over the addenda; NotFound when
	// there are none.
	AddendaSeal(ctx context.Context, id session.ID) (audit.Seal, error)
}

// Node keeps this machine's sandboxes. Errors carry kinds as driver's do.
type Node interface {
	workload.Node

	// Start makes a sandbox; it is known to Recover from the moment any part
	// of it exists. It fails with Conflict when the sandbox is on this node
	// already. A Start that fails leaves nothing, or what List shows and
	// Destroy removes.
	Start(ctx context.Context, want sandbox.Spec) error
	// StartsFrom says what Start makes a sandbox of: "snapshot" or "image".
	StartsFrom(want sandbox.Spec) string
	// Bind waits for the agent inside and gives it identity, environment,
	// clock and token. It may be repeated. It fails with Invalid, field user,
	// for a user that the template does not have, and with Unavailable when the
	// agent does not answer before ctx ends.
	Bind(ctx context.Context, id session.SandboxID) error
	// Inspect is the posture check from outside; a node without an inspector
	// returns a posture that says so and is OK only for drivers that claim no
	// isolation.
	Inspect(ctx context.Context, id session.SandboxID) (driver.Posture, error)
	// Shut refuses new connections into the sandbox and cuts open ones; nothing
	// opens it again. It may be repeated, and fails with NotFound for a sandbox
	// that is not known.
	Shut(ctx context.Context, id session.SandboxID) error
	// Freeze pauses the sandbox if the driver can; otherwise it does nothing.
	// It may be repeated, and fails with NotFound for a sandbox that does not
	// run.
	Freeze(ctx context.Context, id session.SandboxID) error
	// Destroy kills the sandbox, proves its death and removes all of it. It
	// tells what it found: nothing is there when the node, or an earlier call,
	// has destroyed it before. It may be repeated, also for a sandbox that is
	// not known; when it fails, the sandbox stays in List.
	Destroy(ctx context.Context, id session.SandboxID) (sandbox.Removal, error)
	// SetDeadline moves the moment at which the node tells that the sandbox's
	// time is up and, a while later, destroys it by itself, whatever else is
	// dead or alive. It is a distance from now, not a date: moving the wall
	// clock changes nothing. Setting the same moment again changes nothing; the
	// zero time means no deadline.
	SetDeadline(id session.SandboxID, at time.Time) error
	// Recover takes back the sandboxes of earlier processes and reports every
	// one found on the host; called once, before any Start.
	Recover(ctx context.Context) ([]sandbox.Recovered, error)
	// Notices tells of sandboxes that stopped, passed their deadline or lost a
	// process to their memory limit. It has one reader and is never closed. A notice is a reason to look: what is
	// true is in List and Stats.
	Notices() <-chan sandbox.Notice
	// List is what is on the host now.
	List(ctx context.Context) ([]driver.Found, error)
}

// Templates resolves names and keeps images in use from being collected.
type Templates interface {
	// Resolve finds, and for built-in names builds, the template; progress
	// may be nil. It fails with NotFound naming what there is.
	Resolve(ctx context.Context, name string, progress func(done, total int64, what string)) (sandbox.Template, error)
	// Lease keeps the image until Release(holder); repeatable.
	Lease(ctx context.Context, digest, holder string) error
	// Release gives back every lease of the holder; repeatable.
	Release(ctx context.Context, holder string) error
}

// SystemRecord is where the manager records what is about no session.
type SystemRecord interface {
	// Begin makes an intent durable and returns how to conclude it. When it
	// fails the effect must not happen.
	Begin(ctx context.Context, intent audit.Entry) (conclude func(outcome audit.Entry) error, err error)
	// Record makes a fact durable.
	Record(ctx context.Context, e audit.Entry) error
}
