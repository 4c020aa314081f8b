package sentry

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"bivy/internal/driver/gvisor/bootflags"
)

// trimBounding empties the bounding set of everything the sentry will not
// keep, on every thread, and gives up CAP_SETPCAP.
//
// gVisor does the same later, one system call per capability on every thread,
// when the runtime has many threads that each have to be stopped: 12 ms of a
// start. Here there are four, and it takes 2. Without CAP_SETPCAP gVisor skips
// its own pass; everything else it does to capabilities it still does.
//
// The helper that gVisor executes to unmount /proc needs CAP_SYS_ADMIN, which
// root of a user namespace gets across exec from the bounding set or from the
// inheritable one: it is put into the latter until gVisor sets that anew.
func trimBounding() error {
	caps := &capState
	caps.header.Version = unix.LINUX_CAPABILITY_VERSION_3
	if err := unix.Capget(&caps.header, &caps.data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if caps.data[0].Effective&(1<<unix.CAP_SETPCAP) == 0 {
		return nil // gVisor would not trim either, or knows another way
	}
	caps.data[0].Inheritable |= 1 << unix.CAP_SYS_ADMIN
	if err := caps.set(); err != nil {
		return err
	}
	for c := uintptr(0); c < 64; c++ {
		if bootflags.Capabilities&(1<<c) != 0 {
			continue
		}
		_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0)
		if errno == unix.EINVAL {
			break // past the kernel's last capability
		}
		if errno != 0 {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, errno)
		}
	}
	caps.data[0].Effective &^= 1 << unix.CAP_SETPCAP
	caps.data[0].Permitted &^= 1 << unix.CAP_SETPCAP
	return caps.set()
}

// capState is a package variable because its address is given to a system
// call on every thread: a stack may move in between.
var capState capabilities

type capabilities struct {
	header unix.CapUserHeader
	data   [2]unix.CapUserData
}

func (c *capabilities) set() error {
	c.header.Pid = 0
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&c.header)), uintptr(unsafe.Pointer(&c.data[0])), 0)
	if errno != 0 {
		return fmt.Errorf("capset: %w", errno)
	}
	return nil
}
