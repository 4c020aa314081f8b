package sentry

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCloseStrangers(t *testing.T) {
	var fds [6]int
	for i := 0; i < len(fds); i += 2 {
		var pair [2]int
		if err := unix.Pipe2(pair[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		fds[i], fds[i+1] = pair[0], pair[1]
	}
	open := func(fd int) bool {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err == nil
	}
	// As if they had come across exec; nothing else here is.
	for _, fd := range fds[:4] {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"runsc-sandbox", "--root=/x", "boot", "--pin-ring-fd=-1", fmt.Sprintf("--io-fds=%d,%d", fds[0], fds[1]), fmt.Sprintf("--controller-fd=%d", fds[2]), "id"}
	if err := closeInherited(args); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, true, true, false, true, true} {
		if open(fds[i]) != want {
			t.Errorf("descriptor %d is open: %t, want %t", i, !want, want)
		}
		if want {
			unix.Close(fds[i])
		}
	}
	if _, err := named([]string{"boot", "--spec-fd=six"}); err == nil {
		t.Error("a descriptor that is no number was taken")
	}
}
