package tree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
)

func file(text string) *Inode {
	i := &Inode{Mode: unix.S_IFREG | 0o644, Size: int64(len(text))}
	if text != "" {
		i.Content = Bytes(text)
	}
	return i
}

func dir() *Inode { return &Inode{Mode: unix.S_IFDIR | 0o755} }

func symlink(to string) *Inode { return &Inode{Mode: unix.S_IFLNK | 0o777, Target: to} }

// list renders a tree, one entry per line.
func list(t *testing.T, tr *Tree) []string {
	t.Helper()
	var out []string
	err := tr.Walk(func(name string, i *Inode) error {
		switch {
		case i.IsDir():
			out = append(out, name+"/")
		case i.IsSymlink():
			out = append(out, name+" -> "+i.Target)
		default:
			s := name
			if i.Size > 0 {
				r, err := i.Content.Open()
				if err != nil {
					return err
				}
				b, err := io.ReadAll(r)
				if err != nil {
					return err
				}
				s += " = " + string(b)
			}
			if i.Links() != 1 {
				s += fmt.Sprintf(" (%d names)", i.Links())
			}
			out = append(out, s)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out[1:] // without "//"
}

type op func(*Tree) error

func put(name string, i *Inode) op { return func(t *Tree) error { return t.Put(name, i) } }
func link(name, to string) op      { return func(t *Tree) error { return t.Link(name, to) } }
func whiteout(name string) op      { return func(t *Tree) error { return t.Whiteout(name) } }
func opaque(name string) op        { return func(t *Tree) error { return t.Opaque(name) } }
func layer() op                    { return func(t *Tree) error { return t.BeginLayer("layer") } }
func remove(name string) op        { return func(t *Tree) error { return t.Remove(name) } }

func TestMerge(t *testing.T) {
	for _, tc := range []struct {
		name string
		ops  []op
		want []string
	}{
		{"a file makes its parents", []op{put("a/b/c", file("x"))}, []string{"/a/", "/a/b/", "/a/b/c = x"}},
		{"the last file wins", []op{put("f", file("1")), put("./f", file("2"))}, []string{"/f = 2"}},
		{"absolute names are below the root", []op{put("/etc/passwd", file("x"))}, []string{"/etc/", "/etc/passwd = x"}},
		{"a directory keeps its children", []op{put("d/f", file("1")), layer(), put("d", dir())}, []string{"/d/", "/d/f = 1"}},
		{"a file replaces a directory", []op{put("d/f", file("1")), put("d", file("2"))}, []string{"/d = 2"}},
		{"a directory replaces a symlink", []op{put("usr/lib", dir()), put("lib", symlink("usr/lib")), layer(), put("lib", dir()), put("lib/f", file("1"))},
			[]string{"/lib/", "/lib/f = 1", "/usr/", "/usr/lib/"}},
		{"a parent that is a symlink is followed inside the tree", []op{put("usr/lib", dir()), put("lib", symlink("usr/lib")), put("lib/f", file("1"))},
			[]string{"/lib -> usr/lib", "/usr/", "/usr/lib/", "/usr/lib/f = 1"}},
		{"a symlink out of the tree stays in it", []op{put("out", symlink("../../../../etc")), put("out/f", file("1"))},
			[]string{"/etc/", "/etc/f = 1", "/out -> ../../../../etc"}},
		{"an absolute symlink begins at the tree's root", []op{put("d/out", symlink("/etc/x")), put("d/out/f", file("1"))},
			[]string{"/d/", "/d/out -> /etc/x", "/etc/", "/etc/x/", "/etc/x/f = 1"}},
		{"a file is not written through a symlink", []op{put("t", file("1")), put("s", symlink("t")), layer(), put("s", file("2"))},
			[]string{"/s = 2", "/t = 1"}},
		{"hard links are one file", []op{put("a", file("1")), link("d/b", "a")}, []string{"/a = 1 (2 names)", "/d/", "/d/b = 1 (2 names)"}},
		{"a hard link across layers", []op{put("a", file("1")), layer(), link("b", "a"), whiteout("a")}, []string{"/b = 1"}},
		{"replacing one name leaves the other", []op{put("a", file("1")), link("b", "a"), layer(), put("a", file("2"))}, []string{"/a = 2", "/b = 1"}},
		{"a hard link to itself", []op{put("a", file("1")), link("a", "a")}, []string{"/a = 1"}},
		{"a hard link to a symlink", []op{put("s", symlink("x")), link("t", "s")}, []string{"/s -> x", "/t -> x"}},
		{"a whiteout hides a lower file", []op{put("d/f", file("1")), put("d/g", file("2")), layer(), whiteout("d/f")}, []string{"/d/", "/d/g = 2"}},
		{"a whiteout hides a lower directory", []op{put("d/e/f", file("1")), layer(), whiteout("d")}, []string{}},
		{"a whiteout after the new file", []op{put("f", file("1")), layer(), put("f", file("2")), whiteout("f")}, []string{"/f = 2"}},
		{"a whiteout before the new directory", []op{put("d/old", file("1")), layer(), whiteout("d"), put("d/new", file("2"))}, []string{"/d/", "/d/new = 2"}},
		{"a whiteout after the new directory", []op{put("d/old", file("1")), layer(), put("d/new", file("2")), whiteout("d")}, []string{"/d/", "/d/new = 2"}},
		{"a whiteout of nothing", []op{whiteout("no/such"), put("f", file("1"))}, []string{"/f = 1"}},
		{"an opaque directory", []op{put("d/old/f", file("1")), layer(), put("d", dir()), put("d/new", file("2")), opaque("d")}, []string{"/d/", "/d/new = 2"}},
		{"an opaque root", []op{put("old", file("1")), layer(), opaque(""), put("new", file("2"))}, []string{"/new = 2"}},
		{"opaque before the new files", []op{put("d/old", file("1")), layer(), opaque("d"), put("d/new", file("2"))}, []string{"/d/", "/d/new = 2"}},
		{"names need not be UTF-8", []op{put("a\xff\xfe", file("1"))}, []string{"/a\xff\xfe = 1"}},
		{"remove", []op{put("d/f", file("1")), put("g", file("2")), remove("d"), remove("no/such")}, []string{"/g = 2"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tr := New(Limits{})
			for _, o := range append([]op{layer()}, tc.ops...) {
				if err := o(tr); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(tc.want, list(t, tr)); diff != "" && len(tc.want)+len(list(t, tr)) > 0 {
				t.Error(diff)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	long := strings.Repeat("a", 300)
	loop := []op{put("x", symlink("y")), put("y", symlink("x"))}
	for _, tc := range []struct {
		name string
		ops  []op
		kind kind.Kind
		says string
	}{
		{"climbing", []op{put("../f", file("1"))}, kind.Invalid, `".."`},
		{"climbing inside", []op{put("a/../../f", file("1"))}, kind.Invalid, `".."`},
		{"climbing absolute", []op{put("/../etc/passwd", file("1"))}, kind.Invalid, `".."`},
		{"climbing whiteout", []op{whiteout("../f")}, kind.Invalid, `".."`},
		{"climbing link target", []op{link("f", "../../etc/passwd")}, kind.Invalid, `".."`},
		{"NUL", []op{put("a\x00b", file("1"))}, kind.Invalid, "NUL"},
		{"long name", []op{put(long, file("1"))}, kind.Exhausted, "NameBytes"},
		{"long name through a symlink", []op{put("s", symlink(long)), put("s/f", file("1"))}, kind.Exhausted, "NameBytes"},
		{"long path", []op{put(strings.Repeat("abcdefg/", 600), dir())}, kind.Exhausted, "PathBytes"},
		{"deep path", []op{put(strings.Repeat("a/", 300), dir())}, kind.Exhausted, "Depth"},
		{"symlink loop", append(loop, put("x/f", file("1"))), kind.Invalid, "symlinks"},
		{"a long way through symlinks", []op{put("a", symlink(strings.Repeat("./", 2000))), put("b", symlink("a/a/a")), put("b/f", file("1"))}, kind.Invalid, "components"},
		{"below a file", []op{put("f", file("1")), put("f/g", file("2"))}, kind.Invalid, "not a directory"},
		{"root as a file", []op{put("/", file("1"))}, kind.Invalid, "root"},
		{"root whiteout", []op{whiteout("/")}, kind.Invalid, "root"},
		{"device", []op{put("n", &Inode{Mode: unix.S_IFCHR | 0o666})}, kind.Invalid, "not that of a file"},
		{"empty symlink", []op{put("s", symlink(""))}, kind.Invalid, "symlink"},
		{"long symlink", []op{put("s", symlink(strings.Repeat("a/", 4000)))}, kind.Exhausted, "SymlinkBytes"},
		{"link to nothing", []op{link("f", "nothing")}, kind.Invalid, "hard link"},
		{"link to a directory", []op{put("d", dir()), link("f", "d")}, kind.Invalid, "hard link"},
		{"link to what a whiteout hid", []op{put("f", file("1")), layer(), whiteout("f"), link("g", "f")}, kind.Invalid, "hard link"},
		{"xattrs", []op{put("f", &Inode{Mode: unix.S_IFREG, Xattrs: map[string]string{"user.a": strings.Repeat("x", 70000)}})}, kind.Exhausted, "XattrBytes"},
		{"size without content", []op{put("f", &Inode{Mode: unix.S_IFREG, Size: 5})}, kind.Invalid, "size"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tr := New(Limits{})
			var err error
			for _, o := range append([]op{layer()}, tc.ops...) {
				if err = o(tr); err != nil {
					break
				}
			}
			if !kind.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v (%v), want %v saying %q", err, kind.Of(err), tc.kind, tc.says)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	many := func(n int, f func(int) op) []op {
		var out []op
		for i := range n {
			out = append(out, f(i))
		}
		return out
	}
	for _, tc := range []struct {
		limit  string
		limits Limits
		ops    []op
	}{
		{"Entries", Limits{Entries: 10}, many(11, func(i int) op { return put(fmt.Sprint(i), file("x")) })},
		{"Entries", Limits{Entries: 10}, many(11, func(i int) op { return whiteout(fmt.Sprint(i)) })},
		{"Entries", Limits{Entries: 10}, many(11, func(int) op { return put("same", file("x")) })},
		{"Layers", Limits{Layers: 3}, many(4, func(int) op { return layer() })},
		{"Links", Limits{Links: 3}, append([]op{put("f", file("x"))}, many(3, func(i int) op { return link(fmt.Sprint(i), "f") })...)},
		{"MetaBytes", Limits{MetaBytes: 1000}, many(20, func(i int) op { return put(fmt.Sprintf("%0100d", i), file("x")) })},
		{"MetaBytes", Limits{MetaBytes: 1000}, many(5, func(i int) op { return put(fmt.Sprint(i), symlink(strings.Repeat("t", 300))) })},
		// A short name that leads through a symlink counts with its real length.
		{"MetaBytes", Limits{MetaBytes: 3000}, append([]op{put(strings.Repeat("d/", 100), dir()), put("s", symlink(strings.Repeat("d/", 100)))},
			many(100, func(i int) op { return put(fmt.Sprintf("s/%d", i), file("x")) })...)},
		{"Bytes", Limits{Bytes: 100}, []op{func(t *Tree) error { return t.ChargeBytes("f", 101) }}},
		{"Bytes", Limits{Bytes: 100}, []op{func(t *Tree) error { return t.ChargeBytes("f", 60) }, func(t *Tree) error { return t.ChargeBytes("g", 60) }}},
		{"Bytes", Limits{Bytes: 100}, []op{func(t *Tree) error { return t.ChargeBytes("f", -1) }}},
	} {
		tr := New(tc.limits)
		var err error
		for _, o := range tc.ops {
			if err = o(tr); err != nil {
				break
			}
		}
		var le *LimitError
		if !errors.As(err, &le) || le.Limit != tc.limit || !kind.Is(err, kind.Exhausted) {
			t.Errorf("%s: got %v", tc.limit, err)
		}
	}
}

func TestLookup(t *testing.T) {
	tr := New(Limits{})
	for _, o := range []op{
		put("usr/bin/mawk", file("1")), put("bin", symlink("usr/bin")),
		put("etc/alternatives/awk", symlink("/usr/bin/mawk")), put("usr/bin/awk", symlink("/etc/alternatives/awk")),
		put("usr/bin/up", symlink("../bin/./mawk")), put("loop", symlink("loop")), put("gone", symlink("nowhere")),
	} {
		if err := o(tr); err != nil {
			t.Fatal(err)
		}
	}
	for name, ok := range map[string]bool{"/bin/awk": true, "/usr/bin/up": true, "/loop": false, "/gone": false, "/no/such": false, "/": true} {
		if got := tr.Stat(name); (got != nil) != ok {
			t.Errorf("Stat(%s) = %v", name, got)
		}
	}
	if got := tr.Lookup("/bin/awk"); got == nil || got.Target != "/etc/alternatives/awk" {
		t.Errorf("Lookup followed: %v", got)
	}
}

func TestProtect(t *testing.T) {
	tr := New(Limits{})
	hostile := &Inode{Mode: unix.S_IFDIR | 0o777, UID: 1000, GID: 1000}
	for _, o := range []op{put("/", hostile), put("/usr", hostile), put("/usr/bin", hostile), put("/bin", symlink("usr/bin"))} {
		if err := o(tr); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.Protect("/bin/deep/er"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/", "/usr", "/usr/bin", "/usr/bin/deep", "/usr/bin/deep/er"} {
		if i := tr.Lookup(name); i == nil || i.UID != 0 || i.GID != 0 || i.Mode&0o022 != 0 {
			t.Errorf("%s: %+v", name, i)
		}
	}
}

func TestSpool(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "spool"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := NewSpool(f)
	one, err := s.Add(strings.NewReader("first and more"), 5)
	if err != nil {
		t.Fatal(err)
	}
	two, n, err := s.AddAll(strings.NewReader("second"), 6)
	if err != nil || n != 6 {
		t.Fatal(n, err)
	}
	for want, c := range map[string]Content{"first": one, "second": two} {
		r, err := c.Open()
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != want {
			t.Errorf("got %q, %v", b, err)
		}
	}
	if _, err := s.Add(strings.NewReader("short"), 6); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("short input: %v", err)
	}
	if _, _, err := s.AddAll(strings.NewReader("too long"), 7); err == nil {
		t.Error("long input was taken")
	}
}

func TestNotes(t *testing.T) {
	var n Notes
	for i := range 7 {
		n.Add("devices left out", fmt.Sprint("/dev/", i))
	}
	n.Add("another", "x\n")
	want := []string{`another: 1: "x\n"`, `devices left out: 7: "/dev/0", "/dev/1", "/dev/2", "/dev/3", "/dev/4", …`}
	if diff := cmp.Diff(want, n.List()); diff != "" {
		t.Error(diff)
	}
}
