package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// MakeRunDirs creates in dir, usually /run, the directories that the image has
// there, with their modes and owners. An empty tmpfs is mounted over the image's
// directory, and programs expect directories that came with their package, such
// as /run/lock. Files are not copied, because /run does not survive a boot on any
// system. When dir is not a tmpfs, it does nothing.
func MakeRunDirs(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Type != unix.TMPFS_MAGIC {
		return nil
	}
	// A non-recursive bind mount of the root shows the image's directory below
	// the tmpfs.
	root := filepath.Join(dir, ".image")
	if err := os.Mkdir(root, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("/", root, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("look below %s: %w", dir, err), os.Remove(root))
	}
	err := copyDirs(filepath.Join(root, dir), dir)
	return errors.Join(err, unix.Unmount(root, 0), os.Remove(root))
}

// maxRunDirs bounds how many directories of an image's /run are made.
const maxRunDirs = 1000

// copyDirs makes the directories below from below to, with their modes and
// owners.
func copyDirs(from, to string) error {
	n := 0
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() || path == from {
			return err
		}
		if n++; n > maxRunDirs {
			return fmt.Errorf("%s has more than %d directories", from, maxRunDirs)
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		dir := filepath.Join(to, rel)
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
		return unix.Chmod(dir, st.Mode&0o7777)
	})
}
