package link

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Pair makes a wire of this process, for tests: the guest's end as a file and
// the host's as a descriptor for Open. Sandboxes make their own.
func Pair() (guest *os.File, host int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socket pair for the link: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "link guest end"), fds[1], nil
}
