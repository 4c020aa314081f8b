package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
)

func TestExec(t *testing.T) {
	s := newSandbox(t)
	t.Run("output and exit", func(t *testing.T) {
		r := s.sh(t, "echo out; echo err >&2; exit 7")
		want := result{stdout: "out\n", stderr: "err\n", exit: guestclient.Exit{Code: 7, Status: "exit status 7"}}
		if d := cmp.Diff(want, r, cmp.AllowUnexported(result{})); d != "" {
			t.Error(d)
		}
	})
	t.Run("success", func(t *testing.T) {
		if r := s.run(t, guestclient.Command{Argv: []string{"true"}}); r.exit != (guestclient.Exit{Status: "exit status 0"}) {
			t.Errorf("exit %+v", r.exit)
		}
	})
	t.Run("argv is exact", func(t *testing.T) {
		args := []string{"", " ", "a b", "$HOME", "*", "'", "\n", "\xff\xfe", "\U0010FE80", "-n"}
		r := s.run(t, guestclient.Command{Argv: append([]string{"/usr/bin/printf", "<%s>"}, args...)})
		if want := "<" + strings.Join(args, "><") + ">"; r.stdout != want {
			t.Errorf("got %q, want %q", r.stdout, want)
		}
	})
	t.Run("binary output", func(t *testing.T) {
		r := s.sh(t, `printf '\000\377\200\012no newline'`)
		if r.stdout != "\x00\xff\x80\nno newline" {
			t.Errorf("got %q", r.stdout)
		}
	})
	t.Run("user and groups", func(t *testing.T) {
		for user, want := range map[string]string{
			"": "1000 1000 1000 2000 2001\n", "user": "1000 1000 1000 2000 2001\n", "root": "0 0 0\n", "1001": "1001 1001 1001 2000\n",
		} {
			r := s.run(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "echo $(id -u) $(id -g) $(id -G)"}, User: user})
			if r.stdout != want {
				t.Errorf("user %q: got %q, want %q", user, r.stdout, want)
			}
		}
	})
	t.Run("environment", func(t *testing.T) {
		r := s.run(t, guestclient.Command{Argv: []string{"/usr/bin/env"}, Env: map[string]string{"CALL": "1", "USER": "me", "BYTES": "\xff"}})
		for _, want := range []string{"CALL=1", "USER=me", "LOGNAME=user", "HOME=" + s.home, "FROM_INIT=yes", "BYTES=\xff", "PATH=" + os.Getenv("PATH")} {
			if !strings.Contains("\n"+r.stdout, "\n"+want+"\n") {
				t.Errorf("%q is missing in %q", want, r.stdout)
			}
		}
		if strings.Contains(r.stdout, agentEnv) {
			t.Error("the agent's own environment leaks")
		}
	})
	t.Run("directory", func(t *testing.T) {
		writeDir(t, filepath.Join(s.home, "sub"))
		for cwd, want := range map[string]string{"": s.home, "~": s.home, "sub": s.home + "/sub", "~/sub": s.home + "/sub", "/usr": "/usr"} {
			if r := s.run(t, guestclient.Command{Argv: []string{"/bin/pwd"}, Cwd: cwd}); r.stdout != want+"\n" {
				t.Errorf("cwd %q: got %q, want %q", cwd, r.stdout, want)
			}
		}
	})
	t.Run("what is inherited", func(t *testing.T) {
		// Signals that were ignored when the tests started are inherited.
		own, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		_, ignored, _ := strings.Cut(string(own), "SigIgn:\t")
		ignored, _, _ = strings.Cut(ignored, "\n")
		r := s.sh(t, "cat /proc/self/oom_score_adj; umask; nice; grep SigIgn /proc/self/status")
		if want := "100\n0022\n0\nSigIgn:\t" + ignored + "\n"; r.stdout != want {
			t.Errorf("got %q, want %q", r.stdout, want)
		}
	})
	t.Run("no descriptors leak", func(t *testing.T) {
		if r := s.sh(t, "ls -l /proc/self/fd"); strings.Count(r.stdout, " -> ") != 4 {
			t.Errorf("want 0, 1, 2 and ls's own, got\n%s", r.stdout)
		}
	})
}

func writeDir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestExecRefusals(t *testing.T) {
	s := newSandbox(t)
	writeFile(t, filepath.Join(s.home, "data"), "x")
	writeFile(t, filepath.Join(s.home, "noexec"), "#!/bin/sh\n")
	for name, text := range map[string]string{"nointerp": "#!/no/such/interpreter\n", "garbage": "\x01\x02\x03"} {
		writeFile(t, filepath.Join(s.home, name), text)
		if err := os.Chmod(filepath.Join(s.home, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	closed := filepath.Join(s.dir, "closed")
	writeDir(t, filepath.Join(closed, "sub"))
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 100<<10)
	env := map[string]string{}
	for i := range 105 {
		env["V"+strconv.Itoa(i)] = big
	}
	tests := []struct {
		name   string
		cmd    guestclient.Command
		kind   kind.Kind
		reason wire.Reason
		text   string
	}{
		{"no such command", guestclient.Command{Argv: []string{"no-such-command"}}, kind.Invalid, wire.ReasonCommandNotFound, "no-such-command"},
		{"no such path", guestclient.Command{Argv: []string{"/no/such/path"}}, kind.Invalid, wire.ReasonCommandNotFound, "/no/such/path"},
		{"relative", guestclient.Command{Argv: []string{"./nothing"}}, kind.Invalid, wire.ReasonCommandNotFound, "./nothing"},
		{"not executable", guestclient.Command{Argv: []string{"./noexec"}}, kind.Invalid, wire.ReasonCommandNotExecutable, "permission denied"},
		{"a directory", guestclient.Command{Argv: []string{"/usr"}}, kind.Invalid, wire.ReasonCommandNotExecutable, "/usr"},
		{"no interpreter", guestclient.Command{Argv: []string{"./nointerp"}}, kind.Invalid, wire.ReasonCommandNotExecutable, "interpreter"},
		{"garbage", guestclient.Command{Argv: []string{"./garbage"}}, kind.Invalid, wire.ReasonCommandNotExecutable, "unknown executable format"},
		{"in an inaccessible directory", guestclient.Command{Argv: []string{closed + "/sub/x"}}, kind.Invalid, wire.ReasonCommandNotExecutable, "closed/sub/x"},
		{"cwd missing", guestclient.Command{Argv: []string{"true"}, Cwd: "/no/where"}, kind.Invalid, wire.ReasonCwd, "cwd '/no/where' does not exist"},
		{"cwd is a file", guestclient.Command{Argv: []string{"true"}, Cwd: "data"}, kind.Invalid, wire.ReasonCwd, "is not a directory"},
		{"cwd closed", guestclient.Command{Argv: []string{"true"}, Cwd: closed}, kind.Invalid, wire.ReasonCwd, "permission denied"},
		{"cwd of another", guestclient.Command{Argv: []string{"true"}, Cwd: "~root"}, kind.Invalid, wire.ReasonCwd, "another user's home"},
		{"unknown user", guestclient.Command{Argv: []string{"true"}, User: "root123"}, kind.Unauthentic, wire.ReasonUser, "invalid username: 'root123'"},
		{"NUL in argument", guestclient.Command{Argv: []string{"echo", "a\x00b"}}, kind.Invalid, wire.ReasonArgs, "argument 1"},
		{"NUL in command", guestclient.Command{Argv: []string{"echo\x00"}}, kind.Invalid, wire.ReasonArgs, "the program's name"},
		{"NUL in variable", guestclient.Command{Argv: []string{"echo"}, Env: map[string]string{"A": "\x00"}}, kind.Invalid, wire.ReasonEnv, `value of "A"`},
		{"bad variable name", guestclient.Command{Argv: []string{"echo"}, Env: map[string]string{"A=B": ""}}, kind.Invalid, wire.ReasonEnv, `name "A=B"`},
		{"NUL in cwd", guestclient.Command{Argv: []string{"echo"}, Cwd: "/\x00"}, kind.Invalid, wire.ReasonCwd, "cwd"},
		{"10 MB environment", guestclient.Command{Argv: []string{"echo"}, Env: env}, kind.Invalid, wire.ReasonEnv, "env: 107"},
		{"long argument", guestclient.Command{Argv: []string{"echo", strings.Repeat("x", 128<<10)}}, kind.Invalid, wire.ReasonArgs, "argument 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.Exec(t.Context(), tt.cmd)
			if err == nil {
				t.Fatal("it started")
			}
			if kind.Of(err) != tt.kind || wire.ReasonOf(err) != tt.reason || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v (kind %v, reason %q), want kind %v, reason %q, text %q", err, kind.Of(err), wire.ReasonOf(err), tt.kind, tt.reason, tt.text)
			}
		})
	}
}

func TestStdin(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	t.Run("written and closed", func(t *testing.T) {
		p := s.exec(t, guestclient.Command{Argv: []string{"/usr/bin/sha256sum"}, Stdin: true})
		data := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
		if err := p.Write(ctx, data); err != nil {
			t.Fatal(err)
		}
		if err := p.CloseStdin(ctx); err != nil {
			t.Fatal(err)
		}
		r, err := finish(p)
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%x  -\n", sha256.Sum256(data)); r.stdout != want {
			t.Errorf("got %q, want %q", r.stdout, want)
		}
	})
	t.Run("none", func(t *testing.T) {
		if r := s.run(t, guestclient.Command{Argv: []string{"/bin/cat"}}); r.stdout != "" || r.exit.Code != 0 {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("errors", func(t *testing.T) {
		p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sleep", "1000"}})
		for name, err := range map[string]error{
			"write without stdin": p.Write(ctx, []byte("x")), "close without stdin": p.CloseStdin(ctx), "resize without terminal": p.Resize(ctx, guestclient.Size{Cols: 1, Rows: 1}),
			"terminal input": s.SendInput(ctx, p.PID, true, []byte("x")),
		} {
			if kind.Of(err) != kind.Conflict || wire.ReasonOf(err) != wire.ReasonStdin {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := s.CloseStdin(ctx, 99999); kind.Of(err) != kind.NotFound {
			t.Errorf("unknown process: %v", err)
		}
	})
	t.Run("a process that does not read", func(t *testing.T) {
		p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sleep", "1000"}, Stdin: true})
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		if err := p.Write(short, make([]byte, 1<<20)); kind.Of(err) != kind.Unavailable {
			t.Fatalf("got %v", err)
		}
		// The end of the process ends a write that waits.
		written := make(chan error, 1)
		go func() { written <- p.Write(ctx, make([]byte, 1<<20)) }()
		if err := p.Signal(ctx, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := <-written; err == nil {
			t.Error("a write to a dead process succeeded")
		}
	})
}

func TestSignals(t *testing.T) {
	s := newSandbox(t)
	for sig, name := range map[syscall.Signal]string{
		syscall.SIGTERM: "terminated", syscall.SIGKILL: "killed", syscall.SIGINT: "interrupt", syscall.SIGHUP: "hangup", syscall.SIGUSR1: "user defined signal 1",
	} {
		p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sleep", "1000"}})
		if err := p.Signal(t.Context(), sig); err != nil {
			t.Fatal(err)
		}
		r, err := finish(p)
		if err != nil {
			t.Fatal(err)
		}
		want := guestclient.Exit{Code: -1, Signal: int(sig), Status: "signal: " + name}
		if r.exit != want {
			t.Errorf("%v: got %+v, want %+v", sig, r.exit, want)
		}
		if got := r.exit.ShellCode(); got != 128+int(sig) {
			t.Errorf("%v: shell code %d", sig, got)
		}
	}
	t.Run("handler", func(t *testing.T) {
		p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "trap 'echo got it; exit 3' QUIT; echo ready; while :; do sleep 0.01; done"}})
		until(t, p, "ready")
		if err := p.Signal(t.Context(), syscall.SIGQUIT); err != nil {
			t.Fatal(err)
		}
		r, err := finish(p)
		if err != nil || !strings.Contains(r.stdout, "got it") || r.exit.Code != 3 {
			t.Errorf("got %+v, %v", r, err)
		}
	})
	t.Run("unknown", func(t *testing.T) {
		if err := s.Signal(t.Context(), 99999, syscall.SIGTERM); kind.Of(err) != kind.NotFound {
			t.Errorf("unknown process: %v", err)
		}
		p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sleep", "1000"}})
		if err := p.Signal(t.Context(), 77); err == nil {
			t.Error("signal 77 was sent")
		}
	})
}

func TestPTY(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	p := s.exec(t, guestclient.Command{
		Argv: []string{"/bin/sh"}, Env: map[string]string{"PS1": "$ ", "TERM": "xterm"}, PTY: &guestclient.Size{Cols: 100, Rows: 30},
	})
	say := func(line, want string) {
		t.Helper()
		if err := p.Write(ctx, []byte(line)); err != nil {
			t.Fatal(err)
		}
		until(t, p, want)
	}
	say("stty size\n", "30 100\r\n")
	if err := p.Resize(ctx, guestclient.Size{Cols: 132, Rows: 50}); err != nil {
		t.Fatal(err)
	}
	say("stty size\n", "50 132\r\n")
	say("tty; stat -c %u $(tty) > /dev/tty; echo a''b\n", "ab\r\n")
	// Interrupting reaches the foreground program and not the shell.
	say("sleep 1000\n", "sleep 1000")
	eventually(t, "sleep in front", func() bool {
		return strings.Contains(s.sh(t, "ps -o stat=,args= -e").stdout, "S+   sleep 1000")
	})
	say("\x03", "$ ")
	if err := p.CloseStdin(ctx); kind.Of(err) != kind.Conflict {
		t.Errorf("closing the input of a terminal: %v", err)
	}
	if err := p.Write(ctx, []byte("exit 5\n")); err != nil {
		t.Fatal(err)
	}
	r, err := finish(p)
	if err != nil || r.exit.Code != 5 {
		t.Errorf("got %+v, %v", r, err)
	}
	// A session on the terminal ends with it, in the background too.
	r = s.run(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "sleep 1234 & echo started"}, PTY: &guestclient.Size{}})
	if !strings.Contains(r.terminal, "started") || r.exit.Code != 0 {
		t.Errorf("got %+v", r)
	}
}

func TestTimeoutKillsTree(t *testing.T) {
	s := newSandbox(t)
	began := time.Now()
	r := s.run(t, guestclient.Command{
		Argv: []string{"/bin/sh", "-c", escapees + "echo running; sleep 1000"}, Timeout: 500 * time.Millisecond,
	})
	if !r.exit.TimedOut || r.exit.Signal != 9 || r.exit.ShellCode() != 124 {
		t.Errorf("exit %+v", r.exit)
	}
	if !strings.Contains(r.stdout, "running") {
		t.Errorf("output before the timeout is missing: %q", r.stdout)
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
	noneLeft(t, s)
	// A process that ends before its timeout is not affected.
	if r := s.run(t, guestclient.Command{Argv: []string{"true"}, Timeout: time.Minute}); r.exit.TimedOut || r.exit.Code != 0 {
		t.Errorf("exit %+v", r.exit)
	}
}

// escapees are descendants that leave their parent in every ordinary way: in the
// background, in a new session, orphaned, without environment.
const escapees = `
sleep 987601 &
setsid sleep 987602 &
(setsid sh -c 'sleep 987603 & sleep 987604 &' &)
env -i setsid sh -c '(sleep 987605 </dev/null >/dev/null 2>&1 &) &'
nohup sleep 987606 >/dev/null 2>&1 &
sleep 0.1
`

func noneLeft(t *testing.T, s *sandbox) {
	t.Helper()
	r := s.sh(t, "ps -e -o args= | grep '^sleep 98760' ; true")
	if r.stdout != "" {
		t.Errorf("still there:\n%s", r.stdout)
	}
}

func TestKillTree(t *testing.T) {
	s := newSandbox(t)
	p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", escapees + "echo ready; sleep 1000"}})
	bystander := s.exec(t, guestclient.Command{Argv: []string{"/bin/sleep", "5000"}})
	until(t, p, "ready")
	if got := s.sh(t, "ps -e -o args= | grep -c '^sleep 98760'").stdout; got != "6\n" {
		t.Fatalf("%s escapees run, want 6", strings.TrimSpace(got))
	}
	if err := p.Signal(t.Context(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r, err := finish(p)
	if err != nil || r.exit.Signal != 9 {
		t.Errorf("got %+v, %v", r.exit, err)
	}
	noneLeft(t, s)
	all, err := s.Processes(t.Context())
	if err != nil || len(all) != 1 || all[0].PID != bystander.PID {
		t.Errorf("running: %+v, %v; want only the bystander", all, err)
	}
}

func TestKillForkStorm(t *testing.T) {
	s := newSandbox(t)
	p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", "ulimit -u 300; f() { f 2>/dev/null & f 2>/dev/null & }; echo go; f; sleep 1000"}, User: "other"})
	until(t, p, "go")
	if err := p.Signal(t.Context(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := finish(p); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the storm is over", func() bool {
		return strings.TrimSpace(s.sh(t, "ps -u 1001 -o pid= | wc -l").stdout) == "0"
	})
}

func TestOrphansAreReaped(t *testing.T) {
	s := newSandbox(t)
	// Each of 200 orphans outlives its parent and then dies.
	r := s.sh(t, "i=0; while [ $i -lt 200 ]; do (sleep 0.05 & ) ; i=$((i+1)); done; echo done")
	if r.stdout != "done\n" {
		t.Fatalf("got %+v", r)
	}
	eventually(t, "no zombies, no orphans", func() bool {
		out := s.sh(t, "ps -e -o stat=,args=").stdout
		return !strings.Contains(out, "Z") && !strings.Contains(out, "sleep")
	})
}

func TestBackgroundChildHoldsPipe(t *testing.T) {
	s := newSandbox(t)
	began := time.Now()
	r := s.sh(t, "sleep 1000 & echo hi")
	if r.stdout != "hi\n" || r.exit.Code != 0 {
		t.Errorf("got %+v", r)
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("took %v", d)
	}
	// A background process that keeps writing neither delays the end nor is
	// killed by a closed pipe.
	began = time.Now()
	r = s.sh(t, "(while :; do echo noise; sleep 0.02; done) & echo $!")
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("a noisy one: took %v", d)
	}
	pid := strings.TrimSpace(strings.Split(r.stdout, "\n")[0])
	if r := s.sh(t, "sleep 0.2; kill -0 "+pid); r.exit.Code != 0 {
		t.Errorf("the background process died: %+v", r)
	}
	// The same for one that writes without pause.
	if r := s.sh(t, "yes & echo ok"); !strings.Contains(r.stdout, "ok") || r.exit.Code != 0 {
		t.Errorf("a flood: %+v", r.exit)
	}
	s.sh(t, "kill $(ps -u 1000 -o pid=,comm= | grep -v -e ps -e grep -e sh | cut -c1-8) 2>/dev/null; true")
}

func TestReconnect(t *testing.T) {
	s := newSandbox(t)
	ctx := t.Context()
	p := s.exec(t, guestclient.Command{Argv: []string{"/bin/cat"}, Stdin: true, Tag: "the cat"})
	if err := p.Write(ctx, []byte("one\n")); err != nil {
		t.Fatal(err)
	}
	until(t, p, "one\n")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	// Without a follower its output is dropped, and it goes on.
	if err := s.SendInput(ctx, p.PID, false, bytes.Repeat([]byte("lost\n"), 100_000)); err != nil {
		t.Fatal(err)
	}
	q, err := s.AttachTag(ctx, "the cat")
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	second, err := s.Attach(ctx, p.PID)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if q.PID != p.PID {
		t.Errorf("attached to %d, want %d", q.PID, p.PID)
	}
	if err := s.SendInput(ctx, p.PID, false, []byte("two\n")); err != nil {
		t.Fatal(err)
	}
	until(t, q, "two\n")
	until(t, second, "two\n")
	if err := s.CloseStdin(ctx, p.PID); err != nil {
		t.Fatal(err)
	}
	for _, p := range []*guestclient.Process{q, second} {
		if r, err := finish(p); err != nil || r.exit.Status != "exit status 0" {
			t.Errorf("got %+v, %v", r.exit, err)
		}
	}
	// A caller that attaches after the end still gets the exit code.
	late, err := s.Attach(ctx, p.PID)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if r, err := finish(late); err != nil || r.exit.Status != "exit status 0" {
		t.Errorf("late: %+v, %v", r.exit, err)
	}
	if _, err := s.AttachTag(ctx, "no such"); kind.Of(err) != kind.NotFound || wire.ReasonOf(err) != wire.ReasonNoProcess {
		t.Errorf("unknown tag: %v", err)
	}
	if all, err := s.Processes(ctx); err != nil || len(all) != 0 {
		t.Errorf("processes %v, %v", all, err)
	}
}

// TestClientGone checks that the agent notices a client that has disconnected: it
// closes the stream of a silent process, and does not buffer output.
func TestClientGone(t *testing.T) {
	s := newSandbox(t)
	connections := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.pid))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, e := range entries {
			if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", s.pid, e.Name())); err == nil && strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	before := connections()
	other := guestclient.New(guestclient.Config{Dial: s.dial, Token: token})
	for range 5 {
		if _, err := other.Exec(t.Context(), guestclient.Command{Argv: []string{"/bin/sleep", "1000"}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "connections given up", func() bool { return connections() <= before })
	if all, err := s.Processes(t.Context()); err != nil || len(all) != 5 {
		t.Errorf("%d processes go on (%v), want 5", len(all), err)
	}
}

// TestLargeOutput reads 200 MB slowly: all of it arrives in order, and the
// agent's memory does not grow.
func TestLargeOutput(t *testing.T) {
	if testing.Short() {
		t.Skip("moves 200 MB")
	}
	s := newSandbox(t)
	const total = 200 << 20
	p := s.exec(t, guestclient.Command{Argv: []string{"/bin/sh", "-c", fmt.Sprintf("yes 0123456789abcde | head -c %d", total)}})
	before, peak := rss(t, s.pid), 0
	got, next := 0, 0
	pattern := []byte("0123456789abcde\n")
	for {
		e, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == guestclient.End && e.Exit.Code != 0 {
			t.Fatalf("exit %+v", e.Exit)
		}
		for off := range e.Data {
			if e.Data[off] != pattern[(got+off)%len(pattern)] {
				t.Fatalf("byte %d is wrong", got+off)
			}
		}
		got += len(e.Data)
		if got >= next {
			peak, next = max(peak, rss(t, s.pid)), next+8<<20
			wait(t, 10*time.Millisecond) // the slow reader
		}
	}
	if got != total {
		t.Errorf("%d bytes arrived, want %d", got, total)
	}
	t.Logf("resident: %d KiB before, %d KiB at most", before, peak)
	if limit := 24 << 10; peak-before > limit {
		t.Errorf("memory grew by %d KiB", peak-before)
	}
}

// wait sleeps, to simulate slow work.
func wait(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// rss returns the resident memory of a process in KiB.
func rss(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
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

func TestManyAtOnce(t *testing.T) {
	s := newSandbox(t)
	done := make(chan error, 100)
	for i := range cap(done) {
		go func() {
			p, err := s.Exec(t.Context(), guestclient.Command{Argv: []string{"/bin/sh", "-c", fmt.Sprintf("echo %d; exit %d", i, i%50)}})
			if err != nil {
				done <- err
				return
			}
			defer p.Close()
			r, err := finish(p)
			if err == nil && (r.stdout != strconv.Itoa(i)+"\n" || r.exit.Code != i%50) {
				err = fmt.Errorf("process %d: %+v", i, r)
			}
			done <- err
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
