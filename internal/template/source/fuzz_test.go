package source

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// fuzzLimits are small, so that a run that reaches a limit is short.
var fuzzLimits = tree.Limits{
	Bytes: 1 << 20, Entries: 2000, StreamBytes: 4 << 20, MetaBytes: 1 << 20, Depth: 32, Links: 50, XattrBytes: 4096,
}

// FuzzLayer merges arbitrary bytes as a layer, compressed or not, over a small
// image. The tree must stay valid and within its limits, and every error must have
// a kind.
func FuzzLayer(f *testing.F) {
	base := makeTar(f, dirent("usr/lib"), sym("lib", "usr/lib"), reg("etc/passwd", "root"), sym("up", "../../.."), hardlink("also", "etc/passwd"))
	f.Fuzz(func(t *testing.T, data []byte) {
		spool, err := os.Create(filepath.Join(t.TempDir(), "spool"))
		if err != nil {
			t.Fatal(err)
		}
		defer spool.Close()
		tr := tree.New(fuzzLimits)
		sp := tree.NewSpool(spool)
		if err := tr.BeginLayer("base"); err != nil {
			t.Fatal(err)
		}
		if err := mergeTar(context.Background(), tr, sp, bytes.NewReader(base), true); err != nil {
			t.Fatal(err)
		}
		if err := tr.BeginLayer("fuzzed"); err != nil {
			t.Fatal(err)
		}
		u, err := decompress(bytes.NewReader(data))
		if err == nil {
			err = mergeTar(context.Background(), tr, sp, newLimitedReader(u, "StreamBytes", fuzzLimits.StreamBytes, "fuzzed"), true)
			if cerr := u.Close(); cerr != nil {
				t.Fatal(cerr)
			}
		}
		if err != nil && !kind.Is(err, kind.Invalid) && !kind.Is(err, kind.Exhausted) {
			t.Fatalf("an error of kind %v: %v", kind.Of(err), err)
		}
		checkTree(t, tr)
	})
}

func checkTree(t *testing.T, tr *tree.Tree) {
	t.Helper()
	names := map[*tree.Inode]int64{}
	entries := int64(0)
	err := tr.Walk(func(name string, i *tree.Inode) error {
		base := name[strings.LastIndexByte(name, '/')+1:]
		switch {
		case name != "/" && (base == "" || base == "." || base == ".."), strings.ContainsRune(base, 0), len(base) > 255:
			t.Fatalf("the name %q", name)
		case int64(len(name)) > tr.Limits().PathBytes, int64(strings.Count(name, "/")) > tr.Limits().Depth+1:
			t.Fatalf("%q is over a limit", name)
		}
		if !i.IsDir() && !i.IsRegular() && !i.IsSymlink() {
			t.Fatalf("%q has mode %o", name, i.Mode)
		}
		entries++
		if !i.IsDir() {
			names[i]++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if entries > tr.Limits().Entries+1 {
		t.Fatalf("%d entries", entries)
	}
	for i, n := range names {
		if i.Links() != n || n > tr.Limits().Links {
			t.Fatalf("a file of %d names counts %d", n, i.Links())
		}
	}
}

// FuzzArchive reads arbitrary bytes as a tar file with an image in it.
func FuzzArchive(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		file := filepath.Join(dir, "image.tar")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		spool, err := os.Create(filepath.Join(dir, "spool"))
		if err != nil {
			t.Fatal(err)
		}
		defer spool.Close()
		a := NewTarball(file, "", fuzzLimits)
		defer a.Close()
		if _, err := a.Key(context.Background()); err != nil {
			if kind.Of(err) == kind.Internal {
				t.Fatal(err)
			}
			return
		}
		tr := tree.New(fuzzLimits)
		if _, err := a.Load(context.Background(), tr, tree.NewSpool(spool), nil); err != nil && kind.Of(err) == kind.Internal {
			t.Fatal(err)
		}
		checkTree(t, tr)
	})
}
