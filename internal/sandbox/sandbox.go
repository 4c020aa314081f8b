// Package sandbox is what a node and whoever gives it work say to one another
// about sandboxes: what is wanted, what was found, what happened.
//
// It is the one place that translates what a session asks for into what a
// driver is asked for.
package sandbox

import (
	"time"

	"bivy/internal/driver"
	"bivy/internal/session"
)

// Spec describes one wanted sandbox.
type Spec struct {
	ID       session.SandboxID
	Owner    driver.Owner
	Session  session.Spec // defaulted and valid
	Template Template
	Deadline time.Time // when the node tells that its time is up; zero: never
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
	ID       session.SandboxID
	Owner    driver.Owner
	Running  bool // taken back; false: only leftovers, which are to be destroyed
	Relinked bool // connections into it ended with the earlier process
}

// Notice tells that something happened to a sandbox. The same notice may come
// again: it is a reason to look, and what is true is what the node lists and
// measures.
type Notice struct {
	ID       session.SandboxID
	Stopped  bool // by itself; Exit says how
	Exit     driver.Exit
	Deadline bool  // it is past its deadline
	OOMKills int64 // processes that its memory limit has killed so far; 0: none, or not known
}
