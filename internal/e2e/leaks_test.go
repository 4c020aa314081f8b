package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/leakcheck"
)

// groupsOf is how a daemon names the parents of its cgroups.
func groupsOf(run string) string {
	sum := sha256.Sum256([]byte(run))
	return "bivy-" + hex.EncodeToString(sum[:4])
}

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

// where is what belongs to the host, except for its record and for what says
// whether a server runs.
func (h *host) where() leakcheck.Where {
	return leakcheck.Where{
		Dirs: []string{h.data, h.run}, CgroupPrefix: h.groups,
		Ignore: func(k leakcheck.Kind, name string) bool {
			switch k {
			case leakcheck.FD, leakcheck.Goroutine:
				return true // of this process, which is no part of bivy
			case leakcheck.Cgroup:
				return strings.HasPrefix(filepath.Base(name), h.groups) // the parents stay
			case leakcheck.File:
				return strings.HasPrefix(name, h.data+"/store/") || name == filepath.Join(h.run, "server.json")
			case leakcheck.Mount:
				return name == h.data // a disk of the test's own
			case leakcheck.Process, leakcheck.Socket:
			}
			return false
		},
	}
}

// noLeaks complains when the test is over about what is there that was not.
func (h *host) noLeaks(t *testing.T) {
	t.Helper()
	leakcheck.Check(t, h.where())
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
