package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
)

// Budgets; see docs/performance.md.
const (
	maxBinary   = 8_000_000 // bytes
	maxResident = 12 << 10  // KiB, idle
)

// build builds the binary with build.sh, like a release.
func build(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bivy-guest")
	if out, err := exec.Command("./build.sh", path).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

func TestShipped(t *testing.T) {
	path := build(t)
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", st.Size())
	if st.Size() > maxBinary {
		t.Errorf("the binary has %d bytes, at most %d are allowed", st.Size(), maxBinary)
	}
	if os.Getuid() != 0 {
		t.Skip("the rest needs root for namespaces")
	}
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	if err := os.WriteFile(filepath.Join(dir, "passwd"), []byte("root:x:0:0::/:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// /proc has to be that of the new process namespace, so a shell mounts it
	// and then becomes the agent.
	cmd := exec.Command("/bin/sh", "-c", `mount --make-rprivate / && mount -t proc proc /proc && exec "$0" "$@"`,
		path, "-listen", "unix:"+socket, "-etc", dir, "-run", dir, "-user", "root", "-set-clock=false", "-set-hostname=false")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	log := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(bufio.NewReader(stderr)) // ends with the agent
		log <- string(text)
	}()
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		for { // until it listens
			conn, err := d.DialContext(ctx, "unix", socket)
			if err == nil || ctx.Err() != nil || !(errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED)) {
				return conn, err
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
	c := guestclient.New(guestclient.Config{Dial: dial})
	defer c.Close()
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Init(t.Context(), wire.InitRequest{AccessToken: "t"}); err != nil {
		t.Fatal(err)
	}
	p, err := c.Exec(t.Context(), guestclient.Command{Argv: []string{"/bin/sh", "-c", "echo $PPID; sleep 1000 & exit 4"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if e, err := p.Next(); err != nil || string(e.Data) != "1\n" {
		t.Errorf("the parent of a process is %q, want 1 (%v)", e.Data, err)
	}
	if e, err := p.Next(); err != nil || e.Exit.Code != 4 {
		t.Errorf("got %+v, %v", e, err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://guest/reclaim", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderToken, "t")
	plain := http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	res, err := plain.RoundTrip(req)
	if err != nil || res.StatusCode != http.StatusNoContent {
		t.Fatalf("reclaim: %+v, %v", res, err)
	}
	if err := res.Body.Close(); err != nil {
		t.Fatal(err)
	}
	if kib := resident(t, cmd.Process.Pid); kib > maxResident {
		t.Errorf("%d KiB are resident when idle, at most %d are allowed", kib, maxResident)
	} else {
		t.Logf("%d KiB resident", kib)
	}
	// On SIGTERM it kills all other processes.
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, <-log)
	}
}

func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
