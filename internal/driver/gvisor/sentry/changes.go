package sentry

import (
	"archive/tar"
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/fd"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/erofs"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/overlay"
	"gvisor.dev/gvisor/pkg/sentry/fsutil"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	gsync "gvisor.dev/gvisor/pkg/sync"
	"gvisor.dev/gvisor/pkg/usermem"

	"bivy/internal/driver/gvisor/bootflags"
)

// serveChanges lets the driver ask for what the guest changed: see
// bootflags.ChangesSink.
func serveChanges() {
	noteKernel()
	seccheck.RegisterSink(seccheck.SinkDesc{
		Name: bootflags.ChangesSink,
		New: func(_ map[string]any, out *fd.FD) (seccheck.Sink, error) {
			if out == nil {
				return nil, errors.New("no descriptor to write the changes to")
			}
			defer out.Close()
			if err := writeChanges(out); err != nil {
				return nil, err
			}
			return nil, errors.New(bootflags.ChangesWritten)
		},
	})
}

// writeChanges writes the tar of bootflags.ChangesSink. The guest may be
// paused: its tasks hold no lock of a file system then.
func writeChanges(w io.Writer) (err error) {
	defer func() {
		// The session must be told that its changes are not known, and a
		// panic would end the sentry instead.
		if p := recover(); p != nil {
			log.Warningf("changes: %v\n%s", p, debug.Stack())
			err = fmt.Errorf("reading the changes: panic: %v", p)
		}
	}()
	k := running.Load()
	if k == nil {
		return errors.New("the guest has not run yet")
	}
	c := collector{k: k, v: k.VFS(), ctx: k.SupervisorContext(), creds: auth.NewRootCredentials(k.RootUserNamespace())}
	all, err := filesystems(c.v)
	if err != nil {
		return err
	}
	defer func() {
		for _, fs := range all {
			fs.DecRef(c.ctx)
		}
	}()
	upper, err := upperOf(all)
	if err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(w, 64<<10)
	c.out = &output{Writer: buffered}
	c.tar = tar.NewWriter(c.out)
	seen, err := c.export(upper)
	if err != nil {
		return err
	}
	c.outside(all, upper, seen)
	text, err := json.Marshal(c.report)
	if err != nil {
		return err
	}
	last := &tar.Header{Typeflag: tar.TypeReg, Name: "report", Size: int64(len(text)), Format: tar.FormatPAX, PAXRecords: map[string]string{bootflags.ReportRecord: "1"}}
	if err := c.tar.WriteHeader(last); err != nil {
		return err
	}
	if _, err := c.tar.Write(text); err != nil {
		return err
	}
	return errors.Join(c.tar.Close(), buffered.Flush())
}

// Bounds of the export. Its length is bounded by its reader, who closes the
// pipe.
const (
	// maxPath bounds a path in bytes. Each directory of a deep tree would
	// otherwise repeat the names of all above it.
	maxPath = 32 << 10
	// maxXattrs bounds the extended attributes of one file in bytes: a tar
	// reader takes no more than 1 MiB of records.
	maxXattrs = 256 << 10
)

// collector reads the guest's file systems. It goes through mounts of its own,
// on which nothing of the guest's is mounted.
type collector struct {
	k     *kernel.Kernel
	v     *vfs.VirtualFilesystem
	ctx   context.Context
	creds *auth.Credentials

	out    *output
	tar    *tar.Writer
	report bootflags.Report
	until  time.Time // when a count ends
	left   int       // entries that a count may still look at
	buffer []byte
}

// lose notes that something is missing.
func (c *collector) lose(n int64, format string, args ...any) {
	if c.report.Lost == 0 {
		c.report.Why = fmt.Sprintf(format, args...)
	}
	c.report.Lost += n
}

// upperOf finds the writable layer of the root file system that the sandbox
// was started with. It is the overlay that lies directly on an EROFS image: a
// guest cannot mount EROFS, and has no path to the image by which an overlay
// of its own could have it as a layer. What is mounted where plays no part.
func upperOf(all []*vfs.Filesystem) (*vfs.Filesystem, error) {
	var found *vfs.Filesystem
	for _, fs := range all {
		if fs.FilesystemType().Name() != overlay.Name {
			continue
		}
		o, err := field[overlay.FilesystemOptions](reflect.ValueOf(fs.Impl()), "opts")
		if err != nil {
			return nil, err
		}
		if len(o.LowerRoots) != 1 || !o.LowerRoots[0].Ok() || !o.UpperRoot.Ok() ||
			o.LowerRoots[0].Mount().Filesystem().FilesystemType().Name() != erofs.Name {
			continue
		}
		if found != nil {
			return nil, errors.New("two root file systems on an image")
		}
		found = o.UpperRoot.Mount().Filesystem()
	}
	if found == nil {
		return nil, errors.New("the root file system of the start is gone: no process and no mount uses it any more")
	}
	return found, nil
}

// private mounts a tmpfs anew, read-only and nowhere.
func (c *collector) private(fs *vfs.Filesystem) (*vfs.Mount, error) {
	root, err := inner(reflect.ValueOf(fs.Impl()), "root")
	if err != nil {
		return nil, err
	}
	d, err := field[vfs.Dentry](root, "vfsd")
	if err != nil {
		return nil, err
	}
	return c.v.NewDisconnectedMount(fs, d, &vfs.MountOptions{ReadOnly: true, Flags: vfs.MountFlags{NoATime: true}}), nil
}

// entry is a file that a walk has come to.
type entry struct {
	dir  vfs.VirtualDentry // its directory
	name string
	path string // from the root of the file system, without a leading slash
	stat linux.Statx
}

func (e entry) pop() *vfs.PathOperation {
	return &vfs.PathOperation{Root: e.dir, Start: e.dir, Path: fspath.Parse(e.name)}
}

func (e entry) kind() uint16 { return e.stat.Mode & linux.S_IFMT }

// errBudget ends a walk that has looked at enough.
var errBudget = errors.New("there is more than can be looked at")

// batch is how many names of a directory are held at a time.
const batch = 512

// walk calls visit for every file of a tmpfs but its root, each directory
// before what is in it. A bounded walk may end with errBudget.
func (c *collector) walk(m *vfs.Mount, bounded bool, visit func(entry) error) error {
	root := vfs.MakeVirtualDentry(m, m.Root())
	type level struct {
		fd    *vfs.FileDescription
		path  string
		names []string
	}
	var stack []level
	defer func() {
		for _, l := range stack {
			l.fd.DecRef(c.ctx)
		}
	}()
	enter := func(pop *vfs.PathOperation, path string) error {
		d, err := c.v.OpenAt(c.ctx, c.creds, pop, &vfs.OpenOptions{Flags: linux.O_RDONLY | linux.O_DIRECTORY | linux.O_NOFOLLOW})
		if err == nil {
			stack = append(stack, level{fd: d, path: path})
		}
		return err
	}
	if err := enter(&vfs.PathOperation{Root: root, Start: root, Path: fspath.Parse(".")}, ""); err != nil {
		return err
	}
	for len(stack) > 0 {
		top := &stack[len(stack)-1]
		if len(top.names) == 0 {
			err := top.fd.IterDirents(c.ctx, vfs.IterDirentsCallbackFunc(func(d vfs.Dirent) error {
				if len(top.names) == batch {
					return errBudget // comes again
				}
				if d.Name != "." && d.Name != ".." {
					top.names = append(top.names, d.Name)
				}
				return nil
			}))
			if err != nil && !errors.Is(err, errBudget) {
				return err
			}
			if len(top.names) == 0 {
				top.fd.DecRef(c.ctx)
				stack = stack[:len(stack)-1]
				continue
			}
		}
		e := entry{dir: top.fd.VirtualDentry(), name: top.names[0]}
		top.names = top.names[1:]
		e.path = e.name
		if top.path != "" {
			e.path = top.path + "/" + e.name
		}
		if bounded {
			if c.left--; c.left < 0 || time.Now().After(c.until) {
				return errBudget
			}
		}
		if len(e.path) > maxPath {
			c.lose(1, "a path has more than %d bytes", maxPath)
			continue
		}
		var err error
		e.stat, err = c.v.StatAt(c.ctx, c.creds, e.pop(), &vfs.StatOptions{Mask: linux.STATX_BASIC_STATS})
		if err != nil {
			continue // deleted meanwhile, by a guest that runs
		}
		if err := visit(e); err != nil && !errors.Is(err, errSkip) {
			return err
		}
		if e.kind() == linux.S_IFDIR {
			if err := enter(e.pop(), e.path); err != nil {
				c.lose(1, "a directory cannot be read: %v", err)
			}
		}
	}
	return nil
}

// export writes every file of the writable layer, and returns how many inodes
// it has seen.
func (c *collector) export(upper *vfs.Filesystem) (inodes uint64, err error) {
	m, err := c.private(upper)
	if err != nil {
		return 0, err
	}
	defer m.DecRef(c.ctx)
	first := map[uint64]string{} // paths of files with several names, by inode
	whiteout := false
	inodes = 1 // the root
	err = c.walk(m, false, func(e entry) error {
		h := &tar.Header{
			Name: e.path, Mode: int64(e.stat.Mode &^ linux.S_IFMT), Uid: int(e.stat.UID), Gid: int(e.stat.GID),
			ModTime: time.Unix(e.stat.Mtime.Sec, int64(e.stat.Mtime.Nsec)),
		}
		if e.kind() == linux.S_IFCHR && e.stat.RdevMajor == 0 && e.stat.RdevMinor == 0 {
			// gVisor may share one inode among all deletions.
			h.Typeflag = tar.TypeChar
			if !whiteout || e.stat.Nlink <= 1 {
				inodes++
			}
			whiteout = true
			return c.header(h)
		}
		if e.kind() != linux.S_IFDIR && e.stat.Nlink > 1 {
			if path, ok := first[e.stat.Ino]; ok {
				h.Typeflag, h.Linkname = tar.TypeLink, path
				return c.header(h)
			}
			first[e.stat.Ino] = e.path
		}
		inodes++
		c.xattrs(e, h)
		switch e.kind() {
		case linux.S_IFREG:
			return c.file(e, h)
		case linux.S_IFDIR:
			h.Typeflag = tar.TypeDir
			h.Name += "/"
		case linux.S_IFLNK:
			target, err := c.v.ReadlinkAt(c.ctx, c.creds, e.pop())
			if err != nil {
				c.lose(1, "a symbolic link cannot be read: %v", err)
				return nil
			}
			h.Typeflag, h.Linkname = tar.TypeSymlink, target
		case linux.S_IFIFO:
			h.Typeflag = tar.TypeFifo
		case linux.S_IFCHR, linux.S_IFBLK:
			h.Typeflag = tar.TypeChar
			if e.kind() == linux.S_IFBLK {
				h.Typeflag = tar.TypeBlock
			}
			h.Devmajor, h.Devminor = int64(e.stat.RdevMajor), int64(e.stat.RdevMinor)
		case linux.S_IFSOCK:
			// It holds nothing, but may hide a file of the image.
			h.Typeflag = bootflags.SocketType
		default:
			c.lose(1, "a file is of an unknown type: mode %o", e.stat.Mode)
			return nil
		}
		return c.header(h)
	})
	return inodes, err
}

// errSkip says that a file is not in the tar, which goes on without it.
var errSkip = errors.New("the file is left out")

// header begins an entry. A file that a tar cannot describe is lost, and not
// those that follow.
func (c *collector) header(h *tar.Header) error {
	err := c.tar.WriteHeader(h)
	if err == nil || c.out.err != nil {
		return err
	}
	c.lose(1, "a file cannot be described: %v", err)
	return errSkip
}

// output remembers whether writing has failed.
type output struct {
	io.Writer
	err error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.Writer.Write(b)
	if err != nil {
		o.err = err
	}
	return n, err
}

// xattrs adds extended attributes to a header, as tar programs do.
func (c *collector) xattrs(e entry, h *tar.Header) {
	names, err := c.v.ListXattrAt(c.ctx, c.creds, e.pop(), 0)
	if err != nil || len(names) == 0 {
		return // files of other kinds have none
	}
	total := 0
	records := map[string]string{}
	for _, name := range names {
		value, err := c.v.GetXattrAt(c.ctx, c.creds, e.pop(), &vfs.GetXattrOptions{Name: name})
		if err != nil || value == "" || strings.Contains(name, "=") {
			continue // what a tar cannot have
		}
		if name == linux.XATTR_NAME_POSIX_ACL_ACCESS || name == linux.XATTR_NAME_POSIX_ACL_DEFAULT {
			value = base64.RawStdEncoding.EncodeToString([]byte(value))
		}
		if !utf8.ValidString(name) || !utf8.ValidString(value) || strings.Contains(name+value, "\x00") {
			continue
		}
		if total += len(name) + len(value); total > maxXattrs {
			c.lose(1, "a file has more than %d bytes of extended attributes", maxXattrs)
			break
		}
		records["SCHILY.xattr."+name] = value
	}
	if len(records) > 0 {
		h.PAXRecords = records
	}
}

// file writes a regular file, of which it holds no more than one buffer.
func (c *collector) file(e entry, h *tar.Header) error {
	h.Typeflag = tar.TypeReg
	f, err := c.v.OpenAt(c.ctx, c.creds, e.pop(), &vfs.OpenOptions{Flags: linux.O_RDONLY | linux.O_NOFOLLOW})
	if err != nil {
		c.lose(1, "a file cannot be read: %v", err)
		return nil
	}
	defer f.DecRef(c.ctx)
	size := int64(min(e.stat.Size, 1<<62))
	data, sparse, err := extents(f, size)
	if err != nil {
		return err
	}
	if data == nil {
		c.lose(1, "a file of %d bytes has holes between more than %d pieces", size, maxExtents)
		return nil
	}
	if !sparse {
		h.Size = size
		if err := c.header(h); err != nil {
			return err
		}
		return c.content(f, extent{0, size})
	}
	table := sparseMap(data)
	h.Size = int64(len(table))
	for _, d := range data {
		h.Size += d.length
	}
	if h.PAXRecords == nil {
		h.PAXRecords = map[string]string{}
	}
	h.PAXRecords[bootflags.SparseRecord] = strconv.FormatInt(size, 10)
	if err := c.header(h); err != nil {
		return err
	}
	if _, err := c.tar.Write(table); err != nil {
		return err
	}
	for _, d := range data {
		if err := c.content(f, d); err != nil {
			return err
		}
	}
	return nil
}

// content writes one piece of a file. A guest that runs may have shortened it
// meanwhile: what is missing is zero, since the header says how much follows.
func (c *collector) content(f *vfs.FileDescription, piece extent) error {
	if c.buffer == nil {
		c.buffer = make([]byte, 256<<10)
	}
	for piece.length > 0 {
		b := c.buffer[:min(int64(len(c.buffer)), piece.length)]
		n, err := f.PRead(c.ctx, usermem.BytesIOSequence(b), piece.offset, vfs.ReadOptions{})
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read a file of the guest: %w", err)
		}
		if n == 0 {
			clear(b)
			n = int64(len(b))
		}
		if _, err := c.tar.Write(b[:n]); err != nil {
			return err
		}
		piece.offset += n
		piece.length -= n
	}
	return nil
}

// extent is a piece of a file, in bytes.
type extent struct{ offset, length int64 }

const (
	// minHole is the size from which on a hole is left out; smaller ones are
	// written as zeros.
	minHole = 64 << 10
	// minHoles is how many bytes of holes make a file sparse.
	minHoles = 1 << 20
	// maxExtents bounds a sparse map: readers take at most 1 MiB of it.
	maxExtents = 20000
)

// extents returns where a file of a tmpfs has data, in order, and whether
// leaving out the rest is worth it. It returns nil when there are too many.
func extents(f *vfs.FileDescription, size int64) (data []extent, sparse bool, err error) {
	node, err := inner(reflect.ValueOf(f.Dentry().Impl()), "inode")
	if err != nil {
		return nil, false, err
	}
	impl, err := inner(node, "impl")
	if err != nil {
		return nil, false, err
	}
	mu, err := field[gsync.RWMutex](impl, "dataMu")
	if err != nil {
		return nil, false, err
	}
	ranges, err := field[fsutil.FileRangeSet](impl, "data")
	if err != nil {
		return nil, false, err
	}
	mu.RLock()
	defer mu.RUnlock()
	data = []extent{}
	var held int64
	for s := ranges.FirstSegment(); s.Ok(); s = s.NextSegment() {
		from, to := int64(min(s.Start(), uint64(size))), int64(min(s.End(), uint64(size)))
		if from >= to {
			continue
		}
		if n := len(data); n > 0 && from-(data[n-1].offset+data[n-1].length) < minHole {
			held += to - (data[n-1].offset + data[n-1].length)
			data[n-1].length = to - data[n-1].offset
			continue
		}
		data = append(data, extent{from, to - from})
		held += to - from
	}
	if size-held < minHoles {
		return data, false, nil
	}
	if len(data) > maxExtents {
		return nil, true, nil
	}
	return data, true, nil
}

// sparseMap is the map that precedes the data of a sparse file in GNU's PAX
// format 1.0: numbers in lines, filled up to whole blocks.
func sparseMap(data []extent) []byte {
	b := strconv.AppendInt(nil, int64(len(data)), 10)
	for _, d := range data {
		b = append(b, '\n')
		b = strconv.AppendInt(b, d.offset, 10)
		b = append(b, '\n')
		b = strconv.AppendInt(b, d.length, 10)
	}
	b = append(b, '\n')
	return append(b, make([]byte, -len(b)&511)...)
}
