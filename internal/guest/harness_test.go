package guest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/guest"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
)

// agentEnv makes the test binary run as an agent, as process 1 of a new process
// namespace like in a sandbox.
const agentEnv = "BIVY_GUEST_TEST_AGENT"

func TestMain(m *testing.M) {
	if text := os.Getenv(agentEnv); text != "" {
		if err := beAgent(text); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beAgent serves on inherited sockets: 3 for the host, 4 for programs inside.
func beAgent(text string) error {
	cfg := guest.Default()
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	cfg.SetClock = false // the clock is the machine's
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg.Path = os.Getenv("PATH")
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	small := filepath.Join(filepath.Dir(cfg.Etc), "small")
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m,mode=1777"); err != nil {
		return fmt.Errorf("mount %s: %w", small, err)
	}
	host, err := net.FileListener(os.NewFile(3, "host"))
	if err != nil {
		return err
	}
	inside, err := net.FileListener(os.NewFile(4, "inside"))
	if err != nil {
		return err
	}
	if err := guest.PrepareProcess(cfg.Log); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() { // the test ends us by closing standard input
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	agent, err := guest.New(cfg)
	if err != nil {
		return err
	}
	return agent.Run(ctx, merge(host, inside))
}

// merged accepts from several listeners.
type merged struct {
	net.Listener
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func merge(all ...net.Listener) net.Listener {
	m := &merged{Listener: all[0], conns: make(chan net.Conn), done: make(chan struct{})}
	for _, l := range all {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				select {
				case m.conns <- c:
				case <-m.done:
					return
				}
			}
		}()
	}
	return m
}

func (m *merged) Accept() (net.Conn, error) {
	select {
	case c := <-m.conns:
		return c, nil
	case <-m.done:
		return nil, net.ErrClosed
	}
}

func (m *merged) Close() error {
	m.once.Do(func() { close(m.done) })
	return m.Listener.Close()
}

// token is what the tests initialise the agent with.
const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

// sandbox is an agent under test.
type sandbox struct {
	*guestclient.Client
	dir    string // shared by all users; below it home and small
	home   string // of user
	pid    int    // the agent's, on the host
	socket string
	inside string // address for programs inside
}

// newSandbox starts an agent and initialises it.
func newSandbox(t *testing.T) *sandbox {
	s := startSandbox(t)
	if _, err := s.Init(t.Context(), wire.InitRequest{AccessToken: token, EnvVars: map[string]string{"FROM_INIT": "yes"}}); err != nil {
		t.Fatal(err)
	}
	return s
}

// startSandbox starts an agent that is not initialised.
func startSandbox(t *testing.T) *sandbox {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces and users")
	}
	dir := t.TempDir()
	// Other users cannot access the temporary directory's parent.
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s := &sandbox{dir: dir, home: filepath.Join(dir, "home"), socket: filepath.Join(dir, "s")}
	etc := filepath.Join(dir, "etc")
	for _, d := range []string{etc, s.home, filepath.Join(dir, "small"), filepath.Join(dir, "run")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(s.home, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(etc, "passwd"), "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::"+s.home+":/bin/bash\nother:x:1001:1001::/:/bin/sh\n")
	writeFile(t, filepath.Join(etc, "group"), "root:x:0:\nuser:x:1000:\nother:x:1001:\nwheel:x:2000:user,other\naudio:x:2001:user\n")

	host, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	host.SetUnlinkOnClose(false)
	inside, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s.inside = inside.Addr().String()
	hostFile, err1 := host.File()
	insideFile, err2 := inside.File()
	if err := errors.Join(err1, err2, host.Close(), inside.Close()); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{"Etc": etc, "Run": filepath.Join(dir, "run"), "User": "user"})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), agentEnv+"="+string(text))
	cmd.ExtraFiles = []*os.File{hostFile, insideFile}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS}
	var log strings.Builder
	cmd.Stderr = &log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.pid = cmd.Process.Pid
	if err := errors.Join(hostFile.Close(), insideFile.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		stdin.Close()
		kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		if err := cmd.Wait(); err != nil {
			t.Errorf("agent: %v", err)
		}
		if text := log.String(); strings.Contains(text, "level=ERROR") || strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic") {
			t.Errorf("agent's log:\n%s", text)
		}
	})
	s.Client = guestclient.New(guestclient.Config{Dial: s.dial})
	// The socket exists already: this waits for the agent to accept.
	if err := s.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *sandbox) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", s.socket)
}

func (s *sandbox) dialAny(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx) }

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// result is the output and the exit of a command.
type result struct {
	stdout, stderr, terminal string
	exit                     guestclient.Exit
}

// finish reads a process to its end.
func finish(p *guestclient.Process) (result, error) {
	var r result
	var out, errs, tty strings.Builder
	for {
		e, err := p.Next()
		if errors.Is(err, io.EOF) {
			r.stdout, r.stderr, r.terminal = out.String(), errs.String(), tty.String()
			return r, nil
		}
		if err != nil {
			return r, err
		}
		switch e.Kind {
		case guestclient.Stdout:
			out.Write(e.Data)
		case guestclient.Stderr:
			errs.Write(e.Data)
		case guestclient.Terminal:
			tty.Write(e.Data)
		case guestclient.End:
			r.exit = e.Exit
		}
	}
}

// exec starts a command and closes it with the test.
func (s *sandbox) exec(t *testing.T, cmd guestclient.Command) *guestclient.Process {
	t.Helper()
	p, err := s.Exec(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// run runs a command to its end.
func (s *sandbox) run(t *testing.T, cmd guestclient.Command) result {
	t.Helper()
	r, err := finish(s.exec(t, cmd))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// sh runs a script as user.
func (s *sandbox) sh(t *testing.T, script string) result {
	t.Helper()
	return s.run(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", script}})
}

// until reads output until it contains text.
func until(t *testing.T, p *guestclient.Process, text string) string {
	t.Helper()
	var all strings.Builder
	for !strings.Contains(all.String(), text) {
		e, err := p.Next()
		if err != nil || e.Kind == guestclient.End {
			t.Fatalf("waiting for %q: %v %+v after %q", text, err, e.Exit, all.String())
		}
		all.Write(e.Data)
	}
	return all.String()
}

// eventually waits for a condition that only polling can see.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: not true after 10s", what)
		}
	}
}
