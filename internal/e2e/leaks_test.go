package e2e

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// groupsOf is how a daemon names the parents of its cgroups.
func groupsOf(run string) string {
	sum := sha256.Sum256([]byte(run))
	return "bivy-" + hex.EncodeToString(sum[:4])
}

// inventory is everything of a host's that exists outside its database, as
// lines that people can read.
type inventory map[string]bool

// processes finds every process of the host's sandboxes, by the marks that
// nobody inside can change: the binary they run and the group they are in.
func (h *host) processes() map[int]string {
	found := map[int]string{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		exe, _ := os.Readlink(filepath.Join(dir, "exe")) // gone meanwhile, or a kernel thread
		groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		if strings.HasPrefix(exe, h.data+"/bin/") || strings.Contains(string(groups), "/"+h.groups) {
			found[pid] = exe
		}
	}
	return found
}

// inventory takes stock.
func (h *host) inventory() (inventory, error) {
	got := inventory{}
	for pid, exe := range h.processes() {
		got[fmt.Sprintf("process %d %s", pid, exe)] = true
	}
	groups, err := filepath.Glob("/sys/fs/cgroup/*/" + h.groups + "*/*")
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		if info, err := os.Stat(g); err == nil && info.IsDir() {
			got["cgroup "+g] = true
		}
	}
	for file, what := range map[string]string{"/proc/self/mountinfo": "mount", "/proc/net/unix": "socket"} {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		for s := bufio.NewScanner(f); s.Scan(); {
			if strings.Contains(s.Text(), h.dir+"/") {
				got[what+" "+s.Text()] = true
			}
		}
		f.Close()
	}
	for _, root := range []string{h.data, h.run} {
		err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			switch {
			case err != nil && os.IsNotExist(err):
				return nil
			case err != nil:
				return err
			case path == filepath.Join(h.data, "store"):
				return fs.SkipDir // the record of every session stays
			case path == filepath.Join(h.run, "server.json"), path == filepath.Join(h.run, "gvisor", "relink"):
				return nil // says whether a server runs; is empty when nothing is on its way
			}
			got["file "+path] = true
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return got, nil
}

// noLeaks takes stock now and again when the test is over, and complains
// about what is new. Whatever the test starts must be registered after it.
func (h *host) noLeaks(t *testing.T) {
	t.Helper()
	before, err := h.inventory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.compare(t, before) })
}

func (h *host) compare(t *testing.T, before inventory) {
	t.Helper()
	err := within(10*time.Second, func() error {
		after, err := h.inventory()
		if err != nil {
			return err
		}
		maps.DeleteFunc(after, func(k string, _ bool) bool { return before[k] })
		if len(after) > 0 {
			return fmt.Errorf("left behind:\n%s", strings.Join(slices.Sorted(maps.Keys(after)), "\n"))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// descriptors counts a process's open files by what they are.
func descriptors(pid int) (map[string]int, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	kinds := map[string]int{}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		if i := strings.IndexByte(to, '['); i > 0 && !strings.HasPrefix(to, "/") && !strings.HasPrefix(to, "anon") {
			to = to[:i]
		}
		kinds[to]++
	}
	return kinds, nil
}

func threads(pid int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return len(entries), err
}

func diffOf(a, b any) string { return cmp.Diff(a, b) }
