package sentry

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/gomaxprocs"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
)

// TestSpareProcessors fails when gVisor reads page files with another number
// of readers than ours, or counts processors otherwise.
func TestSpareProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	const base = 3
	spareProcessors([]string{"runsc-sandbox", "boot", "--cpu-num=3", "id"})
	gomaxprocs.SetBase(base)
	for range 2 { // a restore's queue, and one of a later checkpoint
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		r := stateio.NewPagesFileFDReaderDefault(int32(fd)) // takes it
		if got := runtime.GOMAXPROCS(0); temporaryProcessors == 0 && got != base {
			t.Errorf("%d processors while reading, want %d", got, base)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if got := runtime.GOMAXPROCS(0); got != base {
			t.Errorf("%d processors after reading, want %d", got, base)
		}
		if temporaryProcessors != 0 {
			t.Errorf("%d temporary processors after reading", temporaryProcessors)
		}
	}
}
