package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/term"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/api/apitest"
	"bivy/internal/config"
)

func TestMain(m *testing.M) {
	// Children inherit ignored signals, and a background job ignores SIGINT. A
	// signal that is caught here has its default action in them.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP)
	testscript.Main(m, map[string]func(){"bivy": func() {
		os.Exit(Main(context.Background(), testEngine(), os.Args[1:], Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}))
	}})
}

// testEngine is a real server whose sessions run commands on this host.
func testEngine() Engine {
	stuck := func(ctx context.Context, name string, _ func(done, total int64, what string)) (bool, error) {
		if name != "stuck" {
			return false, nil
		}
		<-ctx.Done()
		return true, ctx.Err()
	}
	backend := func(ctx context.Context, cfg config.Config) (*apitest.Backend, http.Handler, error) {
		b, err := apitest.Start(ctx, cfg.DataDir, apitest.Options{Resolve: stuck})
		if err != nil {
			return nil, nil, err
		}
		h, err := b.Handler()
		return b, h, err
	}
	return Engine{
		Version: client.Version{Version: "1.2.3", Commit: "abc", Go: "go1", API: "v1"},
		Local: func(ctx context.Context, cfg config.Config, _ *slog.Logger) (*Local, error) {
			b, h, err := backend(ctx, cfg)
			if err != nil {
				return nil, err
			}
			return &Local{Handler: h, Key: apitest.AdminSecret, Close: func(context.Context) error {
				left, err := b.Left()
				if err == nil && left > 0 {
					err = fmt.Errorf("%d sessions were left behind", left)
				}
				return errors.Join(err, b.Close())
			}}, nil
		},
		Serve: func(ctx context.Context, cfg config.Config, log *slog.Logger, ready func(Listening)) (err error) {
			b, h, err := backend(ctx, cfg)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, b.Close()) }()
			tlsConfig, err := cfg.TLS()
			if err != nil {
				return err
			}
			l, err := api.Listen(ctx, cfg.Listen, tlsConfig, cfg.AllowPlaintext)
			if err != nil {
				return err
			}
			keyFile := filepath.Join(cfg.DataDir, "admin.key")
			if err := os.WriteFile(keyFile, []byte(apitest.AdminSecret+"\n"), 0o600); err != nil {
				return err
			}
			srv := api.NewServer(h, log)
			served := make(chan error, 1)
			go func() { served <- srv.Serve(l) }()
			ready(Listening{URL: "http://" + l.Addr().String(), KeyFile: keyFile})
			<-ctx.Done()
			err = srv.Close()
			if e := <-served; !errors.Is(e, http.ErrServerClosed) {
				err = errors.Join(err, e)
			}
			return err
		},
		Doctor: func(context.Context, config.Config) (client.Node, error) {
			return client.Node{ID: "here", Driver: "none", Facts: []client.Fact{
				{Name: "kernel", Status: client.FactOK, Found: "6.18", Means: "sandboxes can run"},
				{Name: "root", Status: client.FactFail, Found: "uid 1000", Means: "sandboxes cannot be made", Hint: "run as root"},
			}}, nil
		},
		Bench: func(_ context.Context, _ config.Config, b Bench) error {
			_, err := fmt.Fprintf(b.Stdout, "suite=%s json=%t\n", b.Suite, b.JSON)
			return err
		},
	}
}

// testEnv writes a configuration below dir and returns the environment that
// makes bivy use it.
func testEnv(dir string) ([]string, error) {
	conf := filepath.Join(dir, "config.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:0\ndata_dir: %s/data\nrun_dir: %s/run\n", dir, dir)
	return []string{"BIVY_CONFIG=" + conf, "HOME=" + dir, "XDG_CONFIG_HOME=" + dir + "/settings", "BIVY_SERVER=", "BIVY_API_KEY="},
		os.WriteFile(conf, []byte(text), 0o600)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			vars, err := testEnv(env.WorkDir)
			env.Vars = append(env.Vars, vars...)
			return err
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// serving waits until a server has announced its address.
			"serving": func(ts *testscript.TestScript, _ bool, _ []string) {
				waitFor(func() bool {
					_, ok, err := config.Find(ts.MkAbs("run"))
					return ok && err == nil
				}, func() { ts.Fatalf("no server was announced") })
			},
			// capture NAME sets a variable to the last standard output.
			"capture": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
			},
			// url sets URL, HOSTPORT and LOCAL to where the announced server is.
			"url": func(ts *testscript.TestScript, _ bool, _ []string) {
				r, _, err := config.Find(ts.MkAbs("run"))
				ts.Check(err)
				ts.Setenv("URL", r.URL)
				ts.Setenv("HOSTPORT", strings.TrimPrefix(r.URL, "http://"))
				ts.Setenv("LOCAL", strings.Replace(r.URL, "127.0.0.1", "localhost", 1))
			},
			// status CODE COMMAND… runs a command and checks its exit code.
			"status": func(ts *testscript.TestScript, _ bool, args []string) {
				err := ts.Exec(args[1], args[2:]...)
				var ee *exec.ExitError
				got := "0"
				if errors.As(err, &ee) {
					got = fmt.Sprint(ee.ExitCode())
				} else if err != nil {
					ts.Fatalf("%v", err)
				}
				if got != args[0] {
					ts.Fatalf("exit code %s, want %s", got, args[0])
				}
			},
			// edit FILE OLD NEW replaces text in a file.
			"edit": func(ts *testscript.TestScript, _ bool, args []string) {
				text := ts.ReadFile(args[0])
				if !strings.Contains(text, args[1]) {
					ts.Fatalf("%s does not contain %q", args[0], args[1])
				}
				ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.Replace(text, args[1], args[2], 1)), 0o600))
			},
		},
	})
}

// waitFor polls until ok, for changes by other processes that send no event.
func waitFor(ok func() bool, late func()) {
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			late()
			return
		}
	}
}

// bivy returns a command that runs this test binary as bivy, in a directory of its
// own.
func bivy(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	env, err := testEnv(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Args = append([]string{"bivy"}, args...)
	cmd.Env = append(append(os.Environ(), "TERM=xterm"), env...)
	cmd.Dir = dir
	return cmd
}

func TestRunSignals(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd := bivy(t, "run", "--", "sh", "-c", fmt.Sprintf("trap 'echo got; exit 5' %d; echo ready; while :; do sleep 0.02; done", sig))
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(out)
			if line, err := r.ReadString('\n'); line != "ready\n" {
				t.Fatalf("%q, %v", line, err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			rest, err := io.ReadAll(r)
			if err != nil || string(rest) != "got\n" {
				t.Errorf("after the signal: %q, %v", rest, err)
			}
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 5 {
				t.Errorf("exit code %d (%v), want the command's 5", cmd.ProcessState.ExitCode(), err)
			}
		})
	}
}

// TestThirdSignalEndsRun: a command that ignores signals does not keep bivy.
func TestThirdSignalEndsRun(t *testing.T) {
	cmd := bivy(t, "run", "--", "sh", "-c", "trap '' INT; echo ready; while :; do sleep 0.02; done")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(io.Discard, r)
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for over := false; !over; {
		select {
		case <-done:
			over = true
		case <-tick.C:
			cmd.Process.Signal(syscall.SIGINT)
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
		t.Errorf("exit code %d (%v), want 130; stderr %q", cmd.ProcessState.ExitCode(), err, errs.String())
	}
}

// TestSignalDuringCreate ends bivy before there is a command.
func TestSignalDuringCreate(t *testing.T) {
	cmd := bivy(t, "run", "--template", "stuck", "--", "true")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			// -1: the signal arrived before bivy handled it.
			if code := cmd.ProcessState.ExitCode(); code != 143 && code != -1 {
				t.Errorf("exit code %d (%v), stderr %q; want 143", code, err, errs.String())
			}
			return
		case <-tick.C:
			cmd.Process.Signal(syscall.SIGTERM)
		}
	}
}

// TestClosedOutput is bivy run … | head.
func TestClosedOutput(t *testing.T) {
	cmd := bivy(t, "run", "--", "yes")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	out.Close()
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 141 || errs.Len() > 0 {
		t.Errorf("exit code %d (%v), stderr %q; want 141 and nothing", cmd.ProcessState.ExitCode(), err, errs.String())
	}
}

func TestShell(t *testing.T) {
	cmd := bivy(t, "shell")
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	if err := pty.Setsize(master, &pty.Winsize{Cols: 101, Rows: 31}); err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() //nolint:errcheck // it has exited, or the test has failed
	out := make(chan string, 1024)
	go func() {
		defer close(out)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			if n > 0 {
				out <- string(buf[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	var seen strings.Builder
	expect := func(want string) {
		t.Helper()
		late := time.After(10 * time.Second)
		for !strings.Contains(seen.String(), want) {
			select {
			case s := <-out:
				seen.WriteString(s)
			case <-late:
				t.Fatalf("%q did not appear on the terminal; it shows %q", want, seen.String())
			}
		}
	}
	send := func(s string) {
		t.Helper()
		if _, err := master.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	// until repeats typed until want appears.
	until := func(want, typed string) {
		t.Helper()
		late := time.After(10 * time.Second)
		again := time.NewTicker(100 * time.Millisecond)
		defer again.Stop()
		for !strings.Contains(seen.String(), want) {
			select {
			case s := <-out:
				seen.WriteString(s)
			case <-again.C:
				send(typed)
			case <-late:
				t.Fatalf("%q did not appear on the terminal; it shows %q", want, seen.String())
			}
		}
	}
	send("stty size; echo one-$((20+22))\n")
	expect("one-42")
	expect("31 101")
	if err := pty.Setsize(master, &pty.Winsize{Cols: 132, Rows: 50}); err != nil {
		t.Fatal(err)
	}
	until("50 132", "stty size\n") // the size may arrive after the input
	send("echo rea''dy; cat\n")
	expect("ready\r\n")
	// Ctrl-C interrupts cat and discards typed input. While the shell has not
	// executed cat yet it has no effect, so it is repeated.
	until("three-42", "\x03\necho three-$((20+22))\n")
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	exit := func() error {
		late := time.After(10 * time.Second)
		again := time.NewTicker(100 * time.Millisecond)
		defer again.Stop()
		for {
			select {
			case s := <-out:
				seen.WriteString(s)
			case <-again.C:
				send("exit 3\n")
			case err := <-ended:
				return err
			case <-late:
				t.Errorf("the shell does not exit")
				_ = cmd.Process.Kill()
				return <-ended
			}
		}
	}
	if err := exit(); cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("exit code %d (%v), want the shell's 3; the terminal shows %q", cmd.ProcessState.ExitCode(), err, seen.String())
	}
	after, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Error("the terminal was not restored")
	}
}
