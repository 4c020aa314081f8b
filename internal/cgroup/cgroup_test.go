package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/kind"
)

func TestParse(t *testing.T) {
	hybrid := `cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
`
	for _, tc := range []struct {
		name, mounts string
		version      Version
		dirs         map[string]string
		missing      string
	}{
		{name: "hybrid", mounts: hybrid, version: V1, dirs: map[string]string{
			"cpu": "/sys/fs/cgroup/cpu,cpuacct/bivy", "cpuacct": "/sys/fs/cgroup/cpu,cpuacct/bivy",
			"memory": "/sys/fs/cgroup/memory/bivy", "pids": "/sys/fs/cgroup/pids/bivy"}},
		{name: "v2", mounts: "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n", version: V2, dirs: map[string]string{"": "/sys/fs/cgroup/bivy"}},
		{name: "v1 without pids", mounts: strings.Replace(hybrid, "rw,pids", "rw,devices", 1), missing: `"pids"`},
		{name: "nothing", mounts: "proc /proc proc rw 0 0\n", missing: `"pids"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, err := parse([]byte(tc.mounts), "bivy")
			if tc.missing != "" {
				if !kind.Is(err, kind.Unavailable) || !strings.Contains(err.Error(), tc.missing) {
					t.Fatalf("error = %v, want Unavailable naming %s", err, tc.missing)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if h.Version != tc.version || !cmp.Equal(h.dirs, tc.dirs) {
				t.Errorf("version %d dirs %v, want %d %v", h.Version, h.dirs, tc.version, tc.dirs)
			}
		})
	}
}

// TestV2Files holds the v2 paths against a directory that looks like one: no
// kernel here has v2 controllers to try.
func TestV2Files(t *testing.T) {
	root := t.TempDir()
	h := &Host{Version: V2, parent: "bivy", dirs: map[string]string{"": root}}
	g := h.Group("a-1")
	if err := os.Mkdir(filepath.Join(root, "a-1"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"cpu.max", "memory.max", "memory.swap.max", "pids.max"} {
		if err := os.WriteFile(filepath.Join(root, "a-1", f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := Limits{CPUMillis: 1500, MemoryBytes: 256 << 20, PIDs: 100}
	if err := g.Create(want); err != nil {
		t.Fatal(err)
	}
	got, err := g.Limits()
	if err != nil || got != want {
		t.Errorf("limits = %+v, %v; want %+v", got, err, want)
	}
	file := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(root, "a-1", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := file("cpu.max"); got != "150000 100000" {
		t.Errorf("cpu.max = %q", got)
	}

	set := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, "a-1", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// A file keeps what is behind the new text, so that values here have the
	// same length as those they replace.
	set("cpu.max", "max 100000")
	set("memory.current", "1000")
	want = Limits{MemoryBytes: 128 << 20, PIDs: 120}
	if err := g.SetLimits(want); err != nil {
		t.Fatal(err)
	}
	if got, err := g.Limits(); err != nil || got != want || file("cpu.max") != "max 100000" {
		t.Errorf("limits = %+v, %v, cpu.max %q; want %+v", got, err, file("cpu.max"), want)
	}
	// On v2 a limit below what is held would kill: it has to be refused.
	set("memory.current", "110000000")
	set("memory.high", "")
	if err := g.SetLimits(Limits{MemoryBytes: 96 << 20}); !kind.Is(err, kind.Exhausted) {
		t.Errorf("a limit below what is held: %v, want Exhausted", err)
	}
	if got, err := g.Limits(); err != nil || got != want {
		t.Errorf("after a refused change: %+v, %v; want %+v", got, err, want)
	}
}

// TestGroup needs root and a kernel with the controllers.
func TestGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: cgroups need root")
	}
	h, err := Detect(fmt.Sprintf("bivy-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.Remove(); err != nil {
			t.Error(err)
		}
	}()
	g := h.Group("one")
	want := Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 64}
	if err := g.Create(want); err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	if got, err := g.Limits(); err != nil || got != want {
		t.Fatalf("limits read back = %+v, %v; want %+v", got, err, want)
	}
	for _, want := range []Limits{{CPUMillis: 250, MemoryBytes: 32 << 20, PIDs: 32}, {PIDs: 16}, {}, {CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 64}} {
		if err := g.SetLimits(want); err != nil {
			t.Errorf("SetLimits %+v: %v", want, err)
		}
		if got, err := g.Limits(); err != nil || got != want {
			t.Errorf("limits read back = %+v, %v; want %+v", got, err, want)
		}
	}
	// A parent, a child, and a grandchild made after the move.
	cmd := exec.Command("sh", "-c", "sleep 60 & read line; sleep 60 & wait")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.PlaceTree(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	var pids []int
	for len(pids) != 3 && time.Now().Before(deadline) {
		if pids, err = g.Procs(); err != nil {
			t.Fatal(err)
		}
	}
	if len(pids) != 3 {
		t.Fatalf("group has %v, want the shell and two sleeps", pids)
	}
	for _, pid := range pids {
		if in, err := g.Contains(pid); err != nil || !in {
			t.Errorf("process %d in the group: %v, %v", pid, in, err)
		}
	}
	if in, _ := g.Contains(os.Getpid()); in {
		t.Error("the test itself is in the group")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	go cmd.Wait() // reaps; ends when Kill has done its work
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if s, err := g.Stats(); err != nil || s.CPU == 0 {
		t.Errorf("stats after kill = %+v, %v", s, err)
	}
	if err := g.Remove(); err != nil || g.Exists() {
		t.Errorf("remove: %v, exists %v", err, g.Exists())
	}
	if err := g.Remove(); err != nil {
		t.Errorf("second remove: %v", err)
	}
}
