package apitest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
)

func (b *Backend) locate(id session.ID, p string) (*state, string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.liveLocked(id)
	if err != nil {
		return nil, "", err
	}
	return st, b.hostPath(st, p), nil
}

func fileError(p string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return kind.Errorf(kind.NotFound, "%s does not exist", p).WithField("path")
	case errors.Is(err, fs.ErrPermission):
		return kind.Errorf(kind.Denied, "%s: permission denied", p).WithField("path")
	case err != nil:
		return kind.Errorf(kind.Invalid, "%s: %w", p, err).WithField("path")
	}
	return nil
}

func info(p string, fi fs.FileInfo) lifecycle.FileInfo {
	out := lifecycle.FileInfo{Path: p, Name: path.Base(p), Size: fi.Size(), Mode: uint32(fi.Mode().Perm()), ModTime: fi.ModTime().UTC(),
		Owner: "user", Group: "user", Type: lifecycle.OtherFile}
	switch {
	case fi.Mode().IsRegular():
		out.Type = lifecycle.RegularFile
	case fi.IsDir():
		out.Type = lifecycle.Directory
	case fi.Mode()&fs.ModeSymlink != 0:
		out.Type = lifecycle.Symlink
	}
	return out
}

// ReadFile implements api.Files.
func (b *Backend) ReadFile(_ context.Context, id session.ID, _ session.Principal, p, _ string) (io.ReadCloser, lifecycle.FileInfo, error) {
	_, host, err := b.locate(id, p)
	if err != nil {
		return nil, lifecycle.FileInfo{}, err
	}
	f, err := os.Open(host)
	if err != nil {
		return nil, lifecycle.FileInfo{}, fileError(p, err)
	}
	fi, err := f.Stat()
	if err == nil && fi.IsDir() {
		err = errors.New("is a directory")
	}
	if err != nil {
		f.Close()
		return nil, lifecycle.FileInfo{}, fileError(p, err)
	}
	if strings.HasSuffix(p, ".cut") {
		return &cutReader{f}, info(p, fi), nil
	}
	return f, info(p, fi), nil
}

// cutReader fails where the file ends.
type cutReader struct{ *os.File }

func (r *cutReader) Read(b []byte) (int, error) {
	n, err := r.File.Read(b)
	if errors.Is(err, io.EOF) {
		err = errors.New("the session is gone")
	}
	return n, err
}

// WriteFile implements api.Files.
func (b *Backend) WriteFile(_ context.Context, id session.ID, actor session.Principal, p, _ string, r io.Reader, _ int64) (lifecycle.FileInfo, error) {
	_, host, err := b.locate(id, p)
	if err != nil {
		return lifecycle.FileInfo{}, err
	}
	if err := os.MkdirAll(filepath.Dir(host), 0o755); err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	f, err := os.OpenFile(host, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(f, sum), r); err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	fi, err := f.Stat()
	if err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	out := info(p, fi)
	out.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return out, b.record(id, audit.Entry{Action: audit.FileWritten, Outcome: audit.OK, Actor: actor,
		Payload: map[string]any{"path": p, "size": out.Size, "sha256": out.SHA256}})
}

// Stat implements api.Files.
func (b *Backend) Stat(_ context.Context, id session.ID, p, _ string) (lifecycle.FileInfo, error) {
	_, host, err := b.locate(id, p)
	if err != nil {
		return lifecycle.FileInfo{}, err
	}
	fi, err := os.Lstat(host)
	if err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	return info(p, fi), nil
}

// ListDir implements api.Files.
func (b *Backend) ListDir(_ context.Context, id session.ID, p, _ string, depth int) ([]lifecycle.FileInfo, error) {
	_, host, err := b.locate(id, p)
	if err != nil {
		return nil, err
	}
	var out []lifecycle.FileInfo
	err = filepath.WalkDir(host, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == host {
			return err
		}
		rel, err := filepath.Rel(host, at)
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		out = append(out, info(path.Join(p, rel), fi))
		if d.IsDir() && strings.Count(rel, "/")+1 >= depth {
			return filepath.SkipDir
		}
		return nil
	})
	return out, fileError(p, err)
}

// MakeDir implements api.Files.
func (b *Backend) MakeDir(ctx context.Context, id session.ID, _ session.Principal, p, user string) (lifecycle.FileInfo, error) {
	_, host, err := b.locate(id, p)
	if err != nil {
		return lifecycle.FileInfo{}, err
	}
	if err := os.MkdirAll(host, 0o755); err != nil {
		return lifecycle.FileInfo{}, fileError(p, err)
	}
	return b.Stat(ctx, id, p, user)
}

// Move implements api.Files.
func (b *Backend) Move(ctx context.Context, id session.ID, _ session.Principal, from, to, user string) (lifecycle.FileInfo, error) {
	st, host, err := b.locate(id, from)
	if err != nil {
		return lifecycle.FileInfo{}, err
	}
	if err := os.Rename(host, b.hostPath(st, to)); err != nil {
		return lifecycle.FileInfo{}, fileError(from, err)
	}
	return b.Stat(ctx, id, to, user)
}

// Remove implements api.Files.
func (b *Backend) Remove(_ context.Context, id session.ID, _ session.Principal, p, _ string) error {
	_, host, err := b.locate(id, p)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(host); err != nil {
		return fileError(p, err)
	}
	return fileError(p, os.RemoveAll(host))
}
