// Package e2e drives the real bivy, built from this tree, as root: the server
// process, gVisor, SQLite, and whatever can go wrong with them.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/session"
)

// bed is what the tests of this package share: the built binaries and one
// data directory, in which the default template is made once.
type bed struct {
	dir    string
	bivy   string // the shipped binary
	killer string // testdata/server
	host   *host
}

var (
	theBed   = sync.OnceValues(newBed)
	bedSkip  = "these tests run sandboxes, which takes root"
	bedInUse bool
)

func TestMain(m *testing.M) {
	code := m.Run()
	if bedInUse {
		b, err := theBed()
		if err == nil {
			err = b.close()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// needBed returns the bed, or skips the test where there can be none.
func needBed(t *testing.T) *bed {
	t.Helper()
	if testing.Short() {
		t.Skip("not with -short: these tests build bivy and run it")
	}
	if os.Geteuid() != 0 {
		t.Skip(bedSkip)
	}
	bedInUse = true
	b, err := theBed()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func newBed() (*bed, error) {
	// Short: the paths of sockets below it have 107 characters at most.
	dir, err := os.MkdirTemp("/tmp", "bivy-e2e-")
	if err != nil {
		return nil, err
	}
	// The sentry opens what it needs as an unprivileged user.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	b := &bed{dir: dir, bivy: filepath.Join(dir, "bivy"), killer: filepath.Join(dir, "server")}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := b.build(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	b.host, err = newHost(b, "h")
	return b, err
}

// build makes what `make build` makes, below the bed's own directory: neither
// a build that runs at the same time nor one that is old gets in the way.
func (b *bed) build(ctx context.Context) error {
	const id = "bivy-e2e"
	payload := filepath.Join(b.dir, "payload")
	if err := os.Mkdir(payload, 0o755); err != nil {
		return err
	}
	sentry, guest := filepath.Join(b.dir, "bivy-sentry"), filepath.Join(b.dir, "bivy-guest")
	overlay := filepath.Join(b.dir, "overlay.json")
	replace := map[string]string{}
	for _, f := range []string{"bivy-sentry.zst", "bivy-guest.zst", "manifest.json"} {
		replace[filepath.Join(moduleRoot(), "internal/bundle/payload", f)] = filepath.Join(payload, f)
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	if err := os.WriteFile(overlay, text, 0o644); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"go", "build", "-trimpath", "-ldflags", "-s -w -X gvisor.dev/gvisor/runsc/version.version=" + id, "-o", sentry, "./cmd/bivy-sentry"},
		{"cmd/bivy-guest/build.sh", guest},
		{"go", "run", "./internal/bundle/pack", "-out", payload, "-build", id, sentry, guest},
		{"go", "build", "-trimpath", "-overlay", overlay, "-ldflags", "-s -w -X main.version=e2e -X gvisor.dev/gvisor/runsc/version.version=" + id, "-o", b.bivy, "./cmd/bivy"},
		{"go", "build", "-trimpath", "-overlay", overlay, "-ldflags", "-s -w -X gvisor.dev/gvisor/runsc/version.version=" + id, "-o", b.killer, "./internal/e2e/testdata/server"},
	} {
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = moduleRoot()
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

func moduleRoot() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

func (b *bed) close() error {
	var err error
	if b.host != nil {
		err = b.host.clear()
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}

// host is one pair of data and run directories, with at most one server.
type host struct {
	b         *bed
	dir       string
	data, run string
	home      string // of the people who use the command line
	groups    string // prefix of the names of its cgroups
}

func newHost(b *bed, name string) (*host, error) {
	dir := filepath.Join(b.dir, name)
	h := &host{b: b, dir: dir, data: filepath.Join(dir, "data"), run: filepath.Join(dir, "run"), home: filepath.Join(dir, "home")}
	h.groups = groupsOf(h.run)
	for _, d := range []string{dir, h.home} {
		if err := os.Mkdir(d, 0o711); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// clear ends whatever a failed test left running, and removes the groups.
func (h *host) clear() error {
	var errs []error
	for range 50 {
		pids := h.processes()
		if len(pids) == 0 {
			break
		}
		for pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				errs = append(errs, err)
			}
		}
		pause(20 * time.Millisecond)
	}
	for _, pattern := range []string{"/*", ""} {
		var dirs []string
		for _, tree := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
			some, err := filepath.Glob(tree + h.groups + "*" + pattern)
			dirs, errs = append(dirs, some...), append(errs, err)
		}
		for _, d := range dirs {
			if info, err := os.Stat(d); err == nil && info.IsDir() {
				errs = append(errs, syscall.Rmdir(d))
			}
		}
	}
	return errors.Join(errs...)
}

// pause waits between two looks at something that tells nobody when it changes.
func pause(d time.Duration) { <-time.After(d) }

// eventually looks until look says that all is well, or limit is over.
func eventually(t *testing.T, limit time.Duration, look func() error) {
	t.Helper()
	if err := within(limit, look); err != nil {
		t.Fatal(err)
	}
}

func within(limit time.Duration, look func() error) error {
	end := time.Now().Add(limit)
	for {
		err := look()
		if err == nil || time.Now().After(end) {
			return err
		}
		pause(20 * time.Millisecond)
	}
}

// server is a running server process.
type server struct {
	h   *host
	cmd *exec.Cmd
	url string
	out *bufio.Reader
	log *syncBuffer
	*client.Client

	done  chan struct{}
	state *os.ProcessState
}

// syncBuffer is a bytes.Buffer for two.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *syncBuffer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}

func (w *syncBuffer) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// serve starts the shipped server and waits until it takes work.
func (h *host) serve(t *testing.T) *server {
	t.Helper()
	return h.launch(t, h.b.bivy, "--data", h.data, "serve", "--run", h.run, "--listen", "127.0.0.1:0")
}

// serveKiller starts the server that dies at a point.
func (h *host) serveKiller(t *testing.T, args ...string) *server {
	t.Helper()
	return h.launch(t, h.b.killer, append([]string{"-data", h.data, "-run", h.run}, args...)...)
}

func (h *host) launch(t *testing.T, bin string, args ...string) *server {
	t.Helper()
	s, err := h.start(bin, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.kill()
		if t.Failed() {
			t.Logf("log of the server:\n%s", s.log)
		}
	})
	if err := s.await(60 * time.Second); err != nil {
		t.Fatal(err)
	}
	return s
}

// start starts a server process without waiting for it.
func (h *host) start(bin string, args ...string) (*server, error) {
	s := &server{h: h, cmd: exec.Command(bin, args...), log: &syncBuffer{}, done: make(chan struct{})}
	s.cmd.Env = h.env()
	s.cmd.Stderr = s.log
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.out = bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { // ends with the process
		_ = s.cmd.Wait() // how it ended is in its state
		s.state = s.cmd.ProcessState
		close(s.done)
	}()
	return s, nil
}

// await waits until the server takes work.
func (s *server) await(limit time.Duration) error {
	return within(limit, func() error {
		select {
		case <-s.done:
			return nil
		default:
		}
		r, ok, err := config.Find(s.h.run)
		if err != nil || !ok || r.PID != s.cmd.Process.Pid {
			return errors.Join(fmt.Errorf("the server did not become ready:\n%s", s.log), err)
		}
		s.url = r.URL
		key, err := config.ReadKey(filepath.Join(s.h.data, "admin.key"))
		if err != nil {
			return err
		}
		s.Client, err = client.New(client.Options{URL: r.URL, Key: key})
		return err
	})
}

// env is the environment of bivy's processes.
func (h *host) env() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + h.home, "LANG=C.UTF-8", "BIVY_CONFIG=" + os.DevNull}
}

// kill sends SIGKILL and waits for the death.
func (s *server) kill() {
	_ = s.cmd.Process.Kill() // an error means that it is dead
	<-s.done
	if s.Client != nil {
		s.Close()
	}
}

// stop ends the server in good order.
func (s *server) stop(t *testing.T) {
	t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	select {
	case <-s.done:
	case <-time.After(30 * time.Second):
		t.Fatalf("the server does not stop:\n%s", s.log)
	}
	if code := s.state.ExitCode(); code != 0 {
		t.Errorf("the server stopped with code %d:\n%s", code, s.log)
	}
	s.Close()
}

// died reports whether the server is dead, after a moment.
func (s *server) died(limit time.Duration) bool {
	select {
	case <-s.done:
		return true
	case <-time.After(limit):
		return false
	}
}

// goroutines asks a killer server for the number of its goroutines.
func (s *server) goroutines() (int, error) {
	if err := s.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		return 0, err
	}
	line, err := s.out.ReadString('\n')
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(line))
}

// result is what an invocation of the command line did.
type result struct {
	code     int
	out, err string
}

func (r result) String() string {
	return fmt.Sprintf("code %d\nstdout: %s\nstderr: %s", r.code, r.out, r.err)
}

// bivy runs the command line against the host's directories.
func (h *host) bivy(t *testing.T, args ...string) result {
	t.Helper()
	return h.invoke(t, nil, append([]string{h.b.bivy, "--data", h.data}, args...)...)
}

// invoke runs a program to its end, in the environment of bivy's processes.
func (h *host) invoke(t *testing.T, prepare func(*exec.Cmd), argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = h.env(), &out, &errs, h.home
	cmd.WaitDelay = time.Second
	if prepare != nil {
		prepare(cmd)
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("%q: %v, %v\n%s", argv, err, ctx.Err(), errs.String())
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// cli is bivy against the running server.
func (s *server) cli(t *testing.T, args ...string) result {
	t.Helper()
	return s.h.bivy(t, append([]string{"--server", s.url, "--key-file", filepath.Join(s.h.data, "admin.key")}, args...)...)
}

// ctx bounds one step of a test.
func limit(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// create makes a session with a label that names the test.
func (s *server) create(t *testing.T, spec client.Spec) *client.Session {
	t.Helper()
	x, err := s.CreateSession(limit(t, 60*time.Second), client.CreateSession{Spec: spec})
	if err != nil {
		t.Fatalf("create: %v\n%s", err, s.log)
	}
	return x
}

// sh runs a shell script in a session as a user, and returns its output.
func sh(t *testing.T, s *client.Session, user, script string) client.Result {
	t.Helper()
	r, err := s.Run(limit(t, 60*time.Second), client.Command{Argv: []string{"bash", "-c", script}, User: user, Cwd: "/"})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return r
}

// end ends a session and checks that it says why and that its record verifies.
func (s *server) end(t *testing.T, x *client.Session) client.SessionInfo {
	t.Helper()
	info, err := x.End(limit(t, 60*time.Second))
	if err != nil {
		t.Fatalf("end %s: %v\n%s", x.ID, err, s.log)
	}
	if info.State != client.Ended || info.Reason == "" {
		t.Errorf("session %s is %s for reason %q after its end", x.ID, info.State, info.Reason)
	}
	s.verify(t, x.ID, false)
	return info
}

// verify checks a record as somebody would who has the node's public key.
func (s *server) verify(t *testing.T, id string, open bool) audit.Report {
	t.Helper()
	pem, err := os.ReadFile(filepath.Join(s.h.data, "signing.pub"))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := audit.ParsePublicKeys(pem)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Session(id).Record(limit(t, 30*time.Second))
	if err != nil {
		t.Fatalf("record of %s: %v", id, err)
	}
	defer r.Close()
	report, err := audit.Verify(r, keys, audit.VerifyOptions{Session: session.ID(id), AllowOpen: open})
	if err != nil {
		t.Errorf("record of %s: %v", id, err)
	}
	return report
}

// events returns a session's record.
func events(t *testing.T, x *client.Session) []client.Event {
	t.Helper()
	var all []client.Event
	for e, err := range x.Events(limit(t, 30*time.Second), 0) {
		if err != nil {
			t.Fatalf("events of %s: %v", x.ID, err)
		}
		all = append(all, e)
	}
	return all
}

// happened returns the events of one action.
func happened(all []client.Event, action audit.Action) []client.Event {
	return slices.DeleteFunc(slices.Clone(all), func(e client.Event) bool { return e.Action != string(action) })
}

// told describes a record for a failed test.
func told(all []client.Event) string {
	var b strings.Builder
	for _, e := range all {
		fmt.Fprintf(&b, "%4d %s %s %s %s\n", e.Seq, e.Action, e.Outcome, e.Ref, e.Payload)
	}
	return b.String()
}
