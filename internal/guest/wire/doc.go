// Package wire is the protocol between the host and the agent inside a sandbox:
// the generated process and filesystem services (below gen), the JSON bodies of
// the plain HTTP endpoints, the limits that both sides know, and the stable
// reasons by which the host tells one withReason from another.
//
// It has no behaviour of either side, so both import it. The services are those
// of E2B's clients; fields and headers that are bivy's own are marked as such in
// the .proto files and by the prefix "Bivy-".
//
//	guestclient ── StartRequest{cmd, args, envs, cwd} ─▶ proc
//	            ◀─ Connect error + header Bivy-Reason: command_not_found
//
// # Text
//
// Names on Linux are bytes, protobuf strings are UTF-8. [Escape] maps any bytes to
// UTF-8 and [Unescape] reverses it; text that is UTF-8 already stays as it is in
// all ordinary cases.
package wire
