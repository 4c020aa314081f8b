// Package cgroup limits sandboxes from the host's side, on cgroup v1, v1
// hybrid and v2, and reads back what it set.
//
// A group is made before the sandbox and its processes are moved in after
// they exist: v1 has no way to start a process inside a group, and the
// daemon must never enter a sandbox's group itself, not even for a moment,
// since concurrent creates would then land in each other's groups.
// Processes made later inherit the group of the one that made them.
package cgroup

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
)

// Limits of one group; zero means none.
type Limits struct {
	CPUMillis   int64 // thousandths of a core
	MemoryBytes int64 // anonymous, file and kernel memory, swap included
	PIDs        int64 // threads
}

// Period is the accounting period of the CPU limit. The kernel's default:
// shorter ones throttle a bursty guest less evenly, longer ones stall it.
const Period = 100 * time.Millisecond

// Version of the hierarchy that enforces limits on this host.
type Version int

// Versions.
const (
	V1 Version = 1
	V2 Version = 2
)

// Host is the hierarchy of this machine under which groups are made.
type Host struct {
	Version Version
	parent  string            // name of the group that holds ours, e.g. "bivy"
	dirs    map[string]string // controller → directory of the parent group
}

// needed are the controllers without which a sandbox cannot be limited.
var needed = [...]string{"cpu", "memory", "pids"}

// Detect finds the controllers of this host and makes the parent group in
// each. It fails with Unavailable naming the controller that is missing.
func Detect(parent string) (*Host, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	h, err := parse(mounts, parent)
	if err != nil {
		return nil, err
	}
	return h, h.prepare()
}

// parse chooses, per controller, the v1 mount that has it, else the v2 mount.
// The parent group is at the root of the mount, not below this process's own
// group: a daemon restarted from another session must find the same groups,
// and on v2 only the root may have both processes and controlled children.
func parse(mounts []byte, parent string) (*Host, error) {
	v1 := map[string]string{}
	v2 := ""
	for s := bufio.NewScanner(bytes.NewReader(mounts)); s.Scan(); {
		f := strings.Fields(s.Text())
		switch {
		case len(f) < 4:
		case f[2] == "cgroup":
			for _, o := range strings.Split(f[3], ",") {
				v1[o] = f[1]
			}
		case f[2] == "cgroup2":
			v2 = f[1]
		}
	}
	h := &Host{Version: V1, parent: parent, dirs: map[string]string{}}
	missing := ""
	for _, c := range needed {
		if v1[c] == "" {
			missing = c
			continue
		}
		h.dirs[c] = filepath.Join(v1[c], parent)
	}
	if missing == "" {
		if v1["cpuacct"] != "" {
			h.dirs["cpuacct"] = filepath.Join(v1["cpuacct"], parent)
		}
		return h, nil
	}
	if v2 == "" || len(h.dirs) > 0 {
		return nil, kind.Errorf(kind.Unavailable, "this host has no cgroup controller %q", missing).
			WithHint("boot with cgroup v2 or mount the v1 %s controller; bivy doctor shows what was found", missing)
	}
	return &Host{Version: V2, parent: parent, dirs: map[string]string{"": filepath.Join(v2, parent)}}, nil
}

func (h *Host) prepare() error {
	if h.Version == V2 {
		dir := h.dirs[""]
		enable := "+" + strings.Join(needed[:], " +")
		for _, d := range []string{filepath.Dir(dir), dir} {
			if err := os.MkdirAll(d, 0o755); err != nil {
				return fmt.Errorf("cgroup %s: %w", d, err)
			}
			if err := write(d, "cgroup.subtree_control", enable); err != nil {
				return kind.Errorf(kind.Unavailable, "enable controllers %s in %s: %w", enable, d, err).
					WithHint("run bivy where it may delegate cpu, memory and pids, e.g. not inside an unprivileged container")
			}
		}
		return nil
	}
	for _, d := range h.dirs {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("cgroup %s: %w", d, err)
		}
	}
	return nil
}

// Controllers lists what this host enforces and where.
func (h *Host) Controllers() map[string]string { return h.dirs }

// Remove deletes the parent group, which must hold none.
func (h *Host) Remove() error { return rmdir(h.allDirs()) }

// RemoveIfEmpty deletes the parent group unless it holds others.
func (h *Host) RemoveIfEmpty() error {
	if left, err := h.List(); err != nil || len(left) > 0 {
		return err
	}
	return h.Remove()
}

func (h *Host) allDirs() []string {
	var all []string
	for _, d := range h.dirs {
		all = append(all, d)
	}
	return all
}

// rmdir removes directories that may be gone already.
func rmdir(dirs []string) error {
	var errs []error
	for _, d := range dirs {
		if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("rmdir %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}

// List names every group under the parent, also half-made ones.
func (h *Host) List() ([]string, error) {
	var names []string
	for _, d := range h.dirs {
		entries, err := os.ReadDir(d)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() && !slices.Contains(names, e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// Group is one sandbox's group, which may not exist yet or any more.
type Group struct {
	host *Host
	name string
}

// Group returns the group of that name, a single path element.
func (h *Host) Group(name string) *Group { return &Group{h, name} }

func (g *Group) dir(controller string) string {
	if g.host.Version == V2 {
		return filepath.Join(g.host.dirs[""], g.name)
	}
	return filepath.Join(g.host.dirs[controller], g.name)
}

func (g *Group) allDirs() []string {
	var all []string
	for c := range g.host.dirs {
		all = append(all, g.dir(c))
	}
	return all
}

// Create makes the group with its limits, which hold from the first process
// on. On failure nothing is left.
func (g *Group) Create(l Limits) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Remove())
		}
	}()
	for _, d := range g.allDirs() {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return g.apply(g.settings(l))
}

func (g *Group) apply(settings []setting) error {
	for _, s := range settings {
		if err := write(g.dir(s.controller), s.file, s.value); err != nil {
			if s.optional && errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return fmt.Errorf("cgroup limit: %w", err)
		}
	}
	return nil
}

// LimitMemory changes the memory limit. It fails while more is held than the
// new limit allows and cannot be given back.
func (g *Group) LimitMemory(bytes int64) error {
	if err := g.reclaimTo(bytes); err != nil {
		return fmt.Errorf("cgroup limit: %w", err)
	}
	return g.apply(g.memory(bytes))
}

// reclaimTo makes room below a lower memory limit on v2, or fails with EBUSY.
// There the kernel takes any limit, and kills processes when it cannot take
// back what is above it; v1 refuses such a limit by itself. memory.high is the
// limit that reclaims and does not kill.
func (g *Group) reclaimTo(bytes int64) (err error) {
	if g.host.Version != V2 || bytes == 0 {
		return nil
	}
	if now, err := g.number("memory", "memory.current"); err != nil || now <= bytes {
		return err
	}
	if err := write(g.dir("memory"), "memory.high", strconv.FormatInt(bytes, 10)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, write(g.dir("memory"), "memory.high", "max")) }()
	now, err := g.number("memory", "memory.current")
	if err == nil && now > bytes {
		err = fmt.Errorf("%d bytes are held: %w", now, unix.EBUSY)
	}
	return err
}

// memory is the settings for a memory limit, 0 for none, in an order that the
// kernel takes: on v1 memory may never be above memory and swap together.
func (g *Group) memory(bytes int64) []setting {
	s := g.settings(Limits{MemoryBytes: bytes})
	if g.host.Version == V2 {
		if bytes == 0 {
			s = []setting{{"memory", "memory.max", "max", false}, {"memory", "memory.swap.max", "max", true}}
		}
		return s
	}
	if bytes == 0 {
		s = []setting{{"memory", "memory.limit_in_bytes", "-1", false}, {"memory", "memory.memsw.limit_in_bytes", "-1", true}}
	}
	if now, err := g.number("memory", "memory.limit_in_bytes"); err == nil && (now < bytes || bytes == 0) {
		slices.Reverse(s) // raising
	}
	return s
}

// SetLimits replaces every limit of an existing group and reads them back.
// Limits that are 0 are taken away. When it fails the earlier limits hold as
// far as the kernel lets them be restored. It fails with Exhausted when the
// group holds more memory than the new limit allows.
func (g *Group) SetLimits(l Limits) error {
	before, err := g.Limits()
	if err != nil {
		return fmt.Errorf("cgroup limits: %w", err)
	}
	err = g.rewrite(l)
	if errors.Is(err, unix.EBUSY) {
		err = kind.Wrap(kind.Exhausted, err)
	}
	if err != nil {
		if undo := g.rewrite(before); undo != nil {
			return errors.Join(err, undo)
		}
	}
	return err
}

func (g *Group) rewrite(l Limits) error {
	if err := g.reclaimTo(l.MemoryBytes); err != nil {
		return fmt.Errorf("cgroup limit: %w", err)
	}
	// Memory first: it is the one that can be refused.
	s := g.memory(l.MemoryBytes)
	rest := l
	rest.MemoryBytes = 0
	s = append(s, g.settings(rest)...)
	if l.CPUMillis == 0 {
		if g.host.Version == V2 {
			s = append(s, setting{"cpu", "cpu.max", "max", false})
		} else {
			s = append(s, setting{"cpu", "cpu.cfs_quota_us", "-1", false})
		}
	}
	if l.PIDs == 0 {
		s = append(s, setting{"pids", "pids.max", "max", false})
	}
	if err := g.apply(s); err != nil {
		return err
	}
	got, err := g.Limits()
	if err != nil {
		return fmt.Errorf("cgroup limits: %w", err)
	}
	if got != l {
		return fmt.Errorf("cgroup limits: wrote %+v, read back %+v", l, got)
	}
	return nil
}

type setting struct {
	controller, file, value string
	optional                bool // the kernel may be built without it
}

// settings in the order they must be written: v1 wants memory before
// memory and swap together.
func (g *Group) settings(l Limits) []setting {
	quota := l.CPUMillis * Period.Microseconds() / 1000
	period := Period.Microseconds()
	var s []setting
	if g.host.Version == V2 {
		if l.CPUMillis > 0 {
			s = append(s, setting{"cpu", "cpu.max", fmt.Sprintf("%d %d", quota, period), false})
		}
		if l.MemoryBytes > 0 {
			s = append(s, setting{"memory", "memory.max", strconv.FormatInt(l.MemoryBytes, 10), false},
				setting{"memory", "memory.swap.max", "0", true})
		}
		if l.PIDs > 0 {
			s = append(s, setting{"pids", "pids.max", strconv.FormatInt(l.PIDs, 10), false})
		}
		return s
	}
	if l.CPUMillis > 0 {
		s = append(s, setting{"cpu", "cpu.cfs_period_us", strconv.FormatInt(period, 10), false},
			setting{"cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10), false})
	}
	if l.MemoryBytes > 0 {
		m := strconv.FormatInt(l.MemoryBytes, 10)
		s = append(s, setting{"memory", "memory.limit_in_bytes", m, false},
			setting{"memory", "memory.memsw.limit_in_bytes", m, true})
	}
	if l.PIDs > 0 {
		s = append(s, setting{"pids", "pids.max", strconv.FormatInt(l.PIDs, 10), false})
	}
	return s
}

// Limits reads back what the kernel enforces.
func (g *Group) Limits() (Limits, error) {
	var l Limits
	var quota, period int64
	var errs []error
	num := func(controller, file string) int64 {
		n, err := g.number(controller, file)
		errs = append(errs, err)
		return n
	}
	if g.host.Version == V2 {
		text, err := read(g.dir("cpu"), "cpu.max")
		if err != nil {
			return l, err
		}
		if f := strings.Fields(text); len(f) == 2 && f[0] != "max" {
			quota, _ = strconv.ParseInt(f[0], 10, 64)
			period, _ = strconv.ParseInt(f[1], 10, 64)
		}
		l.MemoryBytes = num("memory", "memory.max")
	} else {
		quota, period = num("cpu", "cpu.cfs_quota_us"), num("cpu", "cpu.cfs_period_us")
		// "No limit" is the largest multiple of a page on v1.
		if l.MemoryBytes = num("memory", "memory.limit_in_bytes"); l.MemoryBytes > 1<<62 {
			l.MemoryBytes = 0
		}
	}
	l.PIDs = num("pids", "pids.max")
	if quota > 0 && period > 0 {
		l.CPUMillis = quota * 1000 / period
	}
	return l, errors.Join(errs...)
}

// number reads a file that holds one number or "max", which is 0 here.
func (g *Group) number(controller, file string) (int64, error) {
	text, err := read(g.dir(controller), file)
	if err != nil || text == "max" {
		return 0, err
	}
	return strconv.ParseInt(text, 10, 64)
}

func read(dir, file string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(b)), err
}

func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
