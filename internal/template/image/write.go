// Package image writes a merged file tree as one EROFS image that gVisor can
// mount without a gofer: uncompressed, blocks of 4 KiB, no incompatible
// feature, and every file's data in blocks of its own, so that programs can be
// mapped from it.
package image

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/erofs/go-erofs"

	"bivy/internal/template/tree"
)

// BlockSize is the block size of every image: gVisor wants whole pages.
const BlockSize = 4096

// Image is a written image.
type Image struct {
	Name  string // its file name: Hex and ".erofs"
	Hex   string // SHA-256 of the file
	Bytes int64
}

// Write writes t into dir as "<sha256>.erofs". The same tree gives the same
// bytes, which do not contain the time of writing. The file appears complete and
// synced or not at all; a killed process may leave a file whose name begins with
// ".image-". progress is called with the bytes of file content written.
//
// Extended attributes, which gVisor does not support on EROFS, are left out and
// noted in t.Notes.
func Write(ctx context.Context, dir *os.Root, t *tree.Tree, progress func(done, total int64)) (_ Image, err error) {
	tmp := ".image-" + rand.Text()
	f, err := dir.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			err = errors.Join(err, remove(dir, tmp))
		}
	}()
	plan := newSourceFS(ctx, t, progress)
	w := erofs.Create(f, erofs.WithBlockSize(BlockSize), erofs.WithBuildTime(0, 0))
	if err := w.CopyFrom(plan); err != nil {
		return Image{}, fmt.Errorf("image: %w", plan.cause(err))
	}
	if err := w.Close(); err != nil {
		return Image{}, fmt.Errorf("image: %w", plan.cause(err))
	}
	if err := patch(f, plan); err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	if err := f.Sync(); err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	img, err := measure(f)
	if err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	// Read-only, so that a mistake does not change an image that is shared.
	if err := f.Chmod(0o444); err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	if err := dir.Rename(tmp, img.Name); err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	d, err := dir.Open(".")
	if err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return Image{}, fmt.Errorf("image: %w", err)
	}
	return img, nil
}

func measure(f *os.File) (Image, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return Image{}, err
	}
	h := sha256.New()
	n, err := io.CopyBuffer(h, onlyReader{f}, make([]byte, 1<<20))
	if err != nil {
		return Image{}, err
	}
	sum := hex.EncodeToString(h.Sum(nil))
	return Image{Name: sum + ".erofs", Hex: sum, Bytes: n}, nil
}

type onlyReader struct{ io.Reader }

func remove(dir *os.Root, name string) error {
	if err := dir.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
