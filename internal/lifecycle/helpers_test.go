package lifecycle_test

import (
	"testing"
	"time"

	"bivy/internal/driver"
	"bivy/internal/session"
)

func fakeRequest(id session.SandboxID) driver.StartRequest {
	return driver.StartRequest{ID: id, Image: "/nonexistent", Args: []string{"/agent"}}
}

// waitFor polls what nothing announces.
func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatal("it does not come")
		}
	}
}
