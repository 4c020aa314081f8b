// Package hostclock tells which boot of this machine it is and how long ago it
// was: what a wall clock that anybody may move cannot say.
package hostclock

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// BootID returns the id of this boot; each boot has a different one.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id of this machine: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Uptime is the time since this boot, suspension included. It only grows.
func Uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The call has no way to fail on a kernel that has the clock, which is
		// every one since 2.6.39; without it no deadline could be kept.
		panic(fmt.Sprintf("reading CLOCK_BOOTTIME: %v", err))
	}
	return time.Duration(ts.Nano())
}
