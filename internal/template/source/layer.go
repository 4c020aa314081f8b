package source

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// Whiteouts of OCI layers, see the image specification's layer.md.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

const xattrPrefix = "SCHILY.xattr."

// mergeTar merges the entries of one tar stream into t. Whiteouts are interpreted
// in layers only; in a plain tar they are ordinary files. Device nodes, FIFOs and
// sockets are left out and noted: a sandbox has the devices of gVisor only.
func mergeTar(ctx context.Context, t *tree.Tree, spool *tree.Spool, r io.Reader, layer bool) error {
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return tarError(err)
		}
		if layer {
			if done, err := whiteout(t, h); err != nil || done {
				if err != nil {
					return err
				}
				continue
			}
		}
		if err := mergeEntry(t, spool, tr, h); err != nil {
			return err
		}
	}
}

// tarError gives errors of the format the kind Invalid, and returns errors of
// reading unchanged.
func tarError(err error) error {
	if kind.Of(err) != kind.Internal {
		return err
	}
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, io.ErrUnexpectedEOF) {
		return kind.Errorf(kind.Invalid, "malformed or truncated tar: %w", err)
	}
	return err
}

// whiteout applies h if it is a whiteout, and reports whether it is one.
func whiteout(t *tree.Tree, h *tar.Header) (bool, error) {
	base := path.Base(h.Name)
	if !strings.HasPrefix(base, whiteoutPrefix) {
		return false, nil
	}
	// path.Dir would resolve ".." before Clean sees it.
	dir := strings.TrimSuffix(strings.TrimRight(h.Name, "/"), base)
	switch {
	case base == whiteoutOpaque:
		return true, t.Opaque(dir)
	case strings.HasPrefix(base, whiteoutMeta):
		return true, nil // internal files of AUFS
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return true, t.Refuse(h.Name, "a whiteout of %q", hidden)
	}
	return true, t.Whiteout(dir + hidden)
}

func mergeEntry(t *tree.Tree, spool *tree.Spool, tr *tar.Reader, h *tar.Header) error {
	var mode uint32
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		mode = unix.S_IFREG
	case tar.TypeDir:
		mode = unix.S_IFDIR
	case tar.TypeSymlink:
		mode = unix.S_IFLNK
	case tar.TypeLink:
		return t.Link(h.Name, h.Linkname)
	case tar.TypeChar, tar.TypeBlock:
		return leaveOut(t, h.Name, "device nodes left out")
	case tar.TypeFifo:
		return leaveOut(t, h.Name, "FIFOs left out")
	case tar.TypeXGlobalHeader:
		return nil // comments, as git archive writes
	default:
		return t.Refuse(h.Name, "an entry of type %q", h.Typeflag)
	}
	ino, err := inodeOf(t, h, mode)
	if err != nil {
		return err
	}
	if mode == unix.S_IFREG {
		if err := t.ChargeBytes(h.Name, h.Size); err != nil {
			return err
		}
		ino.Size = h.Size
		if ino.Content, err = spool.Add(tr, h.Size); err != nil {
			return fmt.Errorf("entry %.256q: %w", h.Name, tarError(err))
		}
	}
	return t.Put(h.Name, ino)
}

// leaveOut notes an entry that is left out and removes the entry that it replaces.
func leaveOut(t *tree.Tree, name, reason string) error {
	if err := t.Remove(name); err != nil {
		return err
	}
	t.Notes().Add(reason, name)
	return nil
}

func inodeOf(t *tree.Tree, h *tar.Header, mode uint32) (*tree.Inode, error) {
	if h.Uid < 0 || h.Gid < 0 || h.Uid > math.MaxUint32-1 || h.Gid > math.MaxUint32-1 {
		return nil, t.Refuse(h.Name, "owner %d:%d", h.Uid, h.Gid)
	}
	ino := &tree.Inode{
		// The permissions, setuid, setgid and sticky; the type is that of the flag.
		Mode: mode | uint32(h.Mode)&0o7777,
		UID:  uint32(h.Uid),
		GID:  uint32(h.Gid),
	}
	ino.Mtime, ino.MtimeNsec = mtime(h.ModTime)
	if mode == unix.S_IFLNK {
		ino.Mode = unix.S_IFLNK | 0o777
		ino.Target = h.Linkname
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok || !keptXattr(name) {
			continue
		}
		if ino.Xattrs == nil {
			ino.Xattrs = map[string]string{}
		}
		ino.Xattrs[name] = v
	}
	return ino, nil
}

// keptXattr reports whether an extended attribute is kept: those of the kernel, such
// as overlayfs's, have no meaning on another file system.
func keptXattr(name string) bool {
	return name == "security.capability" || strings.HasPrefix(name, "user.")
}

// mtime returns a time as an image stores it; times before 1970 become 0.
func mtime(t time.Time) (int64, uint32) {
	if t.Unix() < 0 {
		return 0, 0
	}
	return t.Unix(), uint32(t.Nanosecond())
}
