// Command bivy-sentry is gVisor's boot, gofer and umount, as bivy runs them.
// It is carried inside bivy and is never started by hand.
package main

import "bivy/internal/driver/gvisor/sentry"

func main() { sentry.Main() }
