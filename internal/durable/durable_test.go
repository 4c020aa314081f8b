package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

func TestWriteFile(t *testing.T) {
	for name, flags := range map[string][]Flag{"synced": nil, "not synced": {NotSynced}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			for _, text := range []string{"old", "new"} {
				if err := WriteFile(path, []byte(text), 0o666, flags...); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(path)
				if err != nil || string(got) != text {
					t.Errorf("read %q, %v; want %q", got, err, text)
				}
			}
			if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o666 {
				t.Errorf("%v, %v; the umask applies to the mode", fi.Mode(), err)
			}
			if err := os.Mkdir(filepath.Join(dir, "dir"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := WriteFile(filepath.Join(dir, "dir"), nil, 0o600, flags...); err == nil {
				t.Error("a directory is replaced")
			}
			if err := WriteFile(filepath.Join(dir, "none", "file"), nil, 0o600, flags...); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a file in a directory that does not exist: %v", err)
			}
			wantEntries(t, dir, 2)
		})
	}
}

// TestReplacesAtOnce reads while the file is replaced: every read gets one of
// the two contents as a whole.
func TestReplacesAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	contents := [2]string{"short", string(make([]byte, 1<<20))}
	write := func(i int) {
		if err := WriteFile(path, []byte(contents[i%2]), 0o600, NotSynced); err != nil {
			t.Error(err)
		}
	}
	write(0)
	var reader sync.WaitGroup
	var done atomic.Bool
	reader.Go(func() {
		for !done.Load() {
			got, err := os.ReadFile(path)
			if err != nil || string(got) != contents[0] && string(got) != contents[1] {
				t.Errorf("read %d bytes, %v", len(got), err)
				return
			}
		}
	})
	for i := range 50 {
		write(i)
	}
	done.Store(true)
	reader.Wait()
}

func TestCreateOnly(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	var wg sync.WaitGroup
	var created atomic.Int32
	for i := range 8 {
		wg.Go(func() {
			err := WriteFile(path, fmt.Append(nil, i), 0o600, CreateOnly)
			if err == nil {
				created.Add(1)
			} else if !errors.Is(err, fs.ErrExist) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := created.Load(); n != 1 {
		t.Errorf("%d writers created the file", n)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("other"), 0o600, CreateOnly, NotSynced); !errors.Is(err, fs.ErrExist) {
		t.Errorf("the file exists: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("an existing file changed from %q to %q, %v", before, after, err)
	}
	wantEntries(t, dir, 1)
}

func TestInRoot(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := root.Mkdir("sub", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFileIn(root, "sub/file", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "sub", "file")); err != nil || string(got) != "x" {
		t.Errorf("read %q, %v", got, err)
	}
	if err := WriteFileIn(root, "../file", nil, 0o600); err == nil {
		t.Error("a file outside the root is written")
	}
	for range 2 { // the second time it is gone already
		if err := RemoveIn(root, "sub/file"); err != nil {
			t.Error(err)
		}
	}
	wantEntries(t, filepath.Join(dir, "sub"), 0)
}

func TestIsTemp(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// A directory in the way makes the last step fail after the temporary
	// file was written.
	if err := root.Mkdir("dir", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeTemp(root, tempPrefix+"X", nil, 0o600, true); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(root.Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if IsTemp(e.Name()) == e.IsDir() {
			t.Errorf("IsTemp(%q) = %t", e.Name(), IsTemp(e.Name()))
		}
	}
}

func wantEntries(t *testing.T, dir string, n int) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != n {
		t.Errorf("%s holds %v, %v; want %d entries", dir, left, err, n)
	}
}
