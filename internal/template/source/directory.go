package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// Directory is a root file system in a directory of this host. Owners, modes, times
// and hard links are kept; symlinks are not followed. Left out are other file
// systems mounted below it, sockets, FIFOs, device nodes and extended attributes.
type Directory struct {
	path string
	root *os.Root
}

// NewDirectory returns a source that reads the directory at path.
func NewDirectory(path string) *Directory { return &Directory{path: path} }

// String implements Source.
func (d *Directory) String() string { return "directory " + d.path }

// Key implements Source. It is empty: a directory has no digest.
func (d *Directory) Key(context.Context) (string, error) {
	fi, err := os.Stat(d.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", kind.Errorf(kind.NotFound, "%s does not exist", d.path)
	case err != nil:
		return "", err
	case !fi.IsDir():
		return "", kind.Errorf(kind.Invalid, "%s is not a directory", d.path).WithHint("use from.tar for a tar file")
	}
	d.root, err = os.OpenRoot(d.path)
	return "", err
}

// Load implements Source.
func (d *Directory) Load(ctx context.Context, t *tree.Tree, _ *tree.Spool, progress Progress) (Defaults, error) {
	if err := t.BeginLayer(""); err != nil {
		return Defaults{}, err
	}
	top, err := d.root.Stat(".")
	if err != nil {
		return Defaults{}, err
	}
	st, err := statOf(top)
	if err != nil {
		return Defaults{}, err
	}
	w := &dirWalk{ctx: ctx, root: d.root, tree: t, progress: progress, dev: st.Dev, links: map[uint64]string{}}
	if err := w.dir(".", top); err != nil {
		return Defaults{}, fmt.Errorf("%s: %w", d.path, err)
	}
	return Defaults{}, nil
}

// Close implements Source.
func (d *Directory) Close() error {
	if d.root == nil {
		return nil
	}
	r := d.root
	d.root = nil
	return r.Close()
}

type dirWalk struct {
	ctx      context.Context
	root     *os.Root
	tree     *tree.Tree
	progress Progress
	done     int64
	dev      uint64
	links    map[uint64]string // the first name of each file with several names, by inode
}

// dir adds the directory name and everything below it.
func (w *dirWalk) dir(name string, fi fs.FileInfo) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	ino, err := HostInode(fi)
	if err != nil {
		return err
	}
	if err := w.tree.Put(name, ino); err != nil {
		return err
	}
	f, err := w.root.Open(name)
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	for _, base := range names {
		child := path.Join(name, base)
		fi, err := w.root.Lstat(child)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since it was listed
		}
		if err != nil {
			return err
		}
		if err := w.entry(child, fi); err != nil {
			return err
		}
	}
	return nil
}

func (w *dirWalk) entry(name string, fi fs.FileInfo) error {
	st, err := statOf(fi)
	if err != nil {
		return err
	}
	if st.Dev != w.dev {
		w.tree.Notes().Add("other file systems left out", name)
		return nil
	}
	switch fi.Mode().Type() {
	case fs.ModeDir:
		return w.dir(name, fi)
	case fs.ModeNamedPipe:
		w.tree.Notes().Add("FIFOs left out", name)
		return nil
	case fs.ModeSocket:
		w.tree.Notes().Add("sockets left out", name)
		return nil
	case 0, fs.ModeSymlink:
	default:
		w.tree.Notes().Add("device nodes left out", name)
		return nil
	}
	if st.Nlink > 1 {
		if first, ok := w.links[st.Ino]; ok {
			return w.tree.Link(name, first)
		}
		w.links[st.Ino] = name
	}
	ino, err := HostInode(fi)
	if err != nil {
		return err
	}
	if ino.IsSymlink() {
		if ino.Target, err = w.root.Readlink(name); err != nil {
			return err
		}
	} else {
		if err := w.tree.ChargeBytes(name, ino.Size); err != nil {
			return err
		}
		if ino.Size > 0 {
			ino.Content = HostFile{Root: w.root, Name: name, Info: fi}
		}
		w.done += ino.Size
		if w.progress != nil {
			w.progress(w.done, 0)
		}
	}
	return w.tree.Put(name, ino)
}

func statOf(fi fs.FileInfo) (*syscall.Stat_t, error) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("%s: no stat", fi.Name())
	}
	return st, nil
}

// HostInode returns the metadata of a file, directory or symlink of this host. The
// caller sets the target of a symlink and the content of a file.
func HostInode(fi fs.FileInfo) (*tree.Inode, error) {
	st, err := statOf(fi)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", fi.Name(), err)
	}
	ino := &tree.Inode{Mode: st.Mode, UID: st.Uid, GID: st.Gid}
	ino.Mtime, ino.MtimeNsec = mtime(fi.ModTime())
	if ino.IsRegular() {
		ino.Size = st.Size
	}
	return ino, nil
}

// HostFile is the content of a regular file of this host. Opening fails when the
// file is not the one that Info describes, or has changed.
type HostFile struct {
	Root *os.Root
	Name string
	Info fs.FileInfo
}

// Open implements tree.Content.
func (h HostFile) Open() (io.ReadCloser, error) {
	f, err := h.Root.OpenFile(h.Name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && (!os.SameFile(fi, h.Info) || fi.Size() != h.Info.Size() || !fi.ModTime().Equal(h.Info.ModTime())) {
		err = kind.Errorf(kind.Conflict, "%s changed while the template was built", h.Name).WithHint("build again when no program writes to it")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
