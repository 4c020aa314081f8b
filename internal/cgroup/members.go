package cgroup

import (
	"bivy/internal/poll"
	"context"
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
)

// PlaceTree moves a process and all its descendants into the group, so that
// what they make later starts there. It walks until a walk finds no new process.
func (g *Group) PlaceTree(pid int) error {
	placed := map[int]bool{}
	for {
		tree, err := Tree(pid)
		if err != nil {
			return err
		}
		fresh := false
		for _, p := range tree {
			if placed[p] {
				continue
			}
			placed[p], fresh = true, true
			// Moving is slow, looking is not: before a move the kernel waits,
			// for milliseconds, for every process that is forking or executing.
			if in, err := g.Contains(p); err == nil && in {
				continue
			}
			if err := g.place(p); err != nil {
				return err
			}
		}
		if !fresh {
			return nil
		}
	}
}

func (g *Group) place(pid int) error {
	for _, d := range g.allDirs() {
		err := write(d, "cgroup.procs", strconv.Itoa(pid))
		if err != nil && !errors.Is(err, unix.ESRCH) { // gone by itself
			return fmt.Errorf("place process %d: %w", pid, err)
		}
	}
	return nil
}

// Tree returns pid and its descendants, parents first. It fails when pid
// itself does not exist.
func Tree(pid int) ([]int, error) {
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", all[i]))
		if err != nil {
			if i == 0 {
				return nil, fmt.Errorf("process %d: %w", pid, err)
			}
			continue // ended between being listed and being looked at
		}
		for _, task := range tasks {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", all[i], task.Name()))
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
				continue
			}
			if err != nil {
				return nil, err
			}
			for _, f := range strings.Fields(string(b)) {
				child, err := strconv.Atoi(f)
				if err != nil {
					return nil, fmt.Errorf("children of %d: %w", all[i], err)
				}
				if !slices.Contains(all, child) {
					all = append(all, child)
				}
			}
		}
	}
	return all, nil
}

// Procs lists the processes in any directory of the group; none for a group
// that does not exist.
func (g *Group) Procs() ([]int, error) {
	var pids []int
	for _, d := range g.allDirs() {
		text, err := read(d, "cgroup.procs")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, f := range strings.Fields(text) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", d, err)
			}
			if !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
}

// Contains reports whether process pid is in every directory of the group.
func (g *Group) Contains(pid int) (bool, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false, err
	}
	suffix := "/" + filepath.Join(g.host.parent, g.name)
	for controller := range g.host.dirs {
		found := false
		for line := range strings.Lines(string(b)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			found = found || len(f) == 3 && slices.Contains(strings.Split(f[1], ","), controller) && strings.HasSuffix(f[2], suffix)
		}
		if !found {
			return false, nil
		}
	}
	return true, nil
}

// Kill sends SIGKILL to every process of the group until none is left or ctx
// ends.
func (g *Group) Kill(ctx context.Context) error {
	return poll.Until(ctx, poll.Delays{First: time.Millisecond / 4, Max: 20 * time.Millisecond}, func() (done bool, err error) {
		if g.host.Version == V2 {
			if err := write(g.dir(""), "cgroup.kill", "1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return true, fmt.Errorf("kill group %s: %w", g.name, err)
			}
		}
		pids, err := g.Procs()
		if err != nil || len(pids) == 0 {
			return true, err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return true, fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		return false, fmt.Errorf("group %s still has processes %v", g.name, pids)
	})
}

// Remove deletes an empty group; nil when it is already gone.
func (g *Group) Remove() error { return rmdir(g.allDirs()) }

// Stats is the group's use so far.
type Stats struct {
	CPU         time.Duration
	MemoryBytes int64
	MemoryPeak  int64
	PIDs        int64
	OOMKills    int64
}

// Stats measures the group.
func (g *Group) Stats() (Stats, error) {
	var s Stats
	var errs []error
	num := func(controller, file string) int64 {
		n, err := g.number(controller, file)
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		return n
	}
	s.PIDs = num("pids", "pids.current")
	if g.host.Version == V2 {
		s.MemoryBytes, s.MemoryPeak = num("memory", "memory.current"), num("memory", "memory.peak")
		s.CPU = time.Duration(g.keyed("cpu", "cpu.stat", "usage_usec", &errs)) * time.Microsecond
		s.OOMKills = g.keyed("memory", "memory.events", "oom_kill", &errs)
		return s, errors.Join(errs...)
	}
	s.MemoryBytes, s.MemoryPeak = num("memory", "memory.usage_in_bytes"), num("memory", "memory.max_usage_in_bytes")
	if g.host.dirs["cpuacct"] != "" {
		s.CPU = time.Duration(num("cpuacct", "cpuacct.usage"))
	}
	s.OOMKills = g.keyed("memory", "memory.oom_control", "oom_kill", &errs)
	return s, errors.Join(errs...)
}

// PIDsRefused is how often a thread was not made because of the limit; 0 where
// the kernel does not count it.
func (g *Group) PIDsRefused() (int64, error) {
	var errs []error
	n := g.keyed("pids", "pids.events", "max", &errs)
	err := errors.Join(errs...)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return n, err
}

// keyed reads one number of a file of "key value" lines.
func (g *Group) keyed(controller, file, key string, errs *[]error) int64 {
	text, err := read(g.dir(controller), file)
	if err != nil {
		*errs = append(*errs, err)
		return 0
	}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			n, err := strconv.ParseInt(v, 10, 64)
			*errs = append(*errs, err)
			return n
		}
	}
	return 0
}
