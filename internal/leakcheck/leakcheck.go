// Package leakcheck finds what a piece of work left behind on the machine:
// processes, cgroups, mounts, files, sockets, file descriptors, goroutines.
//
// Take a [Snapshot] before, another after, and compare; or let [Settle] do the
// second half, which waits for what is just ending.
//
// What belongs to the work is decided by where it is, never by its name: below
// this process, in a directory, in a cgroup. The objects of a sandbox have
// random names, so a name says nothing about whose they are.
package leakcheck

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"bivy/internal/poll"
)

// Kind is a kind of thing that can be left behind.
type Kind string

// The kinds.
const (
	Process   Kind = "process"
	Cgroup    Kind = "cgroup"
	Mount     Kind = "mount"
	File      Kind = "file"
	Socket    Kind = "socket" // bound to a path or an abstract name
	FD        Kind = "fd"     // of this process
	Goroutine Kind = "goroutine"
)

// Where says what belongs to the work that is checked. The zero value looks
// at this process and its descendants only.
type Where struct {
	// Dirs are directories. Every file in them counts, every socket and mount
	// point in them, every mount of something in them, and every process whose
	// working directory or program is in them.
	Dirs []string
	// CgroupPrefix is the beginning of the name of a cgroup. Each cgroup of
	// such a name counts, with all the cgroups and processes in it, whatever
	// they are called; empty: none.
	CgroupPrefix string
	// Marker makes more processes, sockets and mounts count: those with this
	// text in their command line, name or mount point; empty: none.
	Marker string
	// Ignore excludes things by name; may be nil.
	Ignore func(k Kind, name string) bool
	// Proc and Cgroups replace /proc and /sys/fs/cgroup.
	Proc, Cgroups string
}

// Snapshot is what there was at one moment: how many of each name.
type Snapshot map[Kind]map[string]int

// Change is one thing there is more or less of.
type Change struct {
	Kind          Kind
	Name          string
	Before, After int
}

// Diff is the changes between two snapshots.
type Diff []Change

// Grown returns the changes by which there is more than before.
func (d Diff) Grown() Diff {
	return slices.DeleteFunc(slices.Clone(d), func(c Change) bool { return c.After <= c.Before })
}

// String lists the changes, one a line.
func (d Diff) String() string {
	var b strings.Builder
	for _, c := range d {
		fmt.Fprintf(&b, "%-9s %+d (%d → %d)  %s\n", c.Kind, c.After-c.Before, c.Before, c.After, c.Name)
	}
	return b.String()
}

// Compare returns what changed from before to after, in a stable order.
func Compare(before, after Snapshot) Diff {
	var d Diff
	for _, k := range []Kind{Process, Cgroup, Mount, File, Socket, FD, Goroutine} {
		names := map[string]bool{}
		for n := range before[k] {
			names[n] = true
		}
		for n := range after[k] {
			names[n] = true
		}
		for _, n := range slices.Sorted(maps.Keys(names)) {
			if b, a := before[k][n], after[k][n]; a != b {
				d = append(d, Change{k, n, b, a})
			}
		}
	}
	return d
}

// Settle takes snapshots until nothing has grown since before, patience is
// over or ctx ends, and returns what has grown according to the last one.
func Settle(ctx context.Context, w Where, before Snapshot, patience time.Duration) (Diff, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var grown Diff
	var failed error
	waited := poll.Until(ctx, poll.Every(20*time.Millisecond), func() (bool, error) {
		var now Snapshot
		if now, failed = Take(w); failed != nil {
			return true, nil
		}
		grown = Compare(before, now).Grown()
		return len(grown) == 0, nil
	})
	if failed != nil {
		return nil, failed
	}
	if waited != nil {
		return grown, nil // time is up: what is left is the answer
	}
	return nil, nil
}

// TB is the part of testing.TB that Check needs.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// patience is how long Check waits for things to go.
const patience = 10 * time.Second

// Check fails the test if there is more at its end than there is now. Register
// it before what is to be cleaned up: clean-ups run last come first.
func Check(t TB, w Where) {
	t.Helper()
	before, err := Take(w)
	if err != nil {
		t.Fatalf("leakcheck: %v", err)
	}
	t.Cleanup(func() {
		t.Helper()
		grown, err := Settle(context.Background(), w, before, patience)
		if err != nil {
			t.Errorf("leakcheck: %v", err)
		}
		if len(grown) > 0 {
			t.Errorf("left behind:\n%s", grown)
		}
	})
}

// Take returns what there is now.
func Take(w Where) (Snapshot, error) {
	if w.Proc == "" {
		w.Proc = "/proc"
	}
	if w.Cgroups == "" {
		w.Cgroups = "/sys/fs/cgroup"
	}
	for i, d := range w.Dirs {
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			w.Dirs = slices.Clone(w.Dirs)
		}
		w.Dirs[i] = abs
	}
	s := Snapshot{}
	for _, look := range []func(Where, Snapshot) error{processes, cgroups, mounts, files, sockets, descriptors, goroutines} {
		if err := look(w, s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s Snapshot) add(w Where, k Kind, name string) {
	if w.Ignore != nil && w.Ignore(k, name) {
		return
	}
	if s[k] == nil {
		s[k] = map[string]int{}
	}
	s[k][name]++
}

func (w Where) inDirs(path string) bool {
	return slices.ContainsFunc(w.Dirs, func(d string) bool { return path == d || strings.HasPrefix(path, d+"/") })
}

func (w Where) marked(s string) bool { return w.Marker != "" && strings.Contains(s, w.Marker) }

// gone reports whether err means that something ended or was removed while it
// was looked at, which is not an error here.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || strings.Contains(err.Error(), "no such process")
}

func processes(w Where, s Snapshot) error {
	entries, err := os.ReadDir(w.Proc)
	if err != nil {
		return err
	}
	type proc struct {
		parent int
		state  string
	}
	all := map[int]proc{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(w.Proc, e.Name(), "stat"))
		if err != nil {
			if gone(err) {
				continue
			}
			return err
		}
		// The name is in parentheses and may hold anything, so fields are
		// counted from behind it.
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(f) < 2 {
			continue
		}
		parent, err := strconv.Atoi(f[1])
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
		all[pid] = proc{parent, f[0]}
	}
	me := os.Getpid()
	for pid, p := range all {
		below := false
		for at, hops := p.parent, 0; at > 0 && hops < 64; at, hops = all[at].parent, hops+1 {
			if at == me {
				below = true
				break
			}
		}
		cmdline, err := os.ReadFile(filepath.Join(w.Proc, strconv.Itoa(pid), "cmdline"))
		if err != nil {
			if gone(err) {
				continue
			}
			return err
		}
		line := strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
		cwd, err := os.Readlink(filepath.Join(w.Proc, strconv.Itoa(pid), "cwd"))
		if err != nil && !gone(err) {
			return err
		}
		if !below && (pid == me || (!w.marked(line) && !w.inDirs(strings.TrimSuffix(cwd, " (deleted)")) && !w.holds(pid))) {
			continue
		}
		if p.state == "Z" {
			line = "zombie " + line
		}
		s.add(w, Process, fmt.Sprintf("%d %.200s", pid, line))
	}
	return nil
}

// holds reports whether the program of a process is below Dirs, or the process
// is in one of the cgroups that count.
func (w Where) holds(pid int) bool {
	dir := filepath.Join(w.Proc, strconv.Itoa(pid))
	if exe, err := os.Readlink(filepath.Join(dir, "exe")); err == nil && w.inDirs(strings.TrimSuffix(exe, " (deleted)")) {
		return true
	}
	groups, err := os.ReadFile(filepath.Join(dir, "cgroup"))
	return err == nil && w.CgroupPrefix != "" && strings.Contains(string(groups), "/"+w.CgroupPrefix)
}

func cgroups(w Where, s Snapshot) error {
	if w.CgroupPrefix == "" {
		return nil
	}
	return filepath.WalkDir(w.Cgroups, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			if gone(err) {
				return nil
			}
			return err
		}
		if !e.IsDir() {
			return nil
		}
		if strings.Contains(strings.TrimPrefix(path, w.Cgroups), "/"+w.CgroupPrefix) {
			s.add(w, Cgroup, path)
		}
		return nil
	})
}

func mounts(w Where, s Snapshot) error {
	return lines(filepath.Join(w.Proc, "self/mountinfo"), func(line string) {
		f := strings.Fields(line)
		if len(f) < 5 {
			return
		}
		if point := f[4]; w.inDirs(point) || w.marked(point) || w.mounted(f) {
			s.add(w, Mount, point)
		}
	})
}

// mounted reports whether the mount of a line of mountinfo is of something
// below Dirs: its source, the directory of a bind mount, or a layer of an
// overlay, as far as the kernel shows the path.
func (w Where) mounted(fields []string) bool {
	return slices.ContainsFunc(fields, func(f string) bool {
		return slices.ContainsFunc(w.Dirs, func(d string) bool {
			for {
				_, after, found := strings.Cut(f, d)
				if !found {
					return false
				}
				if after == "" || strings.ContainsRune("/:,", rune(after[0])) {
					return true
				}
				f = after
			}
		})
	})
}

func files(w Where, s Snapshot) error {
	for _, dir := range w.Dirs {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				if gone(err) {
					return nil
				}
				return err
			}
			s.add(w, File, path)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func sockets(w Where, s Snapshot) error {
	return lines(filepath.Join(w.Proc, "net/unix"), func(line string) {
		f := strings.Fields(line)
		if len(f) < 8 {
			return // not bound to a name
		}
		if name := f[7]; w.inDirs(name) || w.marked(name) {
			s.add(w, Socket, name)
		}
	})
}

func descriptors(w Where, s Snapshot) error {
	dir := filepath.Join(w.Proc, "self/fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			if gone(err) {
				continue // the one that read the directory
			}
			return err
		}
		// socket:[123] and the like are numbered, and the number says nothing.
		if kind, _, ok := strings.Cut(name, ":["); ok {
			name = kind
		}
		s.add(w, FD, name)
	}
	return nil
}

// goroutines counts goroutines by what runs in them and what started them.
func goroutines(w Where, s Snapshot) error {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	for i, g := range strings.Split(string(buf), "\n\n") {
		if i == 0 {
			continue // this one
		}
		s.add(w, Goroutine, describe(g))
	}
	return nil
}

// describe names a goroutine by its outermost function and its creator. Where
// it happens to wait at the moment does not matter.
func describe(stack string) string {
	var outer, creator string
	for line := range strings.SplitSeq(stack, "\n") {
		if strings.HasPrefix(line, "\t") || strings.HasPrefix(line, "goroutine ") {
			continue
		}
		if by, ok := strings.CutPrefix(line, "created by "); ok {
			creator, _, _ = strings.Cut(by, " in goroutine ")
			continue
		}
		if i := strings.LastIndexByte(line, '('); i > 0 {
			line = line[:i]
		}
		outer = line
	}
	return cmp.Or(outer, "unknown") + " by " + cmp.Or(creator, "the runtime")
}

func lines(path string, each func(string)) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		each(sc.Text())
	}
	return sc.Err()
}
