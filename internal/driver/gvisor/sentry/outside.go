package sentry

import (
	"cmp"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/atomicbitops"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/dev"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/devtmpfs"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"bivy/internal/driver/gvisor/bootflags"
)

// lastStartMount is the highest mount id that gVisor gives while it starts a
// sandbox with the mounts of our spec. Ids are never used again and are saved
// in snapshots, so that a mount with a higher one is the guest's.
// TestChangesCannotBeSteered of the driver finds a change of gVisor's.
const lastStartMount = 25

// Bounds of the count: a guest chooses how much there is to look at.
const (
	countLimit = 20 * time.Second
	maxEntries = 4 << 20 // directory entries
	maxPlaces  = 4096    // file systems that get their path
)

// noFiles are types of file systems in which a guest keeps no files: what they
// show is made by the kernel, or is counted where it is stored.
var noFiles = map[string]bool{
	"overlay": true, "erofs": true, "proc": true, "sysfs": true, "devpts": true, "mqueue": true,
	"cgroup": true, "cgroup2": true, "none": true,
}

// place is where a file system is mounted first.
type place struct {
	id   uint64 // of the mount; 0: nowhere
	path string
}

// outside counts what the guest keeps beside the writable layer, in every file
// system that the kernel has, mounted or not. seen is how many inodes of the
// layer have a name.
func (c *collector) outside(all []*vfs.Filesystem, upper *vfs.Filesystem, seen uint64) {
	c.until, c.left = time.Now().Add(countLimit), maxEntries
	places := c.places()
	var found []bootflags.Outside
	for _, fs := range all {
		at, mounted := places[fs]
		o := bootflags.Outside{Path: at.path, Guest: at.id == 0 || at.id > lastStartMount}
		if !mounted {
			o.Path = "(no longer mounted)"
		}
		name := fs.FilesystemType().Name()
		switch {
		case fs == upper:
			o = bootflags.Outside{Path: "(deleted files of /)"}
			c.deleted(fs, &o, seen)
		case fs == c.k.ShmMount().Filesystem():
			continue // anonymous shared memory and memfds: memory, not files
		case reflect.TypeOf(fs.Impl()).String() == "*tmpfs.filesystem":
			c.count(fs, &o)
		case noFiles[name] || !mounted:
			continue
		default:
			// Its files are where the kernel does not see them, as with FUSE.
			o.Path += " (" + name + ")"
			found = append(found, o)
			continue
		}
		if o.Files > 0 {
			found = append(found, o)
		}
	}
	slices.SortFunc(found, func(a, b bootflags.Outside) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Files, b.Files))
	})
	for i := range found {
		if len(found[i].Path) > bootflags.MaxOutsidePath {
			found[i].Path = found[i].Path[:bootflags.MaxOutsidePath-3] + "..."
		}
	}
	if len(found) > bootflags.MaxOutside {
		rest := bootflags.Outside{Path: "(other file systems)", Guest: true}
		for _, o := range found[bootflags.MaxOutside-1:] {
			rest.Files, rest.Bytes = plus(rest.Files, o.Files), plus(rest.Bytes, o.Bytes)
		}
		found = append(found[:bootflags.MaxOutside-1], rest)
	}
	c.report.Outside = found
}

// places returns for each mounted file system its oldest mount.
func (c *collector) places() map[*vfs.Filesystem]place {
	found := map[*vfs.Filesystem]place{}
	add := func(m *vfs.Mount) {
		if p, ok := found[m.Filesystem()]; ok && p.id <= m.ID {
			return
		}
		path := "(unnamed)"
		// Mounts can be nested as deep as there are mounts: a path is as long.
		if len(found) < maxPlaces && time.Now().Before(c.until) {
			if p, err := c.v.PathnameWithDeleted(c.ctx, vfs.VirtualDentry{}, vfs.MakeVirtualDentry(m, m.Root())); err == nil && p != "" {
				path = p
			}
		}
		found[m.Filesystem()] = place{m.ID, path}
	}
	mounts := c.v.GetAllMounts(c.ctx)
	slices.SortFunc(mounts, func(a, b *vfs.Mount) int { return cmp.Compare(a.ID, b.ID) })
	for _, m := range mounts {
		add(m)
		m.DecRef(c.ctx)
	}
	// The root of a namespace is mounted on nothing, and so not among them.
	namespaces := map[*vfs.MountNamespace]bool{}
	for _, t := range c.k.TaskSet().Root.Tasks() {
		ns := t.MountNamespace()
		if ns == nil || namespaces[ns] || !ns.TryIncRef() {
			continue
		}
		namespaces[ns] = true
		root := ns.Root(c.ctx)
		if root.Ok() {
			add(root.Mount())
			root.DecRef(c.ctx)
		}
		ns.DecRef(c.ctx)
	}
	return found
}

// count adds up the files of a tmpfs.
func (c *collector) count(fs *vfs.Filesystem, o *bootflags.Outside) {
	m, err := c.private(fs)
	if err != nil {
		c.lose(1, "%s cannot be read: %v", o.Path, err)
		return
	}
	defer m.DecRef(c.ctx)
	devices := fs.FilesystemType().Name() == dev.Name || fs.FilesystemType().Name() == devtmpfs.Name
	agents := o.Path == "/run" && !o.Guest
	// A name is data too: the directories of a place in which the start makes
	// none are the guest's.
	dirs := o.Guest || !devices && o.Path != "/run"
	linked := map[uint64]bool{} // files with several names that are counted
	inodes := uint64(1)
	err = c.walk(m, true, func(e entry) error {
		if e.kind() != linux.S_IFDIR && e.stat.Nlink > 1 {
			if linked[e.stat.Ino] {
				return nil
			}
			linked[e.stat.Ino] = true
		}
		inodes++
		if e.kind() == linux.S_IFDIR && !dirs || devices && c.isDevice(e) || agents && isAgents(e) {
			return nil
		}
		o.Files = plus(o.Files, 1)
		if e.kind() == linux.S_IFREG {
			o.Bytes = plus(o.Bytes, int64(min(e.stat.Size, math.MaxInt64)))
		}
		return nil
	})
	if errors.Is(err, errBudget) {
		c.lose(1, "%s holds more files than can be counted", o.Path)
		o.Files = max(o.Files, 1)
		return
	}
	if err != nil {
		c.lose(1, "%s cannot be read: %v", o.Path, err)
		return
	}
	c.deleted(fs, o, inodes)
}

// deleted adds the files of a tmpfs that have no name any more and live on in
// an open descriptor or a mapping: the inodes that it has beyond those seen.
// Their sizes are not known without a name, so that they add no bytes.
func (c *collector) deleted(fs *vfs.Filesystem, o *bootflags.Outside, seen uint64) {
	used, err := field[atomicbitops.Uint64](reflect.ValueOf(fs.Impl()), "inodesUsed")
	if err != nil {
		c.lose(1, "%s: %v", o.Path, err)
		return
	}
	if n := used.Load(); n > seen {
		o.Files = plus(o.Files, int64(min(n-seen, math.MaxInt64)))
	}
}

func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// devLinks are the symbolic links that gVisor makes in /dev.
var devLinks = map[string]string{
	"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	"char/1:3": "../null", "char/1:5": "../zero", "char/1:7": "../full", "char/1:8": "../random", "char/1:9": "../urandom", "char/5:0": "../tty",
	"char/10:200": "../net/tun", "char/10:229": "../fuse",
}

// isDevice reports whether a file of /dev is a device, which holds nothing of
// the guest's, or a link of gVisor's own.
func (c *collector) isDevice(e entry) bool {
	switch e.kind() {
	case linux.S_IFCHR, linux.S_IFBLK:
		return true
	case linux.S_IFLNK:
		want, ok := devLinks[e.path]
		if !ok {
			return false
		}
		target, err := c.v.ReadlinkAt(c.ctx, c.creds, e.pop())
		return err == nil && target == want
	}
	return false
}

// agentFiles are what bivy's agent writes below /run.
var agentFiles = map[string]bool{
	"e2b/.E2B_SANDBOX": true, "e2b/.E2B_SANDBOX_ID": true, "e2b/.E2B_TEMPLATE_ID": true,
}

// isAgents reports whether a file of /run is the agent's. One that is larger
// than such a value can be is not.
func isAgents(e entry) bool {
	return agentFiles[e.path] && e.kind() == linux.S_IFREG && e.stat.Size <= 256
}
