package lifecycle

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"bivy/internal/audit"
	"bivy/internal/driver"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
)

// digest lists what the session left changed in its file system. It is
// bounded in files, names, bytes and time, and says what it left out: a guest
// may have made a million files or one that never ends.
func (m *Manager) digest(ctx context.Context, a *active) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, m.b.Digest)
	defer cancel()
	pr, pw := io.Pipe()
	// The export may hang in the sandbox past its context. It is then left
	// behind: it writes to a closed pipe, and the kill that follows ends it.
	go func() {
		pw.CloseWithError(m.o.Node.Changes(ctx, a.sandbox, pw))
	}()
	defer context.AfterFunc(ctx, func() { pr.CloseWithError(ctx.Err()) })()

	l := lister{m: m}
	err := l.read(tar.NewReader(pr))
	if err == nil {
		// The tar is whole, and the export may still have failed.
		_, err = io.Copy(io.Discard, pr)
	}
	pr.CloseWithError(io.ErrClosedPipe)
	out := outcome{facts: map[string]any{"files": l.listed}}
	why := l.why
	if err != nil {
		if l.listed == 0 && kind.Is(err, kind.NotFound) {
			out.residual = "what the sandbox changed is not known: it was gone before it could be asked"
			return out, nil
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("not finished within %s", m.b.Digest)
		}
		why = clip(err.Error(), maxErrorText)
	}
	out.entries = l.entries
	if why != "" {
		out.entries = append(out.entries, audit.Entry{
			Action: audit.FileChangesCut, Outcome: audit.Failed,
			Payload: map[string]any{"listed": l.listed, "unlisted": l.unlisted, "unhashed": l.unhashed, "why": why},
		})
		out.residual = "not all changed files are listed with their digest; " + string(audit.FileChangesCut) + " in the record says which and why"
	}
	return out, nil
}

// lister turns a tar of changes into events.
type lister struct {
	m        *Manager
	entries  []audit.Entry
	listed   int
	named    int // bytes of names seen
	unlisted int
	unhashed int
	hashed   int64
	why      string // something was left out
}

func (l *lister) read(tr *tar.Reader) error {
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if l.listed >= l.m.b.DigestFiles {
			l.unlisted++
			l.why = fmt.Sprintf("more than %d files", l.m.b.DigestFiles)
			continue
		}
		p := describe(h)
		if p.Path == "/" && p.Kind == "dir" {
			continue // the root is in every layer
		}
		if l.named += len(p.Path) + len(p.Target); l.named > l.m.b.DigestNames {
			l.unlisted++
			l.why = fmt.Sprintf("more than %d bytes of names", l.m.b.DigestNames)
			continue
		}
		if h.Typeflag == tar.TypeReg && p.Kind == "file" {
			if err := l.hash(tr, h.Size, &p); err != nil {
				return err
			}
		}
		l.listed++
		l.entries = append(l.entries, audit.Entry{Action: audit.FileChanged, Outcome: audit.OK, Payload: p})
	}
}

func (l *lister) hash(r io.Reader, size int64, p *filePayload) error {
	p.Size = &size
	if size > l.m.b.DigestBytes-l.hashed {
		l.unhashed++
		l.why = fmt.Sprintf("more than %d bytes", l.m.b.DigestBytes)
		return nil
	}
	sum := sha256.New()
	n, err := io.Copy(sum, r)
	l.hashed += n
	if err != nil {
		return err
	}
	p.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// Whiteouts, as OCI layers write them.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// describe says what a tar header is about. Names come from the guest.
func describe(h *tar.Header) filePayload {
	name := path.Join("/", h.Name)
	p := filePayload{Mode: fmt.Sprintf("%04o", h.Mode&0o7777)}
	dir, base := path.Split(name)
	_, marked := h.PAXRecords[driver.WhiteoutRecord]
	switch {
	case marked && base == opaque:
		p.Kind, p.Mode, name = "replaced_dir", "", path.Clean(dir)
	case marked && strings.HasPrefix(base, whiteout):
		p.Kind, p.Mode, name = "deleted", "", path.Join(dir, base[len(whiteout):])
	default:
		p.Kind = kindOf(h.Typeflag)
	}
	if p.Kind == "symlink" || p.Kind == "hardlink" {
		p.Target = clip(wire.Escape(h.Linkname), maxPathText)
	}
	p.Path = clip(wire.Escape(name), maxPathText)
	return p
}

// maxPathText bounds a path in the record: twice the kernel's own bound, for escapes.
const maxPathText = 8 << 10

func kindOf(flag byte) string {
	switch flag {
	case tar.TypeReg:
		return "file"
	case tar.TypeDir:
		return "dir"
	case tar.TypeSymlink:
		return "symlink"
	case tar.TypeLink:
		return "hardlink"
	case tar.TypeChar, tar.TypeBlock:
		return "device"
	case tar.TypeFifo:
		return "fifo"
	}
	return "other"
}
