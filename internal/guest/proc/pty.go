package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	pb "bivy/internal/guest/wire/gen/process"
)

// readFD reads without blocking.
func readFD(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func isEAGAIN(err error) bool { return errors.Is(err, unix.EAGAIN) }

// pending returns how many bytes can be read from f without waiting.
func pending(f *os.File) int {
	n := 0
	raw, err := f.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) { // on an error n stays 0
			if got, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
				n = got
			}
		})
	}
	return n
}

// openPTY opens a new pseudoterminal and returns the master and a descriptor of
// the slave, which belongs to uid.
func openPTY(uid uint32, size *pb.PTY_Size) (master *os.File, slave int, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	master = os.NewFile(uintptr(fd), "ptmx")
	fail := func(what string, err error) (*os.File, int, error) {
		_ = master.Close()
		return nil, -1, fmt.Errorf("%s: %w", what, err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return fail("unlock terminal", err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return fail("name terminal", err)
	}
	path := "/dev/pts/" + strconv.Itoa(number)
	slave, err = unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail("open "+path, err)
	}
	// Lets the user's programs open the terminal by name. Not every kernel
	// supports it, and few programs need it.
	_ = unix.Fchown(slave, int(uid), -1)
	if err := setSize(master, size); err != nil {
		_ = unix.Close(slave)
		return fail("size terminal", err)
	}
	return master, slave, nil
}

// setSize sets a terminal's size in character cells. A client that does not know
// the size sends zero, which becomes 80 by 24: programs fail on a terminal of
// size zero.
func setSize(master *os.File, size *pb.PTY_Size) error {
	ws := unix.Winsize{Col: cellCount(size.GetCols(), 80), Row: cellCount(size.GetRows(), 24)}
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &ws) }); err != nil {
		return err
	}
	return set
}

func cellCount(n uint32, otherwise uint16) uint16 {
	if n == 0 {
		return otherwise
	}
	return uint16(min(n, 1<<15-1)) //nolint:gosec // bounded here
}

// foreground returns the terminal's foreground process group.
func foreground(master *os.File) (int, error) {
	raw, err := master.SyscallConn()
	if err != nil {
		return 0, err
	}
	var group int
	var get error
	if err := raw.Control(func(fd uintptr) { group, get = unix.IoctlGetInt(int(fd), unix.TIOCGPGRP) }); err != nil {
		return 0, err
	}
	return group, get
}
