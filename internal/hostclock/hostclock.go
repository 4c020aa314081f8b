// Package hostclock returns the id of this boot of the machine and the time since
// it. Unlike the wall clock, neither changes when the time is set.
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

// Uptime returns the time since this boot, including time in suspend. It never
// decreases.
func Uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The call cannot fail on Linux 2.6.39 or newer. Without the clock no
		// deadline could be enforced.
		panic(fmt.Sprintf("reading CLOCK_BOOTTIME: %v", err))
	}
	return time.Duration(ts.Nano())
}
