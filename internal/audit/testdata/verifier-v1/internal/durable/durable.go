// Package durable writes files so that a crash, of the process or of the
// machine, leaves the old content or the new content, never part of either.
//
// A file is first written under a temporary name in its own directory and then
// takes its final name in one step. A process that is killed in between leaves
// the temporary file behind; [IsTemp] recognises it, so that whoever owns the
// directory can remove it at its next start.
package durable

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// A Flag changes what [WriteFile] does.
type Flag uint8

const (
	// CreateOnly makes the write fail with [fs.ErrExist] when the file exists
	// already. Of several processes that create the same file at the same
	// time exactly one succeeds.
	CreateOnly Flag = 1 << iota
	// NotSynced leaves it to the kernel when the file reaches the disk. The
	// file survives the death of the process, but may be lost, or be empty,
	// after a loss of power.
	NotSynced
)

// WriteFile replaces the file at path by one with this content and exactly
// these permissions; the umask does not apply. The directory must exist. At no
// moment can path be read half written, or with other permissions than mode.
//
// When WriteFile returns nil, the file survives a loss of power, unless flags
// has [NotSynced]. When it returns an error, path is as it was before, with
// one exception: when syncing the directory fails after a replacement, path
// has the new content, which a loss of power may undo. A file that CreateOnly
// created is removed in that case.
func WriteFile(path string, data []byte, mode fs.FileMode, flags ...Flag) error {
	dir, name := filepath.Split(path)
	if dir == "" {
		dir = "."
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	return errors.Join(WriteFileIn(root, name, data, mode, flags...), root.Close())
}

// WriteFileIn is [WriteFile] for a file that is named relative to root.
func WriteFileIn(root *os.Root, name string, data []byte, mode fs.FileMode, flags ...Flag) error {
	var set Flag
	for _, f := range flags {
		set |= f
	}
	dir := path.Dir(name)
	temp := path.Join(dir, tempPrefix+rand.Text())
	if err := writeTemp(root, temp, data, mode, set&NotSynced == 0); err != nil {
		return errors.Join(err, removeIfThere(root, temp))
	}
	if set&CreateOnly != 0 {
		// A link, unlike a rename, does not replace what is there.
		if err := root.Link(temp, name); err != nil {
			return errors.Join(err, removeIfThere(root, temp))
		}
		err := root.Remove(temp)
		if err == nil && set&NotSynced == 0 {
			err = SyncDirIn(root, dir)
		}
		if err != nil {
			err = errors.Join(err, removeIfThere(root, name))
		}
		return err
	}
	if err := root.Rename(temp, name); err != nil {
		return errors.Join(err, removeIfThere(root, temp))
	}
	if set&NotSynced != 0 {
		return nil
	}
	return SyncDirIn(root, dir)
}

func writeTemp(root *os.Root, name string, data []byte, mode fs.FileMode, sync bool) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode))
	if err == nil && sync {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func removeIfThere(root *os.Root, name string) error {
	if err := root.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

const tempPrefix = ".durable-"

// IsTemp reports whether name, without its directory, is that of a temporary
// file of this package. Outside of a running write it is left over from a
// process that was killed, and may be removed.
func IsTemp(name string) bool { return strings.HasPrefix(name, tempPrefix) }

// RemoveIn removes the file name below root so that it stays removed after a
// loss of power. It returns nil when there is no such file.
func RemoveIn(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return SyncDirIn(root, path.Dir(name))
}

// SyncDir makes what was created, renamed or removed in the directory dir
// survive a loss of power.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// SyncDirIn is [SyncDir] for a directory that is named relative to root.
func SyncDirIn(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
