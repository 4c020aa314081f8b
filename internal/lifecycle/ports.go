package lifecycle

import (
	"context"
	"io"
	"time"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/guest/guestclient"
	"bivy/internal/session"
)

// Store keeps sessions and their records. There is no way to change a session
// without its event, and none to write an event outside the chain.
//
// Errors: NotFound for an unknown session; Conflict for a stale version, a
// forbidden transition, a reused idempotency key with another request, or a
// write to a sealed record. An error means nothing was written.
type Store interface {
	// Create writes a new session (Version becomes 1) and the first events of
	// its record. With a key that was used before for the same digest it
	// returns that earlier session and existed=true and writes nothing.
	Create(ctx context.Context, s session.Session, key IdempotencyKey, entries ...audit.Entry) (stored session.Session, existed bool, err error)

	// Transition replaces the session if its stored version is s.Version and
	// the stored state CanBecome s.State, appends the entries (at least one),
	// and returns it with the next version.
	Transition(ctx context.Context, s session.Session, entries ...audit.Entry) (session.Session, error)

	// Append adds events without changing the session; they are durable when
	// it returns.
	Append(ctx context.Context, id session.ID, entries ...audit.Entry) error

	// Seal moves the session to Ended, appends the last events and stores the
	// signed seal over the whole record, all in one transaction. sign is
	// called inside it with the record's head.
	Seal(ctx context.Context, s session.Session, sign func(audit.Head) (audit.Seal, error), entries ...audit.Entry) (session.Session, error)

	Get(ctx context.Context, id session.ID) (session.Session, error)

	// List returns sessions newest first, from after the cursor, at most
	// limit (1 to 1000), and the next cursor, empty when the list is complete.
	List(ctx context.Context, f Filter, cursor string, limit int) (page []session.Session, next string, err error)

	// Live returns every session that is not Ended.
	Live(ctx context.Context) ([]session.Session, error)

	// Events calls fn for each event of a record with Seq > after, in order,
	// until fn fails or limit events (0: all) were given.
	Events(ctx context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error

	// SealOf returns the seal of an ended session; NotFound before.
	SealOf(ctx context.Context, id session.ID) (audit.Seal, error)
}

// IdempotencyKey and Filter belong to the session vocabulary, so that a store
// needs nothing of the lifecycle.
type (
	IdempotencyKey = session.IdempotencyKey
	Filter         = session.Filter
)

// Node keeps this machine's sandboxes. Errors carry kinds as driver's do.
type Node interface {
	// Start makes a sandbox; it is known to Recover from the moment any part
	// of it exists.
	Start(ctx context.Context, want SandboxSpec) error
	// Bind waits for the agent inside and gives it identity, environment,
	// clock and token.
	Bind(ctx context.Context, id session.SandboxID) error
	// Inspect is the posture check from outside; a node without an inspector
	// returns a posture that says so and is OK only for drivers that claim no
	// isolation.
	Inspect(ctx context.Context, id session.SandboxID) (driver.Posture, error)
	// Guest returns the client of the agent inside a running sandbox.
	Guest(ctx context.Context, id session.SandboxID) (*guestclient.Client, error)
	// Shut refuses new work for the sandbox and cuts open connections into it.
	Shut(ctx context.Context, id session.SandboxID) error
	// Freeze pauses the sandbox where the driver can; else it does nothing.
	Freeze(ctx context.Context, id session.SandboxID) error
	// Changes writes what the sandbox changed in its file system as a tar.
	Changes(ctx context.Context, id session.SandboxID, w io.Writer) error
	Stats(ctx context.Context, id session.SandboxID) (driver.Stats, error)
	// Destroy kills the sandbox, proves its death and removes all of it.
	Destroy(ctx context.Context, id session.SandboxID) error
	// SetDeadline moves the moment at which the node tells that the sandbox's
	// time is up and, a while later, destroys it by itself, whatever else is
	// dead or alive. It is a distance from now, not a date: moving the wall
	// clock changes nothing. Setting the same moment again changes nothing.
	SetDeadline(id session.SandboxID, at time.Time) error
	// Recover takes back the sandboxes of earlier processes and reports every
	// one found on the host; called once, before any Start.
	Recover(ctx context.Context) ([]Recovered, error)
	// Exits tells of sandboxes that stopped, passed their deadline or lost a
	// process to their memory limit. It is a nudge: what is true is in List
	// and Stats.
	Exits() <-chan Exited
	// List is what is on the host now.
	List(ctx context.Context) ([]driver.Found, error)
}

// SandboxSpec is one wanted incarnation.
type SandboxSpec struct {
	ID       session.SandboxID
	Spec     session.Spec // defaulted and valid
	Template Template
	Deadline time.Time
}

// Snapshot is what to restore; empty when the sandbox must be booted.
func (s SandboxSpec) Snapshot() string {
	if s.Spec.Resources.DiskMiB != s.Template.SnapshotDiskMiB {
		return ""
	}
	return s.Template.Snapshot
}

// Template is a resolved environment to start from.
type Template struct {
	Digest      string // "sha256:…" of the template: of its image and defaults together
	ImageDigest string // "sha256:…" of the image file
	Image       string // path of the image file
	Snapshot    string // directory of its snapshot; empty: boot it
	// SnapshotDiskMiB is the disk that the snapshot was made with, which a
	// restored sandbox has too.
	SnapshotDiskMiB int64
	Env             map[string]string
	User            string
	Workdir         string
	// Agent is the command that the image boots: the guest agent.
	Agent []string
}

// Templates resolves names and keeps images in use from being collected.
type Templates interface {
	// Resolve finds, and for built-in names builds, the template; progress
	// may be nil. It fails with NotFound naming what there is.
	Resolve(ctx context.Context, name string, progress func(done, total int64, what string)) (Template, error)
	// Lease keeps the image until Release(holder); repeatable.
	Lease(ctx context.Context, digest, holder string) error
	Release(ctx context.Context, holder string) error
}

// Recovered is one sandbox found at start.
type Recovered struct {
	ID       session.SandboxID
	Running  bool // taken back; false: only leftovers, Destroy it
	Relinked bool
}

// Exited is news of a sandbox. The same news may come again.
type Exited struct {
	ID       session.SandboxID
	Stopped  bool // by itself; Exit says how
	Exit     driver.Exit
	Deadline bool // it is past its deadline; a while later the node destroys it by itself
	// OOMKills is how many processes its memory limit has killed so far.
	OOMKills int64
}
