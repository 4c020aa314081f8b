package gvisor_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

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

// scriptLimit bounds what a test does inside.
const scriptLimit = 20 * time.Second

// prelude has what scripts use; the image has no mount(8).
const prelude = `
import ctypes, os, time
L = ctypes.CDLL(None, use_errno=True)
BIND, MOVE = 4096, 8192
kept = []
def check(r):
    if r: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def enc(s): return s.encode() if s is not None else None
def mount(source, target, fstype=None, flags=0, data=None): check(L.mount(enc(source), enc(target), enc(fstype), flags, enc(data)))
def umount(target): check(L.umount2(enc(target), 2))
def unshare(): check(L.unshare(0x20000))
def pivot_root(new, old): check(L.syscall(155, enc(new), enc(old)))
def write(path, text):
    with open(path, 'w') as f: f.write(text)
def child(f): # runs f in a process that lives on, and returns when f has
    r, w = os.pipe()
    if os.fork():
        os.close(w)
        if os.read(r, 9) != b'ok': raise Exception('the child failed')
        return
    null = os.open('/dev/null', os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        f()
        os.write(w, b'ok')
    except BaseException as e:
        os.write(w, str(e).encode())
    os.close(w)
    while True: time.sleep(1000)
`

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
	snapshot := driver.Dir(t.TempDir())
	if err := d.Checkpoint(t.Context(), fresh, snapshot, driver.CheckpointOptions{Leave: true}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		script  string
		files   map[string]string
		outside []driver.Outside
	}{
		{"nothing", "", nil, nil},
		{"tmpfs over the root", "mount('none', '/', 'tmpfs'); write('/hidden', 'x')", map[string]string{"hidden": "x"}, nil},
		{"another tree over the root", "os.mkdir('/decoy'); write('/decoy/forged', 'forged'); mount('/decoy', '/', None, BIND)", map[string]string{"decoy/forged": "forged"}, nil},
		{"below /dev", "umount('/dev'); write('/dev/below', 'below')", map[string]string{"dev/below": "below"}, nil},
		{"below /run", "umount('/run'); write('/run/below', 'below')", map[string]string{"run/below": "below"}, nil},
		{"in /dev", "write('/dev/hidden', '12345'); os.symlink('a', '/dev/link'); os.mknod('/dev/more', 0o20600, os.makedev(1, 3))", nil, []driver.Outside{{Path: "/dev", Files: 2, Bytes: 5}}},
		{"in /dev/shm", "os.mkdir('/dev/shm/d'); write('/dev/shm/d/a', '12345'); write('/dev/shm/b', '12'); os.link('/dev/shm/b', '/dev/shm/c')", nil, []driver.Outside{{Path: "/dev/shm", Files: 3, Bytes: 7}}},
		{"in names of directories", "os.mkdir('/dev/shm/secret'); mount('none', '/mnt', 'tmpfs'); os.mkdir('/mnt/secret')", nil,
			[]driver.Outside{{Path: "/dev/shm", Files: 1}, {Path: "/mnt", Files: 1, Guest: true}}},
		{"a socket in place of a file", "import socket; os.remove('/etc/hostname'); os.remove('/etc/passwd'); socket.socket(socket.AF_UNIX).bind('/etc/passwd')",
			map[string]string{"etc/passwd": "", "etc/.wh.hostname": ""}, nil},
		{"in /run", "write('/run/mine', '12345')", nil, []driver.Outside{{Path: "/run", Files: 1, Bytes: 5}}},
		{"as one of the agent's", "os.makedirs('/run/e2b'); write('/run/e2b/.E2B_SANDBOX', 'true'); write('/run/e2b/.E2B_SANDBOX_ID', 300 * 'x')", nil, []driver.Outside{{Path: "/run", Files: 1, Bytes: 300}}},
		{"a tmpfs", "mount('none', '/mnt', 'tmpfs'); write('/mnt/a', '12345')", nil, []driver.Outside{{Path: "/mnt", Files: 1, Bytes: 5, Guest: true}}},
		{"a tmpfs below another", "mount('none', '/mnt', 'tmpfs'); write('/mnt/a', '12345'); mount('none', '/mnt', 'tmpfs'); write('/mnt/b', '12')", nil,
			[]driver.Outside{{Path: "/mnt", Files: 1, Bytes: 2, Guest: true}, {Path: "/mnt", Files: 1, Bytes: 5, Guest: true}}},
		{"a moved mount", "mount('/dev/shm', '/mnt', None, MOVE); write('/mnt/a', '12345')", nil, []driver.Outside{{Path: "/mnt", Files: 1, Bytes: 5}}},
		{"a bind of the layer", "os.mkdir('/a'); mount('/a', '/mnt', None, BIND); write('/mnt/g', '2')", map[string]string{"a/g": "2"}, nil},
		{"an overlay", "mount('none', '/mnt', 'tmpfs'); [os.mkdir(d) for d in ('/mnt/u', '/mnt/w', '/o')]; mount('none', '/o', 'overlay', 0, 'lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w'); write('/o/new', '12345')", nil,
			[]driver.Outside{{Path: "/mnt", Files: 4, Bytes: 5, Guest: true}}},
		{"another namespace", "child(lambda: (unshare(), mount('none', '/mnt', 'tmpfs'), write('/mnt/a', '12345')))", nil,
			[]driver.Outside{{Path: "/mnt", Files: 1, Bytes: 5, Guest: true}}},
		{"a root of its own", "os.mkdir('/new'); child(lambda: (unshare(), mount('none', '/new', 'tmpfs'), os.mkdir('/new/old'), os.chdir('/new'), pivot_root('.', 'old'), write('/f', '12345'), umount('/old')))", nil,
			[]driver.Outside{{Path: "/", Files: 2, Bytes: 5, Guest: true}}},
		{"open in what is unmounted", "mount('none', '/mnt', 'tmpfs'); write('/mnt/a', '12345'); child(lambda: kept.append(open('/mnt/a'))); umount('/mnt')", nil,
			[]driver.Outside{{Path: "(no longer mounted)", Files: 1, Bytes: 5, Guest: true}}},
		{"open and deleted", "write('/root/gone', '12345'); child(lambda: kept.append(open('/root/gone'))); os.remove('/root/gone')", nil,
			[]driver.Outside{{Path: "(deleted files of /)", Files: 1}}},
		{"a descriptor of memory", "child(lambda: kept.append(os.write(os.memfd_create('m'), b'12345')))", nil, nil},
		{"FUSE", "child(lambda: (kept.append(os.open('/dev/fuse', os.O_RDWR)), mount('none', '/mnt', 'fuse', 0, 'fd=%d,rootmode=40000,user_id=0,group_id=0' % kept[0])))", nil,
			[]driver.Outside{{Path: "/mnt (fuse)", Guest: true}}},
		{"the root of the namespace moved", "mount('none', '/mnt', 'tmpfs'); write('/mnt/a', '12345'); os.mkdir('/mnt/old'); os.chdir('/mnt'); pivot_root('.', 'old')", nil,
			[]driver.Outside{{Path: "/", Files: 2, Bytes: 5, Guest: true}, {Path: "/old/run", Files: 1}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, from := range []driver.Source{nil, snapshot} {
				id := start(t, d, func(r *driver.StartRequest) { r.Snapshot = from })
				mustRun(t, d, id, "sh", "-c", "echo evidence > /var/evidence")
				ctx, cancel := context.WithTimeout(t.Context(), scriptLimit)
				out, code, err := run(ctx, d, id, "python3", "-c", prelude+test.script)
				cancel()
				if err != nil || code != 0 {
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
							t.Errorf("restored %t, paused %t: %s holds %q (%t), want %q", from != nil, paused, name, got, ok, text)
						}
					}
					if diff := cmp.Diff(test.outside, c.outside); diff != "" {
						t.Errorf("restored %t, paused %t: outside (-want +got):\n%s", from != nil, paused, diff)
					}
				}
				if err := d.Destroy(t.Context(), id); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestRun: /run is a file system of its own, and has the directories of the
// image.
func TestRun(t *testing.T) {
	d := newDriver(t, t.TempDir())
	booted := start(t, d, nil)
	mustRun(t, d, booted, "true")
	snapshot := driver.Dir(t.TempDir())
	if err := d.Checkpoint(t.Context(), booted, snapshot, driver.CheckpointOptions{Leave: true}); err != nil {
		t.Fatal(err)
	}
	restored := start(t, d, func(r *driver.StartRequest) { r.Snapshot = snapshot })
	for _, id := range []session.SandboxID{booted, restored} {
		if got := mustRun(t, d, id, "sh", "-c", "df -m --output=fstype,size,target /run | tail -n +2 | tr -s ' '; grep -o '^none /run tmpfs rw,nosuid' /proc/mounts; stat -c '%a %u %n' /run /run/lock /var/lock/; ls -A /run"); got != wantRun {
			t.Errorf("/run is\n%s\nwant\n%s", got, wantRun)
		}
		if out, code, err := run(t.Context(), d, id, "sh", "-c", "head -c 70M /dev/zero > /run/big"); err != nil || code == 0 {
			t.Errorf("70 MiB fit into /run: %q, %v", out, err)
		}
	}
}

// wantRun has no nodev, which gVisor does not show in /proc/mounts.
const wantRun = `tmpfs 64 /run
none /run tmpfs rw,nosuid
755 0 /run
1777 0 /run/lock
1777 0 /var/lock/
lock
`

// TestExportOfHoles: a file of 900 GB without data is listed with its size at
// no cost, and data between holes is where it was.
func TestExportOfHoles(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	mustRun(t, d, id, "python3", "-c", `
import os
os.truncate(os.open('/root/empty', os.O_CREAT|os.O_RDWR), 900<<30)
with open('/root/pieces', 'wb') as f:
    for at in (0, 3<<20, 5<<20):
        f.seek(at); f.write(b'piece')
    f.truncate(6<<20)
os.setxattr('/root/pieces', 'user.note', b'kept')
with open('/root/many', 'wb') as f:
    for i in range(200): f.seek(i * (1<<30)); f.write(b'x')
`)
	if err := d.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), scriptLimit)
	defer cancel()
	read, write := io.Pipe()
	go func() { // ends with the read below
		_, err := d.ExportChanges(ctx, id, write)
		write.CloseWithError(err)
	}()
	sizes := map[string]int64{}
	for r := tar.NewReader(read); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sizes[h.Name] = h.Size
		if h.Name != "root/pieces" {
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{0, 3 << 20, 5 << 20} {
			if !bytes.HasPrefix(b[at:], []byte("piece\x00")) {
				t.Errorf("at %d there is %q", at, b[at:at+8])
			}
			clear(b[at : at+5])
		}
		if !bytes.Equal(b, make([]byte, 6<<20)) {
			t.Error("the holes are not zero")
		}
		if got := h.PAXRecords["SCHILY.xattr.user.note"]; got != "kept" || h.Uid != 0 || h.Mode != 0o644 || h.ModTime.Unix() < 1e9 {
			t.Errorf("header %+v", h)
		}
	}
	if sizes["root/empty"] != 900<<30 || sizes["root/pieces"] != 6<<20 || sizes["root/many"] != 199<<30+1 {
		t.Errorf("sizes %v", sizes)
	}
}
