package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// slots returns the slot of each sandbox of a session: the name of what the
// sandbox has on the host. The bundle of each slot says whose it is.
func (h *host) slots(t *testing.T, session string) []string {
	t.Helper()
	labels, err := filepath.Glob(filepath.Join(h.run, "gvisor", "bundles", "*", "sandbox"))
	if err != nil {
		t.Fatal(err)
	}
	var slots []string
	for _, path := range labels {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it was destroyed meanwhile
		}
		var label struct {
			Sandbox string `json:"sandbox"`
		}
		if err := json.Unmarshal(b, &label); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if strings.HasPrefix(label.Sandbox, session+"-") {
			slots = append(slots, filepath.Base(filepath.Dir(path)))
		}
	}
	return slots
}

// slot returns the slot of a session's only sandbox.
func (h *host) slot(t *testing.T, session string) string {
	t.Helper()
	slots := h.slots(t, session)
	if len(slots) != 1 {
		t.Fatalf("session %s has %d sandboxes on the host, not 1", session, len(slots))
	}
	return slots[0]
}
