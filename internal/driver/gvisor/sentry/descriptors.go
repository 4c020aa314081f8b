package sentry

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// closeInherited closes every descriptor that this process has inherited and
// that its command line does not name.
//
// Parts of gVisor make sockets that are inherited across exec, and close or
// mark them a moment later. Where many sandboxes start at once in one process,
// a sentry that starts in that moment gets the control socket of another.
func closeInherited(args []string) error {
	mine, err := named(args)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("own descriptors: %w", err)
	}
	var errs []error
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return fmt.Errorf("own descriptors: %w", err)
		}
		if fd <= 2 || mine[fd] {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if errors.Is(err, unix.EBADF) {
			continue // that of the listing
		}
		// What was marked did not come across exec: the runtime made it.
		if err == nil && flags&unix.FD_CLOEXEC == 0 {
			err = unix.Close(fd)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("descriptor %d: %w", fd, err))
		}
	}
	return errors.Join(errs...)
}

// named returns the descriptors that a command line of gVisor's hands over:
// the values of --x-fd=N and --x-fds=N,N.
func named(args []string) (map[int]bool, error) {
	fds := map[int]bool{}
	for _, a := range args {
		name, values, ok := strings.Cut(a, "=")
		if !ok || !strings.HasPrefix(name, "-") || !strings.HasSuffix(name, "-fd") && !strings.HasSuffix(name, "-fds") {
			continue
		}
		for _, v := range strings.Split(values, ",") {
			fd, err := strconv.Atoi(v)
			if err != nil {
				return nil, fmt.Errorf("%s: not a descriptor: %w", a, err)
			}
			fds[fd] = true
		}
	}
	return fds, nil
}
