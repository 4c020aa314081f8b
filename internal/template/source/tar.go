package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// Tar is a root file system in a tar file, plain or compressed with gzip, zstd or
// bzip2.
type Tar struct {
	path string
	file *os.File
	size int64
}

// NewTar returns a source that reads the tar file at path of this host.
func NewTar(path string) *Tar { return &Tar{path: path} }

// String implements Source.
func (s *Tar) String() string { return "tar " + s.path }

// openFile opens a regular file of this host. It fails for a FIFO or device and
// does not block on it.
func openFile(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, 0, kind.Errorf(kind.NotFound, "%s does not exist", path)
		}
		return nil, 0, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = kind.Errorf(kind.Invalid, "%s is not a regular file", path)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, fi.Size(), nil
}

// Key implements Source: it is the hash of the file.
func (s *Tar) Key(ctx context.Context) (string, error) {
	f, size, err := openFile(s.path)
	if err != nil {
		return "", err
	}
	s.file, s.size = f, size
	return hashFile(ctx, f)
}

func hashFile(ctx context.Context, f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.CopyBuffer(h, &progressReader{ctx: ctx, r: f}, make([]byte, 1<<20)); err != nil {
		return "", fmt.Errorf("%s: %w", f.Name(), err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", fmt.Errorf("%s: %w", f.Name(), err)
	}
	return "tar sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// Load implements Source.
func (s *Tar) Load(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) (Defaults, error) {
	if err := t.BeginLayer(""); err != nil {
		return Defaults{}, err
	}
	if s.size == 0 {
		return Defaults{}, kind.Errorf(kind.Invalid, "%s is empty, not a tar", s.path)
	}
	u, err := decompress(&progressReader{ctx: ctx, r: s.file, progress: progress, total: s.size})
	if err != nil {
		return Defaults{}, fmt.Errorf("%s: %w", s.path, err)
	}
	err = mergeTar(ctx, t, spool, newLimitedReader(u, "StreamBytes", t.Limits().StreamBytes, ""), false)
	if err := errors.Join(err, u.Close()); err != nil {
		return Defaults{}, fmt.Errorf("%s: %w", s.path, err)
	}
	return Defaults{}, nil
}

// Close implements Source.
func (s *Tar) Close() error {
	if s.file == nil {
		return nil
	}
	f := s.file
	s.file = nil
	return f.Close()
}
