package guest

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestCopyDirs makes the directories of an image's /run and nothing else. What
// is there already is kept.
func TestCopyDirs(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	for _, d := range []struct {
		name string
		mode uint32
	}{{"lock", 0o1777}, {"db", 0o750}, {"db/deep", 0o2711}} {
		if err := os.Mkdir(filepath.Join(from, d.name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Chmod(filepath.Join(from, d.name), d.mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{filepath.Join(from, "db/pid"), filepath.Join(to, "kept")} {
		if err := os.WriteFile(name, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(to, "db"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := copyDirs(from, to); err != nil {
		t.Fatal(err)
	}
	got := map[string]uint32{}
	err := filepath.WalkDir(to, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if rel, relErr := filepath.Rel(to, path); relErr == nil && rel != "." {
			got[rel] = st.Mode & 0o7777
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]uint32{"lock": 0o1777, "db": 0o750, "db/deep": 0o2711, "kept": 0o600}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("directories and modes (-want +got):\n%s", diff)
	}
	for i := range maxRunDirs {
		if err := os.Mkdir(filepath.Join(from, "lock", strconv.Itoa(i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := copyDirs(from, t.TempDir()); err == nil {
		t.Error("more directories than allowed were made")
	}
}
