// Package node keeps the sandboxes of one machine: it starts and binds them,
// finds them again after the daemon was restarted, carries traffic into them,
// holds their deadlines and destroys them.
//
// It knows sandboxes, not sessions, and cannot reach the database. What it
// must remember it writes to one private file per sandbox, the handle file,
// before the driver is asked, so that a sandbox is known from the moment any
// part of it exists:
//
//	Start ── handle file without a handle ── driver ── handle file with it
//	Recover: a file with a handle     → driver.Recover, the sandbox goes on
//	         a file without a handle  → a start that was cut short: leftovers
//	         a file that does not read → destroyed, recorded
//	         no file                  → leftovers
//
// Terms:
//
//   - entry: a sandbox in this node's table, from Start or Recover to Destroy
//   - shut: an entry that takes no new connections; its open ones were closed
//   - notice: something happened to a sandbox (package sandbox)
//   - leftovers: what is on the host of a sandbox that does not run
//
// The node destroys a sandbox by itself only when nothing ended it within the
// grace after its deadline, and at Recover. It first writes that down through
// its Recorder; where that fails nothing is destroyed. Sandboxes of a pool are
// only destroyed when the caller asks.
//
// Deadlines count the time this machine is up, sleep included (the kernel's
// CLOCK_BOOTTIME, tied to the boot id): moving the wall clock neither ends a
// sandbox early nor keeps it alive.
package node
