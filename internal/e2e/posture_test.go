package e2e

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/client"
)

// TestPosture looks at running sandboxes from outside, without bivy's own
// check: after they were made at the same time, and again under load.
func TestPosture(t *testing.T) {
	const many = 4
	host := needBed(t).host
	host.warm(t)
	host.noLeaks(t)
	s := host.serve(t)
	sessions := make([]*client.Session, many)
	var work sync.WaitGroup
	for i := range sessions {
		work.Go(func() {
			var err error
			if sessions[i], err = s.CreateSession(limit(t, 60*time.Second), client.CreateSession{}); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for _, x := range sessions {
		inspect(t, host, x)
	}
	strangers(t, host, sessions)
	for _, x := range sessions[:2] {
		work.Go(func() {
			_, err := x.Run(limit(t, 60*time.Second), client.Command{Argv: []string{"bash", "-c",
				"python3 -c 'import threading, time; [threading.Thread(target=time.sleep, args=(3,)).start() for _ in range(40)]' & for i in 1 2 3 4 5 6 7 8; do (head -c 20000000 /dev/urandom | sha256sum) & done; wait"}})
			if err != nil {
				t.Error(err)
			}
		})
		inspect(t, host, x)
	}
	work.Wait()
	for _, x := range sessions {
		inspect(t, host, x)
		s.end(t, x)
	}
	s.stop(t)
}

// guestIDs are the host's user and group ids that guests may have.
const (
	firstGuestID = 0x70000000
	guestIDs     = 65536
)

// inspect checks every thread of every process in a session's group.
func inspect(t *testing.T, h *host, x *client.Session) {
	t.Helper()
	mine := map[string]string{}
	for _, ns := range []string{"ipc", "mnt", "net", "pid", "user", "uts"} {
		to, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		mine[ns] = to
	}
	slot := h.slot(t, x.ID)
	processes := 0
	for pid := range h.processes() {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !strings.Contains(string(group), slot) {
			continue
		}
		processes++
		for _, controller := range []string{"cpu", "memory", "pids"} {
			if in := inController(string(group), controller); in != "" && !strings.Contains(in, slot) {
				t.Errorf("process %d is in %s of controller %s", pid, in, controller)
			}
		}
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, status := range tasks {
			f, err := os.Open(status)
			if err != nil {
				continue // ended meanwhile
			}
			for line := bufio.NewScanner(f); line.Scan(); {
				key, value, _ := strings.Cut(line.Text(), ":")
				value = strings.TrimSpace(value)
				switch key {
				case "Uid", "Gid":
					for _, v := range strings.Fields(value) {
						if n, err := strconv.ParseInt(v, 10, 64); err != nil || n < firstGuestID || n >= firstGuestID+guestIDs {
							t.Errorf("%s: %s", status, line.Text())
						}
					}
				case "Seccomp":
					if value != "2" {
						t.Errorf("%s: %s", status, line.Text())
					}
				case "NoNewPrivs":
					if value != "1" {
						t.Errorf("%s: %s", status, line.Text())
					}
				case "CapInh", "CapAmb":
					if strings.Trim(value, "0") != "" && key == "CapAmb" {
						t.Errorf("%s: %s", status, line.Text())
					}
				}
			}
			f.Close()
		}
		for ns, host := range mine {
			to, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
			if err == nil && to == host {
				t.Errorf("process %d shares the host's %s", pid, to)
			}
		}
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			to, err := os.Readlink(fd)
			if err != nil || !strings.HasPrefix(to, "/") {
				continue
			}
			if to != "/dev/null" && !strings.HasPrefix(to, "/memfd:") && !strings.HasPrefix(to, "/proc") && !strings.HasSuffix(to, ".erofs") {
				t.Errorf("process %d has %s open", pid, to)
			}
		}
	}
	if processes < 2 {
		t.Errorf("session %s has %d processes on the host; there is nothing to look at", x.ID, processes)
	}
}

// inController returns the group that a process is in for a controller.
func inController(groups, controller string) string {
	for line := range strings.Lines(groups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && strings.Contains(","+f[1]+",", ","+controller+",") {
			return f[2]
		}
	}
	return ""
}

// strangers checks that each control socket is open in its own sandbox alone.
func strangers(t *testing.T, h *host, sessions []*client.Session) {
	t.Helper()
	f, err := os.Open("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	slots := map[string]string{} // by session
	for _, x := range sessions {
		slots[x.ID] = h.slot(t, x.ID)
	}
	owner := map[string]string{} // inode → session
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		for _, x := range sessions {
			if len(fields) == 8 && strings.Contains(fields[7], slots[x.ID]) {
				owner["socket:["+fields[6]+"]"] = x.ID
			}
		}
	}
	if len(owner) < len(sessions) {
		t.Fatalf("%d control sockets of %d sessions were found", len(owner), len(sessions))
	}
	for pid := range h.processes() {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			continue
		}
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			to, err := os.Readlink(fd)
			if id := owner[to]; err == nil && id != "" && !strings.Contains(string(group), slots[id]) {
				t.Errorf("process %d of another session has the control socket of %s open", pid, id)
			}
		}
	}
}
