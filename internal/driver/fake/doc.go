// Package fake is a driver for tests and laptops. Its sandboxes are
// directories and ordinary processes of this machine, run as the current
// user: it isolates nothing and says so.
//
// The zero Driver works: it keeps everything in a pretend machine of its own,
// a [Host], and runs a small agent in-process that speaks the real agent's
// protocol. Give two Drivers the same Host and the second is what a restarted
// daemon sees. Give the Host a Program (the real agent, bivy-guest) and a
// directory, and sandboxes are child processes that outlive the one that
// started them.
//
// Faults are scripted: see [Fault].
package fake
