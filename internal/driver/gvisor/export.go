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
	"time"

	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// ExportChanges implements driver.Exporter. gVisor writes its upper layer as
// a tar with overlayfs conventions: a deletion is a character device 0:0 and
// an opaque directory has an extended attribute. Both become OCI's.
func (d *Driver) ExportChanges(ctx context.Context, id session.SandboxID, w io.Writer) (driver.ChangeReport, error) {
	s, err := d.find(id)
	if err != nil {
		return driver.ChangeReport{}, err
	}
	return driver.ChangeReport{}, s.do(ctx, func() error { return s.export(ctx, w) })
}

func (s *sandbox) export(ctx context.Context, w io.Writer) error {
	before, err := s.group.Stats()
	if err != nil {
		return err
	}
	kills := before.OOMKills
	// gVisor holds each file whole while it writes it, and what the guest has
	// on its disk is memory already. Only while the guest is frozen: it could
	// use the room itself.
	if s.paused && s.req.Limits.MemoryBytes > 0 {
		if err := s.group.LimitMemory(s.req.Limits.MemoryBytes + s.req.Limits.DiskBytes + exportSlack); err != nil {
			return fmt.Errorf("room to export %s: %w", s.id, err)
		}
		defer func() {
			// Fails while more than the limit is still held; a guest that is to
			// run again gets its limit back with its resume.
			_ = s.group.LimitMemory(s.req.Limits.MemoryBytes)
		}()
	}
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
		err := s.runsc.TarRootfsUpperLayer(s.slot, write)
		produced <- errors.Join(err, write.Close())
	}()
	err = toOCI(w, read)
	read.Close()
	if producer := <-produced; producer != nil && (err == nil || errors.Is(err, io.ErrUnexpectedEOF)) {
		// A tar cut short is the symptom; why its producer stopped is the cause.
		err = producer
		if st, statErr := s.group.Stats(); statErr == nil && st.OOMKills > kills {
			err = kind.Errorf(kind.Exhausted, "the guest kernel ran out of memory while it read a file: %w", producer)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("changes of %s: %w", s.id, err)
	}
	return nil
}

// exportSlack is for what reading and writing needs beside the files.
const exportSlack = 64 << 20

// whiteout is an entry that stands for what is gone.
func whiteout(name string, at time.Time) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: at, Mode: 0o600, Format: tar.FormatPAX,
		PAXRecords: map[string]string{driver.WhiteoutRecord: "1"}}
}

// Names that OCI layers give to deletions (image-spec, layer.md).
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	// overlayOpaque is gVisor's own mark of an opaque directory; one that a
	// guest sets is in another namespace of attributes.
	overlayOpaque = "SCHILY.xattr.trusted.overlay.opaque"
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
		_, opaque := h.PAXRecords[overlayOpaque]
		delete(h.PAXRecords, driver.WhiteoutRecord)
		switch {
		case h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0:
			dir, base := path.Split(name)
			h = whiteout(dir+whiteoutPrefix+base, h.ModTime)
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
			if err := out.WriteHeader(whiteout(h.Name+opaqueName, h.ModTime)); err != nil {
				return err
			}
		}
	}
}
