package gvisor_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"bivy/internal/cgroup"
	"bivy/internal/driver"
	"bivy/internal/driver/drivertest"
	"bivy/internal/driver/gvisor"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/testbed"
)

var (
	bed  *testbed.Bed
	skip string
)

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, func(b *testbed.Bed, s string) { bed, skip = b, s }))
}

// agentPort is where the agent of the image listens.
const agentPort = 49983

// parentOf names the cgroup parent of one test's root.
func parentOf(root string) string {
	sum := sha256.Sum256([]byte(root))
	return "bivy-test-" + hex.EncodeToString(sum[:6])
}

func newDriver(t *testing.T, root string) *gvisor.Driver {
	t.Helper()
	return newOutboundDriver(t, root, nil)
}

func newOutboundDriver(t *testing.T, root string, o driver.Outbound) *gvisor.Driver {
	t.Helper()
	if skip != "" {
		t.Skip("skip: " + skip)
	}
	// The sentry is another user and reads its bundle below the test's root.
	for dir := root; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	d, err := gvisor.New(gvisor.Options{Root: filepath.Join(root, "gvisor"), Sentry: bed.Sentry, Cgroup: parentOf(root), Outbound: o})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h, err := cgroup.Detect(parentOf(root))
		if err := errors.Join(err, h.Remove()); err != nil {
			t.Error(err)
		}
	})
	return d
}

func request(id session.SandboxID) driver.StartRequest {
	return driver.StartRequest{
		ID: id, Image: bed.Template.Image, Args: []string{testbed.AgentPath}, Env: []string{testbed.Path}, Hostname: "bivy",
		Owner:  driver.Owner{Kind: driver.OwnedBySession, ID: "test"},
		Limits: driver.Limits{CPUMillis: 2000, MemoryBytes: 256 << 20, DiskBytes: 64 << 20, PIDs: 1024},
		Shape:  driver.Shape{CPUs: 2, MemoryBytes: 256 << 20, DiskBytes: 64 << 20},
	}
}

// token is every agent's, so that a client can come back to one.
const token = "driver-test"

func agent(d driver.Driver, id session.SandboxID) *guestclient.Client {
	return guestclient.New(guestclient.Config{Token: token, Dial: func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, id, agentPort) }})
}

// run executes argv inside as root and returns what it wrote to stdout.
func run(ctx context.Context, d driver.Driver, id session.SandboxID, argv ...string) (string, int, error) {
	c := agent(d, id)
	defer c.Close()
	for {
		err := c.Health(ctx)
		if err == nil {
			break
		}
		if kind.Is(err, kind.NotFound) || ctx.Err() != nil {
			return "", -1, err
		}
		select {
		case <-ctx.Done():
			return "", -1, err
		case <-time.After(5 * time.Millisecond):
		}
	}
	if _, err := c.Init(ctx, wire.InitRequest{AccessToken: token, DefaultUser: "root"}); err != nil {
		return "", -1, err
	}
	p, err := c.Exec(ctx, guestclient.Command{Argv: argv, User: "root", Cwd: "/root"})
	if err != nil {
		return "", -1, err
	}
	defer p.Close()
	var out bytes.Buffer
	for {
		e, err := p.Next()
		if err != nil {
			return out.String(), -1, err
		}
		switch e.Kind {
		case guestclient.Stdout:
			out.Write(e.Data)
		case guestclient.End:
			return out.String(), e.Exit.ShellCode(), nil
		}
	}
}

func TestContract(t *testing.T) {
	drivertest.Run(t, drivertest.Harness{
		New:     func(t *testing.T, root string) driver.Driver { return newDriver(t, root) },
		Request: func(t *testing.T, id session.SandboxID) driver.StartRequest { return request(id) },
		NewOutbound: func(t *testing.T, root string, o driver.Outbound) driver.Driver {
			return newOutboundDriver(t, root, o)
		},
		Talk: func(addr string, port uint16, text string) []string {
			return []string{"python3", "-c", "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)\ns.sendall(sys.argv[3].encode())\nb = b''\nwhile True:\n  x = s.recv(100)\n  if not x: break\n  b += x\nprint(b.decode())", addr, strconv.Itoa(int(port)), text}
		},
		Port:       agentPort,
		Exec:       run,
		Existing:   "/etc/issue",
		Changeable: "/etc/hosts",
		Stop: func(t *testing.T, d driver.Driver, id session.SandboxID) {
			// SIGTERM is what the agent takes as the order to stop.
			_, _, _ = run(t.Context(), d, id, "kill", "-TERM", "1")
		},
		Bad: func(t *testing.T, id session.SandboxID) driver.StartRequest {
			r := request(id)
			r.Image = filepath.Join(t.TempDir(), "missing.erofs")
			return r
		},
		Leftovers:      leftovers,
		KeepsProcesses: true,
	})
}

// leftovers looks for anything of a root's sandboxes on this host, by other
// means than the driver's own.
func leftovers(t *testing.T, root string) []string {
	t.Helper()
	var left []string
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte("--root="+root)) {
			left = append(left, p+": "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + parentOf(root) + "/*/cgroup.procs", "/sys/fs/cgroup/" + parentOf(root) + "/*/cgroup.procs"} {
		groups, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, groups...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, root) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	err = filepath.WalkDir(filepath.Join(root, "gvisor"), func(path string, e fs.DirEntry, err error) error {
		// The driver's own directories stay; what is in them may not.
		if rel, _ := filepath.Rel(filepath.Join(root, "gvisor"), path); err == nil && strings.Contains(rel, "/") {
			left = append(left, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return left
}

// start makes a sandbox that the test's end destroys.
func start(t *testing.T, d *gvisor.Driver, change func(*driver.StartRequest)) session.SandboxID {
	t.Helper()
	r := request(session.NewID().Sandbox(1))
	if change != nil {
		change(&r)
	}
	if _, err := d.Start(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Destroy(context.WithoutCancel(t.Context()), r.ID); err != nil {
			t.Error(err)
		}
	})
	return r.ID
}

func mustRun(t *testing.T, d *gvisor.Driver, id session.SandboxID, argv ...string) string {
	t.Helper()
	out, code, err := run(t.Context(), d, id, argv...)
	if err != nil || code != 0 {
		t.Fatalf("%q: exit %d, %v: %s", argv, code, err, out)
	}
	return out
}

// shapeSeen is what programs inside size themselves by.
func shapeSeen(t *testing.T, d *gvisor.Driver, id session.SandboxID) driver.Shape {
	t.Helper()
	var s driver.Shape
	out := mustRun(t, d, id, "sh", "-c", "nproc; awk '/^MemTotal/ {print $2 * 1024}' /proc/meminfo; df --output=size -B1 / | tail -n 1")
	if _, err := fmt.Sscan(out, &s.CPUs, &s.MemoryBytes, &s.DiskBytes); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	return s
}

// TestGuestSeesItsShape: what the guest sees is what was asked for and not the
// host, booted and restored. A restored sandbox has the processors and the
// disk of the one that was saved and memory of its own, which is what
// sandbox.Restorable relies on.
func TestGuestSeesItsShape(t *testing.T) {
	d := newDriver(t, t.TempDir())
	for _, saved := range []driver.Shape{
		{CPUs: 2, MemoryBytes: 256 << 20, DiskBytes: 64 << 20},
		{CPUs: 4, MemoryBytes: 512 << 20, DiskBytes: 128 << 20},
		{CPUs: 8, MemoryBytes: 192 << 20, DiskBytes: 64 << 20},
	} {
		as := func(s driver.Shape) func(*driver.StartRequest) {
			return func(r *driver.StartRequest) {
				r.Shape, r.Limits.MemoryBytes, r.Limits.DiskBytes = s, s.MemoryBytes, s.DiskBytes
			}
		}
		id := start(t, d, as(saved))
		if got := shapeSeen(t, d, id); got != saved {
			t.Errorf("booted as %+v, the guest sees %+v", saved, got)
		}
		dir := driver.Dir(t.TempDir())
		if err := d.Checkpoint(t.Context(), id, dir, driver.CheckpointOptions{}); err != nil {
			t.Fatal(err)
		}
		more := saved
		more.MemoryBytes += 64 << 20
		for _, want := range []driver.Shape{saved, more} {
			if !sandbox.Restorable(saved, want) {
				t.Fatalf("%+v is not restorable as %+v", saved, want)
			}
			restored := start(t, d, func(r *driver.StartRequest) {
				as(want)(r)
				r.Snapshot = dir
			})
			if got := shapeSeen(t, d, restored); got != want {
				t.Errorf("restored as %+v, the guest sees %+v", want, got)
			}
		}
	}
}

// TestOnlyWhatIsRestorable: another number of processors or another disk is
// not what a restored guest would see.
func TestOnlyWhatIsRestorable(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	saved := shapeSeen(t, d, id)
	dir := driver.Dir(t.TempDir())
	if err := d.Checkpoint(t.Context(), id, dir, driver.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	other := saved
	other.CPUs = 4
	r := request(session.NewID().Sandbox(1))
	r.Shape, r.Snapshot = other, dir
	t.Cleanup(func() {
		if err := d.Destroy(context.WithoutCancel(t.Context()), r.ID); err != nil {
			t.Error(err)
		}
	})
	if _, err := d.Start(t.Context(), r); err == nil && shapeSeen(t, d, r.ID) == other {
		t.Error("a restored guest sees other processors than the saved one: Restorable is too strict")
	}
	if sandbox.Restorable(saved, other) {
		t.Error("another number of processors counts as restorable")
	}
}

// TestSlots: nothing on the host is named by the sandbox's id, and a slot
// without its label is listed and destroyed under its own name.
func TestSlots(t *testing.T) {
	root := t.TempDir()
	d := newDriver(t, root)
	r := request(session.NewID().Sandbox(1))
	if _, err := d.Start(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	for _, what := range leftovers(t, root) {
		if strings.Contains(what, string(r.ID)) {
			t.Errorf("named by the sandbox: %s", what)
		}
	}
	labels, err := filepath.Glob(filepath.Join(root, "gvisor", "bundles", "*", "sandbox"))
	if err != nil || len(labels) != 1 {
		t.Fatalf("labels: %v, %v", labels, err)
	}
	if b, err := os.ReadFile(labels[0]); err != nil || !bytes.Contains(b, []byte(r.ID)) {
		t.Errorf("the label says %s, %v", b, err)
	}
	slot := session.SandboxID(filepath.Base(filepath.Dir(labels[0])))
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(labels[0]); err != nil {
		t.Fatal(err)
	}
	// What a process that dies while it makes or removes a bundle leaves.
	half := filepath.Join(root, "gvisor", "bundles", "."+string(session.NewID().Sandbox(0)))
	if err := os.MkdirAll(filepath.Join(half, "root"), 0o711); err != nil {
		t.Fatal(err)
	}
	d = newDriver(t, root)
	if found, err := d.List(t.Context()); err != nil || len(found) != 1 || found[0] != (driver.Found{ID: slot, Running: true}) {
		t.Errorf("list = %+v, %v; want slot %s", found, err, slot)
	}
	if err := d.Destroy(t.Context(), r.ID); err != nil {
		t.Error(err)
	}
	if err := d.Destroy(t.Context(), slot); err != nil {
		t.Error(err)
	}
	if left := leftovers(t, root); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestMemoryLimitBelowWhatIsHeld is refused, and the earlier limits hold.
func TestMemoryLimitBelowWhatIsHeld(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	mustRun(t, d, id, "sh", "-c", "head -c 40M /dev/urandom > /root/held")
	limits := request(id).Limits
	limits.MemoryBytes = 16 << 20
	if err := d.SetLimits(t.Context(), id, limits); !kind.Is(err, kind.Exhausted) {
		t.Errorf("SetLimits: %v, want Exhausted", err)
	}
	mustRun(t, d, id, "true")
	if p, err := d.Inspect(t.Context(), id); err != nil || !p.OK() {
		t.Errorf("posture after a refused change: %+v, %v", p, err)
	}
}

// TestDiskLimit: a full disk is the guest's own trouble.
func TestDiskLimit(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	for _, dir := range []string{"/root", "/tmp", "/var/tmp"} {
		out, code, err := run(t.Context(), d, id, "sh", "-c", fmt.Sprintf("dd if=/dev/zero of=%s/big bs=1M count=100 2>&1; e=$?; rm -f %s/big; exit $e", dir, dir))
		if err != nil || code == 0 || !strings.Contains(out, "No space left") {
			t.Errorf("100 MiB into %s with 64 MiB of disk: exit %d, %v: %s", dir, code, err, out)
		}
	}
	mustRun(t, d, id, "sh", "-c", "echo small > /root/after")
}

// TestMemoryLimit: the sandbox that takes too much loses the process or
// itself, and it is known why; its neighbour notices nothing.
func TestMemoryLimit(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id, neighbour := start(t, d, nil), start(t, d, nil)
	mustRun(t, d, neighbour, "true")
	out, code, err := run(t.Context(), d, id, "python3", "-c", "b = bytearray(400 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('kept', len(b))")
	if strings.Contains(out, "kept") {
		t.Fatalf("400 MiB were kept under a limit of 256: exit %d, %v", code, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if st, err := d.Stats(ctx, id); err == nil {
		t.Logf("the sandbox lives: %+v", st)
		if st.OOMKills == 0 {
			t.Error("the sandbox lives and shows no OOM kill")
		}
	} else if exit, err := d.Wait(ctx, id); err != nil || !exit.OOM {
		t.Errorf("the sandbox ended with %+v, %v; want OOM", exit, err)
	}
	mustRun(t, d, neighbour, "true")
}

// TestCPULimit: half a core is half a core, measured by the host.
func TestCPULimit(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, func(r *driver.StartRequest) { r.Limits.CPUMillis = 500 })
	mustRun(t, d, id, "true")
	before, err := d.Stats(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, code, err := run(t.Context(), d, id, "timeout", "3", "sh", "-c", "while :; do :; done & while :; do :; done"); err != nil || code != 124 {
		t.Fatalf("busy loops: exit %d, %v; want timeout's 124", code, err)
	}
	after, err := d.Stats(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	used, wall := after.CPU-before.CPU, time.Since(began)
	if share := float64(used) / float64(wall); share > 0.6 {
		t.Errorf("used %.2f cores with a limit of 0.5", share)
	}
}

// TestOutboundIsRefusedAndCounted from inside, for every kind of packet a
// program can send without privilege.
func TestOutboundIsRefusedAndCounted(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	// 192.0.2.0/24 is for documentation; the packets end on the wire.
	script := `
import socket, time
def attempt(kind, addr):
    s = socket.socket(socket.AF_INET, kind); s.settimeout(5)
    began = time.time()
    try:
        s.connect(addr)
        if kind == socket.SOCK_DGRAM:
            s.send(b'x'); s.recv(1)
        return 'reached'
    except OSError as e:
        return '%s in %.1f' % (type(e).__name__, time.time() - began)
print(attempt(socket.SOCK_STREAM, ('192.0.2.1', 443)))
print(attempt(socket.SOCK_DGRAM, ('192.0.2.1', 53)))
print(attempt(socket.SOCK_STREAM, ('10.88.0.1', 22)))
`
	out := mustRun(t, d, id, "python3", "-c", script)
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "ConnectionRefusedError in 0.") {
			t.Errorf("an attempt to leave: %q, want refused at once", strings.TrimSpace(line))
		}
	}
	st, err := d.Stats(t.Context(), id)
	if err != nil || st.OutboundRefused < 3 {
		t.Errorf("refused = %d, %v; want at least 3", st.OutboundRefused, err)
	}
}

// TestListenerFromBeforeTheSnapshot: a server that ran when the snapshot was
// taken is reached in every sandbox restored from it.
func TestListenerFromBeforeTheSnapshot(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	mustRun(t, d, id, "sh", "-c", "mkdir -p /srv && echo served > /srv/f && cd /srv && (setsid python3 -m http.server 8000 --bind 0.0.0.0 >/dev/null 2>&1 </dev/null &) ; for i in $(seq 100); do curl -sf http://127.0.0.1:8000/f >/dev/null && exit 0; sleep 0.1; done; exit 1")
	dir := driver.Dir(t.TempDir())
	if err := d.Checkpoint(t.Context(), id, dir, driver.CheckpointOptions{Leave: true}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		restored := start(t, d, func(r *driver.StartRequest) { r.Snapshot = dir })
		conn, err := d.Dial(t.Context(), restored, 8000)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, "GET /f HTTP/1.0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(conn)
		conn.Close()
		if err != nil || !strings.HasSuffix(string(b), "served\n") {
			t.Errorf("server in a restored sandbox said %q, %v", b, err)
		}
	}
}

// TestExportIsOCI: deletions and replaced directories are written as OCI layers have them.
func TestExportIsOCI(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	mustRun(t, d, id, "sh", "-c", "rm /etc/issue && rm -r /etc/profile.d; mkdir -p /etc/profile.d && echo new > /etc/profile.d/mine && ln -s mine /etc/profile.d/link && echo tmp > /tmp/f")
	var b bytes.Buffer
	if err := d.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ExportChanges(t.Context(), id, &b); err != nil {
		t.Fatal(err)
	}
	names := map[string]byte{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names[h.Name] = h.Typeflag
	}
	for name, kind := range map[string]byte{"etc/.wh.issue": tar.TypeReg, "etc/profile.d/mine": tar.TypeReg, "etc/profile.d/link": tar.TypeSymlink, "tmp/f": tar.TypeReg} {
		if names[name] != kind {
			t.Errorf("%s has type %q in %v", name, names[name], names)
		}
	}
	for name := range names {
		if strings.HasPrefix(name, "proc") || strings.HasPrefix(name, "sys") || strings.HasPrefix(name, "dev") {
			t.Errorf("mount point %s is listed as a change", name)
		}
	}
	if err := d.Resume(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	p, err := d.Inspect(t.Context(), id)
	if err != nil || !p.OK() {
		t.Errorf("posture after an export: %+v, %v", p, err)
	}
}

// TestRecoverWhilePaused: a frozen guest stays frozen through a restart, is
// exported as it is, and runs on only when it is resumed.
func TestRecoverWhilePaused(t *testing.T) {
	root := t.TempDir()
	d := newDriver(t, root)
	r := request(session.NewID().Sandbox(1))
	h, err := d.Start(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	mustRun(t, d, r.ID, "sh", "-c", "echo kept > /root/f; (while :; do echo . >> /root/ticks; sleep 0.01; done) >/dev/null 2>&1 &")
	if err := d.Pause(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = newDriver(t, root)
	t.Cleanup(func() {
		if err := d.Destroy(context.WithoutCancel(t.Context()), r.ID); err != nil {
			t.Error(err)
		}
	})
	if _, err := d.Recover(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	size := func() int64 {
		var b bytes.Buffer
		if _, err := d.ExportChanges(t.Context(), r.ID, &b); err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(&b); ; {
			h, err := r.Next()
			if err != nil {
				t.Fatalf("no ticks in the export: %v", err)
			}
			if h.Name == "root/ticks" {
				return h.Size
			}
		}
	}
	if a, b := size(), size(); a != b {
		t.Errorf("the frozen guest went on: %d, then %d ticks", a, b)
	}
	if err := d.Resume(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	if out := mustRun(t, d, r.ID, "cat", "/root/f"); out != "kept\n" {
		t.Errorf("after resume: %q", out)
	}
}

// TestExportOfLargeFilesAndForgedNames: what fits the disk is exported though
// the memory limit is smaller than it twice over, and a name that looks like
// a deletion is a file.
func TestExportOfLargeFilesAndForgedNames(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, func(r *driver.StartRequest) {
		r.Limits.DiskBytes, r.Limits.MemoryBytes = 512<<20, 512<<20
		r.Shape.DiskBytes = 512 << 20
	})
	mustRun(t, d, id, "sh", "-c", "head -c 300M /dev/zero > /root/big; echo payload > /root/.wh.evil; echo after > /var/zzz; rm /etc/issue")
	if err := d.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	read, write := io.Pipe()
	go func() { // ends with the read below
		_, err := d.ExportChanges(t.Context(), id, write)
		write.CloseWithError(err)
	}()
	sizes, marked := map[string]int64{}, map[string]bool{}
	for r := tar.NewReader(read); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sizes[h.Name] = h.Size
		_, marked[h.Name] = h.PAXRecords[driver.WhiteoutRecord]
	}
	if sizes["root/big"] != 300<<20 || sizes["var/zzz"] != 6 || sizes["root/.wh.evil"] != 8 {
		t.Errorf("sizes %v", sizes)
	}
	if marked["root/.wh.evil"] || !marked["etc/.wh.issue"] {
		t.Errorf("marked as deletions: %v", marked)
	}
}

// TestFloodedWire: a guest that sends as fast as it can is refused, stays
// answerable, and is frozen at once.
func TestFloodedWire(t *testing.T) {
	d := newDriver(t, t.TempDir())
	id := start(t, d, nil)
	script := "import os, socket, time\nend = time.time() + 3\nos.fork(); os.fork()\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nwhile time.time() < end:\n  try: s.sendto(b'x' * 60000, ('192.0.2.1', 9))\n  except OSError: pass\n"
	if _, code, err := run(t.Context(), d, id, "timeout", "20", "python3", "-c", script); err != nil || code != 0 {
		t.Fatalf("flood: exit %d, %v; want it to end by itself", code, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := d.Pause(ctx, id); err != nil {
		t.Error(err)
	}
	if st, err := d.Stats(ctx, id); err != nil || st.OutboundRefused == 0 {
		t.Errorf("stats after a flood: %+v, %v", st, err)
	}
}

// TestBorrowedMarks: a process that only looks like a sentry is not taken for
// a sandbox, is not killed for one, and keeps none from being gone.
func TestBorrowedMarks(t *testing.T) {
	root := t.TempDir()
	d := newDriver(t, root)
	id := session.NewID().Sandbox(0) // as a slot is named
	pretender := exec.Command("/bin/sh", "-c", "echo up; read line", "--root="+filepath.Join(root, "gvisor", "state"), string(id))
	pretender.Args[0] = "runsc-sandbox"
	in, err := pretender.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := pretender.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := pretender.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if found, err := d.List(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("list = %v, %v", found, err)
	}
	if err := d.Destroy(t.Context(), id); err != nil {
		t.Error(err)
	}
	in.Close()
	if err := pretender.Wait(); err != nil && pretender.ProcessState.ExitCode() < 0 {
		t.Errorf("the pretender was killed: %v", err)
	}
}
