//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command bivy-sentry contains gVisor's boot, gofer and umount commands, as bivy
// runs them for each sandbox. It is embedded in bivy and not started by hand.
//
// The debug settings above keep the Go runtime from holding the host's CPU
// quota files open in every sandbox; the sentry sets GOMAXPROCS itself.
package main

import "bivy/internal/driver/gvisor/sentry"

func main() { sentry.Main() }
