package sandbox

import (
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/driver"
	"bivy/internal/session"
)

func TestShapeOf(t *testing.T) {
	for _, tc := range []struct {
		millis int64
		host   int
		cpus   int
	}{
		{50, 8, 2}, {1000, 8, 2}, {2000, 8, 2}, {2001, 8, 3}, {4000, 8, 4}, {8000, 8, 8}, {9000, 8, 8}, {64000, 2, 2},
		{1000, 1, 2}, // never one, on a host of one either
		{0, 4, 4},    // no limit
		{64000, 0, max(2, runtime.NumCPU())},
	} {
		got := ShapeOf(session.Resources{CPUMillis: tc.millis, MemoryMiB: 3, DiskMiB: 5}, tc.host)
		if want := (driver.Shape{CPUs: tc.cpus, MemoryBytes: 3 << 20, DiskBytes: 5 << 20}); got != want {
			t.Errorf("%d millis on %d processors: %+v, want %+v", tc.millis, tc.host, got, want)
		}
	}
}

func TestStartRequest(t *testing.T) {
	spec := Spec{
		ID: session.NewID().Sandbox(3), Owner: driver.Owner{Kind: driver.OwnedBySession, ID: "s"},
		Session:  session.Spec{}.WithDefaults(),
		Template: Template{Image: "/images/a", Agent: []string{"/agent", "-x"}},
	}
	want := driver.StartRequest{
		ID: spec.ID, Owner: spec.Owner, Image: "/images/a", Args: []string{"/agent", "-x"},
		Env: []string{"PATH=" + AgentSearchPath}, Hostname: "bivy",
		Limits: driver.Limits{CPUMillis: 2000, MemoryBytes: 1 << 30, DiskBytes: 1 << 30, PIDs: 4096},
		Shape:  driver.Shape{CPUs: 2, MemoryBytes: 1 << 30, DiskBytes: 1 << 30},
	}
	if got := spec.StartRequest(8); !cmp.Equal(got, want) {
		t.Error(cmp.Diff(want, got))
	}
}

// TestSnapshotIsUsedWhereItFits: the guest sees what the session asked for,
// whether it is restored or booted.
func TestSnapshotIsUsedWhereItFits(t *testing.T) {
	template := Template{Image: "/images/a", Snapshot: "/snapshots/a", SnapshotShape: ShapeOf(session.Spec{}.WithDefaults().Resources, 8)}
	for name, tc := range map[string]struct {
		change  func(*session.Resources)
		restore bool
	}{
		"defaults":         {func(*session.Resources) {}, true},
		"less memory":      {func(r *session.Resources) { r.MemoryMiB = 512 }, true},
		"half a processor": {func(r *session.Resources) { r.CPUMillis = 500 }, true},
		"fewer threads":    {func(r *session.Resources) { r.PIDs = 100 }, true},
		"four processors":  {func(r *session.Resources) { r.CPUMillis = 4000 }, false},
		"more disk":        {func(r *session.Resources) { r.DiskMiB = 2048 }, false},
	} {
		spec := Spec{Session: session.Spec{}.WithDefaults(), Template: template}
		tc.change(&spec.Session.Resources)
		got := spec.StartRequest(8).Snapshot
		if tc.restore && got != driver.Dir("/snapshots/a") || !tc.restore && got != nil {
			t.Errorf("%s: snapshot %v, want one: %v", name, got, tc.restore)
		}
	}
	spec := Spec{Session: session.Spec{}.WithDefaults()}
	if got := spec.StartRequest(8).Snapshot; got != nil {
		t.Errorf("a template without a snapshot: %v", got)
	}
}
