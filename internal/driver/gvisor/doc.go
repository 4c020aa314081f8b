// Package gvisor isolates sandboxes with gVisor, embedded: it drives runsc's
// container package in this process, and the sandboxes run bivy-sentry.
//
// Each sandbox is one gVisor container on an EROFS image without a gofer, with
// a writable layer in memory, no host network and one wire (package link). Its
// whole process tree is in one cgroup, which enforces the limits.
//
// Everything that a sandbox has on the host is named by its slot, a random
// name that is made for it, and not by the sandbox's id. The file "sandbox" in
// the bundle says whose the slot is. It is there before anything else of the
// sandbox is, and goes after everything else has gone:
//
//	ROOT/bundles/<slot>/sandbox            id and owner, JSON
//	ROOT/bundles/<slot>/config.json        OCI description
//	ROOT/bundles/<slot>/boot-flags.json    package bootflags
//	ROOT/bundles/<slot>/limits.json        once SetLimits has changed them
//	ROOT/bundles/<slot>/paused             while the guest is paused
//	ROOT/state/<slot>_sandbox:<slot>.*     runsc's state
//	ROOT/state/runsc-<slot>.sock           control socket
//	CGROUP/<slot>                          the cgroup, per controller
//	runsc-sandbox … --root=ROOT/state … <slot>   the sentry's command line
//
// Terms:
//
//   - sentry: the process that is the guest's kernel; bivy-sentry
//   - stub: a process in which systrap runs guest code; a child of the sentry
//   - bundle: the directory of one sandbox
//   - unplaced: a sentry that is not in its cgroup yet
//
// What runsc's Container does after New is not used where it would trust a
// process id across restarts or keep state of its own: death is watched
// through a pidfd, and destruction goes by cgroup.
package gvisor
