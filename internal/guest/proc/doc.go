// Package proc starts and supervises the processes of a sandbox. It is the process
// service of the agent, and it does what the kernel expects of process 1: it reaps
// every orphan.
//
//	StartRequest ─▶ Service.start ─▶ Reaper.spawn ─▶ Process
//	                (checks, user,   (fork, exec)      │ output
//	                 PATH, pipes)                      ▼
//	                              followers ◀─ fanout ◀─ stdout, stderr or terminal
//
// # Terms
//
//   - Service: the handler of the process service.
//   - Process: one process that a client asked for, with its output and its end.
//     Descendants of it are found by their tree and killed with it.
//   - Tree: a process and everything that descends from it, also what left its
//     process group or session. See tree.go.
//   - Mark: a resource limit that limits nothing and is inherited by descendants;
//     its value tells which process a descendant belongs to.
//   - Follower: a client that reads the output of a process. A slow one makes the
//     process wait; one that does not read at all is disconnected.
package proc
