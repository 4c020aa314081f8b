package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func (a *app) cpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files and directories into a session or out of it",
		Long: `Copy files and directories into a session or out of it. One of SRC and DST is
SESSION:PATH, the other one a path of this machine. If DST is a directory, SRC is
copied into it.

Only regular files and directories are copied; other files are skipped with a
message on stderr. Nothing is written outside DST, even if the session contains
unusual names.`,
		Example: "  bivy cp data.csv h2k…:/home/user/data.csv\n  bivy cp h2k…:/home/user/out ./results",
		Args:    want(false, "SRC", "DST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			fromID, from, fromSession := splitRemote(args[0])
			toID, to, toSession := splitRemote(args[1])
			if fromSession == toSession {
				a.parsed = false
				return kind.Errorf(kind.Invalid, "exactly one of SRC and DST must be SESSION:PATH")
			}
			c, err := a.connect(cmd.Context(), onServer)
			if err != nil {
				return err
			}
			if toSession {
				return a.upload(cmd.Context(), c.Session(toID), from, to)
			}
			return a.download(cmd.Context(), c.Session(fromID), from, to)
		},
	}
}

// splitRemote splits SESSION:PATH. An argument that does not begin with the id of
// a session is a path of this machine, even with a colon.
func splitRemote(s string) (id, p string, ok bool) {
	id, p, found := strings.Cut(s, ":")
	if !found {
		return "", s, false
	}
	if _, err := session.ParseID(id); err != nil {
		return "", s, false
	}
	if p == "" {
		p = "."
	}
	return id, p, true
}

// transfer is one run of cp.
type transfer struct {
	a       *app
	ctx     context.Context // of the call that made it
	s       *client.Session
	root    *os.Root // of the local side
	m       *meter
	total   int64 // bytes to copy; 0: not known
	skipped int   // files that were not copied
	// executable are the executable files that were copied into the session.
	// WriteFile sets no mode, so this is done afterwards.
	executable []string
}

// skip reports a file that is not copied.
func (t *transfer) skip(name, why string) {
	t.skipped++
	t.a.note("skipped %q: %s", name, why)
}

// counted is a reader that moves the progress bar.
type counted struct {
	io.Reader
	t    *transfer
	what string
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.t.m.add(c.what, int64(n), c.t.total)
	return n, err
}

func (a *app) upload(ctx context.Context, s *client.Session, src, dst string) error {
	abs, err := filepath.Abs(src)
	if err != nil {
		return err
	}
	fi, err := os.Stat(abs)
	if err != nil {
		return kind.Errorf(kind.Invalid, "%w", err)
	}
	if remote, err := s.Stat(ctx, dst, client.FileOptions{}); err == nil && remote.Type == client.Directory {
		dst = path.Join(dst, filepath.Base(abs))
	} else if err == nil && fi.IsDir() {
		return kind.Errorf(kind.Conflict, "%s in the session is not a directory", dst)
	} else if err != nil && !errors.Is(err, &client.Error{Code: client.CodeNotFound}) {
		return err
	} else if strings.HasSuffix(dst, "/") {
		dst = path.Join(dst, filepath.Base(abs))
	}
	dir, name := filepath.Dir(abs), filepath.Base(abs)
	if fi.IsDir() {
		dir, name = abs, "."
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	t := &transfer{a: a, ctx: ctx, s: s, root: root, m: a.newMeter()}
	defer t.m.end()
	if fi.IsDir() {
		t.total = t.measure(".")
		err = t.putDir(".", dst)
	} else {
		t.total = fi.Size()
		err = t.putFile(name, dst)
	}
	if err != nil {
		return err
	}
	return t.markExecutable()
}

// measure returns the bytes below dir, for the progress bar.
func (t *transfer) measure(dir string) int64 {
	var n int64
	entries, err := t.list(dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if e.IsDir() {
			n += t.measure(filepath.Join(dir, e.Name()))
		} else if fi, err := e.Info(); err == nil && e.Type().IsRegular() {
			n += fi.Size()
		}
	}
	return n
}

func (t *transfer) list(dir string) ([]fs.DirEntry, error) {
	d, err := t.root.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.ReadDir(-1)
}

func (t *transfer) putDir(dir, dst string) error {
	if _, err := t.s.MakeDir(t.ctx, dst, client.FileOptions{}); err != nil && !errors.Is(err, &client.Error{Code: client.CodeConflict}) {
		return err
	}
	entries, err := t.list(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(dir, e.Name()), path.Join(dst, e.Name())
		switch {
		case e.IsDir():
			err = t.putDir(from, to)
		case e.Type().IsRegular():
			err = t.putFile(from, to)
		default:
			t.skip(from, "not a regular file")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *transfer) putFile(name, dst string) error {
	f, err := t.root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return kind.Errorf(kind.Invalid, "%s is not a regular file", name)
	}
	info, err := t.s.WriteFile(t.ctx, dst, counted{f, t, dst}, client.FileOptions{})
	if err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	if fi.Mode()&0o111 != 0 {
		t.executable = append(t.executable, info.ExactPath())
	}
	return nil
}

// markExecutable sets the execute permission of the executable files.
func (t *transfer) markExecutable() error {
	const batch = 500
	for len(t.executable) > 0 {
		n := min(batch, len(t.executable))
		argv := []string{"chmod", "+x", "--"}
		for _, p := range t.executable[:n] {
			if !utf8.ValidString(p) {
				t.a.note("%q is not executable in the session: its name is not UTF-8", p)
				continue
			}
			argv = append(argv, p)
		}
		t.executable = t.executable[n:]
		res, err := t.s.Run(t.ctx, client.Command{Argv: argv})
		if err != nil {
			return fmt.Errorf("set the execute permission of copied files: %w", err)
		}
		if res.Status() != 0 {
			t.a.note("set the execute permission of copied files: %s", strings.TrimSpace(string(res.Stderr)))
		}
	}
	return nil
}

func (a *app) download(ctx context.Context, s *client.Session, src, dst string) error {
	info, err := s.Stat(ctx, src, client.FileOptions{})
	if err != nil {
		return err
	}
	if fi, err := os.Stat(dst); err == nil && fi.IsDir() {
		name := path.Base(info.ExactPath())
		if !localName(name) {
			return kind.Errorf(kind.Invalid, "%q has no name that is valid on this machine", src).WithHint("specify a file name as DST")
		}
		dst = filepath.Join(dst, name)
	}
	abs, err := filepath.Abs(dst)
	if err != nil {
		return err
	}
	dir, name := filepath.Dir(abs), filepath.Base(abs)
	if info.Type == client.Directory {
		if err := os.MkdirAll(abs, 0o755); err != nil {
			return err
		}
		dir, name = abs, "."
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return kind.Errorf(kind.Invalid, "%w", err)
	}
	defer root.Close()
	t := &transfer{a: a, ctx: ctx, s: s, root: root, m: a.newMeter(), total: info.Size}
	defer t.m.end()
	switch info.Type {
	case client.Directory:
		t.total = 0
		return t.getDir(info.ExactPath(), name)
	case client.RegularFile:
		return t.getFile(info, name)
	default:
		return kind.Errorf(kind.Invalid, "%s in the session is neither a regular file nor a directory: its type is %s", src, info.Type)
	}
}

// localName reports whether a name from a session is a file name without a path.
func localName(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

func (t *transfer) getDir(src, dst string) error {
	list, err := t.s.ListDir(t.ctx, src, 1, client.FileOptions{})
	if err != nil {
		return err
	}
	for _, info := range list {
		p := info.ExactPath()
		name := path.Base(p)
		if !localName(name) || path.Dir(p) != path.Clean(src) {
			return kind.Errorf(kind.Invalid, "the session returned a file %q that is not in %q", p, src)
		}
		to := filepath.Join(dst, name)
		switch info.Type {
		case client.Directory:
			if err := t.root.Mkdir(to, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			err = t.getDir(p, to)
		case client.RegularFile:
			err = t.getFile(info, to)
		default:
			t.skip(p, "not a regular file")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// getFile writes a file next to the destination and then renames it, so that the
// destination is never incomplete.
func (t *transfer) getFile(info client.FileInfo, dst string) (err error) {
	r, _, err := t.s.ReadFile(t.ctx, info.ExactPath(), client.FileOptions{})
	if err != nil {
		return err
	}
	defer r.Close()
	part := filepath.Join(filepath.Dir(dst), fmt.Sprintf(".bivy-%d.part", os.Getpid()))
	f, err := t.root.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("copy %q: %w", info.ExactPath(), err), t.root.Remove(part))
		}
	}()
	_, err = io.Copy(f, counted{r, t, info.Path})
	if err == nil {
		err = f.Chmod(fs.FileMode(info.Mode) & 0o777)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return t.root.Rename(part, dst)
}
