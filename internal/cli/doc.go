// Package cli is the bivy command.
//
// # How a command reaches a server
//
// Every command is a client of the REST interface. [Main] finds a server in this
// order: the one that --server or BIVY_SERVER names, the one in the user's
// settings, the one that runs on this machine, and last this process:
//
//	bivy run ──▶ client ──▶ http://host:port ──────▶ bivy serve
//	                │
//	                └─ no server ──▶ socket pair ──▶ Engine.Local, in this process
//
// What is not behind the REST interface is in the [Engine] that the caller passes
// in: the server itself, doctor, bench. So this package imports the client and
// the verifier of records, and no part of the server.
//
// # Terms
//
//   - An app is one invocation: its streams, environment and global flags.
//   - anywhere and onServer say whether a command may use a server in this
//     process, or needs one that continues to run after it.
//   - A meter is the progress bar of one operation, on stderr, on a terminal only.
//   - signals passes the signals of this process to the command in the session.
//
// # Output
//
// Results go to stdout, everything else to stderr: "bivy: " and the error or
// note, and "hint: " and what to do next. Text from a server or a session is made
// printable before it is shown. With -o json the result is JSON. Exit codes are
// in docs/exit-codes.md.
//
//	$ bivy show one two
//	bivy: unexpected argument "two"
//	hint: see bivy show --help
package cli
