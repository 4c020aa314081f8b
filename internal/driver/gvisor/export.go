package gvisor

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"bivy/internal/session"
)

// ExportChanges implements driver.Exporter. gVisor writes its upper layer as
// a tar with overlayfs conventions: a deletion is a character device 0:0 and
// an opaque directory has an extended attribute. Both become OCI's.
func (d *Driver) ExportChanges(ctx context.Context, id session.SandboxID, w io.Writer) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	return s.do(ctx, func() error { return s.export(ctx, w) })
}

func (s *sandbox) export(ctx context.Context, w io.Writer) error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	// An ended context must not leave the copy waiting for the guest kernel.
	stop := context.AfterFunc(ctx, func() { read.Close() })
	defer stop()
	produced := make(chan error, 1)
	go func() { // ends when the tar is written or nobody reads it any more
		err := s.runsc.TarRootfsUpperLayer(string(s.id), write)
		produced <- errors.Join(err, write.Close())
	}()
	err = toOCI(w, read)
	read.Close()
	if producer := <-produced; err == nil && producer != nil {
		err = producer
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("changes of %s: %w", s.id, err)
	}
	return nil
}

// Names that OCI layers give to deletions (image-spec, layer.md).
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	overlayOpaque  = "overlay.opaque"
)

// mountPoints are of the runtime's making, not the guest's.
var mountPoints = []string{"proc", "sys", "dev"}

// toOCI converts a tar of an overlay's upper layer. The input is the guest's.
func toOCI(w io.Writer, r io.Reader) error {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out.Close()
		}
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		top, _, _ := strings.Cut(name, "/")
		if name == "" || slices.Contains(mountPoints, top) {
			continue
		}
		opaque := false
		for key := range h.PAXRecords {
			opaque = opaque || strings.HasSuffix(key, overlayOpaque)
		}
		switch {
		case h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0:
			dir, base := path.Split(name)
			h = &tar.Header{Typeflag: tar.TypeReg, Name: dir + whiteoutPrefix + base, ModTime: h.ModTime, Mode: 0o600}
		case h.Typeflag == tar.TypeDir:
			h.Name = name + "/"
		default:
			h.Name = name
		}
		h.Format = tar.FormatPAX
		if err := out.WriteHeader(h); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		if h.Size > 0 {
			if _, err := io.Copy(out, in); err != nil {
				return err
			}
		}
		if opaque && h.Typeflag == tar.TypeDir {
			if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: h.Name + opaqueName, Mode: 0o600, ModTime: h.ModTime}); err != nil {
				return err
			}
		}
	}
}
