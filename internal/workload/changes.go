package workload

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/driver"
	"bivy/internal/guest/wire"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// ListChanges lists what a sandbox that was closed and frozen has left changed
// in its file system, as events, and names what the list does not cover. It is
// bounded in files, names, bytes and time, and says what it left out: a guest
// may have made a million files or one that never ends.
func (s *Service) ListChanges(ctx context.Context, id session.SandboxID) (journal.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, s.b.List)
	defer cancel()
	pr, pw := io.Pipe()
	var report driver.ChangeReport
	exported := make(chan struct{})
	// The export may hang in the sandbox past its context. It is then left
	// behind: it writes to a closed pipe, and the kill that follows ends it.
	go func() {
		r, err := s.o.Node.Changes(ctx, id, pw)
		report = r
		close(exported)
		pw.CloseWithError(err)
	}()
	defer context.AfterFunc(ctx, func() { pr.CloseWithError(ctx.Err()) })()

	l := lister{b: s.b}
	err := l.read(tar.NewReader(pr))
	if err == nil {
		// The tar is whole, and the export may still have failed.
		_, err = io.Copy(io.Discard, pr)
	}
	pr.CloseWithError(io.ErrClosedPipe)
	out := journal.Result{Facts: map[string]any{"files": l.listed}}
	why := l.why
	if err != nil {
		if l.listed == 0 && kind.Is(err, kind.NotFound) {
			out.Residual = "what the sandbox changed is not known: it had stopped before it could be asked"
			return out, nil
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("not finished within %s", s.b.List)
		}
		why = clip.Counted(err.Error(), journal.MaxErrorText)
	}
	out.Entries = l.entries
	var residuals []string
	if why != "" {
		out.Entries = append(out.Entries, audit.Entry{
			Action: audit.FileChangesCut, Outcome: audit.Failed, Object: "file",
			Payload: cutPayload{Listed: l.listed, Unlisted: l.unlisted, Unhashed: l.unhashed, Why: why},
		})
		residuals = append(residuals, "not all changed files are listed with their digest; "+string(audit.FileChangesCut)+" in the record says which and why")
	}
	if err == nil {
		<-exported // it has closed the pipe
		entries, residual := outside(report)
		out.Entries = append(out.Entries, entries...)
		if residual != "" {
			residuals = append(residuals, residual)
		}
	}
	out.Residual = strings.Join(residuals, "; ")
	return out, nil
}

// maxOutside bounds the places outside the writable layer that are recorded
// one by one.
const maxOutside = 100

// placesOfStart are the places outside the writable layer that every sandbox
// has from its start. Only these are named in a seal: every other name is the
// guest's, and a seal cannot be erased.
var placesOfStart = []string{"/dev", "/dev/shm", "/run"}

// outside returns the events and the residual of places that hold files of the
// guest and that the list of changes does not cover.
func outside(report driver.ChangeReport) (entries []audit.Entry, residual string) {
	var places []string
	others := false
	for n, o := range report.Outside {
		if !o.Guest && slices.Contains(placesOfStart, o.Path) {
			places = append(places, o.Path)
		} else {
			others = true
		}
		if n < maxOutside {
			entries = append(entries, audit.Entry{
				Action: audit.FilesOutside, Outcome: audit.Failed, Object: "file",
				Payload: outsidePayload{Path: clip.Counted(wire.Escape(o.Path), maxPathText), Files: o.Files, Bytes: o.Bytes, Guest: o.Guest},
			})
		}
	}
	if others {
		places = append(places, "mounts and deleted files of the session")
	}
	if len(places) == 0 {
		return nil, ""
	}
	slices.Sort(places)
	return entries, "files outside the writable layer are not listed: " + strings.Join(places, ", ") + "; " + string(audit.FilesOutside) + " in the record counts them"
}

// lister turns a tar of changes into events.
type lister struct {
	b        Bounds
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
		if l.listed >= l.b.ListFiles {
			l.unlisted++
			l.why = fmt.Sprintf("more than %d files", l.b.ListFiles)
			continue
		}
		p := describe(h)
		if p.Path == "/" && p.Kind == "dir" {
			continue // the root is in every layer
		}
		if l.named += len(p.Path) + len(p.Target); l.named > l.b.ListNames {
			l.unlisted++
			l.why = fmt.Sprintf("more than %d bytes of names", l.b.ListNames)
			continue
		}
		if h.Typeflag == tar.TypeReg && p.Kind == "file" {
			if err := l.hash(tr, h.Size, &p); err != nil {
				return err
			}
		}
		l.listed++
		l.entries = append(l.entries, audit.Entry{Action: audit.FileChanged, Outcome: audit.OK, Object: "file", Payload: p})
	}
}

func (l *lister) hash(r io.Reader, size int64, p *filePayload) error {
	p.Size = &size
	if size > l.b.ListBytes-l.hashed {
		l.unhashed++
		l.why = fmt.Sprintf("more than %d bytes", l.b.ListBytes)
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
		p.Target = clip.Counted(wire.Escape(h.Linkname), maxPathText)
	}
	p.Path = clip.Counted(wire.Escape(name), maxPathText)
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
	case driver.SocketType:
		return "socket"
	}
	return "other"
}
