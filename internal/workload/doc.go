// Package workload runs commands and moves files in sandboxes that run.
//
// Terms:
//
//   - An incarnation is the sandbox that a session has at present, as this
//     package sees it: whether work is admitted, what is in progress inside,
//     which commands run. The lifecycle makes it, opens and closes it, and may
//     replace it by the next one.
//   - A command is a process that a caller started. It is followed until it
//     ends, also when its output is not read.
//   - A Process is one caller's hold on a command. Several callers can hold
//     one; each has to read, and the command waits for the slowest.
//
// The way of a command:
//
//	caller ─▶ Service.Start ─▶ decision ─▶ intent on disk ─▶ agent in the guest
//	             │                                              │ output
//	          Process ◀───────────── deliver ◀──────────────────┘
//	                       outcome on disk ─▶ exit is told
//
// Everything that a guest says is bounded before it is kept or passed on.
package workload
