package debian

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// host is a small Debian in a directory.
type host struct {
	t      *testing.T
	dir    string
	status strings.Builder
}

func newHost(t *testing.T) *host {
	h := &host{t: t, dir: t.TempDir()}
	for _, d := range mergedDirs[:3] {
		h.mkdir("usr/" + d)
		h.link(d, "usr/"+d)
	}
	h.mkdir("var/lib/dpkg/info")
	return h
}

func (h *host) mkdir(name string) {
	h.t.Helper()
	if err := os.MkdirAll(filepath.Join(h.dir, name), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) file(name, text string, mode os.FileMode) {
	h.t.Helper()
	h.mkdir(filepath.Dir(name))
	full := filepath.Join(h.dir, name)
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	if err := os.Chmod(full, mode); err != nil {
		h.t.Fatal(err)
	}
	when := time.Unix(1_600_000_000, 0)
	if err := os.Chtimes(full, when, when); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) link(name, target string) {
	h.t.Helper()
	h.mkdir(filepath.Dir(name))
	if err := os.Symlink(target, filepath.Join(h.dir, name)); err != nil {
		h.t.Fatal(err)
	}
}

// pkg records an installed package with the given fields and listed paths.
func (h *host) pkg(name, fields string, paths ...string) {
	h.t.Helper()
	fmt.Fprintf(&h.status, "Package: %s\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n", name)
	if fields != "" {
		h.status.WriteString(fields + "\n")
	}
	h.status.WriteString("\n")
	h.file("var/lib/dpkg/info/"+name+".list", "/.\n"+strings.Join(paths, "\n")+"\n", 0o644)
}

func (h *host) load(names ...string) (*tree.Tree, error) {
	h.t.Helper()
	h.file("var/lib/dpkg/status", h.status.String(), 0o644)
	p := New(h.dir, names)
	h.t.Cleanup(func() { p.Close() })
	if _, err := p.Key(context.Background()); err != nil {
		return nil, err
	}
	tr := tree.New(tree.Limits{})
	_, err := p.Load(context.Background(), tr, nil, nil)
	return tr, err
}

func (h *host) mustLoad(names ...string) *tree.Tree {
	h.t.Helper()
	tr, err := h.load(names...)
	if err != nil {
		h.t.Fatal(err)
	}
	return tr
}

func text(t *testing.T, tr *tree.Tree, name string) string {
	t.Helper()
	i := tr.Stat(name)
	if i == nil {
		t.Fatalf("%s is not in the image", name)
	}
	if i.Size == 0 {
		return ""
	}
	r, err := i.Content.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func md5sum(s string) string {
	sum := md5.Sum([]byte(s))
	return hex.EncodeToString(sum[:])
}

// TestNothingOfTheHost creates a host with secrets and local state in files that a
// package lists, and checks that none of it is in the image.
func TestNothingOfTheHost(t *testing.T) {
	const secret = "SECRET-OF-THE-HOST"
	h := newHost(t)
	secrets := []string{
		"etc/passwd", "etc/shadow", "etc/group", "etc/gshadow", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/machine-id",
		"etc/ssh/ssh_host_ed25519_key", "etc/ssl/private/key.pem", "etc/sudoers", "etc/sudoers.d/admin", "etc/app.conf", "etc/app.key",
		"etc/apt/auth.conf", "etc/environment", "etc/fstab", "etc/profile", "etc/subuid", "root/.ssh/id_rsa", "home/me/notes", "var/lib/app/state.db",
		"var/log/app.log", "run/app.sock.txt", "srv/data", "usr/local/share/ca-certificates/corp.crt", "etc/bash.bashrc",
	}
	var listed []string
	for _, s := range secrets {
		h.file(s, secret, 0o644)
		listed = append(listed, "/"+s)
	}
	// One conffile that was changed here, one that was not.
	h.file("etc/clean.conf", "as installed", 0o644)
	h.file("usr/bin/app", "program", 0o755)
	h.pkg("app", "Conffiles:\n /etc/app.conf "+md5sum("as installed")+"\n /etc/clean.conf "+md5sum("as installed"),
		append(slices.DeleteFunc(listed, func(s string) bool { return strings.HasPrefix(s, "/usr/local") }), "/etc/clean.conf", "/usr/bin/app")...)

	tr := h.mustLoad("app")
	err := tr.Walk(func(name string, i *tree.Inode) error {
		if i.IsRegular() && strings.Contains(text(t, tr, name), secret) {
			t.Errorf("%s of the host is in the image", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, tr, "/etc/clean.conf"); got != "as installed" {
		t.Errorf("a clean conffile is %q", got)
	}
	if got := text(t, tr, "/usr/bin/app"); got != "program" {
		t.Errorf("the program is %q", got)
	}
	if tr.Lookup("/etc/app.conf") != nil || tr.Lookup("/etc/app.key") != nil {
		t.Error("a changed conffile or a file that is none is in the image")
	}
	if notes := strings.Join(tr.Notes().List(), "\n"); !strings.Contains(notes, "/etc/app.conf") {
		t.Errorf("the changed conffile is not noted:\n%s", notes)
	}
}

func TestClosure(t *testing.T) {
	h := newHost(t)
	h.pkg("app", "Depends: lib (>= 1), virtual, missing | other:any, self")
	h.pkg("lib", "Pre-Depends: core [amd64]")
	h.pkg("core", "")
	h.pkg("zprovider", "Provides: virtual (= 2), more")
	h.pkg("provider", "Provides: virtual")
	h.pkg("other", "")
	h.pkg("self", "Depends: app")
	h.pkg("unrelated", "")
	fmt.Fprint(&h.status, "Package: removed\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n")
	fmt.Fprint(&h.status, "Package: foreign\nStatus: install ok installed\nArchitecture: arm64\nVersion: 1\n\n")
	db, err := parseStatus(strings.NewReader(h.status.String()))
	if err != nil {
		t.Fatal(err)
	}
	ps, err := db.closure([]string{"app"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range ps {
		got = append(got, p.name)
	}
	if diff := cmp.Diff([]string{"app", "core", "lib", "other", "provider", "self"}, got); diff != "" {
		t.Error(diff)
	}

	_, err = db.closure([]string{"app", "sudo", "removed", "foreign", "sudo"})
	if !kind.Is(err, kind.NotFound) || !strings.HasSuffix(err.Error(), "host: sudo removed foreign") {
		t.Errorf("missing packages: %v", err)
	}
	if got, want := kind.Hint(err), "apt-get install --no-install-recommends -y sudo removed foreign"; got != want {
		t.Errorf("hint %q, want %q", got, want)
	}
}

func TestBrokenDependency(t *testing.T) {
	h := newHost(t)
	h.pkg("app", "Depends: gone | also-gone")
	_, err := h.load("app")
	if !kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), "app depends on gone or also-gone") {
		t.Errorf("got %v", err)
	}
}

func TestNoDpkg(t *testing.T) {
	_, err := New(t.TempDir(), []string{"bash"}).Key(context.Background())
	if !kind.Is(err, kind.Invalid) || kind.Hint(err) == "" {
		t.Errorf("got %v", err)
	}
}

func TestFiles(t *testing.T) {
	h := newHost(t)
	h.file("usr/bin/tool", "tool", 0o755)
	h.file("usr/bin/sudo", "sudo", 0o755)
	h.file("usr/bin/odd", "odd", 0o755)
	h.file("usr/lib/x86_64-linux-gnu/libx.so.1.2", "lib", 0o644)
	h.link("usr/lib/x86_64-linux-gnu/libx.so.1", "libx.so.1.2")
	h.file("usr/share/doc/tool/readme", "doc", 0o644)
	h.file("usr/share/man/man1/tool.1.gz", "man", 0o644)
	if err := os.Link(filepath.Join(h.dir, "usr/bin/tool"), filepath.Join(h.dir, "usr/bin/tool2")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(h.dir, "usr/bin/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		odd := filepath.Join(h.dir, "usr/bin/odd")
		if err := os.Chown(odd, 123, 456); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(odd, 0o755|os.ModeSetuid|os.ModeSetgid); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(h.dir, "usr/bin/sudo"), 0o755|os.ModeSetuid); err != nil {
			t.Fatal(err)
		}
	}
	h.pkg("tool", "", "/bin", "/bin/tool", "/bin/tool2", "/bin/sudo", "/bin/odd", "/bin/fifo", "/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu/libx.so.1",
		"/lib/x86_64-linux-gnu/libx.so.1.2", "/usr/share/doc/tool/readme", "/usr/share/man/man1/tool.1.gz", "/usr/share/tool/gone")
	tr := h.mustLoad("tool")
	for name, want := range map[string]string{"/bin/tool": "tool", "/usr/bin/tool2": "tool", "/lib/x86_64-linux-gnu/libx.so.1": "lib"} {
		if got := text(t, tr, name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	if i := tr.Lookup("/bin"); i == nil || i.Target != "usr/bin" {
		t.Errorf("/bin is %+v", i)
	}
	if tr.Lookup("/usr/bin/tool") != tr.Lookup("/usr/bin/tool2") {
		t.Error("hard links came apart")
	}
	for _, name := range []string{"/usr/share/doc", "/usr/share/man", "/usr/bin/fifo"} {
		if tr.Lookup(name) != nil {
			t.Errorf("%s is in the image", name)
		}
	}
	if os.Geteuid() == 0 {
		if i := tr.Lookup("/usr/bin/odd"); i.UID != 0 || i.GID != 0 || i.Mode&0o6000 != 0 {
			t.Errorf("a file of accounts that only this host has: %o %d:%d", i.Mode, i.UID, i.GID)
		}
		if i := tr.Lookup("/usr/bin/sudo"); i.Mode&unix.S_ISUID == 0 {
			t.Error("sudo lost its setuid bit")
		}
	}
	if got := text(t, tr, "/etc/sudoers.d/user"); !strings.Contains(got, "NOPASSWD: ALL") {
		t.Errorf("sudoers.d: %q", got)
	}
	if i := tr.Lookup("/etc/sudoers"); i.Mode != unix.S_IFREG|0o440 {
		t.Errorf("sudoers has mode %o", i.Mode)
	}
	notes := strings.Join(tr.Notes().List(), "\n")
	for _, want := range []string{"/usr/share/tool/gone", "/usr/bin/fifo"} {
		if !strings.Contains(notes, want) {
			t.Errorf("%s is not noted:\n%s", want, notes)
		}
	}
	// Everything has the time of the newest file unless it has its own.
	if i := tr.Lookup("/etc/passwd"); i.Mtime != 1_600_000_000 {
		t.Errorf("generated file from %d", i.Mtime)
	}
}

func TestBytecode(t *testing.T) {
	h := newHost(t)
	const src = "print('hello')\n"
	pyc := func(mtime, size uint32) string {
		b := []byte("\xa7\r\r\n\x00\x00\x00\x00")
		b = binary.LittleEndian.AppendUint32(b, mtime)
		return string(binary.LittleEndian.AppendUint32(b, size)) + "code"
	}
	for _, n := range []string{"good", "stale", "short", "none"} {
		h.file("usr/lib/python3/"+n+".py", src, 0o644)
	}
	h.file("usr/lib/python3/__pycache__/good.cpython-311.pyc", pyc(1_600_000_000, uint32(len(src))), 0o644)
	h.file("usr/lib/python3/__pycache__/good.cpython-311.opt-1.pyc", pyc(1_600_000_000, uint32(len(src))), 0o644)
	h.file("usr/lib/python3/__pycache__/stale.cpython-311.pyc", pyc(1_500_000_000, uint32(len(src))), 0o644)
	h.file("usr/lib/python3/__pycache__/short.cpython-311.pyc", "abc", 0o644)
	h.file("usr/lib/python3/__pycache__/stranger.cpython-311.pyc", pyc(1, 1), 0o644)
	h.pkg("py", "", "/usr/lib/python3/good.py", "/usr/lib/python3/stale.py", "/usr/lib/python3/short.py", "/usr/lib/python3/none.py")
	tr := h.mustLoad("py")
	got := tr.Lookup("/usr/lib/python3/__pycache__")
	if got == nil {
		t.Fatal("no bytecode was taken")
	}
	if diff := cmp.Diff([]string{"good.cpython-311.pyc"}, got.Names()); diff != "" {
		t.Error(diff)
	}
}

func TestAlternatives(t *testing.T) {
	h := newHost(t)
	h.file("usr/bin/mawk", "mawk", 0o755)
	h.file("usr/bin/gawk", "gawk", 0o755)
	h.file("usr/bin/vim", "vim", 0o755)
	h.file("usr/bin/nano", "nano", 0o755)
	h.file("var/lib/dpkg/alternatives/awk", "auto\n/usr/bin/awk\nawk.1.gz\n/usr/share/man/man1/awk.1.gz\nnawk\n/usr/bin/nawk\n\n"+
		"/usr/bin/gawk\n10\n/usr/share/man/man1/gawk.1.gz\n/usr/bin/gawk\n"+
		"/usr/bin/mawk\n5\n/usr/share/man/man1/mawk.1.gz\n/usr/bin/mawk\n\n", 0o644)
	h.link("etc/alternatives/awk", "/usr/bin/gawk") // not in the image: the next best is
	h.file("var/lib/dpkg/alternatives/editor", "manual\n/usr/bin/editor\n\n/usr/bin/vim\n50\n/usr/bin/nano\n40\n\n", 0o644)
	h.link("etc/alternatives/editor", "/usr/bin/nano")
	h.file("var/lib/dpkg/alternatives/cc", "auto\n/usr/bin/cc\n\n/usr/bin/gcc\n20\n\n", 0o644)
	h.link("etc/alternatives/cc", "/usr/bin/gcc")
	h.pkg("tools", "", "/usr/bin/mawk", "/usr/bin/vim", "/usr/bin/nano")
	tr := h.mustLoad("tools")
	for name, want := range map[string]string{"/usr/bin/awk": "mawk", "/bin/nawk": "mawk", "/usr/bin/editor": "nano"} {
		if got := text(t, tr, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	for _, name := range []string{"/usr/bin/cc", "/etc/alternatives/cc", "/usr/share/man", "/etc/alternatives/awk.1.gz"} {
		if tr.Lookup(name) != nil {
			t.Errorf("%s is in the image", name)
		}
	}
}

func TestBadAlternative(t *testing.T) {
	for _, s := range []string{"", "auto\n", "auto\nrelative\n\n", "auto\n/a\nname\n", "auto\n/a\n\n/c\nnot a number\n", "auto\n/a\nb\n/b\n\n/c\n5\n", "auto\n/a\n\nrel\n5\n"} {
		if _, err := parseAlternative("x", []byte(s)); !kind.Is(err, kind.Invalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestCertificates(t *testing.T) {
	h := newHost(t)
	h.file("usr/share/ca-certificates/mozilla/B.crt", "second", 0o644)
	h.file("usr/share/ca-certificates/mozilla/A.crt", "first\r\n", 0o644)
	h.file("usr/share/ca-certificates/local/corp.crt", "not of the package", 0o644)
	h.pkg("ca-certificates", "", "/usr/share/ca-certificates/mozilla/A.crt", "/usr/share/ca-certificates/mozilla/B.crt")
	if got, want := text(t, h.mustLoad("ca-certificates"), certBundle), "first\nsecond\n"; got != want {
		t.Errorf("bundle %q, want %q", got, want)
	}
}

func TestAccounts(t *testing.T) {
	h := newHost(t)
	h.pkg("none", "Conffiles:\n /etc/x 00000000000000000000000000000000\nDescription: kept")
	tr := h.mustLoad("none")
	passwd := text(t, tr, "/etc/passwd")
	for _, want := range []string{"root:x:0:0:root:/root:/bin/bash\n", "user:x:1000:1000::/home/user:/bin/bash\n", "nobody:x:65534:65534:"} {
		if !strings.Contains(passwd, want) {
			t.Errorf("passwd has no %q:\n%s", want, passwd)
		}
	}
	if i := tr.Lookup("/home/user"); i == nil || i.UID != 1000 || i.GID != 1000 {
		t.Errorf("home: %+v", i)
	}
	if i := tr.Lookup("/etc/shadow"); i.Mode != unix.S_IFREG|0o640 || i.GID != 42 {
		t.Errorf("shadow: %o %d", i.Mode, i.GID)
	}
	for l := range strings.Lines(text(t, tr, "/etc/shadow")) {
		if f := strings.Split(l, ":"); f[1] != "*" {
			t.Errorf("an account with a password: %s", l)
		}
	}
	status := text(t, tr, "/var/lib/dpkg/status")
	if !strings.Contains(status, "Package: none\n") || !strings.Contains(status, "Description: kept\n") || strings.Contains(status, "/etc/x") {
		t.Errorf("status:\n%s", status)
	}
}

func TestKeyFollowsVersions(t *testing.T) {
	key := func(version string) string {
		h := newHost(t)
		h.pkg("app", "")
		h.file("var/lib/dpkg/status", strings.Replace(h.status.String(), "Version: 1", "Version: "+version, 1), 0o644)
		p := New(h.dir, []string{"app"})
		defer p.Close()
		k, err := p.Key(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	if key("1") != key("1") || key("1") == key("2") {
		t.Errorf("keys %s, %s, %s", key("1"), key("1"), key("2"))
	}
}
