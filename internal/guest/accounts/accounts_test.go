package accounts

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func open(t *testing.T, passwd, group string) *DB {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"passwd": passwd, "group": group} {
		if text == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Open(filepath.Join(dir, "passwd"), filepath.Join(dir, "group"))
}

const passwd = `root:x:0:0:root:/root:/bin/bash
# comment
+nis::::::
user:x:1000:1000:Some One,,,:/home/user:/bin/bash
user:x:4000:4000:the second is not reached:/:/bin/sh
short:x:5
nan:x:abc:1:::
minus:x:-1:1:::
top:x:4294967295:1:::
huge:x:4294967296:1:::
relative:x:1001:1001::home:/bin/sh
dots:x:1002:1002::/a/../b/:
1000:x:1003:1003::/digits:
win:x:1004:1004::/win:/bin/sh` + "\r\n"

func TestLookup(t *testing.T) {
	db := open(t, passwd, "root:x:0:\nuser:x:1000:\nwheel:x:10:root,user\naudio:x:11:user\nuser2:x:1000:user\nbad:x\nwheel2:x:10:user\n")
	for name, want := range map[string]User{
		"root":     {Name: "root", Home: "/root", Shell: "/bin/bash", Groups: []uint32{10}},
		"user":     {Name: "user", UID: 1000, GID: 1000, Home: "/home/user", Shell: "/bin/bash", Groups: []uint32{10, 11}},
		"relative": {Name: "relative", UID: 1001, GID: 1001, Home: "/", Shell: "/bin/sh"},
		"dots":     {Name: "dots", UID: 1002, GID: 1002, Home: "/b"},
		"1000":     {Name: "1000", UID: 1003, GID: 1003, Home: "/digits"}, // a name goes before a number
		"1004":     {Name: "win", UID: 1004, GID: 1004, Home: "/win", Shell: "/bin/sh"},
	} {
		got, err := db.Lookup(name)
		if d := cmp.Diff(want, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", name, err, d)
		}
	}
	for _, name := range []string{"", "nobody", "short", "nan", "minus", "top", "huge", "+nis", "# comment", "9999", "user:x", "-1", "+0"} {
		_, err := db.Lookup(name)
		var unknown *UnknownError
		if !errors.As(err, &unknown) || unknown.Name != name {
			t.Errorf("%q: got %v", name, err)
		}
	}
	user, group := db.Names()
	if user(1000) != "user" || user(77) != "77" || group(10) != "wheel" || group(77) != "77" {
		t.Error("names are wrong")
	}
}

func TestFilesChange(t *testing.T) {
	db := open(t, "a:x:1:1::/a:", "")
	if _, err := db.Lookup("a"); err != nil {
		t.Fatal(err) // no group file is no error
	}
	if err := os.WriteFile(db.passwd, []byte("b:x:2:2::/bb:"), 0o644); err != nil {
		t.Fatal(err)
	}
	if u, err := db.Lookup("b"); err != nil || u.UID != 2 {
		t.Errorf("%+v, %v", u, err)
	}
	if err := os.Remove(db.passwd); err != nil {
		t.Fatal(err)
	}
	var unknown *UnknownError
	if _, err := db.Lookup("b"); !errors.As(err, &unknown) {
		t.Errorf("got %v", err)
	}
	// A FIFO does not block.
	if err := unix.Mkfifo(db.passwd, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Lookup("b"); err == nil {
		t.Error("a user from a FIFO")
	}
}

// TestNoPasswd uses an image without a passwd file.
func TestNoPasswd(t *testing.T) {
	db := open(t, "", "wheel:x:10:root\n")
	for name, want := range map[string]User{
		"root": {Name: "root", Home: "/", Shell: "/bin/sh", Groups: []uint32{10}},
		"0":    {Name: "0", Home: "/", Shell: "/bin/sh"},
		"1000": {Name: "1000", UID: 1000, GID: 1000, Home: "/", Shell: "/bin/sh"},
	} {
		got, err := db.Lookup(name)
		if d := cmp.Diff(want, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", name, err, d)
		}
	}
	for _, name := range []string{"", "user", "-1", "4294967295"} {
		var unknown *UnknownError
		if _, err := db.Lookup(name); !errors.As(err, &unknown) {
			t.Errorf("%q: got %v", name, err)
		}
	}
	// Once there is a passwd file, only its accounts exist.
	if err := os.WriteFile(db.passwd, []byte("a:x:1:1::/a:"), 0o644); err != nil {
		t.Fatal(err)
	}
	var unknown *UnknownError
	if _, err := db.Lookup("1000"); !errors.As(err, &unknown) {
		t.Errorf("got %v", err)
	}
}

func TestDefaultUser(t *testing.T) {
	r := NewResolver(open(t, "", ""), "", Settings{User: "user"})
	if u, err := r.User(""); err != nil || u.Name != "root" {
		t.Errorf("no default set, no such account: %+v, %v", u, err)
	}
	r.Update(Settings{User: "user"})
	var unknown *UnknownError
	if _, err := r.User(""); !errors.As(err, &unknown) {
		t.Errorf("default set, no such account: %v", err)
	}
	r = NewResolver(open(t, "user:x:1000:1000::/home/user:", ""), "", Settings{User: "user"})
	if u, err := r.User(""); err != nil || u.Name != "user" {
		t.Errorf("no default set, account exists: %+v, %v", u, err)
	}
}

func FuzzPasswd(f *testing.F) {
	f.Add([]byte(passwd), []byte("wheel:x:10:root,user\n"))
	f.Add([]byte("a:b:c:d:e:f:g\n:::::::\n::::::"), []byte(":::\n\x00:x:1:,,,"))
	f.Add([]byte(strings.Repeat("x", 1000)), []byte("\xff:x:4294967294:\xff"))
	f.Fuzz(func(t *testing.T, passwd, group []byte) {
		for _, u := range parsePasswd(passwd) {
			if u.Name == "" || !filepath.IsAbs(u.Home) || strings.ContainsAny(u.Name, ":\n") || strings.IndexByte(u.Home, 0) >= 0 || u.UID == 1<<32-1 {
				t.Errorf("user %+v", u)
			}
		}
		for _, g := range parseGroup(group) {
			if g.name == "" || g.gid == 1<<32-1 {
				t.Errorf("group %+v", g)
			}
		}
	})
}

func TestPath(t *testing.T) {
	u := User{Name: "u", Home: "/home/u"}
	r := NewResolver(nil, "", Settings{})
	for path, want := range map[string]string{
		"": "/home/u", "~": "/home/u", "~/": "/home/u", "~/a": "/home/u/a", "a/./b//c": "/home/u/a/b/c", "/x/../y": "/y", "/../..": "/",
		"../../..": "/", "~/../v": "/home/v", "a~": "/home/u/a~", "\U0010FEFF": "/home/u/\xff", "/a b\n": "/a b\n",
	} {
		if got, err := r.Path(u, path); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", path, got, err, want)
		}
	}
	for _, path := range []string{"~root", "~root/x", "a\x00", strings.Repeat("a/", 2048)} {
		if got, err := r.Path(u, path); err == nil {
			t.Errorf("%q: got %q", path, got)
		}
	}
	for dir, want := range map[string]string{"/w": "/w", "w": "/home/u/w", "~/w": "/home/u/w", "~": "/home/u"} {
		r.Update(Settings{Workdir: dir})
		if got, err := r.Path(u, ""); err != nil || got != want {
			t.Errorf("default %q: got %q, %v", dir, got, err)
		}
	}
}

func FuzzPath(f *testing.F) {
	for _, s := range []string{"", "~", "~/x", "~root", "../../x", "/a/../../b", "\x00", "\U0010FE80", "//", "./~", "\xff"} {
		f.Add(s)
	}
	r := NewResolver(nil, "", Settings{})
	f.Fuzz(func(t *testing.T, path string) {
		got, err := r.Path(User{Home: "/home/u"}, path)
		if err == nil && (!filepath.IsAbs(got) || filepath.Clean(got) != got || strings.IndexByte(got, 0) >= 0) {
			t.Errorf("%q became %q", path, got)
		}
	})
}

func TestEnv(t *testing.T) {
	r := NewResolver(nil, "", Settings{})
	r.Update(Settings{Env: map[string]string{"A": "sandbox", "HOME": "/sandbox"}})
	got := r.Env(User{Name: "u", Home: "/home/u"}, map[string]string{"A": "call"})
	want := map[string]string{"PATH": defaultPath, "HOME": "/sandbox", "USER": "u", "LOGNAME": "u", "A": "call"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestDo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to switch users")
	}
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	u := User{Name: "u", UID: 12345, GID: 12346, Groups: []uint32{12347}}
	for range 100 { // on any thread, which is root again afterwards
		err := u.Do(func() error {
			groups, err := unix.Getgroups()
			if err != nil || len(groups) != 1 || groups[0] != 12347 || unix.Geteuid() != 12345 || unix.Getegid() != 12346 || unix.Getuid() != 0 {
				t.Errorf("groups %v, %v, euid %d, egid %d, uid %d", groups, err, unix.Geteuid(), unix.Getegid(), unix.Getuid())
			}
			_, err = os.Open(secret)
			return err
		})
		if !errors.Is(err, os.ErrPermission) {
			t.Fatalf("got %v", err)
		}
		if err := os.Chmod(secret, 0o600); err != nil {
			t.Fatal(err)
		}
		if unix.Geteuid() != 0 || unix.Getegid() != 0 {
			t.Fatal("not root again")
		}
	}
	if err := u.Do(func() error { panic("x") }); err == nil || !strings.Contains(err.Error(), "panic: x") {
		t.Errorf("got %v", err)
	}
	if err := (User{}).Do(func() error { _, err := os.ReadFile(secret); return err }); err != nil {
		t.Errorf("root: %v", err)
	}
}
