package accounts

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keep is the argument of setresuid and setresgid that leaves an id unchanged.
const keep = ^uintptr(0)

// Do runs fn with the user's file system rights on a separate thread: the
// effective ids and the groups are the user's, and the kernel drops the
// capabilities of root. The kernel then checks every path that fn uses, also
// through symbolic links, as it would for a program of the user.
//
// The real and saved ids stay 0, so only root can signal or trace the thread
// meanwhile. fn must not start goroutines for its work: they have the agent's
// rights.
func (u User) Do(fn func() error) error {
	if u.UID == 0 {
		return fn()
	}
	done := make(chan error, 1)
	go func() {
		// A goroutine that ends while locked to its thread ends the thread too.
		// That is wanted when the thread could not be switched back to root.
		runtime.LockOSThread()
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("acting as %s: panic: %v", u.Name, p)
			}
		}()
		back, err := become(u)
		if err != nil {
			done <- fmt.Errorf("acting as %s: %w", u.Name, err)
			return
		}
		err = fn()
		if failed := back(); failed != nil {
			done <- errors.Join(err, fmt.Errorf("acting as %s: switch back to root: %w", u.Name, failed))
			return
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// become switches only the calling thread to u. It uses raw system calls because
// those of package syscall switch every thread of the process.
func become(u User) (back func() error, err error) {
	own, err := unix.Getgroups()
	if err != nil {
		return nil, os.NewSyscallError("getgroups", err)
	}
	uid, gid := os.Geteuid(), os.Getegid()
	if err := setGroups(u.Groups); err != nil {
		return nil, err
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(u.GID), keep); e != 0 {
		return nil, os.NewSyscallError("setresgid", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(u.UID), keep); e != 0 {
		return nil, os.NewSyscallError("setresuid", e)
	}
	return func() error {
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); e != 0 {
			return os.NewSyscallError("setresuid", e)
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(gid), keep); e != 0 {
			return os.NewSyscallError("setresgid", e)
		}
		groups := make([]uint32, len(own))
		for i, g := range own {
			groups[i] = uint32(g) //nolint:gosec // the kernel's group ids are 32 bits wide
		}
		return setGroups(groups)
	}, nil
}

func setGroups(groups []uint32) error {
	var list unsafe.Pointer
	if len(groups) > 0 {
		list = unsafe.Pointer(&groups[0]) //nolint:gosec // the kernel reads the array during the call
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(list), 0); e != 0 {
		return os.NewSyscallError("setgroups", e)
	}
	return nil
}
