// Package driver is the contract between a node and whatever isolates its
// sandboxes. drivertest holds the contract's test suite; fake and gvisor
// implement it.
package driver

import (
	"context"
	"io"
	"net"
	"time"

	"bivy/internal/session"
)

// Driver runs sandboxes: starts them, finds them again, reaches a port inside
// them and destroys them. Files and commands are not its business: those go
// through Dial to the agent inside.
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
	// with NotFound when the sandbox is gone, after removing what is left of
	// it. Recovering a sandbox that this process already has is a no-op.
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
	Isolation string // "gvisor", "none"
	Pause     bool
	Snapshot  bool
	Export    bool
	Limits    []string // of "cpu", "memory", "pids", "disk": those really enforced
	Attached  bool     // sandboxes die with this process
}

// StartRequest describes one sandbox.
type StartRequest struct {
	ID       session.SandboxID
	Image    string   // path of the root file system image, named by its content
	Snapshot string   // directory of a Checkpoint of the same image; empty: boot
	Args     []string // first process, absolute path first
	Env      []string // its environment, "K=V"
	Hostname string
	Limits   Limits
}

// Owner says whose a sandbox is.
type Owner struct {
	Kind OwnerKind `json:"kind"`
	ID   string    `json:"id"` // of the session, pool or template
}

// OwnerKind is what a sandbox can belong to.
type OwnerKind string

// The kinds of owner.
const (
	OwnedBySession  OwnerKind = "session"
	OwnedByPool     OwnerKind = "pool"     // warm, nobody's session yet
	OwnedByTemplate OwnerKind = "template" // booted to take a snapshot
)

// Shape is what a guest sees of its machine. It is part of a snapshot: a
// sandbox that is restored has the shape of the one that was saved.
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
	Sandbox session.SandboxID `json:"sandbox"`
	Driver  string            `json:"driver"`
	Version int               `json:"version"`
	State   []byte            `json:"state"`
}

// Recovery says what taking a sandbox back cost it.
type Recovery struct {
	// Relinked: the wire to the sandbox was lost and re-made; connections
	// into it were cut, its memory and files are as they were.
	Relinked bool
	// Paused: it was being paused or is, so that nothing in it need answer.
	Paused bool
}

// Exit says how a sandbox stopped.
type Exit struct {
	Code   int  // of the first process; -1 when unknown
	Signal int  // that ended the first process; 0 for none
	OOM    bool // the host's memory limit was hit in its life
	PIDs   bool // the host's limit of threads was
	At     time.Time
}

// Found is one sandbox seen on the host.
type Found struct {
	ID      session.SandboxID
	Running bool // false: only leftovers, Destroy them
}

// Pauser is implemented by drivers that can freeze a sandbox in memory.
// Both calls may be repeated.
type Pauser interface {
	Pause(ctx context.Context, id session.SandboxID) error
	Resume(ctx context.Context, id session.SandboxID) error
}

// Checkpointer is implemented by drivers that can write a sandbox to disk.
type Checkpointer interface {
	// Checkpoint writes memory and writable layer into dir, which must be
	// empty. With leave the sandbox runs on, else it is stopped. A failed
	// Checkpoint leaves dir without a valid snapshot and the sandbox running.
	Checkpoint(ctx context.Context, id session.SandboxID, dir string, leave bool) error
}

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
	Stats(ctx context.Context, id session.SandboxID) (Stats, error)
}

// Stats is one measurement, from the host's side.
type Stats struct {
	CPU             time.Duration // since start
	MemoryBytes     int64         // held now
	MemoryPeakBytes int64
	PIDs            int64  // host threads now
	OOMKills        int64  // processes killed by the memory limit since start
	OutboundRefused uint64 // packets and connections that tried to leave
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
	Checks []Check `json:"checks"`
}

// Check is one property, as wanted and as found.
type Check struct {
	Name string `json:"name"` // "uid", "namespaces", "capabilities", "seccomp", "no_new_privs", "cgroup", "limits", "fds"
	Want string `json:"want"`
	Got  string `json:"got"`
	OK   bool   `json:"ok"`
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
