// Package driver is the contract between a node and whatever isolates its
// sandboxes. drivertest holds the contract's test suite; fake and gvisor
// implement it.
package driver

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"bivy/internal/session"
)

// Driver runs sandboxes: starts them, finds them again, reaches a port inside
// them and destroys them. Files and commands go through Dial to the agent
// inside; a driver has no methods for them.
//
// Every method may be called from any goroutine. Calls for one sandbox are
// serialised by the driver; calls for different sandboxes run in parallel.
// A sandbox outlives the process that started it, unless the driver's
// Capabilities say Attached.
//
// Errors carry a kind: NotFound for a sandbox the driver does not have,
// Invalid for a request that can never work, Exhausted for a host resource
// that is used up, Unavailable for a sandbox that is starting or dying.
type Driver interface {
	// Name is the driver's name in handles, records and the API.
	Name() string

	// Capabilities says what this driver on this host can do; constant.
	Capabilities() Capabilities

	// Start makes the sandbox and returns once its first process runs (booted)
	// or runs again (restored) inside every limit of the request. Starting an
	// id that exists fails with Conflict. When Start fails, or its context
	// ends, nothing of the sandbox is left. When the caller dies during Start,
	// List shows whatever is left and Destroy removes it.
	Start(ctx context.Context, req StartRequest) (Handle, error)

	// Recover takes back a sandbox started by an earlier process. It fails
	// with NotFound when the sandbox does not run any more. It removes
	// nothing: what is left of a sandbox that cannot be taken back stays in
	// List until Destroy is called, so that the caller can record why.
	// Recovering a sandbox that this process already has is a no-op.
	Recover(ctx context.Context, h Handle) (Recovery, error)

	// Dial connects to a TCP port inside. It fails with NotFound, with
	// Unavailable when nothing listens there, and with the context's error.
	Dial(ctx context.Context, id session.SandboxID, port uint16) (net.Conn, error)

	// Wait returns when the sandbox has stopped by itself or was destroyed.
	// Any number of callers may wait.
	Wait(ctx context.Context, id session.SandboxID) (Exit, error)

	// Destroy ends the sandbox and removes everything of it from the host:
	// processes, cgroups, mounts, sockets, files. It returns nil only when
	// all of that is gone, for an unknown id too; otherwise the joined reasons,
	// and may be called again.
	Destroy(ctx context.Context, id session.SandboxID) error

	// List returns every sandbox of this driver's root on this host, also those
	// that no handle names and those that are only leftovers.
	List(ctx context.Context) ([]Found, error)

	// Close drops what this process holds (links, watchers). Sandboxes live on.
	Close() error
}

// Capabilities is what a driver on this host can do.
type Capabilities struct {
	Isolation string   // "gvisor", "none"
	Pause     bool     // it is a Pauser
	Snapshot  bool     // it is a Checkpointer
	Export    bool     // it is an Exporter
	Limits    []string // of "cpu", "memory", "pids", "disk": those really enforced
	Attached  bool     // sandboxes die with this process
}

// StartRequest describes one sandbox.
type StartRequest struct {
	ID       session.SandboxID // which sandbox
	Owner    Owner             // whose it is
	Image    string            // path of the root file system image, named by its content
	Snapshot Source            // files of a Checkpoint of a sandbox with the same image, Args, Env and Shape; nil: boot
	Args     []string          // first process, absolute path first
	Env      []string          // its environment, "K=V"
	Hostname string            // of the guest
	Limits   Limits            // enforced from outside
	Shape    Shape             // what the guest sees; a zero field is the driver's choice
}

// Owner says whose a sandbox is. A driver keeps it with the sandbox, so that
// it is known without the database.
type Owner struct {
	Kind OwnerKind `json:"kind"` // what it is that owns
	ID   string    `json:"id"`   // of the session, pool or template
}

// OwnerKind is what a sandbox can belong to.
type OwnerKind string

// The kinds of owner.
const (
	OwnedBySession  OwnerKind = "session"
	OwnedByPool     OwnerKind = "pool"     // started ahead of time, not yet given to a session
	OwnedByTemplate OwnerKind = "template" // booted to take a snapshot
)

// Shape is what a guest sees of its machine: what its programs size
// themselves by. The number of processors and the disk are part of a
// snapshot: a sandbox that is restored has those of the one that was saved.
type Shape struct {
	CPUs        int   `json:"cpus"`         // processors
	MemoryBytes int64 `json:"memory_bytes"` // total memory
	DiskBytes   int64 `json:"disk_bytes"`   // of the writable layer
}

// Limits are enforced from outside the guest. Zero means no limit.
type Limits struct {
	CPUMillis   int64 // thousandths of a core
	MemoryBytes int64 // everything the sandbox holds, the runtime included
	DiskBytes   int64 // the writable layer
	PIDs        int64 // host threads
}

// Handle is what a driver needs to find a sandbox again. It is opaque to
// everyone else and versioned by its driver.
type Handle struct {
	Sandbox session.SandboxID `json:"sandbox"` // which sandbox
	Owner   Owner             `json:"owner"`   // whose it is
	Driver  string            `json:"driver"`  // Name of the driver that made it
	Version int               `json:"version"` // of State
	State   []byte            `json:"state"`   // the driver's own
}

// Recovery says what taking a sandbox back cost it.
type Recovery struct {
	// Relinked means that connections into the sandbox ended with the earlier
	// process; its memory and files are as they were.
	Relinked bool
	// Paused means that the sandbox is paused, or may be: nothing in it needs
	// to answer.
	Paused bool
}

// Exit says how a sandbox stopped.
type Exit struct {
	Code   int       // of the first process; -1 when unknown
	Signal int       // that ended the first process; 0 for none
	OOM    bool      // the host's memory limit was hit in its life
	PIDs   bool      // the host's limit of threads was
	At     time.Time // when it was noticed
}

// Found is one sandbox seen on the host.
type Found struct {
	ID      session.SandboxID // which sandbox
	Owner   Owner             // the zero value when the host does not say
	Running bool              // false: only leftovers, Destroy them
}

// Pauser is implemented by drivers that can freeze a sandbox in memory.
// Both calls may be repeated.
type Pauser interface {
	// Pause stops everything in the sandbox where it is.
	Pause(ctx context.Context, id session.SandboxID) error
	// Resume lets a paused sandbox go on.
	Resume(ctx context.Context, id session.SandboxID) error
}

// Checkpointer is implemented by drivers that can save a sandbox, so that
// others can be started from the copy.
type Checkpointer interface {
	// Checkpoint writes memory and writable layer into new files of to. A
	// paused sandbox is saved without running in between. With o.Leave it
	// then is as it was before, running or paused; without, it is stopped.
	//
	// The content is on disk when Checkpoint returns nil; to make the files'
	// names durable and to remove the files after a failure is the caller's
	// part. A Checkpoint that fails leaves the sandbox as it was.
	Checkpoint(ctx context.Context, id session.SandboxID, to Sink, o CheckpointOptions) error
}

// CheckpointOptions of a Checkpoint.
type CheckpointOptions struct {
	Leave bool // the sandbox goes on afterwards
}

// Sink takes the files of a checkpoint.
type Sink interface {
	// Create makes a new file, open for reading and writing, and fails when
	// there is one of that name. The caller closes it.
	Create(name string) (*os.File, error)
}

// Source gives the files of a checkpoint.
type Source interface {
	// Open opens a file for reading. It fails with fs.ErrNotExist when there
	// is none of that name. The caller closes it.
	Open(name string) (*os.File, error)
}

// Dir is a directory that holds the files of one checkpoint: a Sink while it
// is empty, and a Source.
type Dir string

// Create implements Sink.
func (d Dir) Create(name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(string(d), name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
}

// Open implements Source.
func (d Dir) Open(name string) (*os.File, error) { return os.Open(filepath.Join(string(d), name)) }

// Limiter is implemented by drivers that can change the limits of a sandbox
// that runs.
type Limiter interface {
	// SetLimits replaces the limits of a running or paused sandbox and reads
	// them back. When it fails the earlier limits hold. DiskBytes is fixed at
	// the start: another value fails with Invalid. A memory limit below what
	// the sandbox holds and cannot give back fails with Exhausted. The guest
	// goes on seeing the Shape that it was started with.
	SetLimits(ctx context.Context, id session.SandboxID, l Limits) error
}

// Outbound handles the TCP connections that guests open. A driver without one
// refuses them all.
type Outbound interface {
	// Flow handles one connection from beginning to end: it is refused unless
	// Flow accepts it, and closed when Flow returns. Each call has a goroutine
	// of its own; ctx ends when the sandbox does. A panic ends the one flow.
	Flow(ctx context.Context, id session.SandboxID, f Flow)
}

// Flow is one TCP connection that a guest is opening. The guest waits until it
// is accepted or refused.
type Flow interface {
	// Source is the guest's end.
	Source() netip.AddrPort
	// Destination is where the guest wants to connect to.
	Destination() netip.AddrPort
	// Accept completes the connection and returns this end of it, which
	// stands for the destination. It is called at most once.
	Accept() (net.Conn, error)
}

// SocketType is the type of an entry of ExportChanges that is a socket, for
// which tar has no type. It has no content.
const SocketType = 's'

// WhiteoutRecord is the PAX record by which ExportChanges marks the entries
// that stand for deletions and opaque directories.
const WhiteoutRecord = "BIVY.whiteout"

// Exporter is implemented by drivers that can tell what a sandbox changed.
type Exporter interface {
	// ExportChanges writes the writable layer to w as a tar stream: changed
	// and new files whole, deletions as OCI whiteouts (".wh." names), opaque
	// directories as ".wh..wh..opq". A guest may name its own files so too:
	// only entries with the PAX record WhiteoutRecord mean it. The report
	// names what the guest has outside the writable layer, which is not in
	// the stream. The sandbox must not be destroyed; it may be paused.
	ExportChanges(ctx context.Context, id session.SandboxID, w io.Writer) (ChangeReport, error)
}

// ChangeReport says what an export of changes does not hold.
type ChangeReport struct {
	// Outside lists every place outside the writable layer that holds files
	// of the guest.
	Outside []Outside
}

// Outside is a place that is not part of the writable layer.
type Outside struct {
	Path  string // in the guest
	Files int64  // entries below it
	Bytes int64  // in its regular files
	Guest bool   // the guest mounted it; false: it is there from the start
}

// Statter is implemented by drivers that can measure a sandbox.
type Statter interface {
	// Stats measures a sandbox that runs or is paused.
	Stats(ctx context.Context, id session.SandboxID) (Stats, error)
}

// Stats is one measurement, from the host's side.
type Stats struct {
	CPU             time.Duration // since start
	MemoryBytes     int64         // held now
	MemoryPeakBytes int64         // most that was held since start
	PIDs            int64         // host threads now
	OOMKills        int64         // processes killed by the memory limit since start
	OutboundRefused uint64        // packets and connections that tried to leave
}

// Inspector is implemented by drivers that can prove a sandbox's isolation
// from outside.
type Inspector interface {
	// Inspect compares the host's view of the sandbox with what the request
	// asked for. A deviation is not an error: it is in the Posture.
	Inspect(ctx context.Context, id session.SandboxID) (Posture, error)
}

// Posture is the host's view of one sandbox.
type Posture struct {
	Checks []Check `json:"checks"` // one for each property
}

// Check is one property, as wanted and as found.
type Check struct {
	Name string `json:"name"` // "uid", "namespaces", "capabilities", "seccomp", "no_new_privs", "cgroup", "limits", "fds"
	Want string `json:"want"` // for people
	Got  string `json:"got"`  // for people
	OK   bool   `json:"ok"`   // Got is as wanted
}

// OK reports whether every check holds; an empty posture does not.
func (p Posture) OK() bool {
	for _, c := range p.Checks {
		if !c.OK {
			return false
		}
	}
	return len(p.Checks) > 0
}
