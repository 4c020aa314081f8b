package fake_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"bivy/internal/driver"
	"bivy/internal/driver/drivertest"
	"bivy/internal/driver/fake"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/leakcheck"
	"bivy/internal/session"
)

// execIn runs a command through the agent, which may still be starting.
func execIn(ctx context.Context, d driver.Driver, id session.SandboxID, argv ...string) (string, int, error) {
	return execAt(ctx, d, id, "", argv...)
}

func execAt(ctx context.Context, d driver.Driver, id session.SandboxID, dir string, argv ...string) (string, int, error) {
	c := guestclient.New(guestclient.Config{Dial: func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, id, wire.Port) }})
	defer c.Close()
	// The real agent does nothing before it has been bound.
	if _, err := c.Init(ctx, wire.InitRequest{AccessToken: "test", Timestamp: time.Now()}); err != nil {
		return "", 0, err
	}
	p, err := c.Exec(ctx, guestclient.Command{Argv: argv, Cwd: dir})
	if err != nil {
		return "", 0, err
	}
	defer p.Close()
	var out bytes.Buffer
	for {
		ev, err := p.Next()
		if err != nil {
			return out.String(), 0, err
		}
		switch ev.Kind {
		case guestclient.Stdout:
			out.Write(ev.Data)
		case guestclient.End:
			return out.String(), ev.Exit.ShellCode(), nil
		case guestclient.Stderr, guestclient.Terminal:
		}
	}
}

func TestContract(t *testing.T) {
	image := t.TempDir()
	for name, text := range map[string]string{"old": "old", "doomed": "doomed", "untouched": "untouched"} {
		if err := os.WriteFile(filepath.Join(image, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	hosts := map[string]*fake.Host{}
	drivertest.Run(t, drivertest.Harness{
		New: func(_ *testing.T, root string) driver.Driver {
			if hosts[root] == nil {
				hosts[root] = &fake.Host{Dir: filepath.Join(root, "sandboxes")}
			}
			return &fake.Driver{Host: hosts[root]}
		},
		Request: func(_ *testing.T, id session.SandboxID) driver.StartRequest {
			return driver.StartRequest{ID: id, Image: image, Args: []string{"/agent"}}
		},
		Port:       wire.Port,
		Exec:       execIn,
		Existing:   "doomed",
		Changeable: "old",
		Stop: func(_ *testing.T, d driver.Driver, id session.SandboxID) {
			d.(*fake.Driver).Host.Kill(id, 3, 0)
		},
		Bad: func(_ *testing.T, _ session.SandboxID) driver.StartRequest {
			return driver.StartRequest{ID: "not an id", Image: image}
		},
		Leftovers: func(t *testing.T, root string) []string { return leftovers(t, filepath.Join(root, "sandboxes")) },
	})
}

// The real agent as child processes: they outlive the driver that started
// them, and another Host on the same directory finds them.
func TestContractWithTheRealAgent(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds bivy-guest")
	}
	if os.Getuid() != 0 {
		t.Skip("bivy-guest changes users, which takes root")
	}
	bin := filepath.Join(t.TempDir(), "bivy-guest")
	build := exec.Command("go", "build", "-o", bin, "bivy/cmd/bivy-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building bivy-guest: %v\n%s", err, out)
	}
	// A Unix socket's path is short, and that of a test's directory is not.
	dirs := map[string]string{}
	open := func(t *testing.T, root string) *fake.Driver {
		if dirs[root] == "" {
			dir, err := os.MkdirTemp("", "f")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			dirs[root] = dir
		}
		return &fake.Driver{Host: &fake.Host{
			Dir: dirs[root],
			Program: func(_ driver.StartRequest, dir, socket string) *exec.Cmd {
				return exec.Command(bin, "-listen", "unix:"+socket, "-run", filepath.Join(dir, "..", "run"), "-user", "root")
			},
		}}
	}
	drivertest.Run(t, drivertest.Harness{
		New: func(t *testing.T, root string) driver.Driver { return open(t, root) },
		Request: func(_ *testing.T, id session.SandboxID) driver.StartRequest {
			return driver.StartRequest{ID: id, Args: []string{"/agent"}}
		},
		Port: wire.Port,
		Exec: func(ctx context.Context, d driver.Driver, id session.SandboxID, argv ...string) (string, int, error) {
			dir := filepath.Join(d.(*fake.Driver).Host.Dir, string(id), "root")
			return execAt(ctx, d, id, dir, argv...)
		},
		Stop: func(_ *testing.T, d driver.Driver, id session.SandboxID) {
			d.(*fake.Driver).Host.Kill(id, 3, 0)
		},
		Leftovers: func(t *testing.T, root string) []string { return leftovers(t, dirs[root]) },
	})
}

func leftovers(t *testing.T, dir string) []string {
	t.Helper()
	var left []string
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for _, e := range entries {
		left = append(left, e.Name())
	}
	// A child that has died is reaped a moment later by the Host that started
	// it, which after a restart is not the one that destroyed it.
	grown, err := leakcheck.Settle(context.Background(), leakcheck.Where{Marker: dir, Dirs: []string{dir}, Ignore: func(k leakcheck.Kind, _ string) bool {
		return k == leakcheck.Goroutine || k == leakcheck.FD || k == leakcheck.File
	}}, leakcheck.Snapshot{}, 2*time.Second)
	if err != nil {
		t.Error(err)
	}
	for _, c := range grown {
		left = append(left, string(c.Kind)+" "+c.Name)
	}
	return left
}

func TestZeroValue(t *testing.T) {
	var d fake.Driver
	id := session.NewID().Sandbox(1)
	if _, err := d.Start(t.Context(), driver.StartRequest{ID: id}); err != nil {
		t.Fatal(err)
	}
	if out, exit, err := execIn(t.Context(), &d, id, "echo", "works"); err != nil || exit != 0 || out != "works\n" {
		t.Errorf("exec: %q, exit %d, %v", out, exit, err)
	}
	if err := d.Destroy(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestRestartInProcessLosesSandboxes(t *testing.T) {
	// Another Host on the same directory is another process: what ran
	// in-process is gone, and its directory is found.
	dir := t.TempDir()
	first := &fake.Driver{Host: &fake.Host{Dir: dir}}
	id := session.NewID().Sandbox(1)
	handle, err := first.Start(t.Context(), driver.StartRequest{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	first.Host.Reboot()
	second := &fake.Driver{Host: &fake.Host{Dir: dir}}
	found, err := second.List(t.Context())
	if err != nil || len(found) != 1 || found[0].ID != id || found[0].Running {
		t.Errorf("List: %+v, %v; want the leftovers of %s", found, err, id)
	}
	if _, err := second.Recover(t.Context(), handle); !kind.Is(err, kind.NotFound) {
		t.Errorf("Recover: %v", err)
	}
	if found, err := second.List(t.Context()); err != nil || len(found) != 1 {
		t.Errorf("List after Recover: %+v, %v; want the leftovers still", found, err)
	}
	if err := second.Destroy(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestFaults(t *testing.T) {
	broken := errors.New("broken")
	hit := make(chan struct{}, 1)
	start := func(d *fake.Driver) (session.SandboxID, error) {
		id := session.NewID().Sandbox(1)
		_, err := d.Start(t.Context(), driver.StartRequest{ID: id})
		return id, err
	}
	count := func(d *fake.Driver) int {
		found, err := d.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	t.Run("before", func(t *testing.T) {
		var d fake.Driver
		d.Script(fake.Fault{Method: "Start", Mode: fake.FailBefore, Err: broken, Hit: hit})
		if _, err := start(&d); !errors.Is(err, broken) || count(&d) != 0 {
			t.Errorf("Start: %v, %d sandboxes", err, count(&d))
		}
		<-hit
		id, err := start(&d)
		if err != nil {
			t.Errorf("the fault struck twice: %v", err)
		}
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	})
	t.Run("after", func(t *testing.T) {
		var d fake.Driver
		d.Script(fake.Fault{Method: "Start", Mode: fake.FailAfter})
		id, err := start(&d)
		if !kind.Is(err, kind.Unavailable) || count(&d) != 1 {
			t.Errorf("Start: %v, %d sandboxes", err, count(&d))
		}
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	})
	t.Run("stall", func(t *testing.T) {
		var d fake.Driver
		d.Script(fake.Fault{Method: "List", Mode: fake.Stall, Skip: 1})
		if n := count(&d); n != 0 {
			t.Error(n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := d.List(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a stalled List: %v", err)
		}
	})
	t.Run("die", func(t *testing.T) {
		var d fake.Driver
		d.Script(fake.Fault{Method: "Start", Mode: fake.Die})
		id, err := start(&d)
		if err != nil {
			t.Fatal(err)
		}
		if x, err := d.Wait(t.Context(), id); err != nil || x.Signal != 9 {
			t.Errorf("Wait: %+v, %v", x, err)
		}
		if _, err := d.ExportChanges(t.Context(), id, io.Discard); !kind.Is(err, kind.Unavailable) {
			t.Errorf("ExportChanges of a dead sandbox: %v", err)
		}
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	})
}
