package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// sample is a tree with every kind of entry, and sizes around the limits of the
// format.
func sample(t *testing.T) *tree.Tree {
	t.Helper()
	tr := tree.New(tree.Limits{})
	put := func(name string, i *tree.Inode) {
		t.Helper()
		if err := tr.Put(name, i); err != nil {
			t.Fatal(err)
		}
	}
	text := func(n int) *tree.Inode {
		i := &tree.Inode{Mode: unix.S_IFREG | 0o644, Mtime: 1700000000, MtimeNsec: 123, Size: int64(n)}
		if n > 0 {
			i.Content = tree.Bytes(strings.Repeat("0123456789abcdef", n/16+1)[:n])
		}
		return i
	}
	for _, n := range []int{0, 1, 15, 100, 4000, 4031, 4032, 4033, 4064, 4095, 4096, 4097, 8191, 8192, 8193, 100_000} {
		put(fmt.Sprintf("sizes/%d", n), text(n))
	}
	sudo := text(10)
	sudo.Mode = unix.S_IFREG | 0o4755
	put("modes/setuid", sudo)
	odd := text(10)
	odd.Mode, odd.UID, odd.GID = unix.S_IFREG|0o2640, 100_000, 4_000_000_000
	put("modes/big-ids", odd)
	put("modes/sticky", &tree.Inode{Mode: unix.S_IFDIR | 0o1777, Mtime: 5})
	put("modes/old", &tree.Inode{Mode: unix.S_IFREG | 0o600, Mtime: 0})
	put("links/short", &tree.Inode{Mode: unix.S_IFLNK | 0o777, Target: "a"})
	put("links/long", &tree.Inode{Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("x", 4095)})
	put("links/z-first", text(5000))
	put("links/small", text(7))
	for name, to := range map[string]string{
		"links/a-second": "links/z-first", "a-third": "links/z-first", "links/small-too": "links/small", "links/short-too": "links/short",
	} {
		if err := tr.Link(name, to); err != nil {
			t.Fatal(err)
		}
	}
	put("names/\xff\xfe not utf-8", text(3))
	put("names/"+strings.Repeat("n", 255), text(3))
	put("names/.hidden", text(3))
	put("names/-dash", text(3))
	put("names/back\\slash", text(3))
	put("names/\n", text(3))
	put("empty", &tree.Inode{Mode: unix.S_IFDIR | 0o700})
	for i := range 5000 { // a directory of many blocks
		put(fmt.Sprintf("big/%s-%d", strings.Repeat("f", i%200), i), text(i%3))
	}
	deep := text(1)
	put(strings.Repeat("d/", 100)+"f", deep)
	return tr
}

// inspect renders an image as read by go-erofs, one line per name.
type inspect map[string]string

// want renders the tree as inspect would find it in an image. Hard links are
// compared by the first name in byte order.
func want(t *testing.T, tr *tree.Tree) inspect {
	t.Helper()
	out := inspect{}
	first := map[*tree.Inode]string{}
	err := tr.Walk(func(name string, i *tree.Inode) error {
		line := fmt.Sprintf("%06o %d:%d %d.%09d links=%d", i.Mode, i.UID, i.GID, i.Mtime, i.MtimeNsec, i.Links())
		switch {
		case i.IsSymlink():
			line += " -> " + i.Target
		case i.IsRegular():
			sum := sha256.New()
			if i.Size > 0 {
				r, err := i.Content.Open()
				if err != nil {
					return err
				}
				if _, err := io.Copy(sum, r); err != nil {
					return err
				}
			}
			line += fmt.Sprintf(" %d %x", i.Size, sum.Sum(nil)[:6])
		}
		if !i.IsDir() && i.Links() > 1 {
			if first[i] == "" {
				first[i] = name
			}
			line += " is " + first[i]
		}
		out[name] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func write(t *testing.T, tr *tree.Tree) (*os.Root, Image) {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	img, err := Write(t.Context(), root, tr, nil)
	if err != nil {
		t.Fatal(err)
	}
	return root, img
}

// TestReadBack reads an image with go-erofs, whose reader shares no code with
// patch.
func TestReadBack(t *testing.T) {
	tr := sample(t)
	// go-erofs opens no name that is not UTF-8; the kernel test has it.
	if err := tr.Remove("names/\xff\xfe not utf-8"); err != nil {
		t.Fatal(err)
	}
	root, img := write(t, tr)
	f, err := root.Open(img.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fsys, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	got := inspect{}
	first := map[int64]string{}
	err = fs.WalkDir(fsys, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*erofs.Stat)
		if !ok {
			return fmt.Errorf("%s: no stat", name)
		}
		full := "/" + name
		if name == "." {
			full = "/"
		}
		line := fmt.Sprintf("%06o %d:%d %d.%09d links=%d", unixMode(st.Mode), st.UID, st.GID, st.Mtime, st.MtimeNs, st.Nlink)
		switch {
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := fs.ReadLink(fsys, name)
			if err != nil {
				return err
			}
			line += " -> " + to
		case fi.Mode().IsRegular():
			b, err := fs.ReadFile(fsys, name)
			if err != nil {
				return err
			}
			sum := sha256.Sum256(b)
			line += fmt.Sprintf(" %d %x", fi.Size(), sum[:6])
			if st.InodeLayout != layoutPlain {
				t.Errorf("%s: data is inline, gVisor cannot map it", name)
			}
		}
		if !fi.IsDir() && st.Nlink > 1 {
			if first[st.Ino] == "" {
				first[st.Ino] = full
			}
			line += " is " + first[st.Ino]
		}
		got[full] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want(t, tr), got); diff != "" {
		t.Error(diff)
	}
}

func unixMode(m fs.FileMode) uint32 {
	out := uint32(m.Perm())
	switch {
	case m.IsDir():
		out |= unix.S_IFDIR
	case m&fs.ModeSymlink != 0:
		out |= unix.S_IFLNK
	default:
		out |= unix.S_IFREG
	}
	for bit, to := range map[fs.FileMode]uint32{fs.ModeSetuid: unix.S_ISUID, fs.ModeSetgid: unix.S_ISGID, fs.ModeSticky: unix.S_ISVTX} {
		if m&bit != 0 {
			out |= to
		}
	}
	return out
}

// TestKernel mounts an image with the kernel's own EROFS and compares all of
// it.
func TestKernel(t *testing.T) {
	tr := sample(t)
	root, img := write(t, tr)
	mnt := mount(t, filepath.Join(root.Name(), img.Name))
	got := inspect{}
	first := map[uint64]string{}
	err := filepath.WalkDir(mnt, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := os.Lstat(name)
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%s: no stat", name)
		}
		full := strings.TrimPrefix(name, mnt)
		if full == "" {
			full = "/"
		}
		line := fmt.Sprintf("%06o %d:%d %d.%09d links=%d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Nlink)
		switch {
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(name)
			if err != nil {
				return err
			}
			line += " -> " + to
		case fi.Mode().IsRegular():
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			sum := sha256.Sum256(b)
			line += fmt.Sprintf(" %d %x", fi.Size(), sum[:6])
		}
		if !fi.IsDir() && st.Nlink > 1 {
			if first[st.Ino] == "" {
				first[st.Ino] = full
			}
			line += " is " + first[st.Ino]
		}
		got[full] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want(t, tr), got); diff != "" {
		t.Error(diff)
	}
}

// mount mounts an image read-only for the test, which is skipped where the
// kernel will not.
func mount(t *testing.T, image string) string {
	t.Helper()
	mnt := t.TempDir()
	if err := unix.Mount(image, mnt, "erofs", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		t.Skipf("the kernel mounts no EROFS file here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return mnt
}

func TestFsck(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("fsck.erofs is not installed (erofs-utils)")
	}
	root, img := write(t, sample(t))
	out, err := exec.Command(fsck, "--extract", filepath.Join(root.Name(), img.Name)).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestNameIsHash(t *testing.T) {
	root, img := write(t, sample(t))
	b, err := root.ReadFile(img.Name)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	if got := hex.EncodeToString(sum[:]); img.Hex != got || img.Name != got+".erofs" || img.Bytes != int64(len(b)) {
		t.Errorf("%+v is not the image's: %s, %d bytes", img, got, len(b))
	}
	names, err := fs.ReadDir(root.FS(), ".")
	if err != nil || len(names) != 1 {
		t.Errorf("left in the directory: %v, %v", names, err)
	}
}

func TestSameTreeSameImage(t *testing.T) {
	_, a := write(t, sample(t))
	_, b := write(t, sample(t))
	if a != b {
		t.Errorf("%+v and %+v", a, b)
	}
}

func TestXattrsAreNoted(t *testing.T) {
	tr := tree.New(tree.Limits{})
	err := tr.Put("ping", &tree.Inode{Mode: unix.S_IFREG | 0o755, Xattrs: map[string]string{"security.capability": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	write(t, tr)
	if notes := tr.Notes().List(); len(notes) != 1 || !strings.Contains(notes[0], "/ping") {
		t.Errorf("notes: %q", notes)
	}
}

type failing struct{ open, read error }

func (f failing) Open() (io.ReadCloser, error) { return io.NopCloser(f), f.open }
func (f failing) Read([]byte) (int, error)     { return 0, f.read }

func TestNothingHalfMade(t *testing.T) {
	broken := errors.New("broken disk")
	for _, tc := range []struct {
		name    string
		content tree.Content
		size    int64
		want    error
	}{
		{"cannot open", failing{open: broken}, 10, broken},
		{"cannot read", failing{read: broken}, 10_000, broken},
		{"kind is kept", failing{read: kind.Errorf(kind.Conflict, "changed")}, 10, nil},
		{"too short", tree.Bytes("abc"), 10, io.ErrUnexpectedEOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tr := tree.New(tree.Limits{})
			if err := tr.Put("f", &tree.Inode{Mode: unix.S_IFREG, Size: tc.size, Content: tc.content}); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			_, err = Write(t.Context(), root, tr, nil)
			if tc.want != nil && !errors.Is(err, tc.want) || tc.want == nil && !kind.Is(err, kind.Conflict) {
				t.Errorf("got %v", err)
			}
			if err != nil && !strings.Contains(err.Error(), "/f") {
				t.Errorf("%v does not name the file", err)
			}
			if names, err := fs.ReadDir(root.FS(), "."); err != nil || len(names) != 0 {
				t.Errorf("left: %v, %v", names, err)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	tr := sample(t)
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, err = Write(ctx, root, tr, func(done, _ int64) {
		if done > 1000 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if names, err := fs.ReadDir(root.FS(), "."); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}

func TestProgress(t *testing.T) {
	var last, total int64
	tr := sample(t)
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, err = Write(t.Context(), root, tr, func(done, all int64) {
		if done < last {
			t.Fatalf("went back from %d to %d", last, done)
		}
		last, total = done, all
	})
	if err != nil || last != total || total == 0 {
		t.Errorf("ended at %d of %d, %v", last, total, err)
	}
}
