// Package tree holds the merged file tree of an image while it is built:
// names and metadata in memory, file contents as references to where they
// can be read. Nothing is ever unpacked to a host path, so no name, symlink
// or hard link of a hostile image can reach outside the tree.
package tree

import (
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
)

// maxHops is how many symlinks the lookup of one path may follow, as in Linux.
// maxSteps is how many components it may visit, including those of symlinks; it
// limits the time of a lookup.
const (
	maxHops  = 40
	maxSteps = 4096
)

// Content opens the bytes of a regular file. It may be opened more than once,
// also after other entries were added. What it returns must yield exactly the
// size its inode says.
type Content interface {
	// Open opens the content from its beginning. The caller closes it.
	Open() (io.ReadCloser, error)
}

// Inode is a file, directory or symlink, apart from its names.
type Inode struct {
	Mode      uint32 // as in stat(2): type, setuid, setgid, sticky, permissions
	UID, GID  uint32
	Mtime     int64 // seconds since 1970
	MtimeNsec uint32
	Size      int64             // regular files only
	Target    string            // symlinks only
	Xattrs    map[string]string // limited in size; package image decides what is written
	Content   Content           // regular files of a size above zero only

	links    int64
	pathLen  int64 // directories: bytes of the path from the root
	children map[string]*dirent
}

type dirent struct {
	ino   *Inode
	layer int // the last layer that added it; a whiteout hides entries of lower layers
}

// IsDir reports whether i is a directory.
func (i *Inode) IsDir() bool { return i.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsRegular reports whether i is a regular file.
func (i *Inode) IsRegular() bool { return i.Mode&unix.S_IFMT == unix.S_IFREG }

// IsSymlink reports whether i is a symlink.
func (i *Inode) IsSymlink() bool { return i.Mode&unix.S_IFMT == unix.S_IFLNK }

// Links returns the link count of i, as Linux counts it.
func (i *Inode) Links() int64 {
	if !i.IsDir() {
		return i.links
	}
	n := int64(2)
	for _, d := range i.children {
		if d.ino.IsDir() {
			n++
		}
	}
	return n
}

// Names returns the names in directory i, sorted by bytes.
func (i *Inode) Names() []string { return slices.Sorted(maps.Keys(i.children)) }

// Child returns the entry called name of directory i, or nil.
func (i *Inode) Child(name string) *Inode {
	if d := i.children[name]; d != nil {
		return d.ino
	}
	return nil
}

// Tree is a merged file tree. It is not safe for concurrent use.
type Tree struct {
	root   *Inode
	limits Limits

	layer     int
	layerName string
	entries   int64
	bytes     int64
	meta      int64

	notes Notes
}

// New returns a tree that holds an empty root directory.
func New(limits Limits) *Tree {
	return &Tree{
		root:   &Inode{Mode: unix.S_IFDIR | 0o755, children: map[string]*dirent{}, links: 2},
		limits: limits.WithDefaults(),
	}
}

// Root returns the root directory.
func (t *Tree) Root() *Inode { return t.root }

// Limits returns the limits t enforces.
func (t *Tree) Limits() Limits { return t.limits }

// Notes returns the notes on what was left out.
func (t *Tree) Notes() *Notes { return &t.notes }

// BeginLayer starts the next layer. name is used in LimitErrors; it is empty for
// an input without layers.
func (t *Tree) BeginLayer(name string) error {
	t.layer++
	t.layerName = name
	if int64(t.layer) > t.limits.Layers {
		return t.over("Layers", t.limits.Layers, "")
	}
	return nil
}

func (t *Tree) over(limit string, limitMax int64, entry string) error {
	return kind.Wrap(kind.Exhausted, &LimitError{Limit: limit, Max: limitMax, Layer: t.layerName, Entry: entry})
}

// Refuse returns the error for an invalid entry. Like a LimitError its text does
// not name the layer; the caller adds that.
func (t *Tree) Refuse(entry, format string, args ...any) error {
	return kind.Errorf(kind.Invalid, "entry %.256q: %s", entry, fmt.Sprintf(format, args...))
}

// Clean splits the name of an archive's entry into the components of a path below
// the root. A leading slash and "." are dropped; ".." and NUL are refused, and so
// is a name beyond a limit. The root itself has no components.
func (t *Tree) Clean(name string) ([]string, error) {
	if int64(len(name)) > t.limits.PathBytes {
		return nil, t.over("PathBytes", t.limits.PathBytes, name)
	}
	if strings.ContainsRune(name, 0) {
		return nil, t.Refuse(name, "name contains a NUL byte")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return nil, t.Refuse(name, `".." in the path`)
		case int64(len(part)) > t.limits.NameBytes:
			return nil, t.over("NameBytes", t.limits.NameBytes, name)
		}
		parts = append(parts, part)
		if int64(len(parts)) > t.limits.Depth {
			return nil, t.over("Depth", t.limits.Depth, name)
		}
	}
	return parts, nil
}

// charge counts one more entry and its real path against the limits. Whiteouts
// count too, because they are read like other entries.
func (t *Tree) charge(name string, pathLen int64) error {
	if t.entries++; t.entries > t.limits.Entries {
		return t.over("Entries", t.limits.Entries, name)
	}
	if t.meta += max(int64(len(name)), pathLen); t.meta > t.limits.MetaBytes {
		return t.over("MetaBytes", t.limits.MetaBytes, name)
	}
	return nil
}

// ChargeBytes counts n more bytes of file content against the limits.
func (t *Tree) ChargeBytes(name string, n int64) error {
	if n < 0 || n > t.limits.Bytes-t.bytes {
		return t.over("Bytes", t.limits.Bytes, name)
	}
	t.bytes += n
	return nil
}

// dir returns the directory at the path parts. Missing directories are created if
// create is set; otherwise it returns nil. Symlinks are followed inside the tree,
// in which the root is its own parent: layers made on a system with a merged /usr
// have entries below /lib, which is a symlink.
func (t *Tree) dir(name string, parts []string, create bool) (*Inode, error) {
	at, err := t.descend(name, parts, create)
	if err != nil || at == nil {
		return nil, err
	}
	return at[len(at)-1], nil
}

// descend is dir, but returns all directories from the root to the last one.
func (t *Tree) descend(name string, parts []string, create bool) ([]*Inode, error) {
	at := []*Inode{t.root}
	hops := 0
	queue := slices.Clone(parts)
	for steps := 0; len(queue) > 0; steps++ {
		if steps > maxSteps {
			return nil, t.Refuse(name, "more than %d components, including those of symlinks", maxSteps)
		}
		part := queue[0]
		queue = queue[1:]
		cur := at[len(at)-1]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(at) > 1 {
				at = at[:len(at)-1]
			}
			continue
		}
		next := cur.Child(part)
		if next == nil {
			if !create {
				return nil, nil
			}
			if int64(len(part)) > t.limits.NameBytes {
				return nil, t.over("NameBytes", t.limits.NameBytes, name)
			}
			if int64(len(at)) > t.limits.Depth {
				return nil, t.over("Depth", t.limits.Depth, name)
			}
			next = &Inode{Mode: unix.S_IFDIR | 0o755, children: map[string]*dirent{}}
			if err := t.place(name, cur, part, next); err != nil {
				return nil, err
			}
		}
		switch {
		case next.IsDir():
			at = append(at, next)
		case next.IsSymlink():
			if hops++; hops > maxHops {
				return nil, t.Refuse(name, "more than %d symlinks in the path", maxHops)
			}
			if strings.HasPrefix(next.Target, "/") {
				at = at[:1]
			}
			queue = append(strings.Split(next.Target, "/"), queue...)
		default:
			return nil, t.Refuse(name, "%q is a file, not a directory", part)
		}
	}
	return at, nil
}

// Put adds or replaces an entry. A directory that replaces a directory keeps its
// children; anything else replaces the old entry, also if that is a symlink.
// Missing parents are created with owner root and mode 0755.
func (t *Tree) Put(name string, ino *Inode) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	if err := t.check(name, ino); err != nil {
		return err
	}
	if len(parts) == 0 {
		if !ino.IsDir() {
			return t.Refuse(name, "the root is not a directory")
		}
		t.root.setMeta(ino)
		return nil
	}
	parent, err := t.dir(name, parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	base := parts[len(parts)-1]
	old := parent.children[base]
	if old != nil && old.ino.IsDir() && ino.IsDir() {
		old.ino.setMeta(ino)
		old.layer = t.layer
		return t.charge(name, 0)
	}
	made := *ino
	made.links, made.children = 0, nil
	if made.IsDir() {
		made.children = map[string]*dirent{}
	}
	return t.place(name, parent, base, &made)
}

// place adds ino to parent under the name base and unlinks an old entry. The real
// path counts against the limits, because a symlink in name can make it longer.
func (t *Tree) place(name string, parent *Inode, base string, ino *Inode) error {
	pathLen := parent.pathLen + 1 + int64(len(base))
	if pathLen > t.limits.PathBytes {
		return t.over("PathBytes", t.limits.PathBytes, name)
	}
	if err := t.charge(name, pathLen); err != nil {
		return err
	}
	if old := parent.children[base]; old != nil {
		old.ino.unlink()
	}
	ino.links++
	if ino.IsDir() {
		ino.pathLen = pathLen
	}
	parent.children[base] = &dirent{ino: ino, layer: t.layer}
	return nil
}

func (t *Tree) check(name string, ino *Inode) error {
	var xattrs int64
	for k, v := range ino.Xattrs {
		xattrs += int64(len(k) + len(v))
	}
	if xattrs > t.limits.XattrBytes {
		return t.over("XattrBytes", t.limits.XattrBytes, name)
	}
	switch ino.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if ino.Size < 0 || (ino.Size > 0) != (ino.Content != nil) {
			return t.Refuse(name, "size %d does not match its content", ino.Size)
		}
	case unix.S_IFDIR:
	case unix.S_IFLNK:
		if int64(len(ino.Target)) > t.limits.SymlinkBytes {
			return t.over("SymlinkBytes", t.limits.SymlinkBytes, name)
		}
		if ino.Target == "" || strings.ContainsRune(ino.Target, 0) {
			return t.Refuse(name, "a symlink to %.64q", ino.Target)
		}
	default:
		return t.Refuse(name, "mode %#o is not that of a file, directory or symlink", ino.Mode)
	}
	if t.meta += xattrs + int64(len(ino.Target)); t.meta > t.limits.MetaBytes {
		return t.over("MetaBytes", t.limits.MetaBytes, name)
	}
	return nil
}

func (i *Inode) setMeta(from *Inode) {
	i.Mode, i.UID, i.GID = from.Mode, from.UID, from.GID
	i.Mtime, i.MtimeNsec, i.Xattrs = from.Mtime, from.MtimeNsec, from.Xattrs
}

// unlink reduces the link count of i and everything below it by one.
func (i *Inode) unlink() {
	i.links--
	for _, d := range i.children {
		d.ino.unlink()
	}
}

// Link adds a hard link to the file or symlink target.
func (t *Tree) Link(name, target string) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return t.Refuse(name, "the root cannot be a hard link")
	}
	from, err := t.Clean(target)
	if err != nil {
		return err
	}
	ino, err := t.lookup(name, from)
	if err != nil {
		return err
	}
	if ino == nil || ino.IsDir() {
		return t.Refuse(name, "hard link to %.256q, which is not a file of this image", target)
	}
	parent, err := t.dir(name, parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	base := parts[len(parts)-1]
	old := parent.children[base]
	if old != nil && old.ino == ino {
		old.layer = t.layer
		return t.charge(name, 0)
	}
	if ino.links >= t.limits.Links {
		return t.over("Links", t.limits.Links, name)
	}
	return t.place(name, parent, base, ino)
}

// lookup returns the entry at the path parts, or nil. It does not follow a symlink
// in the last component.
func (t *Tree) lookup(name string, parts []string) (*Inode, error) {
	if len(parts) == 0 {
		return t.root, nil
	}
	parent, err := t.dir(name, parts[:len(parts)-1], false)
	if err != nil || parent == nil {
		return nil, err
	}
	return parent.Child(parts[len(parts)-1]), nil
}

// Lookup returns the entry name or nil. It follows symlinks except in the last
// component, like lstat(2).
func (t *Tree) Lookup(name string) *Inode {
	parts, err := t.Clean(name)
	if err != nil {
		return nil
	}
	ino, err := t.lookup(name, parts)
	if err != nil {
		return nil
	}
	return ino
}

// Stat is Lookup that also follows a symlink in the last component, like stat(2).
func (t *Tree) Stat(name string) *Inode {
	parts, err := t.Clean(name)
	if err != nil {
		return nil
	}
	hops := 0
	for {
		ino, err := t.lookup(name, parts)
		if err != nil || ino == nil || !ino.IsSymlink() {
			return ino
		}
		if hops++; hops > maxHops {
			return nil
		}
		target := ino.Target
		if !strings.HasPrefix(target, "/") {
			target = path.Join("/", path.Join(parts[:len(parts)-1]...), target)
		}
		// Clean refuses "..", so path.Clean resolves it first. The result is
		// inexact only where a parent is itself a symlink.
		if parts, err = t.Clean(path.Clean(target)); err != nil {
			return nil
		}
	}
}

// Whiteout removes what lower layers have at name. Entries of the current layer
// stay, whatever their order.
func (t *Tree) Whiteout(name string) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return t.Refuse(name, "a whiteout of the root")
	}
	if err := t.charge(name, 0); err != nil {
		return err
	}
	parent, err := t.dir(name, parts[:len(parts)-1], false)
	if err != nil || parent == nil {
		return err
	}
	base := parts[len(parts)-1]
	if d := parent.children[base]; d != nil && !t.prune(d) {
		d.ino.links--
		delete(parent.children, base)
	}
	return nil
}

// Opaque removes what lower layers have in directory name.
func (t *Tree) Opaque(name string) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	if err := t.charge(name, 0); err != nil {
		return err
	}
	dir, err := t.dir(name, parts, false)
	if err != nil || dir == nil {
		return err
	}
	t.pruneChildren(dir)
	return nil
}

// prune removes the entries of lower layers below d and reports whether d itself
// stays.
func (t *Tree) prune(d *dirent) bool {
	if d.ino.IsDir() {
		t.pruneChildren(d.ino)
		return d.layer == t.layer || len(d.ino.children) > 0
	}
	return d.layer == t.layer
}

func (t *Tree) pruneChildren(dir *Inode) {
	for name, d := range dir.children {
		if !t.prune(d) {
			d.ino.links--
			delete(dir.children, name)
		}
	}
}

// Remove removes name and everything below it. A missing entry is no error.
func (t *Tree) Remove(name string) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return t.Refuse(name, "the root cannot be removed")
	}
	parent, err := t.dir(name, parts[:len(parts)-1], false)
	if err != nil || parent == nil {
		return err
	}
	base := parts[len(parts)-1]
	if d := parent.children[base]; d != nil {
		d.ino.unlink()
		delete(parent.children, base)
	}
	return nil
}

// Protect creates the directory name if necessary, and makes it and its parents
// owned by root and writable by root only.
func (t *Tree) Protect(name string) error {
	parts, err := t.Clean(name)
	if err != nil {
		return err
	}
	for n := 0; n <= len(parts); n++ {
		// Each prefix separately, because a symlink may lead through directories
		// that are not on the path of a longer prefix.
		at, err := t.descend(name, parts[:n], true)
		if err != nil {
			return err
		}
		for _, d := range at {
			d.UID, d.GID, d.Mode = 0, 0, d.Mode&^0o022
		}
	}
	return nil
}

// Walk calls fn for the root and everything below it, parents first and names
// in byte order. The root's path is "/".
func (t *Tree) Walk(fn func(path string, ino *Inode) error) error {
	return walk("", t.root, fn)
}

func walk(at string, ino *Inode, fn func(string, *Inode) error) error {
	name := at
	if name == "" {
		name = "/"
	}
	if err := fn(name, ino); err != nil {
		return err
	}
	for _, base := range ino.Names() {
		if err := walk(at+"/"+base, ino.children[base].ino, fn); err != nil {
			return err
		}
	}
	return nil
}
