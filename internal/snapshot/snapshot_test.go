package snapshot

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/session"
)

// counting counts what it lets through.
type counting struct {
	*fake.Driver
	mu     sync.Mutex
	starts int
}

func (c *counting) Start(ctx context.Context, req driver.StartRequest) (driver.Handle, error) {
	c.mu.Lock()
	c.starts++
	c.mu.Unlock()
	return c.Driver.Start(ctx, req)
}

func newMaker(t *testing.T) (*Maker, *counting) {
	t.Helper()
	d := &counting{Driver: &fake.Driver{}}
	t.Cleanup(func() {
		left, err := d.List(context.Background())
		if err != nil || len(left) > 0 {
			t.Errorf("sandboxes left: %v, %v", left, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return New(Options{Driver: d, Build: "one", Log: slog.New(slog.DiscardHandler),
		Ready: func(context.Context, driver.Driver, session.SandboxID) error { return nil }}), d
}

func request(t *testing.T) Request {
	t.Helper()
	dir := t.TempDir()
	image := filepath.Join(dir, "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return Request{Dir: filepath.Join(dir, "snapshots"), Start: driver.StartRequest{
		ID: session.NewID().Sandbox(1), Image: image, Args: []string{"/agent"}, Shape: driver.Shape{CPUs: 2, MemoryBytes: 1 << 30, DiskBytes: 1 << 30},
		Limits: driver.Limits{DiskBytes: 1 << 30}}}
}

func ensure(t *testing.T, m *Maker, req Request) string {
	t.Helper()
	dir, err := m.Ensure(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestMadeOnceByMany(t *testing.T) {
	m, d := newMaker(t)
	req := request(t)
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			if _, err := m.Ensure(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	again := New(m.Options) // a later process
	ensure(t, again, req)
	if d.starts != 1 {
		t.Errorf("booted %d times for one snapshot", d.starts)
	}
}

// TestDamageIsSeen: whatever is wrong with a snapshot's files, it is made
// again, by the process that made it when a size is wrong, by the next one
// in any case.
func TestDamageIsSeen(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir, file string) error{
		"cut file":    func(_ *testing.T, dir, file string) error { return os.Truncate(filepath.Join(dir, file), 0) },
		"lost file":   func(_ *testing.T, dir, file string) error { return os.Remove(filepath.Join(dir, file)) },
		"no manifest": func(_ *testing.T, dir, _ string) error { return os.Remove(filepath.Join(dir, manifestName)) },
		"bad manifest": func(_ *testing.T, dir, _ string) error {
			return os.WriteFile(filepath.Join(dir, manifestName), []byte("{"), 0o600)
		},
		"another manifest": func(_ *testing.T, dir, _ string) error {
			return os.WriteFile(filepath.Join(dir, manifestName), []byte(`{"version":2,"key":"x","files":{"a":{}}}`), 0o600)
		},
		"changed byte": func(t *testing.T, dir, file string) error {
			b, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil || len(b) == 0 {
				t.Fatalf("%s has %d bytes to change: %v", file, len(b), err)
			}
			b[0] ^= 1
			return os.WriteFile(filepath.Join(dir, file), b, 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, d := newMaker(t)
			req := request(t)
			dir := ensure(t, m, req)
			if err := damage(t, dir, largest(t, dir)); err != nil {
				t.Fatal(err)
			}
			ensure(t, New(m.Options), req)
			if d.starts != 2 {
				t.Errorf("booted %d times, want 2: the damage was not seen", d.starts)
			}
		})
	}
}

func largest(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return e.Name() == manifestName || e.IsDir() })
	if len(entries) == 0 {
		t.Fatal("a snapshot without files")
	}
	return slices.MaxFunc(entries, func(a, b os.DirEntry) int {
		x, _ := a.Info()
		y, _ := b.Info()
		return int(x.Size() - y.Size())
	}).Name()
}

// TestOneBuildAtATime: what another build made is of no use and goes.
func TestOneBuildAtATime(t *testing.T) {
	m, _ := newMaker(t)
	req := request(t)
	old := ensure(t, m, req)
	half := filepath.Join(req.Dir, ".making-of-a-killed-process")
	if err := os.Mkdir(half, 0o700); err != nil {
		t.Fatal(err)
	}
	o := m.Options
	o.Build = "two"
	if fresh := ensure(t, New(o), req); fresh == old {
		t.Fatal("another build has the same snapshot")
	}
	for _, gone := range []string{old, half} {
		if _, err := os.Stat(gone); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", gone, err)
		}
	}
}

func TestFailureLeavesNothing(t *testing.T) {
	m, d := newMaker(t)
	d.Script(fake.Fault{Method: "Checkpoint", Mode: fake.FailBefore})
	req := request(t)
	if _, err := m.Ensure(t.Context(), req); err == nil {
		t.Fatal("a failed checkpoint is no failure")
	}
	entries, err := os.ReadDir(req.Dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// TestKeyHasTheShape: a snapshot of a sandbox that saw other processors,
// memory or disk is another snapshot.
func TestKeyHasTheShape(t *testing.T) {
	m, _ := newMaker(t)
	req := request(t)
	keys := map[string]string{}
	for what, change := range map[string]func(*driver.StartRequest){
		"the same":              func(*driver.StartRequest) {},
		"more processors":       func(r *driver.StartRequest) { r.Shape.CPUs++ },
		"more memory":           func(r *driver.StartRequest) { r.Shape.MemoryBytes++ },
		"more disk":             func(r *driver.StartRequest) { r.Shape.DiskBytes++; r.Limits.DiskBytes++ },
		"another first process": func(r *driver.StartRequest) { r.Args = []string{"/other"} },
	} {
		r := req
		change(&r.Start)
		key, err := m.key(r)
		if err != nil {
			t.Fatal(err)
		}
		if other, there := keys[key]; there {
			t.Errorf("%s and %s have the same key", what, other)
		}
		keys[key] = what
	}
	// Who owns the sandbox, its name and its limits are not in a snapshot.
	r := req
	r.Start.ID, r.Start.Owner = session.NewID().Sandbox(1), driver.Owner{Kind: driver.OwnedByTemplate, ID: "x"}
	r.Start.Limits.CPUMillis = 100
	if key, err := m.key(r); err != nil || keys[key] != "the same" {
		t.Errorf("key %s (%s), %v; want that of the same snapshot", key, keys[key], err)
	}
}
