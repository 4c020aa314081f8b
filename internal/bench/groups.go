package bench

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/cgroup"
)

// groups account for what each engine uses: its processes are in cgroups of
// ours, or in ones made by itself that are watched from here.
type groups struct {
	host    *cgroup.Host
	made    map[string]*cgroup.Group
	watched []*cgroup.Group
	parent  string
	earlier time.Duration // used by groups that are gone
}

func openGroups(parent string) (*groups, error) {
	h, err := cgroup.Detect(parent)
	if err != nil {
		return nil, err
	}
	return &groups{host: h, made: map[string]*cgroup.Group{}, parent: parent}, nil
}

// group returns the group of that name, made when it is not there yet.
func (g *groups) group(name string) (*cgroup.Group, error) {
	if c := g.made[name]; c != nil {
		return c, nil
	}
	c := g.host.Group(name)
	if err := c.Create(cgroup.Limits{}); err != nil {
		return nil, err
	}
	g.made[name] = c
	return c, nil
}

// path is the group's name for engines that are told where to make theirs.
func (g *groups) path(name string) string { return "/" + g.parent + "/" + name }

// dir is where a controller has the group, or the one group on v2.
func (g *groups) dir(controller, name string) string {
	if g.host.Version == cgroup.V2 {
		controller = ""
	}
	return filepath.Join(g.host.Controllers()[controller], name)
}

// watch adds a group that bivy's server made, by the name of the parent of its
// sandboxes.
func (g *groups) watch(parent string) (*cgroup.Group, error) {
	h, err := cgroup.Detect(parent)
	if err != nil {
		return nil, err
	}
	c := h.Group("") // the parent itself, where what ended sandboxes used stays counted
	g.watched = append(g.watched, c)
	g.earlier -= used(c) // what was before is not part of what is measured
	return c, nil
}

func used(all ...*cgroup.Group) time.Duration {
	var sum time.Duration
	for _, c := range all {
		if s, err := c.Stats(); err == nil {
			sum += s.CPU
		}
	}
	return sum
}

// cpu is what everybody has used so far.
func (g *groups) cpu() time.Duration {
	sum := g.earlier + used(g.watched...)
	for _, c := range g.made {
		sum += used(c)
	}
	return sum
}

// unwatch lets go of watched groups, which are about to be removed.
func (g *groups) unwatch() {
	g.earlier += used(g.watched...)
	g.watched = nil
}

func (g *groups) close() error {
	var errs []error
	for _, d := range g.host.Controllers() {
		errs = append(errs, prune(d))
	}
	errs = append(errs, g.host.Remove())
	// The engines beside bivy make theirs under every controller there is.
	others, err := filepath.Glob("/sys/fs/cgroup/*/" + g.parent)
	errs = append(errs, err)
	for _, d := range others {
		errs = append(errs, prune(d))
		if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// prune removes the empty groups below a directory, deepest first.
func prune(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			sub := filepath.Join(dir, e.Name())
			err = errors.Join(err, prune(sub))
			if e := unix.Rmdir(sub); e != nil && !errors.Is(e, unix.ENOENT) {
				err = errors.Join(err, e)
			}
		}
	}
	return err
}

// start starts a command inside a group, so that all it uses from its first
// instruction on is counted there.
func (g *groups) start(name string, cmd *exec.Cmd) error {
	if _, err := g.group(name); err != nil {
		return err
	}
	if g.host.Version == cgroup.V2 {
		dir, err := os.Open(g.dir("", name))
		if err != nil {
			return err
		}
		defer dir.Close()
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &unix.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
		return cmd.Start()
	}
	dir := g.dir("cpuacct", name)
	if g.host.Controllers()["cpuacct"] == "" {
		return cmd.Start() // nothing counts; figures then have no CPU time
	}
	// v1 lets a single thread enter, and its children are born there.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tid := []byte(strconv.Itoa(unix.Gettid()))
	home := filepath.Join(filepath.Dir(g.host.Controllers()["cpuacct"]), own("cpuacct"), "tasks")
	if err := os.WriteFile(filepath.Join(dir, "tasks"), tid, 0); err != nil {
		return err
	}
	err := cmd.Start()
	return errors.Join(err, os.WriteFile(home, tid, 0))
}

// own is this thread's group in a v1 controller.
func own(controller string) string {
	for line := range strings.Lines(fact("/proc/thread-self/cgroup")) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && strings.Contains(","+f[1]+",", ","+controller+",") {
			return f[2]
		}
	}
	return "/"
}

// self is the processor time of this process.
func self() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// memoryUse is the memory that only a group's processes hold: anonymous
// and shared memory and what the kernel keeps for them, files not counted.
type memoryUse struct{ anonymous, shared, kernel int64 }

func (m memoryUse) sum() int64 { return m.anonymous + m.shared + m.kernel }

// memoryOf reads a directory of the memory controller, those below it included.
func memoryOf(dir string, v cgroup.Version) memoryUse {
	n := func(file, key string) int64 {
		for line := range strings.Lines(fact(filepath.Join(dir, file))) {
			k, v, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok {
				k, v = "", k
			}
			if k == key {
				n, _ := strconv.ParseInt(v, 10, 64)
				return n
			}
		}
		return 0
	}
	if v == cgroup.V2 {
		return memoryUse{n("memory.stat", "anon"), n("memory.stat", "shmem"), n("memory.stat", "kernel")}
	}
	return memoryUse{n("memory.stat", "total_rss"), n("memory.stat", "total_shmem"), n("memory.kmem.usage_in_bytes", "")}
}
