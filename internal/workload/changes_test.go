package workload

import (
	"strings"
	"testing"

	"bivy/internal/driver"
)

// What a guest named is in the events, which can be erased, and not in the
// residual, which goes into the seal.
func TestOutsideNamesOnlyPlacesOfTheStart(t *testing.T) {
	entries, residual := outside(driver.ChangeReport{Outside: []driver.Outside{
		{Path: "/dev/shm", Files: 2, Bytes: 7},
		{Path: "/home/ada/secret", Files: 1, Bytes: 1},
		{Path: "/mnt/private", Files: 1, Bytes: 1, Guest: true},
	}})
	if len(entries) != 3 {
		t.Errorf("%d events, want one for each place", len(entries))
	}
	if !strings.Contains(residual, "/dev/shm") || strings.Contains(residual, "ada") || strings.Contains(residual, "private") || !strings.Contains(residual, "mounts") {
		t.Errorf("residual: %q", residual)
	}
	if entries, residual := outside(driver.ChangeReport{}); len(entries) != 0 || residual != "" {
		t.Errorf("of nothing: %v, %q", entries, residual)
	}
	many := driver.ChangeReport{Outside: make([]driver.Outside, 5000)}
	if entries, _ := outside(many); len(entries) != maxOutside {
		t.Errorf("%d events of 5,000 places", len(entries))
	}
}
