package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"bivy/internal/cgroup"
	"bivy/internal/driver"
	"bivy/internal/driver/gvisor/bootflags"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Stats implements driver.Statter. It asks the host only, and so takes no
// turn: a guest kernel that does not answer is measured too.
func (d *Driver) Stats(ctx context.Context, id session.SandboxID) (driver.Stats, error) {
	s, err := d.find(id)
	if err != nil {
		return driver.Stats{}, err
	}
	if !s.started() {
		return driver.Stats{}, kind.Errorf(kind.Unavailable, "sandbox %s is not running", id)
	}
	st, err := s.group.Stats()
	if err != nil {
		return driver.Stats{}, err
	}
	return driver.Stats{
		CPU: st.CPU, MemoryBytes: st.MemoryBytes, MemoryPeakBytes: st.MemoryPeak,
		PIDs: st.PIDs, OOMKills: st.OOMKills, OutboundRefused: s.outboundRefused(),
	}, ctx.Err()
}

// Inspect implements driver.Inspector. It trusts nothing that runs inside: it
// reads /proc of every process of the sandbox, and the limits back from the
// kernel.
func (d *Driver) Inspect(ctx context.Context, id session.SandboxID) (driver.Posture, error) {
	s, err := d.find(id)
	if err != nil {
		return driver.Posture{}, err
	}
	var p driver.Posture
	err = s.do(ctx, func() (err error) {
		p, err = s.inspect()
		return err
	})
	if err != nil {
		return driver.Posture{}, err
	}
	return p, nil
}

func (s *sandbox) inspect() (driver.Posture, error) {
	tree, err := cgroup.Tree(s.proc.Pid)
	if err != nil {
		return driver.Posture{}, err
	}
	p := &inspection{sandbox: s}
	for _, pid := range tree {
		if err := p.process(pid); err != nil {
			if errors.Is(err, fs.ErrNotExist) && pid != s.proc.Pid {
				continue // a stub that ended meanwhile
			}
			return driver.Posture{}, err
		}
	}
	if err := p.limits(); err != nil {
		return driver.Posture{}, err
	}
	return p.posture(), nil
}

// inspection gathers deviations by check.
type inspection struct {
	sandbox *sandbox
	faults  map[string][]string
	read    driver.Check // the limits check, which has values to show
}

func (p *inspection) fault(check, format string, args ...any) {
	if p.faults == nil {
		p.faults = map[string][]string{}
	}
	if f := p.faults[check]; len(f) < 4 { // enough to understand it
		p.faults[check] = append(f, fmt.Sprintf(format, args...))
	}
}

func (p *inspection) process(pid int) error {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return err
	}
	for _, t := range threads {
		status, err := statusOf(filepath.Join("/proc", strconv.Itoa(pid), "task", t.Name(), "status"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a thread that ended meanwhile
		}
		if err != nil {
			return err
		}
		for _, ids := range []string{"Uid", "Gid"} {
			for _, f := range strings.Fields(status[ids]) {
				if n, err := strconv.ParseInt(f, 10, 64); err != nil || n < hostID || n >= hostID+idCount {
					p.fault("uid", "thread %s has %s %s", t.Name(), ids, status[ids])
				}
			}
		}
		for _, c := range []string{"CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"} {
			if bits, err := strconv.ParseUint(status[c], 16, 64); err != nil || bits&^bootflags.Capabilities != 0 {
				p.fault("capabilities", "thread %s has %s %s", t.Name(), c, status[c])
			}
		}
		if status["Seccomp"] != "2" {
			p.fault("seccomp", "thread %s has mode %s", t.Name(), status["Seccomp"])
		}
		if status["NoNewPrivs"] != "1" {
			p.fault("no_new_privs", "thread %s has %s", t.Name(), status["NoNewPrivs"])
		}
	}
	for _, ns := range namespaces {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err != nil {
			return err
		}
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return err
		}
		if theirs == ours {
			p.fault("namespaces", "process %d shares %s", pid, theirs)
		}
	}
	if err := p.files(pid); err != nil {
		return err
	}
	in, err := p.sandbox.group.Contains(pid)
	if err != nil {
		return err
	}
	if !in {
		p.fault("cgroup", "process %d is outside", pid)
	}
	return nil
}

var namespaces = []string{"ipc", "mnt", "net", "pid", "user", "uts"}

func statusOf(file string) (map[string]string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			fields[k] = strings.TrimSpace(v)
		}
	}
	return fields, nil
}

// files checks what a process of the sandbox holds open: the image, /dev/null,
// its own namespace's /proc, and what has no name in any file system. What a
// nameless socket is connected to cannot be seen from here.
func (p *inspection) files(pid int) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if to != os.DevNull && to != p.sandbox.req.Image && !nameless(to) {
			p.fault("fds", "descriptor %s of process %d is %s", e.Name(), pid, to)
		}
	}
	return nil
}

// nameless reports whether a descriptor's link is to something that no path
// leads to; deleted files have a suffix and do not count.
func nameless(to string) bool {
	for _, prefix := range []string{"socket:[", "pipe:[", "anon_inode:", "/memfd:"} {
		if strings.HasPrefix(to, prefix) {
			return true
		}
	}
	return false
}

func (p *inspection) limits() error {
	got, err := p.sandbox.group.Limits()
	if err != nil {
		return err
	}
	want := groupLimits(p.sandbox.req.Limits)
	p.read = driver.Check{Name: "limits", Want: fmt.Sprintf("%+v", want), Got: fmt.Sprintf("%+v", got), OK: got == want}
	return nil
}

func (p *inspection) posture() driver.Posture {
	want := []driver.Check{
		{Name: "uid", Want: fmt.Sprintf("host ids %d to %d", hostID, hostID+idCount-1)},
		{Name: "namespaces", Want: "own " + strings.Join(namespaces, " ")},
		{Name: "capabilities", Want: fmt.Sprintf("within %016x, in its own user namespace", bootflags.Capabilities)},
		{Name: "seccomp", Want: "filter on every thread"},
		{Name: "no_new_privs", Want: "1 on every thread"},
		{Name: "cgroup", Want: "every process inside"},
		{Name: "fds", Want: "image, null, and nameless ones"},
	}
	for i, c := range want {
		want[i].OK = len(p.faults[c.Name]) == 0
		want[i].Got = c.Want
		if !want[i].OK {
			want[i].Got = strings.Join(p.faults[c.Name], "; ")
		}
	}
	return driver.Posture{Checks: append(want, p.read)}
}
