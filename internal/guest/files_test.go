package guest_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
)

func (s *sandbox) write(t *testing.T, user, path, text string) wire.WrittenFile {
	t.Helper()
	w, err := s.WriteFile(t.Context(), user, path, strings.NewReader(text), int64(len(text)))
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (s *sandbox) read(t *testing.T, user, path string) (string, error) {
	t.Helper()
	f, err := s.ReadFile(t.Context(), user, path)
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(f)
	return string(text), errors.Join(err, f.Close())
}

func TestWriteAndRead(t *testing.T) {
	s := newSandbox(t)
	text := strings.Repeat("binary \x00\xff\n", 50_000)
	w := s.write(t, "", "a/b/c.bin", text)
	sum := sha256.Sum256([]byte(text))
	want := wire.WrittenFile{Name: "c.bin", Path: s.home + "/a/b/c.bin", Type: "file", Size: int64(len(text)), SHA256: hex.EncodeToString(sum[:])}
	if d := cmp.Diff(want, w); d != "" {
		t.Error(d)
	}
	if got, err := s.read(t, "", "~/a/b/c.bin"); err != nil || got != text {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	e, err := s.Stat(t.Context(), "", "a/b")
	if err != nil {
		t.Fatal(err)
	}
	e.Modified, e.Size = want0(e.Modified), 0
	if d := cmp.Diff(guestclient.Entry{Name: "b", Path: s.home + "/a/b", Type: guestclient.Directory, Mode: 0o755, Permissions: "drwxr-xr-x", Owner: "user", Group: "user"}, e); d != "" {
		t.Error(d)
	}
	e, err = s.Stat(t.Context(), "", "a/b/c.bin")
	if err != nil || e.Mode != 0o644 || e.Permissions != "-rw-r--r--" || e.Owner != "user" || e.Size != int64(len(text)) || e.Type != guestclient.Regular {
		t.Errorf("got %+v, %v", e, err)
	}
	// Overwriting keeps the file and its rights, and loses the old content.
	if err := os.Chmod(filepath.Join(s.home, "a/b/c.bin"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.write(t, "", "a/b/c.bin", "short")
	if got, err := s.read(t, "", "a/b/c.bin"); err != nil || got != "short" {
		t.Errorf("read %q, %v", got, err)
	}
	if e, err = s.Stat(t.Context(), "", "a/b/c.bin"); err != nil || e.Mode != 0o600 {
		t.Errorf("got %+v, %v", e, err)
	}
	for _, text := range []string{"", "x"} {
		s.write(t, "root", "/"+strings.TrimPrefix(s.dir, "/")+"/tiny", text)
		if got, err := s.read(t, "", s.dir+"/tiny"); err != nil || got != text {
			t.Errorf("read %q, %v", got, err)
		}
	}
	if got, err := s.read(t, "", "/proc/self/status"); err != nil || !strings.Contains(got, "Pid:") {
		t.Errorf("a file of /proc: %q, %v", got, err)
	}
	// Of unknown length.
	if w, err := s.WriteFile(t.Context(), "", "piped", io.MultiReader(strings.NewReader("a"), strings.NewReader("b")), -1); err != nil || w.Size != 2 {
		t.Errorf("got %+v, %v", w, err)
	}
}

func want0[T any](T) (zero T) { return zero }

func TestFileRefusals(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	writeFile(t, filepath.Join(s.dir, "roots"), "secret")
	if err := os.Chmod(filepath.Join(s.dir, "roots"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Symbolic links by which a user may try to make root write elsewhere.
	for name, to := range map[string]string{"link": s.dir + "/roots", "linkdir": "/root", "dangling": "/root/new", "loop": "loop"} {
		if err := os.Symlink(to, filepath.Join(s.home, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(s.home, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(s.home, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	s.write(t, "", "file", "x")
	read := func(path string) error { _, err := s.read(t, "", path); return err }
	write := func(path string) error {
		_, err := s.WriteFile(ctx, "", path, strings.NewReader("x"), 1)
		return err
	}
	entry := func(_ guestclient.Entry, err error) error { return err }
	list := func(_ []guestclient.Entry, err error) error { return err }
	tests := map[string]struct {
		err  error
		kind kind.Kind
	}{
		"read missing":           {read("nothing"), kind.NotFound},
		"read directory":         {read("/usr"), kind.Invalid},
		"read device":            {read("/dev/zero"), kind.Invalid},
		"read fifo":              {read("fifo"), kind.Invalid},
		"read what is root's":    {read(s.dir + "/roots"), kind.Denied},
		"read through link":      {read("link"), kind.Denied},
		"read other's home":      {read("~root/x"), kind.Invalid},
		"read NUL":               {read("a\x00b"), kind.Invalid},
		"read dots":              {read("../../../../../../root/.bashrc"), kind.Denied},
		"write into root's":      {write("/root/x"), kind.Denied},
		"write through link":     {write("link"), kind.Denied},
		"write through linkdir":  {write("linkdir/x"), kind.Denied},
		"write through dangling": {write("dangling"), kind.Denied},
		"write device":           {write("/dev/null"), kind.Invalid},
		"write fifo":             {write("fifo"), kind.Invalid},
		"write directory":        {write("/tmp"), kind.Invalid},
		"write below file":       {write("file/x"), kind.Invalid},
		"write long name":        {write(strings.Repeat("x", 300)), kind.Invalid},
		"write loop":             {write("loop"), kind.Invalid},
		"stat missing":           {entry(s.Stat(ctx, "", "nothing")), kind.NotFound},
		"stat long":              {entry(s.Stat(ctx, "", strings.Repeat("x/", 3000))), kind.Invalid},
		"stat unknown user":      {entry(s.Stat(ctx, "nobody at all", "/")), kind.Unauthentic},
		"list missing":           {list(s.ListDir(ctx, "", "nothing", 1)), kind.NotFound},
		"list file":              {list(s.ListDir(ctx, "", "file", 1)), kind.Invalid},
		"list loop":              {list(s.ListDir(ctx, "", "loop", 1)), kind.Conflict},
		"list root's":            {list(s.ListDir(ctx, "", "/root", 1)), kind.Denied},
		"make existing":          {entry(s.MakeDir(ctx, "", "~")), kind.Conflict},
		"make over file":         {entry(s.MakeDir(ctx, "", "file")), kind.Invalid},
		"make in root's":         {entry(s.MakeDir(ctx, "", "/root/x")), kind.Denied},
		"move missing":           {entry(s.Move(ctx, "", "nothing", "x/y/z")), kind.NotFound},
		"move into root's":       {entry(s.Move(ctx, "", "file", "/root/x")), kind.Denied},
		"remove root's":          {s.Remove(ctx, "", s.dir+"/roots"), kind.Denied},
		"remove through link":    {s.Remove(ctx, "", "linkdir/.bashrc"), kind.Denied},
	}
	for name, tt := range tests {
		if tt.err == nil || kind.Of(tt.err) != tt.kind {
			t.Errorf("%s: got %v (%v), want %v", name, tt.err, kind.Of(tt.err), tt.kind)
		}
	}
	if _, err := os.Stat(filepath.Join(s.home, "x")); err == nil {
		t.Error("a refused move made directories")
	}
	if text, err := os.ReadFile(filepath.Join(s.dir, "roots")); err != nil || string(text) != "secret" {
		t.Errorf("root's file: %q, %v", text, err)
	}
}

func TestSetuidIsLostByWriting(t *testing.T) {
	s := newSandbox(t)
	path := filepath.Join(s.home, "tool")
	writeFile(t, path, "old")
	if err := errors.Join(os.Chown(path, 0, 0), os.Chmod(path, 0o777|os.ModeSetuid)); err != nil {
		t.Fatal(err)
	}
	s.write(t, "", "tool", "new")
	if st, err := os.Stat(path); err != nil || st.Mode()&os.ModeSetuid != 0 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestListDir(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	for _, path := range []string{"d/b/2", "d/b/1", "d/a", "d/b/c/x", "d/\xff\xfe"} {
		s.write(t, "", path, path)
	}
	for name, to := range map[string]string{"d/link": "b", "d/gone": "/no/where", "root": "d"} {
		if err := os.Symlink(to, filepath.Join(s.home, name)); err != nil {
			t.Fatal(err)
		}
	}
	names := func(path string, depth int) []string {
		all, err := s.ListDir(ctx, "", path, depth)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range all {
			names = append(names, strings.TrimPrefix(e.Path, s.home+"/"))
		}
		return names
	}
	if d := cmp.Diff([]string{"d/a", "d/b", "d/gone", "d/link", "d/\xff\xfe"}, names("d", 0)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"d/a", "d/b", "d/b/1", "d/b/2", "d/b/c", "d/gone", "d/link", "d/\xff\xfe"}, names("d", 2)); d != "" {
		t.Error(d)
	}
	// The link at the root is followed, and the paths are as asked for.
	if d := cmp.Diff([]string{"root/a", "root/b", "root/gone", "root/link", "root/\xff\xfe"}, names("root", 1)); d != "" {
		t.Error(d)
	}
	link, err := s.Stat(ctx, "", "d/link")
	if err != nil || link.Type != guestclient.Directory || link.Target != s.home+"/d/b" || link.Permissions != "Lrwxrwxrwx" || link.Mode != 0o755 {
		t.Errorf("link: %+v, %v", link, err)
	}
	gone, err := s.Stat(ctx, "", "d/gone")
	if err != nil || gone.Type != guestclient.Unknown || gone.Target != "/no/where" {
		t.Errorf("dangling: %+v, %v", gone, err)
	}
	// A name that is not UTF-8 works everywhere.
	odd := "d/\xff\xfe"
	if got, err := s.read(t, "", odd); err != nil || got != odd {
		t.Errorf("odd name: %q, %v", got, err)
	}
	if e, err := s.Move(ctx, "", odd, "d/\xf0(\x80 \U0010FE80"); err != nil || e.Name != "\xf0(\x80 \U0010FE80" {
		t.Errorf("odd name: %+v, %v", e, err)
	}
	if err := s.Remove(ctx, "", "d/\xf0(\x80 \U0010FE80"); err != nil {
		t.Error(err)
	}
	if got := names("d", 1); !slices.Equal(got, []string{"d/a", "d/b", "d/gone", "d/link"}) {
		t.Errorf("left: %q", got)
	}
}

func TestMakeMoveRemove(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	if e, err := s.MakeDir(ctx, "", "x/y/z"); err != nil || e.Owner != "user" || e.Mode != 0o755 || e.Path != s.home+"/x/y/z" {
		t.Errorf("got %+v, %v", e, err)
	}
	s.write(t, "", "x/f", "1")
	s.write(t, "", "g", "2")
	if e, err := s.Move(ctx, "", "x/f", "g"); err != nil || e.Name != "g" {
		t.Errorf("got %+v, %v", e, err)
	}
	if got, err := s.read(t, "", "g"); err != nil || got != "1" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := s.Move(ctx, "", "x", "new/parents/x"); err != nil {
		t.Error(err)
	}
	if _, err := s.Move(ctx, "", "g", s.dir+"/small/g"); kind.Of(err) != kind.Conflict && kind.Of(err) != kind.Denied {
		t.Errorf("to another file system: %v", err)
	}
	for range 2 { // the second time it is missing
		if err := s.Remove(ctx, "", "new"); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Stat(ctx, "", "new/parents"); kind.Of(err) != kind.NotFound {
		t.Errorf("got %v", err)
	}
}

func TestNoSpace(t *testing.T) {
	s := newSandbox(t)
	small := s.dir + "/small"
	_, err := s.WriteFile(t.Context(), "", small+"/big", bytes.NewReader(make([]byte, 2<<20)), 2<<20)
	if kind.Of(err) != kind.Exhausted || wire.ReasonOf(err) != wire.ReasonNoSpace {
		t.Errorf("got %v, reason %q", err, wire.ReasonOf(err))
	}
	if _, err := s.Stat(t.Context(), "", small+"/big"); kind.Of(err) != kind.NotFound {
		t.Errorf("a part of the file is left: %v", err)
	}
	s.write(t, "", small+"/fits", "x")
}

func TestMetadataIsReplaced(t *testing.T) {
	s := newSandbox(t)
	post := func(h map[string]string) string {
		h["Content-Type"] = "application/octet-stream"
		return s.http(t, "POST", "/files?path="+s.dir+"/small/m", "x", h)
	}
	// The small file system is a tmpfs of the machine's kernel, which may know
	// no attributes for users.
	if got := post(map[string]string{"X-Metadata-Author": "me", "X-Metadata-b": "2"}); !strings.HasPrefix(got, "200 ") {
		t.Skipf("no user attributes here: %s", got)
	}
	e, err := s.Stat(t.Context(), "", s.dir+"/small/m")
	if d := cmp.Diff(map[string]string{"author": "me", "b": "2"}, e.Metadata); err != nil || d != "" {
		t.Error(d, err)
	}
	post(map[string]string{"X-Metadata-C": "3"})
	e, err = s.Stat(t.Context(), "", s.dir+"/small/m")
	if d := cmp.Diff(map[string]string{"c": "3"}, e.Metadata); err != nil || d != "" {
		t.Error(d, err)
	}
	for name, h := range map[string]map[string]string{
		"key too long": {"X-Metadata-" + strings.Repeat("k", 247): "v"}, "too much": {"X-Metadata-A": strings.Repeat("v", 4096)}, "not printable": {"X-Metadata-A": "\x80"},
	} {
		if got := post(h); !strings.HasPrefix(got, `400 {"code":400,"message":"metadata`) {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestListLimit(t *testing.T) {
	if testing.Short() {
		t.Skip("makes 65537 files")
	}
	s := newSandbox(t)
	many := s.dir + "/small/many" // in memory
	r := s.sh(t, "mkdir "+many+" && cd "+many+" && seq 65537 | xargs -n 5000 touch")
	if r.exit.Code != 0 {
		t.Fatal(r)
	}
	if _, err := s.ListDir(t.Context(), "", many, 1); kind.Of(err) != kind.Exhausted {
		t.Errorf("got %v", err)
	}
	if err := s.Remove(t.Context(), "", many+"/1"); err != nil {
		t.Fatal(err)
	}
	all, err := s.ListDir(t.Context(), "", many, 1)
	if err != nil || len(all) != 65536 {
		t.Errorf("got %d, %v", len(all), err)
	}
	if got := s.http(t, "POST", "/reclaim", "", nil); got != "204" {
		t.Error(got)
	}
	t.Logf("resident after the largest listing and a reclaim: %s", fmt.Sprint(rss(t, s.pid), " KiB"))
}
