package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

func tarFile(t *testing.T, b []byte) *Tar {
	t.Helper()
	name := filepath.Join(t.TempDir(), "rootfs.tar")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return NewTar(name)
}

func TestTar(t *testing.T) {
	raw := makeTar(t,
		dirent("./"), dirent("./etc/"), reg("./etc/motd", "hello"), reg("/abs", "a"), sym("sh", "bash"), hardlink("motd", "etc/motd"),
		entry{name: "bin/sudo", flag: tar.TypeReg, mode: 0o4755, text: "s"}, entry{name: "tmp", flag: tar.TypeDir, mode: 0o1777},
		reg(".wh.kept", "no whiteout in a plain tar"), entry{name: "mine", flag: tar.TypeReg, mode: 0o600, uid: 1000},
		entry{name: "dev/null", flag: tar.TypeChar, mode: 0o666}, entry{name: "dev/sda", flag: tar.TypeBlock}, entry{name: "fifo", flag: tar.TypeFifo},
		entry{name: "ping", flag: tar.TypeReg, mode: 0o755, pax: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00", "SCHILY.xattr.user.k": "v", "SCHILY.xattr.trusted.overlay.opaque": "y"}},
		entry{name: "pax_global_header", flag: tar.TypeXGlobalHeader, pax: map[string]string{"comment": "x"}},
	)
	want := map[string]string{
		"/.wh.kept": "100644 0 no whiteout in a plain tar", "/abs": "100644 0 a", "/bin": "40755 0", "/bin/sudo": "104755 0 s",
		"/etc": "40755 0", "/etc/motd": "100644 0 links=2 hello", "/motd": "100644 0 links=2 hello", "/mine": "100600 1000",
		"/sh": "120777 0 -> bash", "/tmp": "41777 0",
	}
	for name, b := range map[string][]byte{"plain": raw, "gzip": gz(t, raw), "zstd": zst(t, raw)} {
		t.Run(name, func(t *testing.T) {
			got, _, tr, err := load(t, tarFile(t, b), tree.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			ping := tr.Lookup("ping")
			if diff := cmp.Diff(map[string]string{"security.capability": "\x01\x00", "user.k": "v"}, ping.Xattrs); diff != "" {
				t.Error(diff)
			}
			delete(got, "/ping")
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
			if n := len(tr.Notes().List()); n != 2 {
				t.Errorf("notes: %q", tr.Notes().List())
			}
		})
	}
}

func TestTarRefused(t *testing.T) {
	good := makeTar(t, reg("f", "hello"))
	for _, tc := range []struct {
		name string
		data []byte
		kind kind.Kind
		says string
	}{
		{"not a tar", bytes.Repeat([]byte("this is no tar "), 100), kind.Invalid, "malformed or truncated tar"},
		{"empty", nil, kind.Invalid, "empty"},
		{"cut short", good[:514], kind.Invalid, "malformed or truncated tar"},
		{"cut in a header", good[:300], kind.Invalid, "malformed or truncated tar"},
		{"broken gzip", append(gz(t, good)[:20], "garbage garbage garbage"...), kind.Invalid, ""},
		{"cut gzip", gz(t, good)[:30], kind.Invalid, ""},
		{"cut zstd", zst(t, good)[:30], kind.Invalid, ""},
		{"xz", []byte("\xfd7zXZ\x00 and more"), kind.Invalid, "xz"},
		{"climbs", makeTar(t, reg("../../etc/passwd", "x")), kind.Invalid, `".."`},
		{"links out", makeTar(t, hardlink("f", "../../etc/shadow")), kind.Invalid, `".."`},
		{"links to the host", makeTar(t, hardlink("f", "/etc/shadow")), kind.Invalid, "hard link"},
		{"odd type", makeTar(t, entry{name: "f", flag: 'Z'}), kind.Invalid, "type"},
		{"an image", makeTar(t, reg("f", "x"), sym("d", "/"), reg("d/f/g", "y")), kind.Invalid, "not a directory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, _, err := load(t, tarFile(t, tc.data), tree.Limits{})
			if !kind.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v: %v", kind.Of(err), err)
			}
		})
	}
	if _, _, _, err := load(t, NewTar("/no/such.tar"), tree.Limits{}); !kind.Is(err, kind.NotFound) {
		t.Errorf("missing: %v", err)
	}
	if _, _, _, err := load(t, NewTar(t.TempDir()), tree.Limits{}); !kind.Is(err, kind.Invalid) {
		t.Errorf("a directory: %v", err)
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := load(t, NewTar(fifo), tree.Limits{}); !kind.Is(err, kind.Invalid) {
		t.Errorf("a FIFO: %v", err)
	}
}

// zeros is an endless stream of zeros, which compresses very well.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestBombs reads small archives whose content is huge; each must fail at its
// limit.
func TestBombs(t *testing.T) {
	const huge = 1 << 30
	header := func(size int64) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&tar.Header{Name: "bomb", Typeflag: tar.TypeReg, Size: size}); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	var gzBomb, zstBomb bytes.Buffer
	zw := gzip.NewWriter(&gzBomb)
	sw, err := zstd.NewWriter(&zstBomb)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []io.WriteCloser{zw, sw} {
		if _, err := w.Write(header(huge)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(w, zeros{}, 64<<20); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var many []entry
	for i := range 200 {
		many = append(many, reg(strings.Repeat("d/", i%100)+"f", ""))
	}
	for _, tc := range []struct {
		name   string
		data   []byte
		limits tree.Limits
		limit  string
	}{
		{"a declared size", gzBomb.Bytes(), tree.Limits{Bytes: 1 << 20}, "Bytes"},
		{"gzip", gzBomb.Bytes(), tree.Limits{StreamBytes: 1 << 20}, "StreamBytes"},
		{"zstd", zstBomb.Bytes(), tree.Limits{StreamBytes: 1 << 20}, "StreamBytes"},
		{"entries", makeTar(t, many...), tree.Limits{Entries: 50}, "Entries"},
		{"depth", makeTar(t, many...), tree.Limits{Depth: 20}, "Depth"},
		{"several files", makeTar(t, reg("a", strings.Repeat("a", 600)), reg("a", strings.Repeat("a", 600))), tree.Limits{Bytes: 1000}, "Bytes"},
		{"xattrs", makeTar(t, entry{name: "f", flag: tar.TypeReg, pax: map[string]string{"SCHILY.xattr.user.x": strings.Repeat("x", 5000)}}), tree.Limits{XattrBytes: 1000}, "XattrBytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, _, err := load(t, tarFile(t, tc.data), tc.limits)
			var le *tree.LimitError
			if !errors.As(err, &le) || le.Limit != tc.limit || !kind.Is(err, kind.Exhausted) || !strings.Contains(err.Error(), tc.limit) {
				t.Errorf("got %v: %v", kind.Of(err), err)
			}
		})
	}
}

func TestDirectory(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(at("etc/deep"), 0o755))
	must(os.WriteFile(at("etc/motd"), []byte("hello"), 0o644))
	must(os.WriteFile(at("empty"), nil, 0o600))
	must(os.Link(at("etc/motd"), at("motd")))
	must(os.Symlink("/etc/passwd", at("leak")))
	must(os.Symlink("..", at("up")))
	must(os.WriteFile(at("setuid"), []byte("x"), 0o755))
	must(os.Chmod(at("setuid"), 0o755|os.ModeSetuid))
	must(os.WriteFile(at("not\xffutf8"), []byte("n"), 0o644))
	must(unix.Mkfifo(at("fifo"), 0o600))
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(err)
	defer unix.Close(sock)
	must(unix.Bind(sock, &unix.SockaddrUnix{Name: at("sock")}))

	got, _, tr, err := load(t, NewDirectory(dir), tree.Limits{})
	must(err)
	for name, s := range got { // the files belong to the user who runs the test
		f := strings.SplitN(s, " ", 3)
		f[1] = ""
		got[name] = strings.TrimSpace(strings.Join(f, " "))
	}
	want := map[string]string{
		"/etc": "40755", "/etc/deep": "40755", "/etc/motd": "100644  links=2 hello", "/motd": "100644  links=2 hello", "/empty": "100600",
		"/leak": "120777  -> /etc/passwd", "/up": "120777  -> ..", "/setuid": "104755  x", "/not\xffutf8": "100644  n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if notes := tr.Notes().List(); len(notes) != 2 {
		t.Errorf("notes: %q", notes)
	}
}

func TestDirectoryRefused(t *testing.T) {
	if _, _, _, err := load(t, NewDirectory("/no/such"), tree.Limits{}); !kind.Is(err, kind.NotFound) {
		t.Errorf("missing: %v", err)
	}
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := load(t, NewDirectory(file), tree.Limits{}); !kind.Is(err, kind.Invalid) {
		t.Errorf("a file: %v", err)
	}
}

// TestDirectoryChanges replaces a file between the walk and the read: the
// replacement must not be read.
func TestDirectoryChanges(t *testing.T) {
	for name, swap := range map[string]func(file string) error{
		"replaced by a link out": func(f string) error { return errors.Join(os.Remove(f), os.Symlink("/etc/passwd", f)) },
		"replaced by a FIFO":     func(f string) error { return errors.Join(os.Remove(f), unix.Mkfifo(f, 0o600)) },
		"replaced by a file":     func(f string) error { return errors.Join(os.Remove(f), os.WriteFile(f, []byte("12345"), 0o600)) },
		"grown":                  func(f string) error { return os.WriteFile(f, []byte("123456"), 0o600) },
		"gone":                   os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "f")
			if err := os.WriteFile(file, []byte("12345"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, tr, err := load(t, NewDirectory(dir), tree.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			if err := swap(file); err != nil {
				t.Fatal(err)
			}
			if r, err := tr.Lookup("f").Content.Open(); err == nil {
				b, _ := io.ReadAll(r)
				t.Errorf("read %q", b)
			}
		})
	}
}
