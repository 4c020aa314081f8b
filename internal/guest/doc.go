// Package guest is the agent inside a sandbox, the program bivy-guest. It is
// process 1 there, starts and reaps every other process, and serves the host over
// one port: the process and filesystem services, file contents, metrics, and the
// initialisation of the sandbox.
//
//	host                          │ sandbox
//	                              │
//	guestclient ── HTTP, one port ┼─▶ Agent ─▶ process service     (package proc)
//	               access token   │        ├─▶ filesystem service  (package files)
//	                              │        ├─▶ /files, /metrics, /health
//	                              │        └─▶ /init
//	                              │   programs inside ─▶ the same port, without /init
//
// # Terms
//
//   - Agent: the running program.
//   - Initialisation: POST /init, by which the host sets the access token, the
//     environment, the user, the host name and the clock. It is sent once after a
//     start and again after each restore of a snapshot.
//   - Generation: how often the agent was initialised.
//   - Local connection: one from a program inside the sandbox.
//
// # Access
//
// The host initialises the agent with a token. Every request except the health
// check needs that token or, for files, a signature made with it. The agent runs
// as root, and the programs in the sandbox can reach its port; so a local
// connection needs the token for everything and can never initialise. Before the
// first initialisation no request is served. An initialisation may leave the
// token empty: then the host needs none.
//
// # Limits
//
// Limits are constants beside what they limit: message sizes in package wire,
// sizes of commands in package argv, processes in proc, watchers and listings in
// files and watch, connections and times here.
package guest
