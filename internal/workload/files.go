package workload

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"sync"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/clip"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// File operations that read or change content are recorded like commands:
// the intent before, the outcome after. Stat and ListDir only look.

// fileOp is one recorded file operation in progress.
type fileOp struct {
	entered
	pending *journal.Pending
	client  *guestclient.Client
	about   filePayload
	ctx     context.Context
	cancel  context.CancelFunc
}

// beginFile admits a file operation and records its intent.
func (s *Service) beginFile(ctx context.Context, who access.Caller, id session.ID, permission access.Action, action audit.Action, about filePayload, paths ...string) (*fileOp, error) {
	for _, p := range paths {
		if err := checkPath(p); err != nil {
			return nil, err
		}
	}
	e, err := s.enter(ctx, who, permission, id)
	if err != nil {
		return nil, err
	}
	op := &fileOp{entered: e, about: about}
	op.ctx, op.cancel = e.within(ctx)
	if op.client, err = e.guest(op.ctx); err == nil {
		s.failPoint("file." + about.Op + ".intent")
		op.pending, err = e.log.Begin(op.ctx, audit.Entry{
			Action: action, Ref: string(session.NewID()), Object: "file", Actor: who.Principal, Decision: e.decision, Payload: about,
		}, audit.Entry{
			Action: audit.FileFailed, Object: "file", Payload: failedFile(about, errors.New("the session ended before its outcome was known")),
		})
	}
	if err != nil {
		op.cancel()
		e.leave()
		return nil, e.cutError(err)
	}
	s.failPoint("file." + about.Op + ".do")
	return op, nil
}

func failedFile(about filePayload, err error) filePayload {
	about.Error = clip.Counted(err.Error(), journal.MaxErrorText)
	return about
}

// end records the outcome, with facts when err is nil, and counts the
// operation out. It returns err, or what kept the outcome from being recorded.
func (op *fileOp) end(action audit.Action, facts filePayload, err error) error {
	defer op.leave()
	defer op.cancel()
	op.s.failPoint("file." + op.about.Op + ".done")
	if err != nil {
		err = refusedFile(op.cutError(err))
		recorded := op.log.Conclude(op.pending, audit.Entry{Action: audit.FileFailed, Outcome: audit.Failed, Object: "file", Payload: failedFile(op.about, err)})
		if recorded != nil {
			op.s.log.Error("recording a file operation that failed", "session", op.session, "error", recorded)
		}
		return err
	}
	return op.log.Conclude(op.pending, audit.Entry{Action: action, Outcome: audit.OK, Object: "file", Payload: facts})
}

func checkPath(p string) error {
	switch {
	case p == "":
		return kind.Errorf(kind.Invalid, "missing: the path of a file").WithField("path")
	case strings.ContainsRune(p, 0):
		return kind.Errorf(kind.Invalid, "%.64q contains a NUL byte", p).WithField("path")
	case len(p) > wire.MaxPath:
		return kind.Errorf(kind.Invalid, "%d bytes, at most %d", len(p), wire.MaxPath).WithField("path")
	}
	return nil
}

// refusedFile says which part of a file operation the agent did not accept.
func refusedFile(err error) error {
	switch wire.ReasonOf(err) {
	case wire.ReasonUser:
		return invalidField("user", err)
	case wire.ReasonPath:
		if kind.Is(err, kind.Invalid) {
			return invalidField("path", err)
		}
	}
	return err
}

// digestReader digests what passes through it. The transport may read a body while
// its answer is already being handled, hence the lock.
type digestReader struct {
	r io.Reader

	mu  sync.Mutex
	sum hash.Hash
	n   int64
}

func newDigestReader(r io.Reader) *digestReader { return &digestReader{r: r, sum: sha256.New()} }

func (d *digestReader) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sum.Write(p[:n])
	d.n += int64(n)
	return n, err
}

func (d *digestReader) result() (int64, string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n, hex.EncodeToString(d.sum.Sum(nil))
}

// Aborter is a reader whose Read may wait for a caller that sends nothing.
type Aborter interface {
	// Abort makes Read fail at once; without it a write would outlive its
	// session. It may be called from any goroutine, and again.
	Abort()
}

// WriteFile writes all of r to path, making parents, and returns what was
// written. size may be -1 when it is not known. r may be an Aborter.
func (s *Service) WriteFile(ctx context.Context, who access.Caller, id session.ID, path, user string, r io.Reader, size int64) (FileInfo, error) {
	about := filePayload{Op: "write", Path: wire.Escape(path), User: user}
	op, err := s.beginFile(ctx, who, id, access.FileWrite, audit.FileWriteIntent, about, path)
	if err != nil {
		return FileInfo{}, err
	}
	over := func() bool { return true }
	if a, ok := r.(Aborter); ok {
		over = context.AfterFunc(op.ctx, a.Abort)
	}
	body := newDigestReader(r)
	written, err := op.client.WriteFile(op.ctx, user, path, body, size)
	over() // before the operation's context ends by its own end
	n, sum := body.result()
	if err == nil && (written.Size != n || written.SHA256 != sum) {
		err = kind.Errorf(kind.Internal, "write %q: the session holds %d bytes of digest %.80q, sent were %d of %s", path, written.Size, written.SHA256, n, sum)
	}
	err = op.end(audit.FileWritten, filePayload{Path: wire.Escape(written.Path), User: user, Size: &n, SHA256: sum}, err)
	return FileInfo{Path: written.Path, Name: written.Name, Type: RegularFile, Size: n, SHA256: sum}, err
}

// ReadFile opens a file for reading. The reader must be closed; what was
// given through it is recorded when the file ends or when it is closed. Size
// in the returned FileInfo is -1 when it is not known beforehand.
func (s *Service) ReadFile(ctx context.Context, who access.Caller, id session.ID, path, user string) (io.ReadCloser, FileInfo, error) {
	about := filePayload{Op: "read", Path: wire.Escape(path), User: user}
	op, err := s.beginFile(ctx, who, id, access.FileRead, audit.FileIntent, about, path)
	if err != nil {
		return nil, FileInfo{}, err
	}
	f, err := op.client.ReadFile(op.ctx, user, path)
	if err != nil {
		return nil, FileInfo{}, op.end(audit.FileRead, filePayload{}, err)
	}
	info := FileInfo{Path: path, Name: path[strings.LastIndexByte(path, '/')+1:], Type: RegularFile, Size: f.Size, ModTime: f.Modified}
	reader := &fileReader{op: op, body: f, sum: newDigestReader(f)}
	// A reader that is not read must not hold up the end of the session.
	context.AfterFunc(op.ctx, func() { reader.abandon(context.Cause(op.ctx)) })
	return reader, info, nil
}

// fileReader gives a file and records what it gave.
type fileReader struct {
	op   *fileOp
	body *guestclient.File
	sum  *digestReader

	mu   sync.Mutex
	over bool
	err  error
}

// Read gives io.EOF only once the record has the reading.
func (f *fileReader) Read(p []byte) (int, error) {
	n, err := f.sum.Read(p)
	if err == nil {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		if end := f.end(nil, false); end != nil {
			return n, end
		}
		return n, io.EOF
	}
	return n, f.end(err, false)
}

// Close lets go of the file. Closed before its end, the record says that
// only part was read.
func (f *fileReader) Close() error {
	err := f.end(nil, true)
	return errors.Join(err, f.body.Close())
}

// abandon records what was given when the session or the caller is gone. It
// comes after every other end, too, and then finds nothing to do.
func (f *fileReader) abandon(cause error) {
	f.mu.Lock()
	over := f.over
	f.mu.Unlock()
	if over {
		return
	}
	if err := f.end(cause, false); err != nil && !errors.Is(err, cause) {
		f.op.s.log.Error("recording a file that was not read to its end", "session", f.op.session, "error", err)
	}
}

func (f *fileReader) end(cause error, partial bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		if partial {
			return nil // what there was to say was said by Read
		}
		return f.err
	}
	f.over = true
	n, sum := f.sum.result()
	f.err = f.op.end(audit.FileRead, filePayload{Path: f.op.about.Path, User: f.op.about.User, Size: &n, SHA256: sum, Partial: partial}, cause)
	return f.err
}

// MakeDir makes a directory and its parents.
func (s *Service) MakeDir(ctx context.Context, who access.Caller, id session.ID, path, user string) (FileInfo, error) {
	op, err := s.beginFile(ctx, who, id, access.FileWrite, audit.FileIntent, filePayload{Op: "mkdir", Path: wire.Escape(path), User: user}, path)
	if err != nil {
		return FileInfo{}, err
	}
	e, err := op.client.MakeDir(op.ctx, user, path)
	return fileInfo(e), op.end(audit.FileDone, op.about, err)
}

// Move renames a file or directory, making the destination's parents.
func (s *Service) Move(ctx context.Context, who access.Caller, id session.ID, from, to, user string) (FileInfo, error) {
	about := filePayload{Op: "move", Path: wire.Escape(from), To: wire.Escape(to), User: user}
	op, err := s.beginFile(ctx, who, id, access.FileWrite, audit.FileIntent, about, from, to)
	if err != nil {
		return FileInfo{}, err
	}
	e, err := op.client.Move(op.ctx, user, from, to)
	return fileInfo(e), op.end(audit.FileDone, op.about, err)
}

// Remove removes a path and everything below it; one that is missing is no
// error.
func (s *Service) Remove(ctx context.Context, who access.Caller, id session.ID, path, user string) error {
	op, err := s.beginFile(ctx, who, id, access.FileWrite, audit.FileIntent, filePayload{Op: "remove", Path: wire.Escape(path), User: user}, path)
	if err != nil {
		return err
	}
	return op.end(audit.FileDone, op.about, op.client.Remove(op.ctx, user, path))
}

// Stat describes a path.
func (s *Service) Stat(ctx context.Context, who access.Caller, id session.ID, path, user string) (FileInfo, error) {
	var info FileInfo
	err := s.look(ctx, who, id, path, func(ctx context.Context, g *guestclient.Client) error {
		e, err := g.Stat(ctx, user, path)
		info = fileInfo(e)
		return err
	})
	return info, err
}

// ListDir lists a directory to the given depth (at least 1).
func (s *Service) ListDir(ctx context.Context, who access.Caller, id session.ID, path, user string, depth int) ([]FileInfo, error) {
	var infos []FileInfo
	err := s.look(ctx, who, id, path, func(ctx context.Context, g *guestclient.Client) error {
		entries, err := g.ListDir(ctx, user, path, depth)
		for _, e := range entries {
			infos = append(infos, fileInfo(e))
		}
		return err
	})
	return infos, err
}

func (s *Service) look(ctx context.Context, who access.Caller, id session.ID, path string, do func(context.Context, *guestclient.Client) error) error {
	if err := checkPath(path); err != nil {
		return err
	}
	e, err := s.enter(ctx, who, access.FileRead, id)
	if err != nil {
		return err
	}
	defer e.leave()
	ctx, cancel := e.within(ctx)
	defer cancel()
	g, err := e.guest(ctx)
	if err != nil {
		return err
	}
	if err := do(ctx, g); err != nil {
		return fmt.Errorf("session %s: %w", id, refusedFile(e.cutError(err)))
	}
	return nil
}

func fileInfo(e guestclient.Entry) FileInfo {
	info := FileInfo{
		Path: e.Path, Name: e.Name, Type: OtherFile, Size: e.Size, Mode: uint32(e.Mode.Perm()),
		Owner: e.Owner, Group: e.Group, ModTime: e.Modified, SymlinkTarget: e.Target,
	}
	switch {
	case strings.HasPrefix(e.Permissions, "L"):
		info.Type = Symlink
	case e.Type == guestclient.Directory:
		info.Type = Directory
	case e.Type == guestclient.Regular:
		info.Type = RegularFile
	}
	return info
}
