package template

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

func open(t *testing.T, dir string, opts Options) *Store {
	t.Helper()
	s, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

// rootfs creates a directory and returns a spec that builds from it.
func rootfs(t *testing.T, files map[string]string) Spec {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		full := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(full, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	return Spec{Version: 1, From: From{Directory: &Directory{Path: dir}}}
}

func build(t *testing.T, s *Store, spec Spec) Template {
	t.Helper()
	tmpl, err := s.Build(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

// read returns a file of a template's image.
func read(t *testing.T, tmpl Template, file string) string {
	t.Helper()
	f, err := os.Open(tmpl.Image)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := fs.ReadFile(img, file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// left lists the files in the store's tmp.
func left(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestBuild(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	spec := rootfs(t, map[string]string{"etc/motd": "hello"})
	spec.Name, spec.User, spec.Env, spec.Cmd = "team/app:v1", "app", map[string]string{"A": "b"}, []string{"/app"}
	var events []string
	tmpl, err := s.Build(t.Context(), spec, func(e Event) {
		if len(events) == 0 || events[len(events)-1] != e.Phase {
			events = append(events, e.Phase)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"read", "write"}, events); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(Config{User: "app", Env: map[string]string{"A": "b"}, Cmd: []string{"/app"}}, tmpl.Config); diff != "" {
		t.Error(diff)
	}
	if got := read(t, tmpl, "etc/motd"); got != "hello" {
		t.Errorf("motd: %q", got)
	}
	if got := read(t, tmpl, "etc/hosts"); !strings.Contains(got, "localhost") {
		t.Errorf("hosts: %q", got)
	}
	if want := filepath.Join(dir, tmpl.Digest.Hex(), tmpl.ImageDigest.Hex()+".erofs"); tmpl.Image != want {
		t.Errorf("image %s, want %s", tmpl.Image, want)
	}
	for _, ref := range []string{"team/app:v1", string(tmpl.Digest)} {
		got, err := s.Get(ref)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tmpl, got); diff != "" {
			t.Errorf("%s: %s", ref, diff)
		}
	}
	for _, ref := range []string{"team/app", "app:v1", "sha256:" + strings.Repeat("0", 64)} {
		if _, err := s.Get(ref); !kind.Is(err, kind.NotFound) {
			t.Errorf("%s: %v", ref, err)
		}
	}
	if _, err := s.Get("../../etc"); !kind.Is(err, kind.Invalid) {
		t.Errorf("a path as a name: %v", err)
	}
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Listed{{Template: tmpl, Names: []Ref{{"team/app", "v1"}}}}, list); diff != "" {
		t.Error(diff)
	}
	if l := left(t, dir); len(l) != 0 {
		t.Errorf("left in tmp: %v", l)
	}
	// The same files and settings are the same template, whatever their name.
	spec.Name = "other"
	if again := build(t, s, spec); again.Digest != tmpl.Digest {
		t.Errorf("another digest for the same content")
	}
	// Other settings are another template with the same image file.
	spec.User = "root"
	other := build(t, s, spec)
	if other.Digest == tmpl.Digest || other.ImageDigest != tmpl.ImageDigest {
		t.Errorf("templates %+v and %+v", tmpl, other)
	}
	a, errA := os.Stat(tmpl.Image)
	b, errB := os.Stat(other.Image)
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(a, b) {
		t.Error("the same image is two files")
	}
}

func TestExtra(t *testing.T) {
	extra := []Extra{{Path: "/.bivy/guest", Mode: 0o555, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader("agent")), nil
	}}}
	spec := rootfs(t, map[string]string{".bivy/guest": "hostile", "f": "x"})
	bare := open(t, t.TempDir(), Options{})
	s := open(t, t.TempDir(), Options{Extra: extra})
	tmpl := build(t, s, spec)
	if got := read(t, tmpl, ".bivy/guest"); got != "agent" {
		t.Errorf("the agent is %q", got)
	}
	if tmpl.ImageDigest == build(t, bare, spec).ImageDigest {
		t.Error("the agent is not in the image's digest")
	}
	for _, path := range []string{"relative", "/", "/../x", "/a//b", "/a/"} {
		bad := open(t, t.TempDir(), Options{Extra: []Extra{{Path: path, Mode: 0o555, Open: extra[0].Open}}})
		if _, err := bad.Build(t.Context(), spec, nil); !kind.Is(err, kind.Invalid) {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestFailureLeavesNothing(t *testing.T) {
	spec := rootfs(t, map[string]string{"f": strings.Repeat("x", 1000)})
	spec.Name = "app"
	broken := errors.New("broken agent")
	for name, tc := range map[string]struct {
		opts Options
		kind kind.Kind
	}{
		"limit":         {Options{Limits: tree.Limits{Bytes: 10}}, kind.Exhausted},
		"agent missing": {Options{Extra: []Extra{{Path: "/a", Open: func() (io.ReadCloser, error) { return nil, broken }}}}, kind.Internal},
	} {
		dir := t.TempDir()
		s := open(t, dir, tc.opts)
		if _, err := s.Build(t.Context(), spec, nil); !kind.Is(err, tc.kind) || !strings.Contains(err.Error(), "template app") {
			t.Errorf("%s: %v", name, err)
		}
		list, err := s.List()
		if err != nil || len(list) != 0 || len(left(t, dir)) != 0 {
			t.Errorf("%s: left %v, %v, %v", name, list, left(t, dir), err)
		}
		if _, err := s.Get("app"); !kind.Is(err, kind.NotFound) {
			t.Errorf("%s: the name exists: %v", name, err)
		}
	}
}

func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no tmpfs can be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := open(t, dir, Options{})
	defer s.Close()
	spec := rootfs(t, map[string]string{"f": strings.Repeat("x", 1<<20)})
	_, err := s.Build(t.Context(), spec, nil)
	if !kind.Is(err, kind.Exhausted) || !errors.Is(err, unix.ENOSPC) || kind.Hint(err) == "" {
		t.Errorf("got %v: %v", kind.Of(err), err)
	}
	if l := left(t, dir); len(l) != 0 {
		t.Errorf("left in tmp: %v", l)
	}
}

func TestLeasesAndGC(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	opts := Options{Now: func() time.Time { return now }}
	s := open(t, dir, opts)
	named := rootfs(t, map[string]string{"f": "named"})
	named.Name = "kept"
	kept := build(t, s, named)
	leased := build(t, s, rootfs(t, map[string]string{"f": "leased"}))
	loose := build(t, s, rootfs(t, map[string]string{"f": "loose"}))

	for range 2 { // repeatable
		if err := s.Lease(leased.Digest, "sandbox-1.2"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Lease(leased.Digest, "other"); err != nil {
		t.Fatal(err)
	}
	gc := func() []Digest {
		t.Helper()
		c, err := s.GC(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c.Digests
	}
	if got := gc(); len(got) != 0 {
		t.Errorf("collected in the grace period: %v", got)
	}
	now = now.Add(2 * DefaultGrace)
	if diff := cmp.Diff([]Digest{loose.Digest}, gc()); diff != "" {
		t.Error(diff)
	}
	if _, err := os.Stat(loose.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the collected directory: %v", err)
	}
	if _, err := os.Stat(filepath.Dir(leased.SnapshotDir())); err != nil {
		t.Errorf("the leased one: %v", err)
	}

	// Leases outlive the process.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, opts)
	holders, err := s.Leases(leased.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"other", "sandbox-1.2"}, holders); diff != "" {
		t.Error(diff)
	}
	if got := gc(); len(got) != 0 {
		t.Errorf("collected with leases: %v", got)
	}
	if err := s.Remove(string(leased.Digest)); !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "sandbox-1.2") {
		t.Errorf("removed in use: %v", err)
	}
	for range 2 { // repeatable
		if err := errors.Join(s.Release(leased.Digest, "other"), s.Release(leased.Digest, "sandbox-1.2")); err != nil {
			t.Fatal(err)
		}
	}
	now = now.Add(2 * DefaultGrace)
	if diff := cmp.Diff([]Digest{leased.Digest}, gc()); diff != "" {
		t.Error(diff)
	}

	if err := s.Lease(leased.Digest, "late"); !kind.Is(err, kind.NotFound) {
		t.Errorf("lease of a collected template: %v", err)
	}
	if err := s.Release(leased.Digest, "late"); err != nil {
		t.Errorf("release of a collected template: %v", err)
	}
	for _, holder := range []string{"", "..", "../x", "a/b", "a b", strings.Repeat("a", 200)} {
		if err := s.Lease(kept.Digest, holder); !kind.Is(err, kind.Invalid) {
			t.Errorf("holder %q: %v", holder, err)
		}
	}
}

func TestShortDigest(t *testing.T) {
	s := open(t, t.TempDir(), Options{Grace: -1})
	a := build(t, s, rootfs(t, map[string]string{"a": "1"}))
	build(t, s, rootfs(t, map[string]string{"a": "2"}))
	short := string(a.Digest)[:len("sha256:")+12]
	if got, err := s.Get(short); err != nil || got.Digest != a.Digest {
		t.Errorf("%s, %v", got.Digest, err)
	}
	if _, err := s.Get("sha256:000000000000"); !kind.Is(err, kind.NotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Get(short[:len(short)-1]); !kind.Is(err, kind.NotFound) {
		t.Errorf("too short, so a name: got %v", err)
	}
	if err := s.Remove(short); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(string(a.Digest)); !kind.Is(err, kind.NotFound) {
		t.Errorf("got %v", err)
	}
}

func TestRemove(t *testing.T) {
	s := open(t, t.TempDir(), Options{Grace: -1})
	spec := rootfs(t, map[string]string{"f": "x"})
	spec.Name = "a"
	tmpl := build(t, s, spec)
	if err := s.SetName("b:v2", tmpl.Digest); err != nil {
		t.Fatal(err)
	}
	if err := s.Lease(tmpl.Digest, "holder"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("a"); err != nil { // it keeps its other name
		t.Fatal(err)
	}
	if _, err := s.Get("a"); !kind.Is(err, kind.NotFound) {
		t.Errorf("a: %v", err)
	}
	if err := s.Remove("b:v2"); !kind.Is(err, kind.Conflict) {
		t.Errorf("the last name of one in use: %v", err)
	}
	if err := s.Release(tmpl.Digest, "holder"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(string(tmpl.Digest)); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"b:v2", string(tmpl.Digest)} {
		if _, err := s.Get(ref); !kind.Is(err, kind.NotFound) {
			t.Errorf("%s: %v", ref, err)
		}
		if err := s.Remove(ref); !kind.Is(err, kind.NotFound) {
			t.Errorf("remove %s again: %v", ref, err)
		}
	}
	if err := s.SetName("c", tmpl.Digest); !kind.Is(err, kind.NotFound) {
		t.Errorf("a name for a removed template: %v", err)
	}
}

func TestSecondStore(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	if _, err := Open(dir, Options{}); !kind.Is(err, kind.Conflict) || kind.Hint(err) == "" {
		t.Errorf("a second store: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, dir, Options{}).Close()
	if err := os.WriteFile(filepath.Join(dir, "version"), []byte("bivy templates 99\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{}); !kind.Is(err, kind.Conflict) || !strings.Contains(err.Error(), "99") {
		t.Errorf("a newer store: %v", err)
	}
}

func TestRecovery(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	good := rootfs(t, map[string]string{"f": "good"})
	good.Name = "good"
	bad := rootfs(t, map[string]string{"f": "bad"})
	bad.Name = "bad"
	used := rootfs(t, map[string]string{"f": "used"})
	used.Name = "used"
	g, b, u := build(t, s, good), build(t, s, bad), build(t, s, used)
	if err := s.Lease(u.Digest, "running"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// As after a crash, and after files were deleted by hand.
	for _, err := range []error{
		os.MkdirAll(filepath.Join(dir, "tmp/build-X"), 0o700),
		os.WriteFile(filepath.Join(dir, "tmp/build-X/.image-Y"), []byte("half"), 0o600),
		os.WriteFile(filepath.Join(dir, "tmp/file-Z"), []byte("half"), 0o600),
		os.WriteFile(filepath.Join(dir, "refs/_/good/.durable-X"), []byte(string(g.Digest)+"\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "builds/.durable-X"), nil, 0o600),
		os.Truncate(b.Image, 100),
		os.Remove(u.Image),
		os.MkdirAll(filepath.Join(dir, "refs/_/ghost"), 0o700),
		os.WriteFile(filepath.Join(dir, "refs/_/ghost/default"), []byte("sha256:"+strings.Repeat("1", 64)+"\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "refs/_/ghost/garbage"), []byte("garbage"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, dir, Options{})
	if l := left(t, dir); len(l) != 0 {
		t.Errorf("left in tmp: %v", l)
	}
	for _, temp := range []string{"refs/_/good/.durable-X", "builds/.durable-X"} {
		if _, err := os.Lstat(filepath.Join(dir, temp)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", temp, err)
		}
	}
	if got, err := s.Get("good"); err != nil || got.Digest != g.Digest {
		t.Errorf("good: %v, %v", got, err)
	}
	for _, ref := range []string{"bad", "ghost", "ghost:garbage", string(b.Digest)} {
		if _, err := s.Get(ref); !kind.Is(err, kind.NotFound) {
			t.Errorf("%s: %v", ref, err)
		}
	}
	if _, err := s.Get("used"); err == nil {
		t.Error("a template without its image was given out")
	}
	list, err := s.List()
	if err != nil || len(list) != 2 {
		t.Errorf("list: %v, %v", list, err)
	}
	if again := build(t, s, bad); again.Digest != b.Digest {
		t.Errorf("built again as %s", again.Digest)
	}
}

// A name that cannot be read is kept.
func TestUnreadableNameStays(t *testing.T) {
	dir := t.TempDir()
	if err := open(t, dir, Options{}).Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "refs/_/app/default")
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("default", name); err != nil { // a loop, which not even root can read
		t.Fatal(err)
	}
	open(t, dir, Options{})
	if _, err := os.Lstat(name); err != nil {
		t.Error(err)
	}
}

// TestKilled kills a process during a build, when its files are half written.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("BIVY_TEST_STORE"); dir != "" {
		s, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Build(context.Background(), Spec{Version: 1, Name: "app", From: From{Directory: &Directory{Path: os.Getenv("BIVY_TEST_FROM")}}}, func(e Event) {
			if e.Phase == "write" && e.Done > e.Total/2 {
				fmt.Println("half way")
				select {} // until it is killed
			}
		})
		t.Fatal("the build ended", err)
	}
	dir := t.TempDir()
	spec := rootfs(t, map[string]string{"a": strings.Repeat("a", 1<<20), "b": strings.Repeat("b", 1<<20)})
	cmd := exec.Command(os.Args[0], "-test.run", "^TestKilled$")
	cmd.Env = append(os.Environ(), "BIVY_TEST_STORE="+dir, "BIVY_TEST_FROM="+spec.From.Directory.Path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, len("half way\n"))
	if _, err := io.ReadFull(out, buf); err != nil || !bytes.Contains(buf, []byte("half way")) {
		t.Fatalf("the child says %q, %v", buf, err)
	}
	if l := left(t, dir); len(l) != 1 {
		t.Errorf("while it builds: %v", l)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the child was not killed")
	}
	s := open(t, dir, Options{})
	if l := left(t, dir); len(l) != 0 {
		t.Errorf("left in tmp: %v", l)
	}
	list, err := s.List()
	if err != nil || len(list) != 0 {
		t.Errorf("left in the store: %v, %v", list, err)
	}
	spec.Name = "app"
	build(t, s, spec)
}

// gate is a registry that counts downloads of one layer and can block them.
type gate struct {
	handler   http.Handler
	layer     string
	downloads atomic.Int32
	hold      chan struct{} // nil: open
	arrived   chan struct{}
}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if g.hold != nil && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, g.layer) {
		g.downloads.Add(1)
		g.arrived <- struct{}{}
		select {
		case <-g.hold:
		case <-r.Context().Done():
		}
	}
	g.handler.ServeHTTP(w, r)
}

func pushed(t *testing.T) (*gate, Spec) {
	t.Helper()
	g := &gate{handler: registry.New(registry.Logger(log.New(io.Discard, "", 0))), arrived: make(chan struct{}, 100)}
	srv := httptest.NewServer(g)
	t.Cleanup(srv.Close)
	ref, err := name.ParseReference(strings.TrimPrefix(srv.URL, "http://") + "/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	img, err := random.Image(10_000, 1)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg.OS, cfg.Architecture = "linux", "amd64"
	cfg.Config = v1.Config{User: "app", Env: []string{"A=image", "B=image"}, Cmd: []string{"run"}}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	g.layer = digest.String()
	return g, Spec{Version: 1, Name: "app", From: From{Image: &Image{Ref: ref.String()}}, Env: map[string]string{"B": "spec"}}
}

func TestImageBuild(t *testing.T) {
	_, spec := pushed(t)
	s := open(t, t.TempDir(), Options{})
	tmpl := build(t, s, spec)
	want := Config{User: "app", Env: map[string]string{"A": "image", "B": "spec"}, Cmd: []string{"run"}}
	if diff := cmp.Diff(want, tmpl.Config); diff != "" {
		t.Error(diff)
	}
	// A second build reads no layer: the manifest is the same.
	again, err := s.Build(t.Context(), spec, func(e Event) { t.Errorf("built again: %v", e) })
	if err != nil || again.Digest != tmpl.Digest {
		t.Errorf("again: %v, %v", again, err)
	}
	// After GC it is built again.
	if err := s.Remove(string(tmpl.Digest)); err != nil {
		t.Fatal(err)
	}
	if again := build(t, s, spec); again.Digest != tmpl.Digest {
		t.Errorf("after removal: %s", again.Digest)
	}
}

// TestOneBuild makes many callers build the same template at once. The layer is
// blocked until all of them wait; then the one that started the build is cancelled.
func TestOneBuild(t *testing.T) {
	g, spec := pushed(t)
	s := open(t, t.TempDir(), Options{})
	g.hold = make(chan struct{})
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	results := make([]error, 5)
	digests := make([]Digest, 5)
	for i := range 5 {
		c := t.Context()
		if i == 0 {
			c = ctx
		}
		wg.Go(func() {
			tmpl, err := s.Build(c, spec, nil)
			digests[i], results[i] = tmpl.Digest, err
		})
	}
	<-g.arrived
	waitFor(t, s, 5)
	leave()
	waitFor(t, s, 4)
	close(g.hold)
	wg.Wait()
	if !errors.Is(results[0], context.Canceled) && results[0] != nil {
		t.Errorf("the one that left: %v", results[0])
	}
	for i := 1; i < 5; i++ {
		if results[i] != nil || digests[i] != digests[1] || digests[i] == "" {
			t.Errorf("caller %d: %v %v", i, digests[i], results[i])
		}
	}
	if n := g.downloads.Load(); n != 1 {
		t.Errorf("the layer was fetched %d times", n)
	}
}

// waitFor returns when n callers wait for the running build.
func waitFor(t *testing.T, s *Store, n int) {
	t.Helper()
	for {
		s.runningMu.Lock()
		total := 0
		for _, f := range s.running {
			f.mu.Lock()
			total += len(f.waiters)
			f.mu.Unlock()
		}
		s.runningMu.Unlock()
		if total == n {
			return
		}
		runtime.Gosched()
	}
}

// TestAllLeave checks that a build ends and leaves no files when its last caller
// is cancelled.
func TestAllLeave(t *testing.T) {
	g, spec := pushed(t)
	dir := t.TempDir()
	s := open(t, dir, Options{})
	g.hold = make(chan struct{})
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := s.Build(ctx, spec, nil)
		done <- err
	}()
	<-g.arrived
	if l := left(t, dir); len(l) != 1 {
		t.Errorf("while it builds: %v", l)
	}
	leave()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if l := left(t, dir); len(l) != 0 {
		t.Errorf("left in tmp: %v", l)
	}
	close(g.hold)
	build(t, s, spec)
}

func TestBrokenIsBuiltAgain(t *testing.T) {
	_, spec := pushed(t)
	s := open(t, t.TempDir(), Options{})
	tmpl := build(t, s, spec)
	if err := s.Verify(t.Context(), tmpl.Digest); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(tmpl.Image)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(tmpl.Image, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), tmpl.Digest); !kind.Is(err, kind.Conflict) {
		t.Errorf("a flipped bit: %v", err)
	}
	if err := os.Remove(tmpl.Image); err != nil {
		t.Fatal(err)
	}
	if err := s.Lease(tmpl.Digest, "x"); err == nil {
		t.Error("a lease on a broken template")
	}
	if again := build(t, s, spec); again.Digest != tmpl.Digest {
		t.Errorf("built again as %s", again.Digest)
	}
	if err := s.Verify(t.Context(), tmpl.Digest); err != nil {
		t.Error(err)
	}
}

func TestLogins(t *testing.T) {
	dir := t.TempDir()
	pass := filepath.Join(dir, "pass")
	config := filepath.Join(dir, "config.json")
	for f, text := range map[string]string{pass: "from-file\n", config: `{"auths":{"r.example":{"username":"carol","password":"from-config"}}}`} {
		if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, t.TempDir(), Options{Getenv: func(k string) string { return map[string]string{"PASS": "from-env"}[k] }})
	for want, c := range map[string]*Credentials{
		"alice:from-env":    {Username: "alice", PasswordEnv: "PASS"},
		"bob:from-file":     {Username: "bob", PasswordFile: pass},
		"carol:from-config": {DockerConfig: config},
	} {
		l, err := s.login(&Image{Ref: "r.example/app", Credentials: c})
		if err != nil || l.Username+":"+l.Password != want {
			t.Errorf("%s: %v, %v", want, l, err)
		}
	}
	for _, c := range []*Credentials{{Username: "a", PasswordEnv: "UNSET"}, {Username: "a", PasswordFile: "/no/such"}, {DockerConfig: "/no/such"}} {
		if _, err := s.login(&Image{Ref: "r.example/app", Credentials: c}); !kind.Is(err, kind.Invalid) || kind.Field(err) != "from.image.credentials" {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestEverySourceSaysWhatIsMissing(t *testing.T) {
	s := open(t, t.TempDir(), Options{HostRoot: t.TempDir()})
	for _, f := range []From{
		{HostPackages: &HostPackages{Packages: []string{"bash"}}},
		{Tarball: &Tarball{Path: "/no/such"}},
		{Layout: &Layout{Path: "/no/such"}},
		{Directory: &Directory{Path: "/no/such"}},
		{Tar: &Tar{Path: "/no/such"}},
	} {
		_, err := s.Build(t.Context(), Spec{Version: 1, From: f}, nil)
		if !slices.Contains([]kind.Kind{kind.NotFound, kind.Invalid}, kind.Of(err)) || !strings.Contains(err.Error(), "template from "+f.Kind()) {
			t.Errorf("%s: %v", f.Kind(), err)
		}
	}
}
