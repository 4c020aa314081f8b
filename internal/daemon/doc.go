// Package daemon assembles bivy: it alone names the concrete store, driver and
// interfaces, and connects them with plain constructor calls.
//
//	directories locked ─▶ store ─▶ signing key ─▶ record of the node ─▶ driver, templates
//	  ─▶ server.started ─▶ API keys ─▶ journal, node, lifecycle ─▶ REST interface
//
// Terms:
//
//   - The data directory holds what must survive a reboot, the run directory
//     what need not. One process at a time has each.
//   - A server serves an address until it is stopped. A local daemon is the
//     same without an address, for the one command that has started it.
//
// Run works until its context ends; Close then stops what only records, writes
// what is left to record, and closes the store last.
package daemon
