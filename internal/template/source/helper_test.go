package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"bivy/internal/template/tree"
)

// entry is one entry of a test's tar.
type entry struct {
	name string
	text string
	to   string // of links
	flag byte
	mode int64
	uid  int
	pax  map[string]string
}

func reg(name, text string) entry {
	return entry{name: name, text: text, flag: tar.TypeReg, mode: 0o644}
}
func dirent(name string) entry       { return entry{name: name, flag: tar.TypeDir, mode: 0o755} }
func sym(name, to string) entry      { return entry{name: name, to: to, flag: tar.TypeSymlink, mode: 0o777} }
func hardlink(name, to string) entry { return entry{name: name, to: to, flag: tar.TypeLink} }

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.to, Typeflag: e.flag, Mode: e.mode, Uid: e.uid, Gid: e.uid, Size: int64(len(e.text)),
			ModTime: time.Unix(1_700_000_000, 0), PAXRecords: e.pax}
		if e.pax != nil {
			h.Format = tar.FormatPAX
		}
		if e.flag == tar.TypeXGlobalHeader {
			h = &tar.Header{Name: e.name, Typeflag: e.flag, PAXRecords: e.pax, Format: tar.FormatPAX}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gz(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zst(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(b, nil)
}

// load runs a source as a store does and renders the tree.
func load(t *testing.T, s Source, limits tree.Limits) (map[string]string, Defaults, *tree.Tree, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "spool"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		f.Close()
	})
	if _, err := s.Key(context.Background()); err != nil {
		return nil, Defaults{}, nil, err
	}
	tr := tree.New(limits)
	d, err := s.Load(context.Background(), tr, tree.NewSpool(f), nil)
	if err != nil {
		return nil, Defaults{}, nil, err
	}
	return render(t, tr), d, tr, nil
}

// render is a tree as text: one line per name.
func render(t testing.TB, tr *tree.Tree) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := tr.Walk(func(name string, i *tree.Inode) error {
		s := fmt.Sprintf("%o %d", i.Mode, i.UID)
		if i.IsSymlink() {
			s += " -> " + i.Target
		}
		if i.IsRegular() && i.Links() > 1 {
			s += fmt.Sprintf(" links=%d", i.Links())
		}
		if i.Size > 0 {
			r, err := i.Content.Open()
			if err != nil {
				return err
			}
			b, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			if err := r.Close(); err != nil {
				return err
			}
			s += " " + string(b)
		}
		for k, v := range i.Xattrs {
			s += fmt.Sprintf(" %s=%q", k, v)
		}
		if name != "/" {
			out[name] = s
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
