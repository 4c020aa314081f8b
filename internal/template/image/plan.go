package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"bivy/internal/template/tree"
)

// sourceFS is the tree as the fs.FS that go-erofs reads. Two things differ from
// the tree, because go-erofs v0.3.1 cannot write them; patch corrects them in the
// image:
//
//   - a file shorter than a block has the size of one block; otherwise its data
//     would be stored beside its inode, where gVisor can read it but not map or
//     execute it;
//   - the second and later names of a file are empty files; otherwise each would
//     get a copy of the data.
type sourceFS struct {
	ctx      context.Context
	tree     *tree.Tree
	progress func(done, total int64)
	done     int64
	total    int64
	first    map[*tree.Inode]string // the first name of every file with several names
	failed   error                  // the first error of a read; go-erofs may not wrap it
}

// newSourceFS finds the first name of each file with several and the total size,
// and notes what the image will not contain.
func newSourceFS(ctx context.Context, t *tree.Tree, progress func(done, total int64)) *sourceFS {
	p := &sourceFS{ctx: ctx, tree: t, progress: progress, first: map[*tree.Inode]string{}}
	_ = t.Walk(func(name string, ino *tree.Inode) error { // the function never fails
		if len(ino.Xattrs) > 0 {
			t.Notes().Add("extended attributes left out, which gVisor cannot read from an image", name)
		}
		if p.alias(name, ino) {
			return nil
		}
		if !ino.IsDir() && ino.Links() > 1 {
			p.first[ino] = name
		}
		p.total += ino.Size
		return nil
	})
	return p
}

// alias reports whether name is a second or later name of ino.
func (p *sourceFS) alias(name string, ino *tree.Inode) bool {
	first, ok := p.first[ino]
	return ok && first != name
}

// cause returns the error of a read if there was one, otherwise err.
func (p *sourceFS) cause(err error) error {
	if p.failed != nil && !errors.Is(err, p.failed) {
		return p.failed
	}
	return err
}

// lookup finds the entry for a name of fs.WalkDir. Names need not be UTF-8, so it
// does not use fs.ValidPath.
func (p *sourceFS) lookup(name string) (*tree.Inode, error) {
	ino := p.tree.Root()
	if name != "." {
		for part := range strings.SplitSeq(name, "/") {
			if ino = ino.Child(part); ino == nil {
				return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
			}
		}
	}
	return ino, nil
}

// Open is called by go-erofs for all files while it lists directories, so the
// content is opened only at the first read.
func (p *sourceFS) Open(name string) (fs.File, error) {
	ino, err := p.lookup(name)
	if err != nil {
		return nil, err
	}
	return &reader{plan: p, name: name, ino: ino, left: ino.Size}, nil
}

func (p *sourceFS) Stat(name string) (fs.FileInfo, error) {
	ino, err := p.lookup(name)
	if err != nil {
		return nil, err
	}
	return p.info(name, ino), nil
}

func (p *sourceFS) ReadDir(name string) ([]fs.DirEntry, error) {
	ino, err := p.lookup(name)
	if err != nil {
		return nil, err
	}
	names := ino.Names()
	out := make([]fs.DirEntry, len(names))
	for i, base := range names {
		full := base
		if name != "." {
			full = name + "/" + base
		}
		out[i] = fs.FileInfoToDirEntry(p.info(full, ino.Child(base)))
	}
	return out, nil
}

func (p *sourceFS) ReadLink(name string) (string, error) {
	ino, err := p.lookup(name)
	if err != nil {
		return "", err
	}
	return ino.Target, nil
}

func (p *sourceFS) info(name string, ino *tree.Inode) *info {
	i := &info{
		name:  path.Base(name),
		mode:  goMode(ino.Mode),
		size:  max(ino.Size, 0),
		mtime: ino.Mtime,
		stat: &erofs.Stat{
			UID:     ino.UID,
			GID:     ino.GID,
			Mtime:   uint64(max(ino.Mtime, 0)),
			MtimeNs: ino.MtimeNsec,
			Nlink:   int(ino.Links()),
		},
	}
	switch {
	case p.alias("/"+name, ino):
		i.mode, i.size, i.stat = 0, 0, &erofs.Stat{Nlink: 1}
	case ino.Size > 0 && ino.Size < BlockSize:
		i.size = BlockSize
	}
	return i
}

func goMode(m uint32) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFDIR:
		out |= fs.ModeDir
	case unix.S_IFLNK:
		out |= fs.ModeSymlink
	}
	if m&unix.S_ISUID != 0 {
		out |= fs.ModeSetuid
	}
	if m&unix.S_ISGID != 0 {
		out |= fs.ModeSetgid
	}
	if m&unix.S_ISVTX != 0 {
		out |= fs.ModeSticky
	}
	return out
}

type info struct {
	name  string
	mode  fs.FileMode
	size  int64
	mtime int64
	stat  *erofs.Stat
}

func (i *info) Name() string       { return i.name }
func (i *info) Size() int64        { return i.size }
func (i *info) Mode() fs.FileMode  { return i.mode }
func (i *info) ModTime() time.Time { return time.Unix(i.mtime, int64(i.stat.MtimeNs)) }
func (i *info) IsDir() bool        { return i.mode.IsDir() }
func (i *info) Sys() any           { return i.stat }

// reader reads the content of one file, and pads that of a short one with zeros to
// a block. Content shorter than the inode's size is an error: a file of this host
// may change while it is read.
type reader struct {
	plan *sourceFS
	name string
	ino  *tree.Inode
	src  io.ReadCloser
	left int64
	pad  int64
	open bool
}

func (r *reader) Stat() (fs.FileInfo, error) { return r.plan.info(r.name, r.ino), nil }

func (r *reader) Read(b []byte) (int, error) {
	n, err := r.read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("/%s: %w", r.name, err)
		if r.plan.failed == nil {
			r.plan.failed = err
		}
	}
	return n, err
}

func (r *reader) read(b []byte) (int, error) {
	if err := r.plan.ctx.Err(); err != nil {
		return 0, err
	}
	if !r.open {
		src, err := r.ino.Content.Open()
		if err != nil {
			return 0, err
		}
		r.src, r.open = src, true
		if r.left < BlockSize {
			r.pad = BlockSize - r.left
		}
	}
	if r.left > 0 {
		n, err := r.src.Read(b[:min(int64(len(b)), r.left)])
		r.left -= int64(n)
		r.plan.done += int64(n)
		if r.plan.progress != nil {
			r.plan.progress(r.plan.done, r.plan.total)
		}
		if errors.Is(err, io.EOF) {
			err = nil
			if r.left > 0 {
				err = fmt.Errorf("%w: %d of %d bytes are missing", io.ErrUnexpectedEOF, r.left, r.ino.Size)
			}
		}
		return n, err
	}
	if r.pad > 0 {
		n := min(int64(len(b)), r.pad)
		clear(b[:n])
		r.pad -= n
		return int(n), nil
	}
	return 0, io.EOF
}

// Close closes the content. go-erofs calls it when it has read the file.
func (r *reader) Close() error {
	if r.src == nil {
		return nil
	}
	src := r.src
	r.src = nil
	return src.Close()
}
