package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"bivy/client"
)

// bad is a mistake made at the command line, and what has to come of it.
type bad struct {
	name string
	args []string
	code int
	want []string // all of it is in what is said on stderr
}

func (b bad) check(t *testing.T, r result) {
	t.Helper()
	if r.code != b.code {
		t.Errorf("code %d, want %d", r.code, b.code)
	}
	for _, w := range b.want {
		if !strings.Contains(r.err, w) {
			t.Errorf("stderr does not say %q", w)
		}
	}
	if strings.Contains(r.err, "internal error") || strings.Contains(r.err, "goroutine ") || strings.Contains(r.err, "Usage:") {
		t.Error("stderr says what nobody can use")
	}
	if t.Failed() {
		t.Log(r)
	}
}

// TestBadInput: what is wrong with a command line or a spec is said with the
// field or line, the reason and the next step, and nothing is half made.
func TestBadInput(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	file := func(name, text string) string {
		path := filepath.Join(h.home, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(path) })
		return path
	}
	sh(t, x, "user", "cd /home/user; echo '#!/bin/sh' > plain; printf '\\177ELFnot' > elf; chmod +x elf; printf '#!/no/such/interpreter\\n' > script; chmod +x script; mkdir dir")
	run := func(args ...string) []string { return append([]string{"run"}, args...) }
	for _, b := range []bad{
		{"unknown field", run("--spec", file("u.yaml", "version: 1\nresources:\n  memory_mbi: 5\n"), "--", "true"), 125, []string{"line 3", "resources.memory_mbi", "unknown field"}},
		{"wrong type", run("--spec", file("t.yaml", "version: 1\ntimeout_seconds: soon\n"), "--", "true"), 125, []string{"line 2", "timeout_seconds", "whole number"}},
		{"out of bounds", run("--spec", file("b.yaml", "version: 1\nresources: {memory_mib: 1}\n"), "--", "true"), 125, []string{"resources.memory_mib", "64"}},
		{"no version", run("--spec", file("v.yaml", "template: base\n"), "--", "true"), 125, []string{"version", "hint: "}},
		{"newer version", run("--spec", file("n.yaml", "version: 9\n"), "--", "true"), 125, []string{"version", "hint: "}},
		{"not YAML", run("--spec", file("y.yaml", "version: [\n"), "--", "true"), 125, []string{"line"}},
		{"no spec", run("--spec", "/no/such/file", "--", "true"), 2, []string{"--spec", "no such file"}},
		{"memory in words", run("--memory", "lots", "--", "true"), 2, []string{"--memory", "lots"}},
		{"unknown flag", run("--memroy", "1G", "--", "true"), 2, []string{"--memroy", "hint: "}},
		{"no command", run(), 2, []string{"hint: "}},
		{"missing template", run("--template", "nowhere", "--", "true"), 125, []string{"nowhere", "hint: "}},
		{"user unknown to a session", run("--user", "nobody-here", "--", "true"), 125, []string{"nobody-here", "user"}},
		{"workdir missing", run("--workdir", "/no/such/dir", "--", "true"), 125, []string{"/no/such/dir"}},
		{"command not found", run("--", "no-such-command"), 127, []string{"no-such-command"}},
		{"not executable", []string{"exec", x.ID, "--", "/home/user/plain"}, 126, []string{"/home/user/plain"}},
		{"a directory", []string{"exec", x.ID, "--", "/home/user/dir"}, 126, []string{"/home/user/dir"}},
		{"not a program", []string{"exec", x.ID, "--", "/home/user/elf"}, 126, []string{"/home/user/elf"}},
		{"no interpreter", []string{"exec", x.ID, "--", "/home/user/script"}, 126, []string{"/home/user/script"}},
		{"cwd missing", []string{"exec", "--workdir", "/no/such/dir", x.ID, "--", "true"}, 125, []string{"workdir", "/no/such/dir"}},
		{"cwd not a directory", []string{"exec", "--workdir", "/etc/passwd", x.ID, "--", "true"}, 125, []string{"cwd", "/etc/passwd"}},
		{"user unknown", []string{"exec", "--user", "nobody-here", x.ID, "--", "true"}, 125, []string{"user", "nobody-here"}},
		{"no such session", []string{"exec", "aaaaaaaaaaaaaaaaaaaa", "--", "true"}, 125, []string{"aaaaaaaaaaaaaaaaaaaa"}},
		{"not an id", []string{"show", "../../etc"}, 1, []string{"../../etc"}},
		{"an environment of 10 MB", run("--spec", file("e.yaml", "version: 1\nenv:\n  BIG: "+strings.Repeat("x", 10<<20)+"\n"), "--", "true"), 2, []string{"--spec", "larger than"}},
		{"an environment of 300 kB", run("--spec", file("m.yaml", "version: 1\nenv:\n  BIG: "+strings.Repeat("x", 300<<10)+"\n"), "--", "true"), 125, []string{"env", "at most", "hint: "}},
		{"cp between machines", []string{"cp", "/a", "/b"}, 2, []string{"SESSION:PATH"}},
		{"cp of nothing", []string{"cp", "/no/such/file", x.ID + ":/tmp/x"}, 1, []string{"/no/such/file"}},
		{"cp out of nothing", []string{"cp", x.ID + ":/no/such/file", h.home}, 1, []string{"/no/such/file"}},
		{"cp of a device", []string{"cp", x.ID + ":/dev/zero", h.home}, 1, []string{"/dev/zero", "neither a regular file nor a directory"}},
		{"an image that is none", []string{"template", "build", "--name", "x", "--tarball", file("x.tar", "not a tarball at all\n")}, 1, []string{"x.tar"}},
		{"a tar that is none", []string{"template", "build", "--name", "x", "--tar", file("y.tar", strings.Repeat("nonsense", 1000))}, 1, []string{"y.tar"}},
		{"a layout that is none", []string{"template", "build", "--name", "x", "--layout", h.home}, 1, []string{h.home}},
		{"a directory that is none", []string{"template", "build", "--name", "x", "--directory", "/no/such/dir"}, 1, []string{"/no/such/dir"}},
		{"a template file with a mistake", []string{"template", "build", "-f", file("f.yaml", "version: 1\nname: x\nform:\n  packages: []\n")}, 1, []string{"line 3", "form"}},
		{"wrong key", []string{"--key-file", file("key", "bivy_nonsense\n"), "ls"}, 1, []string{"key"}},
		{"nobody listens", []string{"--server", "http://127.0.0.1:1", "ls"}, 1, []string{"127.0.0.1:1", "hint: "}},
		{"a strange address", []string{"--server", "ftp://x", "ls"}, 2, []string{"ftp://x"}},
	} {
		t.Run(b.name, func(t *testing.T) { b.check(t, s.cli(t, b.args...)) })
	}
	s.end(t, x)
	t.Run("ended session", func(t *testing.T) {
		bad{code: 125, want: []string{x.ID, "ended", "requested", "hint: "}}.check(t, s.cli(t, "exec", x.ID, "--", "true"))
	})
	for info, err := range s.Sessions(limit(t, 20*time.Second), client.ListOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if info.State != client.Ended {
			t.Errorf("session %s is %s", info.ID, info.State)
		}
	}
	if list, err := s.Templates(limit(t, 20*time.Second)); err != nil || len(list) != 1 {
		t.Errorf("templates after failed builds: %+v, %v", list, err)
	}
	s.onlyOf(t)
	s.stop(t)
}

// TestBadRequests: the same at the interface, where programs make mistakes.
func TestBadRequests(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	key, err := os.ReadFile(filepath.Join(h.data, "admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	plain := &http.Client{Timeout: 20 * time.Second}
	defer plain.CloseIdleConnections()
	for _, b := range []struct {
		name, method, path, body string
		status                   int
		want                     []string
	}{
		{"unknown field", "POST", "/v1/sessions", `{"template":"base","memory":5}`, 400, []string{"memory", `"invalid"`}},
		{"wrong type", "POST", "/v1/sessions", `{"resources":{"memory_mib":"much"}}`, 400, []string{"memory_mib", `"invalid"`}},
		{"two documents", "POST", "/v1/sessions", `{}{}`, 400, []string{`"invalid"`}},
		{"a field twice", "POST", "/v1/sessions", `{"template":"a","template":"base"}`, 400, []string{"template"}},
		{"half a document", "POST", "/v1/sessions", `{"template":`, 400, []string{`"invalid"`}},
		{"NUL in an argument", "POST", "/v1/sessions/" + x.ID + "/commands", `{"argv":["echo","a\u0000b"]}`, 400, []string{"argv", "NUL"}},
		{"no command", "POST", "/v1/sessions/" + x.ID + "/commands", `{"argv":[]}`, 400, []string{"argv"}},
		{"an environment of 10 MB", "POST", "/v1/sessions/" + x.ID + "/commands", `{"argv":["true"],"env":{"A":"` + strings.Repeat("x", 10<<20) + `"}}`, 0, []string{"bytes"}},
		{"no such route", "GET", "/v1/nothing", "", 404, []string{`"not_found"`}},
		{"no such method", "PATCH", "/v1/sessions", "", 405, nil},
		{"no such session", "GET", "/v1/sessions/aaaaaaaaaaaaaaaaaaaa", "", 404, []string{`"not_found"`}},
	} {
		t.Run(b.name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), b.method, s.url+b.path, strings.NewReader(b.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(key)))
			req.Header.Set("Content-Type", "application/json")
			resp, err := plain.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var text strings.Builder
			if _, err := fmt.Fprint(&text, readAll(t, resp)); err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode/100 != 4 || b.status != 0 && resp.StatusCode != b.status {
				t.Errorf("status %d, want %d: %.300s", resp.StatusCode, b.status, text.String())
			}
			for _, w := range b.want {
				if !strings.Contains(text.String(), w) {
					t.Errorf("the answer does not say %q: %.300s", w, text.String())
				}
			}
		})
	}
	// A caller that goes away while its session is being made leaves nothing.
	for _, after := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 80 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		y, err := s.CreateSessionWith(ctx, client.CreateSession{}, client.CreateOptions{UndoOnCancel: true})
		cancel()
		if err == nil {
			s.end(t, y)
		}
	}
	eventually(t, 20*time.Second, func() error {
		for info, err := range s.Sessions(limit(t, 20*time.Second), client.ListOptions{}) {
			if err != nil {
				return err
			}
			if info.State != client.Ended && info.ID != x.ID {
				return fmt.Errorf("session %s is %s", info.ID, info.State)
			}
		}
		return nil
	})
	s.end(t, x)
	s.stop(t)
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err != nil || b.Len() > 64<<10 {
			return b.String()
		}
	}
}

// TestServerRefuses: what keeps a server from starting is said, and an earlier
// server and its sessions are none the worse.
func TestServerRefuses(t *testing.T) {
	b := needBed(t)
	h := b.host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	other := filepath.Join(h.dir, "other")
	if err := os.Mkdir(other, 0o711); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(other)
	defer removeGroups(t, filepath.Join(other, "run"))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		name string
		argv []string
		want []string
	}{
		{"port in use", []string{b.bivy, "--data", other + "/data", "serve", "--run", other + "/run", "--listen", taken.Addr().String()}, []string{"listen", "in use", "hint: "}},
		{"second server on the data", []string{b.bivy, "--data", h.data, "serve", "--run", other + "/run", "--listen", "127.0.0.1:0"}, []string{h.data, "hint: "}},
		{"second server on the run directory", []string{b.bivy, "--data", other + "/data", "serve", "--run", h.run, "--listen", "127.0.0.1:0"}, []string{h.run, fmt.Sprint(s.cmd.Process.Pid), "hint: "}},
		{"not root", []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", b.bivy, "--data", other + "/data", "serve", "--run", other + "/run", "--listen", "127.0.0.1:0"}, []string{"root", "hint: "}},
		{"not root, beside a server", []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", b.bivy, "--data", h.data, "--server", s.url, "ls"}, []string{"key", "hint: "}},
		{"not root, without a server", []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", b.bivy, "--data", other + "/data", "template", "ls"}, []string{"root", "hint: "}},
		{"beyond loopback without TLS", []string{b.bivy, "--data", other + "/data", "serve", "--run", other + "/run", "--listen", "0.0.0.0:0"}, []string{"listen", "hint: "}},
		{"no controller", []string{"unshare", "-m", "sh", "-c", "umount -l /sys/fs/cgroup/pids /sys/fs/cgroup/unified 2>/dev/null; exec " + b.bivy + " --data " + other + "/data serve --run " + other + "/run --listen 127.0.0.1:0"}, []string{"pids", "hint: "}},
		{"unknown driver", []string{b.bivy, "--data", other + "/data", "serve", "--driver", "magic", "--run", other + "/run", "--listen", "127.0.0.1:0"}, []string{"driver", "magic"}},
		{"relative directory", []string{b.bivy, "--data", "data", "serve", "--run", other + "/run", "--listen", "127.0.0.1:0"}, []string{"data_dir"}},
	} {
		t.Run(c.name, func(t *testing.T) { bad{code: 1, want: c.want}.check(t, h.invoke(t, nil, c.argv...)) })
	}
	if r := sh(t, x, "", "echo unharmed"); string(r.Stdout) != "unharmed\n" {
		t.Errorf("the session of the first server: %+v", r)
	}
	s.end(t, x)
	s.stop(t)

	t.Run("data of a newer version", func(t *testing.T) {
		data := filepath.Join(other, "newer")
		if err := os.Mkdir(data, 0o711); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "cp", "-r", filepath.Join(h.data, "store"), data).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, out)
		}
		if out, err := exec.CommandContext(t.Context(), "python3", "-c", "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA user_version = 999'); c.commit()", filepath.Join(data, "store", "bivy.db")).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, out)
		}
		bad{code: 1, want: []string{"999", "newer", "hint: "}}.check(t, h.invoke(t, nil, b.bivy, "--data", data, "serve", "--run", other+"/run", "--listen", "127.0.0.1:0"))
	})
}

// removeGroups removes the parents of a run directory's cgroups.
func removeGroups(t *testing.T, run string) {
	dirs, err := filepath.Glob("/sys/fs/cgroup/*/" + groupsOf(run) + "*")
	if err != nil {
		t.Error(err)
	}
	for _, d := range dirs {
		if err := syscall.Rmdir(d); err != nil {
			t.Error(err)
		}
	}
}

// TestDiskFull: a full disk is said to be the reason, stops what cannot be
// recorded, and is all right again when there is room.
func TestDiskFull(t *testing.T) {
	b := needBed(t)
	h, err := newHost(b, "full")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(h.clear(), os.RemoveAll(h.dir)); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(h.data, 0o711); err != nil {
		t.Fatal(err)
	}
	mount := func(size string) {
		t.Helper()
		if err := syscall.Mount("bivy-e2e", h.data, "tmpfs", 0, "mode=711,size="+size); err != nil {
			t.Skipf("no small disk to fill: %v", err)
		}
	}
	t.Run("from the start", func(t *testing.T) {
		mount("12m")
		defer syscall.Unmount(h.data, 0)
		bad{code: 1, want: []string{"no space left"}}.check(t, h.invoke(t, nil, b.bivy, "--data", h.data, "serve", "--run", h.run, "--listen", "127.0.0.1:0"))
	})
	mount("1g")
	t.Cleanup(func() {
		if err := syscall.Unmount(h.data, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	filler := filepath.Join(h.data, "filler")
	if err := fill(filler); err != nil {
		t.Fatal(err)
	}
	_, runErr := x.Run(limit(t, 30*time.Second), client.Command{Argv: []string{"bash", "-c", "echo done > /home/user/done; " + strings.Repeat("# some text that a record has to hold\n", 3000)}})
	var e *client.Error
	if runErr == nil {
		t.Error("a command ran that cannot have been recorded")
	} else if !errors.As(runErr, &e) || e.Code == client.CodeInternal {
		t.Errorf("a command on a full disk: %v\n%s", runErr, s.log)
	}
	if _, err := s.CreateSession(limit(t, 60*time.Second), client.CreateSession{}); err == nil {
		t.Log("a session fitted on the full disk")
	} else if !errors.As(err, &e) || e.Code == client.CodeInternal {
		t.Errorf("a create on a full disk: %v\n%s", err, s.log)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, func() error {
		r, err := x.Run(limit(t, 20*time.Second), client.Command{Argv: []string{"bash", "-c", "ls /home/user"}})
		if err == nil && runErr != nil && strings.Contains(string(r.Stdout), "done") {
			t.Error("the refused command ran")
		}
		return err
	})
	s.end(t, x)
	for info, err := range s.Sessions(limit(t, 20*time.Second), client.ListOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if info.State != client.Ended {
			if _, err := s.Session(info.ID).End(limit(t, 30*time.Second)); err != nil {
				t.Error(err)
			}
		}
		s.verify(t, info.ID, false)
	}
	s.onlyOf(t)
	s.stop(t)
}

// fill takes all the room there is.
func fill(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; size > 0; {
		_, err := f.Write(make([]byte, size))
		var pe *fs.PathError
		switch {
		case err == nil:
		case errors.As(err, &pe) && errors.Is(err, syscall.ENOSPC):
			size /= 2
		default:
			return err
		}
	}
	return nil
}
