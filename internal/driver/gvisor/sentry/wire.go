package sentry

import (
	"fmt"

	"golang.org/x/sys/unix"

	"bivy/internal/driver/gvisor/bootflags"
)

// makeWire makes the sandbox's wire here, in the process that lives as long as
// the sandbox. The daemon takes both ends out by pidfd_getfd(2): the guest's to
// hand it to the guest's network stack, the host's for itself, and again after
// a restart. The wire stays open when the daemon dies, which matters twice:
// connections from a new daemon work at once, and gVisor's reader, which spins
// on the end of file of a closed wire and then never stops for a checkpoint,
// does not see one.
//
// The sentry can read its own wire. It learns nothing by that: what is on it
// is what its guest sent or is about to receive.
func makeWire() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("wire: %w", err)
	}
	for i, at := range []int{bootflags.WireGuestFD, bootflags.WireHostFD} {
		if err := unix.Dup3(fds[i], at, unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("wire: %w", err)
		}
		if err := unix.Close(fds[i]); err != nil {
			return fmt.Errorf("wire: %w", err)
		}
	}
	return nil
}
