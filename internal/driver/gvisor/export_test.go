package gvisor

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/driver"
	"bivy/internal/driver/gvisor/bootflags"
	"bivy/internal/kind"
)

// sentryTar is a tar as a sentry writes it, with a report at its end if there
// is one.
func sentryTar(t testing.TB, report *bootflags.Report, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if report != nil {
		text, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		h := tar.Header{Name: "report", Size: int64(len(text)), Format: tar.FormatPAX, PAXRecords: map[string]string{bootflags.ReportRecord: "1"}}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestToOCI(t *testing.T) {
	report := bootflags.Report{Outside: []bootflags.Outside{{Path: "/mnt", Files: 2, Bytes: 3, Guest: true}}}
	in := sentryTar(t, &report,
		tar.Header{Typeflag: tar.TypeDir, Name: "dev/"},
		tar.Header{Typeflag: tar.TypeReg, Name: "dev/below", Size: 5},
		tar.Header{Typeflag: tar.TypeDir, Name: "run/", Format: tar.FormatPAX, PAXRecords: map[string]string{overlayOpaque: "y"}},
		tar.Header{Typeflag: tar.TypeDir, Name: "home/dev/"},
		tar.Header{Typeflag: tar.TypeChar, Name: "etc/gone"},
		tar.Header{Typeflag: tar.TypeChar, Name: "etc/null", Devmajor: 1, Devminor: 3},
		tar.Header{Typeflag: tar.TypeReg, Name: ".wh.mine", Size: 1, Format: tar.FormatPAX, PAXRecords: map[string]string{driver.WhiteoutRecord: "1"}},
		tar.Header{Typeflag: tar.TypeLink, Name: "link", Linkname: "dev/below"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "sym", Linkname: "../x"},
	)
	var out bytes.Buffer
	got, err := toOCI(&out, bytes.NewReader(in))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(driver.ChangeReport{Outside: []driver.Outside{{Path: "/mnt", Files: 2, Bytes: 3, Guest: true}}}, got); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	marked := map[string]bool{}
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		_, marked[h.Name] = h.PAXRecords[driver.WhiteoutRecord]
	}
	want := map[string]bool{"dev/below": false, "run/": false, "run/.wh..wh..opq": true, "home/dev/": false, "etc/.wh.gone": true, "etc/null": false, ".wh.mine": false, "link": false, "sym": false}
	if diff := cmp.Diff(want, marked); diff != "" {
		t.Errorf("names and which are deletions (-want +got):\n%s", diff)
	}
}

// TestToOCISaysWhatIsMissing: a tar without a report, and a report of losses,
// are errors after all that came.
func TestToOCISaysWhatIsMissing(t *testing.T) {
	entry := tar.Header{Typeflag: tar.TypeReg, Name: "file", Size: 5}
	if _, err := toOCI(io.Discard, bytes.NewReader(sentryTar(t, nil, entry))); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("without a report: %v", err)
	}
	lossy := bootflags.Report{Lost: 3, Why: "a path is too long", Outside: []bootflags.Outside{{Path: "/mnt", Files: 1}}}
	var out bytes.Buffer
	report, err := toOCI(&out, bytes.NewReader(sentryTar(t, &lossy, entry)))
	if !kind.Is(err, kind.Exhausted) || !strings.Contains(err.Error(), "a path is too long") || len(report.Outside) != 1 {
		t.Errorf("with losses: %+v, %v", report, err)
	}
	if h, err := tar.NewReader(&out).Next(); err != nil || h.Name != "file" {
		t.Errorf("what was not lost: %+v, %v", h, err)
	}
	for name, r := range map[string]bootflags.Report{
		"negative":  {Outside: []bootflags.Outside{{Path: "/", Files: -1}}},
		"many":      {Outside: make([]bootflags.Outside, bootflags.MaxOutside+1)},
		"very long": {Why: strings.Repeat("x", bootflags.MaxReport)},
	} {
		if _, err := toOCI(io.Discard, bytes.NewReader(sentryTar(t, &r))); err == nil {
			t.Errorf("a report that is %s was taken", name)
		}
	}
}

// TestSparse: the header before a map and data is one that readers of GNU's
// format understand, whatever the name and attributes are.
func TestSparse(t *testing.T) {
	long := strings.Repeat("long/", 100) + "näme"
	table := append([]byte("2\n0\n5\n1048576\n3\n"), make([]byte, 512-16)...)
	h := &tar.Header{Typeflag: tar.TypeReg, Name: long, Mode: 0o640, Uid: 1 << 25, Gid: 7, Size: 512 + 8, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "b=c\nd", "GNU.sparse.size": "1"}}
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	if err := out.WriteHeader(&tar.Header{Name: "before", Size: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := sparseHeader(out, &b, h, 2<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write(append(table, "firstend"...)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(out.WriteHeader(&tar.Header{Name: "after"}), out.Close()); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(&b)
	if _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	got, err := r.Next()
	if err != nil {
		t.Fatal(err)
	}
	if got.Name != long || got.Size != 2<<20 || got.Mode != 0o640 || got.Uid != 1<<25 || got.Gid != 7 || got.PAXRecords["SCHILY.xattr.user.a"] != "b=c\nd" {
		t.Errorf("header %+v", got)
	}
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 2<<20)
	copy(want, "first")
	copy(want[1<<20:], "end")
	if !bytes.Equal(content, want) {
		t.Error("the content is not where it was")
	}
	if h, err := r.Next(); err != nil || h.Name != "after" {
		t.Errorf("after it: %+v, %v", h, err)
	}
}

// FuzzToOCI: whatever a sentry sends, what comes out is a tar, and only
// deletions are marked as such.
func FuzzToOCI(f *testing.F) {
	f.Add(sentryTar(f, &bootflags.Report{}, tar.Header{Typeflag: tar.TypeReg, Name: "a", Size: 3}, tar.Header{Typeflag: tar.TypeChar, Name: "b"}))
	f.Add(sentryTar(f, &bootflags.Report{Lost: 1}, tar.Header{Typeflag: tar.TypeReg, Name: "s", Size: 515, Format: tar.FormatPAX, PAXRecords: map[string]string{bootflags.SparseRecord: "99999999"}}))
	f.Add(sentryTar(f, nil, tar.Header{Typeflag: tar.TypeDir, Name: "../../dev/", Format: tar.FormatPAX, PAXRecords: map[string]string{overlayOpaque: "y", driver.WhiteoutRecord: "1"}}))
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		report, err := toOCI(&out, bytes.NewReader(in))
		if len(report.Outside) > bootflags.MaxOutside {
			t.Errorf("%d places", len(report.Outside))
		}
		if err != nil {
			return
		}
		for r := tar.NewReader(&out); ; {
			h, err := r.Next()
			if err != nil {
				return // its end, or a sparse map that is none
			}
			if strings.HasPrefix(h.Name, "/") || slices.Contains(strings.Split(h.Name, "/"), "..") {
				t.Errorf("the name %q", h.Name)
			}
			if _, marked := h.PAXRecords[driver.WhiteoutRecord]; marked && !strings.Contains(h.Name, whiteoutPrefix) {
				t.Errorf("%q is marked as a deletion: %v", h.Name, slices.Collect(maps.Keys(h.PAXRecords)))
			}
		}
	})
}
