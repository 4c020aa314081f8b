package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/audit"
)

// storm is something that a session does to take all there is of something.
type storm struct {
	name   string
	limits client.Resources
	user   string
	script string
	mounts bool // it mounts a file system of its own, whose files are not listed
	// seen checks what came of it: the command's end, or err when there was
	// none, and the session a moment later.
	seen func(r client.Result, err error, info client.SessionInfo, all []client.Event) error
}

// stormLimit is how long a storm may last before its command is killed.
const stormLimit = 8 * time.Second

// limited says that a storm either was kept in bounds inside or ended its own
// session for one of these reasons.
func limited(reasons ...string) func(client.Result, error, client.SessionInfo, []client.Event) error {
	return func(_ client.Result, _ error, info client.SessionInfo, _ []client.Event) error {
		if info.State == client.Running || slices.Contains(reasons, info.Reason) {
			return nil
		}
		return fmt.Errorf("the session is %s for %s (%s)", info.State, info.Reason, info.Detail)
	}
}

func storms() []storm {
	small := client.Resources{MemoryMiB: 256, DiskMiB: 64, PIDs: 256}
	return []storm{
		{name: "fork bomb", limits: small, script: ":(){ :|:& };: ; sleep 5", seen: limited("oom", "resource_exceeded")},
		{name: "processes", limits: small, script: "for i in $(seq 2000); do sleep 60 & done 2>/dev/null; wait", seen: limited("oom", "resource_exceeded")},
		{name: "threads", limits: small, seen: limited("oom", "resource_exceeded"), script: python(`
import threading, time
n = 0
try:
    while n < 20000:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); n += 1
except BaseException as e:
    print(type(e).__name__)
print('started', n)
`)},
		{name: "memory", limits: small, script: "python3 -c 'b = []\nwhile True: b.append(bytearray(1 << 20))'", seen: outOfMemory},
		{name: "memory in shm", limits: small, script: "head -c 1G /dev/zero > /dev/shm/fill; true", seen: limited("oom")},
		{name: "disk", limits: small, script: "{ head -c 1G /dev/zero > /home/user/fill; } 2>&1; ls -l /home/user/fill; rm /home/user/fill && echo again > /home/user/ok && cat /home/user/ok",
			seen: func(r client.Result, err error, info client.SessionInfo, _ []client.Event) error {
				if err != nil || !strings.Contains(string(r.Stdout), "No space left") || !strings.HasSuffix(string(r.Stdout), "again\n") || info.State != client.Running {
					return fmt.Errorf("%q %q, %w, %s", r.Stdout, r.Stderr, err, info.State)
				}
				return nil
			}},
		{name: "descriptors", limits: small, seen: limited("oom"), script: "for i in 1 2 3; do python3 -c '\nimport os, time\nn = 0\ntry:\n  while True: os.open(\"/dev/null\", 0); n += 1\nexcept OSError as e: print(n, e.strerror)\ntime.sleep(1)' & done; wait"},
		{name: "watches", limits: small, seen: limited("oom"), script: python(`
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/tmp/w', exist_ok=True)
n = 0
for i in range(2000):
    fd = libc.inotify_init1(0o4000)
    if fd < 0: print(os.strerror(ctypes.get_errno())); break
    for j in range(20):
        if libc.inotify_add_watch(fd, b'/tmp/w', 0xfff) >= 0: n += 1
for i in range(200): open('/tmp/w/%d' % i, 'w').close()
print('watches', n)
`)},
		{name: "packets", limits: small, seen: limited(), script: python(`
import socket, threading, time
end = time.time() + 4
def datagrams():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); n = 0
    while time.time() < end:
        try: s.sendto(b'x' * 1400, ('192.0.2.%d' % (n % 250 + 1), n % 60000 + 1))
        except OSError: pass
        n += 1
def connections():
    n = 0
    while time.time() < end:
        s = socket.socket(); s.setblocking(False)
        try: s.connect(('192.0.2.1', n % 60000 + 1))
        except OSError: pass
        s.close(); n += 1
for f in (datagrams, connections, connections):
    threading.Thread(target=f).start()
`)},
		{name: "a file system that hangs", limits: small, user: "root", mounts: true, seen: limited(), script: python(`
import ctypes, os, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open('/dev/fuse', os.O_RDWR)
os.makedirs('/tmp/f', exist_ok=True)
r = libc.mount(b'x', b'/tmp/f', b'fuse', 0, b'fd=%d,rootmode=40000,user_id=0,group_id=0' % fd)
print('mounted' if r == 0 else os.strerror(ctypes.get_errno()))
os.set_inheritable(fd, True)
subprocess.Popen(['sh', '-c', 'ls /tmp/f; cat /tmp/f/x'], close_fds=False)
time.sleep(2)
`) + "\nfor i in 1 2 3; do (trap '' TERM INT; kill -STOP $BASHPID) & done; sleep 1"},
		{name: "processors", limits: small, script: "for i in 1 2 3 4 5 6 7 8; do (trap '' TERM; while :; do :; done) & done; sleep 4; kill -9 $(jobs -p)", seen: limited()},
	}
}

func outOfMemory(r client.Result, err error, info client.SessionInfo, all []client.Event) error {
	if info.State == client.Ended || info.State == client.Ending {
		if info.Reason != "oom" {
			return fmt.Errorf("the session ended for %s (%s)", info.Reason, info.Detail)
		}
		return nil
	}
	if err != nil || r.Status() != 137 || !r.OOM {
		return fmt.Errorf("the command: %+v, %w", r.Exit, err)
	}
	if len(happened(all, audit.OutOfMemory)) == 0 {
		return errors.New("the record does not say that memory ran out")
	}
	return nil
}

// TestStorms: whatever a session takes all of, its neighbour works on, the
// server stays well, and the session can be ended.
func TestStorms(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	neighbour := s.create(t, client.Spec{TimeoutSeconds: 3600})
	calm := newMeter(t, s, neighbour)
	pause(2 * time.Second)
	t.Logf("%-14s %s", "calm", calm.stop())
	for _, w := range storms() {
		t.Run(w.name, func(t *testing.T) {
			x := s.create(t, client.Spec{Resources: w.limits})
			meter := newMeter(t, s, neighbour)
			ctx, cancel := context.WithTimeout(t.Context(), stormLimit)
			r, err := x.Run(ctx, client.Command{Argv: []string{"bash", "-c", w.script}, User: w.user})
			cancel()
			measured := meter.stop()
			info, getErr := x.Get(limit(t, 10*time.Second))
			if getErr != nil {
				t.Fatal(getErr)
			}
			if w.seen != nil {
				if err := w.seen(r, err, info, events(t, x)); err != nil {
					t.Error(err)
				}
			}
			began := time.Now()
			ended := s.end(t, x)
			took := time.Since(began)
			t.Logf("%-14s %s; exit %d, %.60q, %v; was %s; end took %s, reason %s %s", w.name, measured, r.Status(), r.Stdout, err, info.State,
				took.Round(time.Millisecond), ended.Reason, ended.Detail)
			// A sandbox that died cannot be asked what it changed, and what is in
			// a mount that it made itself is not listed.
			residuals := slices.DeleteFunc(slices.Clone(ended.Residuals), func(r string) bool { return w.mounts && strings.Contains(r, "mounts") })
			if took > 30*time.Second || len(residuals) > 0 && ended.Reason == "requested" {
				t.Errorf("the end took %s and left %q", took, ended.Residuals)
			}
		})
	}
	if r := sh(t, neighbour, "", "echo well"); string(r.Stdout) != "well\n" {
		t.Errorf("the neighbour: %+v", r)
	}
	s.end(t, neighbour)
	s.stop(t)
}

// meter runs a small command in a session again and again.
type meter struct {
	cancel context.CancelFunc
	over   chan struct{}
	took   []time.Duration
	failed error
}

func newMeter(t *testing.T, s *server, x *client.Session) *meter {
	ctx, cancel := context.WithCancel(t.Context())
	m := &meter{cancel: cancel, over: make(chan struct{})}
	t.Cleanup(func() {
		m.stop()
		if m.failed != nil {
			t.Errorf("the neighbour or the server failed: %v", m.failed)
		}
	})
	go func() {
		defer close(m.over)
		for ctx.Err() == nil {
			one, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
			began := time.Now()
			r, err := x.Run(one, client.Command{Argv: []string{"true"}})
			m.took = append(m.took, time.Since(began))
			if err == nil && r.Status() != 0 {
				err = fmt.Errorf("true ended with %+v", r.Exit)
			}
			if health, healthErr := s.Health(one); err == nil && (healthErr != nil || health.Status != "ok") {
				err = fmt.Errorf("health: %+v, %w", health, healthErr)
			}
			cancel()
			if err != nil {
				m.failed = err
				return
			}
		}
	}()
	return m
}

// stop ends the measurement and describes it.
func (m *meter) stop() string {
	m.cancel()
	<-m.over
	if len(m.took) == 0 {
		return "nothing measured"
	}
	slices.Sort(m.took)
	at := func(q int) time.Duration { return m.took[(len(m.took)-1)*q/100].Round(time.Millisecond) }
	return fmt.Sprintf("neighbour n=%d p50=%s p99=%s", len(m.took), at(50), at(99))
}

// TestOutput: output without end, without lines, that nobody reads.
func TestOutput(t *testing.T) {
	const size = 256 << 20
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})

	began := time.Now()
	p, err := x.Start(limit(t, 120*time.Second), client.Command{Argv: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}})
	if err != nil {
		t.Fatal(err)
	}
	var n counter
	exit, err := p.Wait(&n, io.Discard)
	if err != nil || exit.Status() != 0 || n != size {
		t.Errorf("%d bytes of %d came, %+v, %v", n, size, exit, err)
	}
	t.Logf("%d MiB without a newline in %s", size>>20, time.Since(began).Round(time.Millisecond))

	// A reader that stops reading holds up its own command and nothing else.
	before, err := threads(s.cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	slow, err := x.Start(limit(t, 60*time.Second), client.Command{Argv: []string{"head", "-c", "1G", "/dev/zero"}, OnDisconnect: client.Kill})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := slow.Next(); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if r := sh(t, x, "", "echo on"); string(r.Stdout) != "on\n" {
			t.Errorf("beside a reader that does not read: %+v", r)
		}
	}
	if now, err := threads(s.cmd.Process.Pid); err != nil || now > before+10 {
		t.Errorf("%d threads before, %d now, %v", before, now, err)
	}
	// A caller that goes away in the middle of a stream takes its command
	// along, as it asked for.
	id := slow.ID
	slow.Close()
	eventually(t, 10*time.Second, func() error {
		all, err := x.Commands(limit(t, 10*time.Second))
		if err != nil {
			return err
		}
		for _, c := range all {
			if c.ID == id && c.Running {
				return errors.New("the command of a caller that is gone still runs")
			}
		}
		return nil
	})

	// Every byte comes as it is.
	all := make([]byte, 0, 256*256)
	for i := range 256 * 256 {
		all = append(all, byte(i), byte(i>>8))
	}
	if _, err := x.WriteFile(limit(t, 20*time.Second), "bytes", bytes.NewReader(all), client.FileOptions{}); err != nil {
		t.Fatal(err)
	}
	if r, err := x.Run(limit(t, 20*time.Second), client.Command{Argv: []string{"cat", "bytes"}}); err != nil || !bytes.Equal(r.Stdout, all) {
		t.Errorf("binary output is not what it was: %v", err)
	}
	r := s.cli(t, "exec", x.ID, "--", "cat", "bytes")
	if r.code != 0 || r.out != string(all) {
		t.Errorf("binary output of the command line is not what it was: code %d, %d bytes, %s", r.code, len(r.out), r.err)
	}
	s.end(t, x)
	s.stop(t)
}

type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}
