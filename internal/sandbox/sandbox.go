// Package sandbox has the types in which a node and its callers speak about
// sandboxes: what is wanted, what was found, what happened.
//
// It is the one place that translates what a session asks for into what a
// driver is asked for: Spec.StartRequest and ShapeOf.
package sandbox

import (
	"runtime"
	"slices"
	"time"

	"bivy/internal/driver"
	"bivy/internal/session"
)

// Spec describes one wanted sandbox.
type Spec struct {
	ID       session.SandboxID // which sandbox
	Owner    driver.Owner      // whose it is
	Session  session.Spec      // defaulted and valid
	Template Template          // what it starts from
	Deadline time.Time         // when the node sends the notice that its time is up; zero: never
}

// AgentSearchPath is the PATH of the agent, which its commands start from.
const AgentSearchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// StartRequest translates the spec for a driver on a host with that many
// processors. It asks for a restore where the template has a snapshot that a
// sandbox of this shape can be restored from, and for a boot elsewhere.
//
// It is used for the sandboxes of sessions and for those that snapshots are
// taken of. A restore compares the two, so nothing else makes a request.
func (s Spec) StartRequest(hostCPUs int) driver.StartRequest {
	r := s.Session.Resources
	req := driver.StartRequest{
		ID: s.ID, Owner: s.Owner, Image: s.Template.Image,
		Args: slices.Clone(s.Template.Agent), Env: []string{"PATH=" + AgentSearchPath}, Hostname: s.Session.Hostname,
		Limits: driver.Limits{CPUMillis: r.CPUMillis, MemoryBytes: r.MemoryMiB << 20, DiskBytes: r.DiskMiB << 20, PIDs: r.PIDs},
		Shape:  ShapeOf(r, hostCPUs),
	}
	if s.Template.Snapshot != "" && Restorable(s.Template.SnapshotShape, req.Shape) {
		req.Snapshot = driver.Dir(s.Template.Snapshot)
	}
	return req
}

// ShapeOf is what a guest with these resources sees on a host with that many
// processors. A CPU limit is rounded up to whole processors, but to at least
// two: a guest that sees one leaves out locks that gVisor's threads need. It
// is never more than the host has, except for those two. hostCPUs 0 means the
// processors of this machine.
func ShapeOf(r session.Resources, hostCPUs int) driver.Shape {
	if hostCPUs == 0 {
		hostCPUs = runtime.NumCPU()
	}
	cpus := (r.CPUMillis + 999) / 1000
	if r.CPUMillis == 0 {
		cpus = int64(hostCPUs)
	}
	return driver.Shape{
		CPUs:        int(max(2, min(cpus, int64(hostCPUs)))),
		MemoryBytes: r.MemoryMiB << 20,
		DiskBytes:   r.DiskMiB << 20,
	}
}

// Restorable reports whether a sandbox of shape want can be restored from a
// snapshot of one of shape saved. The number of processors and the size of the
// disk are in the snapshot and cannot be changed by a restore; the memory that
// the guest sees is the new sandbox's own.
func Restorable(saved, want driver.Shape) bool {
	return saved.CPUs == want.CPUs && saved.DiskBytes == want.DiskBytes
}

// Template is a resolved environment to start from.
type Template struct {
	Digest      string // "sha256:…" of the template: of its image and defaults together
	ImageDigest string // "sha256:…" of the image file
	Image       string // path of the image file

	// Snapshot is the directory of its snapshot, taken of a sandbox of shape
	// SnapshotShape; empty: every sandbox is booted.
	Snapshot      string
	SnapshotShape driver.Shape

	Env     map[string]string // of every process
	User    string            // default user
	Workdir string            // default directory
	Agent   []string          // the command that the image boots: the guest agent
}

// Recovered is one sandbox found when a node starts.
type Recovered struct {
	ID       session.SandboxID // which sandbox
	Owner    driver.Owner      // whose it is
	Running  bool              // taken back; false: only leftovers, which are to be destroyed
	Relinked bool              // connections into it ended with the earlier process
}

// Removal says what a node found when it was asked to destroy a sandbox.
type Removal struct {
	Found   bool   // something of it was there, and this call removed it
	Earlier string // who had destroyed it before and why, "node: deadline passed"; empty: not known
}

// Notice says that something happened to a sandbox. The same notice may come
// again: it is a reason to look, and what is true is what the node lists and
// measures.
type Notice struct {
	ID       session.SandboxID // which sandbox
	Stopped  bool              // by itself; Exit says how
	Exit     driver.Exit       // how it stopped
	Deadline bool              // it is past its deadline
	OOMKills int64             // processes that its memory limit has killed so far; 0: none, or not known
}
