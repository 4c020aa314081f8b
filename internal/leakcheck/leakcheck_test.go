package leakcheck

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestFindsEachKind(t *testing.T) {
	dir := t.TempDir()
	cg := t.TempDir()
	w := Where{Dirs: []string{dir}, CgroupPrefix: "bivy-", Cgroups: cg}
	for kind, leak := range map[Kind]func(*testing.T) (clear func()){
		Process: func(t *testing.T) func() {
			cmd := exec.Command("sleep", "1000")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := cmd.Process.Kill(); err != nil {
					t.Error(err)
				}
				_ = cmd.Wait() // it says that it was killed
			}
		},
		Cgroup: func(t *testing.T) func() {
			path := filepath.Join(cg, "memory", "bivy-x")
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			return func() { must(t, os.RemoveAll(path)) }
		},
		File: func(t *testing.T) func() {
			path := filepath.Join(dir, "file")
			must(t, os.WriteFile(path, nil, 0o600))
			return func() { must(t, os.Remove(path)) }
		},
		Socket: func(t *testing.T) func() {
			l, err := net.Listen("unix", filepath.Join(dir, "sock"))
			must(t, err)
			return func() { must(t, l.Close()) }
		},
		FD: func(t *testing.T) func() {
			f, err := os.Open("/etc/passwd")
			must(t, err)
			return func() { must(t, f.Close()) }
		},
		Goroutine: func(*testing.T) func() {
			stop := make(chan struct{})
			go func() { <-stop }()
			return func() { close(stop) }
		},
	} {
		t.Run(string(kind), func(t *testing.T) {
			before, err := Take(w)
			must(t, err)
			clear := leak(t)
			after, err := Take(w)
			must(t, err)
			d := Compare(before, after).Grown()
			if !strings.Contains(d.String(), string(kind)) {
				t.Errorf("a leaked %s is not found:\n%s", kind, d)
			}
			clear()
			if left, err := Settle(t.Context(), w, before, 10*time.Second); err != nil || len(left) != 0 {
				t.Errorf("after it was cleared: %v\n%s", err, left)
			}
			if left, err := Settle(t.Context(), w, Snapshot{}, time.Millisecond); err != nil || len(left) == 0 {
				t.Errorf("nothing grew from nothing: %v", err)
			}
		})
	}
}

func TestFindsOrphansByTheirDirectory(t *testing.T) {
	dir := t.TempDir()
	w := Where{Dirs: []string{dir}}
	before, err := Take(w)
	must(t, err)
	// The shell ends at once, and its child belongs to nobody here any more.
	cmd := exec.Command("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
	cmd.Dir = dir
	out, err := cmd.Output()
	must(t, err)
	after, err := Take(w)
	must(t, err)
	if d := Compare(before, after).Grown(); len(d) != 1 || d[0].Kind != Process || !strings.Contains(d[0].Name, "sleep 1000") {
		t.Errorf("found:\n%s", d)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	must(t, err)
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	if left, err := Settle(t.Context(), w, before, 10*time.Second); err != nil || len(left) != 0 {
		t.Errorf("after it was killed: %v\n%s", err, left)
	}
}

// TestFindsWhatIsInside: everything below a cgroup that counts is found,
// whatever its name, and so is a process that runs a program of a directory and
// is not a descendant of this one.
func TestFindsWhatIsInside(t *testing.T) {
	dir, cg := t.TempDir(), t.TempDir()
	must(t, os.MkdirAll(filepath.Join(cg, "memory", "bivy-x"), 0o755))
	w := Where{Dirs: []string{dir}, CgroupPrefix: "bivy-", Cgroups: cg}
	sleep, err := exec.LookPath("sleep")
	must(t, err)
	program, err := os.ReadFile(sleep)
	must(t, err)
	copied := filepath.Join(dir, "program")
	must(t, os.WriteFile(copied, program, 0o700))
	before, err := Take(w)
	must(t, err)
	must(t, os.Mkdir(filepath.Join(cg, "memory", "bivy-x", "k3vq7slot"), 0o755))
	cmd := exec.Command("sh", "-c", "cd / && exec 3>&1 && ("+copied+" 1000 >/dev/null 2>&1 3>&- & echo $! >&3)")
	out, err := cmd.Output()
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	must(t, err)
	defer func() { must(t, syscall.Kill(pid, syscall.SIGKILL)) }()
	after, err := Take(w)
	must(t, err)
	grown := Compare(before, after).Grown()
	kinds := map[Kind]int{}
	for _, c := range grown {
		kinds[c.Kind]++
	}
	if len(grown) != 2 || kinds[Process] != 1 || kinds[Cgroup] != 1 {
		t.Errorf("found:\n%s", grown)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestMounts(t *testing.T) {
	proc := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(proc, "self"), 0o755))
	text := "36 35 98:0 / /data/box/a rw - ext4 /dev/x rw\n37 35 98:0 / /else rw - ext4 /dev/x rw\n38 35 98:0 / /run/bivy-9 rw - tmpfs x rw\n" +
		"39 35 98:0 /data/box/b /mnt/bind rw - ext4 /dev/x rw\n" +
		"40 35 98:0 / /mnt/image rw - erofs /data/box/image rw\n" +
		"41 35 98:0 / /mnt/overlay rw - overlay o rw,lowerdir=/x:/data/box/l,upperdir=/y\n" +
		"42 35 98:0 /data/boxes /mnt/other rw - ext4 /dev/x rw\n"
	must(t, os.WriteFile(filepath.Join(proc, "self/mountinfo"), []byte(text), 0o600))
	s := Snapshot{}
	must(t, mounts(Where{Dirs: []string{"/data/box"}, Marker: "bivy-", Proc: proc}, s))
	if got := fmt.Sprint(s[Mount]); got != "map[/data/box/a:1 /mnt/bind:1 /mnt/image:1 /mnt/overlay:1 /run/bivy-9:1]" {
		t.Errorf("mounts: %s", got)
	}
}

func TestCompare(t *testing.T) {
	d := Compare(Snapshot{File: {"a": 1, "gone": 1}}, Snapshot{File: {"a": 3}, FD: {"socket": 1}})
	want := "file      +2 (1 → 3)  a\nfile      -1 (1 → 0)  gone\nfd        +1 (0 → 1)  socket\n"
	if d.String() != want {
		t.Errorf("got\n%swant\n%s", d, want)
	}
	if len(d.Grown()) != 2 {
		t.Errorf("grown:\n%s", d.Grown())
	}
}

type fakeTB struct {
	cleanups []func()
	failed   []string
}

func (*fakeTB) Helper()                     {}
func (f *fakeTB) Cleanup(c func())          { f.cleanups = append(f.cleanups, c) }
func (f *fakeTB) Fatalf(s string, a ...any) { f.Errorf(s, a...) }
func (f *fakeTB) Errorf(s string, a ...any) { f.failed = append(f.failed, fmt.Sprintf(s, a...)) }

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	tb := &fakeTB{}
	Check(tb, Where{Dirs: []string{dir}, Ignore: func(_ Kind, name string) bool { return strings.HasSuffix(name, ".log") }})
	must(t, os.WriteFile(filepath.Join(dir, "a.log"), nil, 0o600))
	for _, c := range tb.cleanups {
		c()
	}
	if len(tb.failed) != 0 {
		t.Errorf("failed without a leak: %v", tb.failed)
	}
}
