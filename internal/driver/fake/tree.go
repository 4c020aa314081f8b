package fake

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"bivy/internal/driver"
)

// copyTree copies a directory, keeping modes and times so that a copy can be
// told from what was changed in it.
func copyTree(to, from string) error {
	type stamp struct {
		path string
		info fs.FileInfo
	}
	var dirs []stamp
	err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case e.IsDir():
			dirs = append(dirs, stamp{target, info})
			return os.MkdirAll(target, info.Mode().Perm()|0o700)
		case e.Type() == fs.ModeSymlink:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		case e.Type().IsRegular():
			return copyFile(target, path, info)
		}
		return nil // sockets and pipes belong to processes, which are not copied
	})
	for i := len(dirs) - 1; i >= 0 && err == nil; i-- { // inner ones first: making a file in a directory moves its time
		d := dirs[i]
		err = errors.Join(os.Chmod(d.path, d.info.Mode().Perm()), os.Chtimes(d.path, d.info.ModTime(), d.info.ModTime()))
	}
	return err
}

func copyFile(to, from string, info fs.FileInfo) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close(), os.Chtimes(to, info.ModTime(), info.ModTime()))
}

// exportTree writes what differs between root and base as a layer.
func exportTree(ctx context.Context, w io.Writer, root, base string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			return err
		}
		old := ""
		if base != "" {
			old = filepath.Join(base, rel)
		}
		same, err := unchanged(path, old)
		if err != nil || same {
			return err
		}
		return writeEntry(tw, path, rel)
	})
	if err == nil && base != "" {
		err = writeWhiteouts(tw, root, base)
	}
	return errors.Join(err, tw.Close())
}

// importTree unpacks what exportTree wrote without a base into an empty
// directory.
func importTree(root string, r io.Reader) error {
	dir, err := os.OpenRoot(root)
	if err != nil {
		return err
	}
	defer dir.Close()
	var dirs []*tar.Header
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		mode := h.FileInfo().Mode().Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			dirs = append(dirs, h)
			err = dir.MkdirAll(name, mode|0o700)
		case tar.TypeSymlink:
			err = dir.Symlink(h.Linkname, name)
		case tar.TypeReg:
			if err = importFile(dir, name, mode, tr); err == nil {
				err = dir.Chtimes(name, h.ModTime, h.ModTime)
			}
		}
		if err != nil {
			return fmt.Errorf("snapshot: %s: %w", name, err)
		}
	}
	for i := len(dirs) - 1; i >= 0; i-- { // inner ones first, as in copyTree
		name := strings.TrimSuffix(dirs[i].Name, "/")
		if err := errors.Join(dir.Chmod(name, dirs[i].FileInfo().Mode().Perm()), dir.Chtimes(name, dirs[i].ModTime, dirs[i].ModTime)); err != nil {
			return err
		}
	}
	return nil
}

func importFile(dir *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	f, err := dir.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// unchanged reports whether path is what old is. Directories count as changed
// only when they are new or their mode is.
func unchanged(path, old string) (bool, error) {
	a, err := os.Lstat(path)
	if err != nil || old == "" {
		return false, err
	}
	b, err := os.Lstat(old)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return false, nil
	}
	if err != nil || a.Mode() != b.Mode() {
		return false, err
	}
	switch {
	case a.IsDir():
		return true, nil
	case a.Mode().Type() == fs.ModeSymlink:
		x, err1 := os.Readlink(path)
		y, err2 := os.Readlink(old)
		return x == y, errors.Join(err1, err2)
	case a.Size() != b.Size():
		return false, nil
	case a.ModTime().Equal(b.ModTime()):
		return true, nil
	case !a.Mode().IsRegular():
		return false, nil
	}
	x, err1 := os.ReadFile(path)
	y, err2 := os.ReadFile(old)
	return bytes.Equal(x, y), errors.Join(err1, err2)
}

func writeEntry(tw *tar.Writer, path, rel string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	link := ""
	if info.Mode().Type() == fs.ModeSymlink {
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Format = rel, tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	if err := tw.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	// A file that grows meanwhile is cut at the size in its header.
	if _, err := io.CopyN(tw, f, h.Size); err != nil {
		return fmt.Errorf("%s: %w", rel, err)
	}
	return nil
}

func writeWhiteouts(tw *tar.Writer, root, base string) error {
	return filepath.WalkDir(base, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(base, path)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(filepath.Join(root, rel)); err == nil {
			return nil
		} else if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			return err
		}
		dir, name := filepath.Split(rel)
		// Where a file replaced the directory, the file's entry is enough.
		if st, err := os.Lstat(filepath.Join(root, strings.TrimSuffix(dir, "/"))); err == nil && !st.IsDir() {
			return fs.SkipDir
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: dir + ".wh." + name, Format: tar.FormatPAX, PAXRecords: map[string]string{driver.WhiteoutRecord: "1"}}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if e.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
}
