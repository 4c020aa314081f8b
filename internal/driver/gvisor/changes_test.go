package gvisor_test

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/driver"
	"bivy/internal/driver/gvisor"
	"bivy/internal/session"
)

// changed is what an export says: contents by name, and what is outside.
type changed struct {
	files   map[string]string // of regular files of less than 1 KiB; else the size
	outside []driver.Outside
}

func (c changed) at(path string) (driver.Outside, bool) {
	i := slices.IndexFunc(c.outside, func(o driver.Outside) bool { return o.Path == path })
	if i < 0 {
		return driver.Outside{}, false
	}
	return c.outside[i], true
}

func changes(t *testing.T, d *gvisor.Driver, id session.SandboxID) changed {
	t.Helper()
	read, write := io.Pipe()
	type answer struct {
		report driver.ChangeReport
		err    error
	}
	got := make(chan answer, 1)
	go func() { // ends with the read below
		report, err := d.ExportChanges(t.Context(), id, write)
		write.CloseWithError(err)
		got <- answer{report, err}
	}()
	c := changed{files: map[string]string{}}
	for r := tar.NewReader(read); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("reading the export: %v", err)
		}
		if h.Size >= 1024 {
			c.files[h.Name] = fmt.Sprint(h.Size)
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("reading %s: %v", h.Name, err)
		}
		c.files[h.Name] = string(b)
	}
	if _, err := io.Copy(io.Discard, read); err != nil {
		t.Fatal(err)
	}
	a := <-got
	if a.err != nil {
		t.Fatalf("ExportChanges: %v", a.err)
	}
	c.outside = a.report.Outside
	return c
}

// TestChangesCannotBeSteered lets root inside try to hide a file from the
// list, and has the list taken from a running, a paused and a restored
// sandbox.
func TestChangesCannotBeSteered(t *testing.T) {
	d := newDriver(t, t.TempDir())
	fresh := start(t, d, nil)
	mustRun(t, d, fresh, "true")
	if c := changes(t, d, fresh); len(c.outside) != 0 {
		t.Errorf("outside the layer of a fresh sandbox: %+v", c.outside)
	}
	snapshot := t.TempDir()
	if err := d.Checkpoint(t.Context(), fresh, snapshot, true); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		script  string
		files   map[string]string
		outside []driver.Outside
	}{
		{"nothing", "true", nil, nil},
		{"tmpfs over the root", "mount -t tmpfs none / && mount --bind / /", nil, nil},
		{"another tree over the root", "mkdir /decoy && echo forged > /decoy/forged && mount --rbind /decoy /", map[string]string{"decoy/forged": "forged\n"}, nil},
		{"below /dev", "umount -l /dev && echo below > /dev/below", map[string]string{"dev/below": "below\n"}, nil},
		{"below /run", "umount -l /run && echo below > /run/below", map[string]string{"run/below": "below\n"}, nil},
		{"in /dev", "echo 12345 > /dev/hidden; ln -s a /dev/link; mknod /dev/more c 1 3", nil, []driver.Outside{{Path: "/dev", Files: 2, Bytes: 6}}},
		{"in /dev/shm", "mkdir /dev/shm/d; echo 12345 > /dev/shm/d/a; echo 1 > /dev/shm/b; ln /dev/shm/b /dev/shm/c", nil, []driver.Outside{{Path: "/dev/shm", Files: 2, Bytes: 8}}},
		{"in /run", "echo 12345 > /run/mine", nil, []driver.Outside{{Path: "/run", Files: 1, Bytes: 6}}},
		{"as one of the agent's", "mkdir -p /run/e2b; echo true > /run/e2b/.E2B_SANDBOX; head -c 300 /dev/zero > /run/e2b/.E2B_SANDBOX_ID", nil, []driver.Outside{{Path: "/run", Files: 1, Bytes: 300}}},
		{"a tmpfs", "mount -t tmpfs none /mnt && echo 12345 > /mnt/a", nil, []driver.Outside{{Path: "/mnt", Files: 1, Bytes: 6, Guest: true}}},
		{"a tmpfs below another", "mount -t tmpfs none /mnt && echo 12345 > /mnt/a && mount -t tmpfs none /mnt && echo 1 > /mnt/b", nil,
			[]driver.Outside{{Path: "/mnt", Files: 1, Bytes: 6, Guest: true}, {Path: "/mnt", Files: 1, Bytes: 2, Guest: true}}},
		{"a moved mount", "mount --move /dev/shm /mnt && echo 12345 > /mnt/a", nil, []driver.Outside{{Path: "/mnt", Files: 1, Bytes: 6}}},
		{"a bind of the layer", "mkdir /a && echo 1 > /a/f && mount --bind /a /mnt && echo 2 > /mnt/g", map[string]string{"a/f": "1\n", "a/g": "2\n"}, nil},
		{"an overlay", "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /o && mount -t overlay -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w none /o && echo 12345 > /o/new", nil,
			[]driver.Outside{{Path: "/mnt", Files: 1, Bytes: 6, Guest: true}}},
		{"another namespace", "unshare -m sh -c 'mount -t tmpfs none /mnt && echo 12345 > /mnt/a && exec sleep 1000' >/dev/null 2>&1 & while ! grep -qs /mnt /proc/$!/mounts || [ ! -e /proc/$!/root/mnt/a ]; do :; done", nil,
			[]driver.Outside{{Path: "/mnt", Files: 1, Bytes: 6, Guest: true}}},
		{"a root of its own", "mkdir /new && unshare -m sh -c 'mount -t tmpfs none /new && cp -r /bin /lib /lib64 /usr/bin/sleep /new/ 2>/dev/null; mkdir /new/old; mkdir /new/proc; cd /new && pivot_root . old && umount -l old; echo 12345 > /f; exec sleep 1000' >/dev/null 2>&1 & while [ ! -e /proc/$!/root/f ]; do :; done", nil, nil},
		{"open in what is unmounted", "mount -t tmpfs none /mnt && echo 12345 > /mnt/a && (exec 9</mnt/a; exec sleep 1000) >/dev/null 2>&1 & while [ \"$(readlink /proc/$!/fd/9)\" != /mnt/a ] && [ \"$(readlink /proc/*/fd/9)\" != /mnt/a ]; do :; done; umount -l /mnt", nil,
			[]driver.Outside{{Path: "(no longer mounted)", Files: 1, Bytes: 6, Guest: true}}},
		{"open and deleted", "echo 12345 > /root/gone; (exec 9</root/gone; exec sleep 1000) >/dev/null 2>&1 & while ! ls -l /proc/*/fd/9 2>/dev/null | grep -q gone; do :; done; rm /root/gone", nil,
			[]driver.Outside{{Path: "(deleted files of /)", Files: 1}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, from := range []string{"", snapshot} {
				id := start(t, d, func(r *driver.StartRequest) { r.Snapshot = from })
				mustRun(t, d, id, "sh", "-c", "echo evidence > /var/evidence")
				if out, code, err := run(t.Context(), d, id, "sh", "-c", test.script); err != nil || code != 0 {
					t.Errorf("the script: exit %d, %q, %v", code, out, err)
				}
				for _, paused := range []bool{false, true} {
					if paused {
						if err := d.Pause(t.Context(), id); err != nil {
							t.Fatal(err)
						}
					}
					c := changes(t, d, id)
					want := map[string]string{"var/evidence": "evidence\n"}
					for name, text := range test.files {
						want[name] = text
					}
					for name, text := range want {
						if got, ok := c.files[name]; !ok || got != text {
							t.Errorf("restored %t, paused %t: %s holds %q (%t), want %q", from != "", paused, name, got, ok, text)
						}
					}
					if test.name == "a root of its own" {
						if len(c.outside) != 1 || c.outside[0].Path != "/" || !c.outside[0].Guest || c.outside[0].Files < 10 {
							t.Errorf("restored %t, paused %t: outside: %+v", from != "", paused, c.outside)
						}
						continue
					}
					slices.SortFunc(c.outside, func(a, b driver.Outside) int {
						return strings.Compare(fmt.Sprint(a.Path, -a.Bytes), fmt.Sprint(b.Path, -b.Bytes))
					})
					if diff := cmp.Diff(test.outside, c.outside); diff != "" {
						t.Errorf("restored %t, paused %t: outside (-want +got):\n%s", from != "", paused, diff)
					}
				}
				if err := d.Destroy(t.Context(), id); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
