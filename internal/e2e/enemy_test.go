package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/guest/wire"
)

// TestEnemyInside is a program that means harm: as root of its guest and as
// its user it looks for a way to the host, to a neighbour and to the server.
func TestEnemyInside(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	neighbour, enemy := s.create(t, client.Spec{}), s.create(t, client.Spec{})
	const canary = "canary-of-the-neighbour-8c1f"
	if r := sh(t, neighbour, "root", "for d in /tmp /home/user /dev/shm /var/tmp /run; do echo "+canary+" > $d/c; done; nohup sleep 1000 >/dev/null 2>&1 &"); r.Status() != 0 {
		t.Fatalf("%+v", r)
	}

	t.Run("guest", func(t *testing.T) { probeGuest(t, enemy) })
	t.Run("host", func(t *testing.T) { probeHost(t, enemy) })
	t.Run("network", func(t *testing.T) { probeNetwork(t, s, enemy) })
	t.Run("agent", func(t *testing.T) { probeAgent(t, enemy) })
	t.Run("files", func(t *testing.T) { probeFiles(t, s, enemy) })
	search := "grep -rls " + canary + " /tmp /home /dev/shm /var /run /root /etc 2>/dev/null; ps ax 2>/dev/null | grep '[s]leep 1000'; env | grep " + neighbour.ID + "; true"
	t.Run("neighbour", func(t *testing.T) {
		if r := sh(t, enemy, "root", search); len(r.Stdout) > 0 {
			t.Errorf("something of a neighbour is visible:\n%s", r.Stdout)
		}
	})
	s.end(t, neighbour)
	t.Run("successor", func(t *testing.T) {
		x := s.create(t, client.Spec{})
		if r := sh(t, x, "root", search); len(r.Stdout) > 0 {
			t.Errorf("something of an earlier session is visible:\n%s", r.Stdout)
		}
		s.end(t, x)
	})
	s.end(t, enemy)
	if len(happened(events(t, enemy), audit.OutboundRefused)) == 0 {
		t.Errorf("the record does not say that the enemy tried to get out:\n%s", told(events(t, enemy)))
	}
	s.stop(t)
}

// python is a script that runs Python code.
func python(code string) string {
	return "python3 - <<'END' 2>&1\n" + code + "\nEND"
}

// probeGuest: what a guest kernel must not have.
func probeGuest(t *testing.T, x *client.Session) {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	disks, err := filepath.Glob("/sys/block/*")
	if err != nil || len(disks) == 0 {
		t.Logf("no disks of the host to look for: %v", err)
	}
	for _, p := range []struct {
		name, user, script, want string // want is in the output
		never                    []string
	}{
		{name: "no mount of the host", user: "root", script: "cat /proc/self/mountinfo", want: " / / ",
			never: []string{"ext4", "/dev/vd", "virtiofs", "9p", "bivy-e2e", "cgroup"}},
		{name: "no device of the host", user: "root", script: "ls /dev /dev/char /dev/block 2>/dev/null; true", want: "null",
			never: []string{"kvm", "kmsg", "vda", "sda", "mem\n", "vhost", "loop"}},
		{name: "no block device in sysfs", user: "root", script: "ls -A /sys/block /sys/class/block /sys/dev/block 2>/dev/null | grep -v : | sort -u; echo end", want: "end",
			never: []string{"vda", "sda", "loop", "nvme"}},
		{name: "not the host's kernel", user: "root", script: "uname -r; cat /proc/version", want: "\n", never: []string{strings.TrimSpace(string(kernel))}},
		{name: "no kernel memory", user: "root", script: "cat /proc/kcore /proc/kallsyms /dev/mem /dev/kmem /dev/kmsg 2>&1 | head -c 400; true", want: "No such file"},
		{name: "made devices do not open", user: "root", script: python(`
import os, errno
for kind, major, minor in ((0o060000, 254, 0), (0o060000, 8, 0), (0o060000, 7, 0), (0o020000, 1, 1), (0o020000, 1, 11), (0o020000, 10, 232), (0o020000, 10, 237)):
    path = '/tmp/dev-%d-%d' % (major, minor)
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
        os.close(os.open(path, os.O_RDWR))
        print('OPENED', path)
    except OSError as e:
        print('refused', path, e.strerror)
`), want: "refused", never: []string{"OPENED"}},
		{name: "no raw sockets", user: "root", script: python(`
import socket
for family, kind, proto in ((socket.AF_PACKET, socket.SOCK_RAW, 3), (socket.AF_PACKET, socket.SOCK_DGRAM, 3), (socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_RAW, 255), (40, socket.SOCK_STREAM, 0)):
    try:
        socket.socket(family, kind, proto)
        print('MADE', family, kind)
    except OSError as e:
        print('refused', family, kind, e.strerror)
`), want: "refused", never: []string{"MADE"}},
		{name: "no module, no kexec, no bpf", user: "root", script: python(`
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, nr in (('bpf', 321), ('init_module', 175), ('finit_module', 313), ('kexec_load', 246), ('perf_event_open', 298), ('userfaultfd', 323), ('open_by_handle_at', 304), ('iopl', 172), ('keyctl', 250), ('fanotify_init', 300)):
    r = libc.syscall(nr, 0, 0, 0, 0, 0)
    print('DONE' if r >= 0 else 'refused', name, os.strerror(ctypes.get_errno()))
`), want: "refused", never: []string{"DONE"}},
		{name: "no checkpoint by oneself", user: "root", script: "cat /proc/gvisor/spec_environ | tr '\\0' '\\n'; for f in $(ls /proc/gvisor); do [ $f = spec_environ ] || { echo 1 > /proc/gvisor/$f && echo DONE; }; done; echo end", want: "end",
			never: []string{"DONE", "bivy-e2e", "TOKEN"}},
		{name: "no interface of one's own", user: "root", script: python(`
import fcntl, os, struct
try:
    fd = os.open('/dev/net/tun', os.O_RDWR)
    fcntl.ioctl(fd, 0x400454ca, struct.pack('16sH', b'evil', 0x1001))
    print('MADE')
except OSError as e:
    print('refused', e.strerror)
`), want: "refused", never: []string{"MADE"}},
		{name: "no cgroup to release from", user: "root", script: "mkdir -p /tmp/cg; python3 -c \"import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.mount(b'cgroup',b'/tmp/cg',b'cgroup',0,b'memory'); print(r, os.strerror(ctypes.get_errno()))\"; ls /tmp/cg; echo end", want: "end",
			never: []string{"release_agent", "bivy"}},
		{name: "user reads no other's environment", user: "user", script: "cat /proc/1/environ /proc/1/maps /proc/1/mem 2>&1; ls /proc/1/fd /proc/1/cwd/ 2>&1; true", want: "denied"},
		{name: "user does not trace the agent", user: "user", script: python(`
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
r = libc.ptrace(16, 1, 0, 0)
print('TRACED' if r == 0 else 'refused', os.strerror(ctypes.get_errno()))
try:
    os.kill(1, 9); print('KILLED')
except OSError as e:
    print('refused', e.strerror)
`), want: "refused", never: []string{"TRACED", "KILLED"}},
		{name: "set-uid is the guest's own", user: "user", script: "cp /bin/bash /tmp/b && sudo chown root /tmp/b && sudo chmod 4755 /tmp/b && /tmp/b -p -c 'id -u'", want: "0"},
	} {
		t.Run(p.name, func(t *testing.T) {
			r := sh(t, x, p.user, p.script)
			out := string(r.Stdout) + string(r.Stderr)
			if !strings.Contains(out, p.want) {
				t.Errorf("want %q in:\n%s", p.want, out)
			}
			for _, n := range p.never {
				if strings.Contains(out, n) {
					t.Errorf("%q is in:\n%s", n, out)
				}
			}
		})
	}
}

// probeHost: what guest root changes is not the host's.
func probeHost(t *testing.T, x *client.Session) {
	sleeper := exec.Command("sleep", "600")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = sleeper.Process.Kill()
		_ = sleeper.Wait()
	}()
	abstract := "@bivy-e2e-" + strconv.Itoa(os.Getpid())
	l, err := net.Listen("unix", abstract)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	met := accepts(l)

	knobs := []string{"kernel/hostname", "kernel/core_pattern", "kernel/domainname", "kernel/modprobe", "vm/overcommit_memory", "fs/file-max", "net/ipv4/ip_forward", "kernel/panic"}
	before := map[string]string{}
	for _, k := range knobs {
		b, err := os.ReadFile("/proc/sys/" + k)
		if err != nil {
			continue // not a knob of this kernel
		}
		before[k] = string(b)
	}
	r := sh(t, x, "root", "for k in "+strings.Join(knobs, " ")+"; do echo '|/tmp/evil' > /proc/sys/$k; done 2>/dev/null; hostname evil 2>/dev/null; "+
		"python3 -c \"import socket; socket.sethostname('evil')\" 2>/dev/null; echo h > /proc/sysrq-trigger 2>/dev/null; true")
	if r.Status() != 0 {
		t.Fatalf("%+v", r)
	}
	for k, want := range before {
		if b, err := os.ReadFile("/proc/sys/" + k); err != nil || string(b) != want {
			t.Errorf("the guest changed the host's %s from %q to %q, %v", k, want, b, err)
		}
	}
	r = sh(t, x, "root", fmt.Sprintf("ls -d /proc/%[1]d 2>/dev/null; kill -0 %[1]d 2>/dev/null && echo KILLABLE; ls /proc | grep -c '^[0-9]*$'; cat /proc/net/unix", sleeper.Process.Pid))
	if out := string(r.Stdout); strings.Contains(out, "/proc/") || strings.Contains(out, "KILLABLE") || strings.Contains(out, abstract) {
		t.Errorf("the host's processes or sockets are visible:\n%s", out)
	}
	r = sh(t, x, "root", python(`
import socket
s = socket.socket(socket.AF_UNIX)
try:
    s.connect('\0`+abstract[1:]+`'); print('CONNECTED')
except OSError as e:
    print('refused', e.strerror)
`))
	if !strings.Contains(string(r.Stdout), "refused") || met.Load() > 0 {
		t.Errorf("an abstract socket of the host: %s, %d connections", r.Stdout, met.Load())
	}
	// Open files of the server are no way either.
	r = sh(t, x, "root", "for p in /proc/[0-9]*/fd/*; do readlink $p; done 2>/dev/null | grep -E 'bivy-e2e|/var/lib|\\.sock|erofs|\\.db' ; true")
	if len(r.Stdout) > 0 {
		t.Errorf("files of the host are open inside:\n%s", r.Stdout)
	}
	for fd := range 12 {
		res, err := x.Run(limit(t, 20*time.Second), client.Command{Argv: []string{"cat", "/etc/hostname"}, Cwd: fmt.Sprintf("/proc/self/fd/%d", fd)})
		if err == nil && res.Status() == 0 && strings.Contains(string(res.Stdout), "evil-host") {
			t.Errorf("descriptor %d leads out", fd)
		}
	}
}

// accepts counts who connects.
func accepts(l net.Listener) *atomic.Int64 {
	var n atomic.Int64
	go func() { // ends when the listener is closed
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			c.Close()
		}
	}()
	return &n
}

// probeNetwork: every packet of the guest ends on bivy's own link.
func probeNetwork(t *testing.T, s *server, x *client.Session) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	type target struct {
		what, host, port string
		met              *atomic.Int64
	}
	var targets []target
	for _, a := range addrs {
		ip, _, err := net.ParseCIDR(a.String())
		if err != nil || ip.To4() == nil {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(ip.String(), "0"))
		if err != nil {
			t.Logf("no listener on %s: %v", ip, err)
			continue
		}
		defer l.Close()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		targets = append(targets, target{"the host's " + ip.String(), ip.String(), port, accepts(l)})
	}
	_, api, err := net.SplitHostPort(strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	for _, ip := range []string{"127.0.0.1", "10.88.0.1", "10.88.0.2"} {
		targets = append(targets, target{what: "the control interface by " + ip, host: ip, port: api})
	}
	targets = append(targets,
		target{what: "the metadata service", host: "169.254.169.254", port: "80"},
		target{what: "a link-local address", host: "169.254.1.1", port: "80"},
		target{what: "an address beyond the link", host: "10.88.0.6", port: strconv.Itoa(int(wire.Port))},
		target{what: "a documentation address", host: "192.0.2.1", port: "443"},
	)
	type try struct {
		Host string `json:"host"`
		Port int    `json:"port"`
	}
	var tries []try
	for _, to := range targets {
		port, err := strconv.Atoi(to.port)
		if err != nil {
			t.Fatal(err)
		}
		tries = append(tries, try{to.host, port})
	}
	list, err := json.Marshal(tries)
	if err != nil {
		t.Fatal(err)
	}
	before, err := x.Stats(limit(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	r := sh(t, x, "root", python(`
import json, socket, time
for to in json.loads('''`+string(list)+`'''):
    s = socket.socket(); s.settimeout(5); began = time.time()
    try:
        s.connect((to['host'], to['port'])); print('CONNECTED', to)
    except OSError as e:
        took = time.time() - began
        print('refused' if took < 2 else 'SLOW', to, type(e).__name__, '%.3f' % took)
    s.close()
for host in ('192.0.2.53', '10.88.0.1', '169.254.169.254'):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(5); began = time.time()
    try:
        u.connect((host, 53)); u.send(b'x' * 30); u.recv(100); print('ANSWERED', host)
    except OSError as e:
        took = time.time() - began
        print('refused' if took < 2 else 'SLOW', 'udp', host, type(e).__name__, '%.3f' % took)
for host in ('224.0.0.251', '255.255.255.255'):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); u.settimeout(0.3)
    try:
        u.sendto(b'anyone', (host, 5353)); u.recv(100); print('ANSWERED', host)
    except OSError as e:
        print('refused', host, type(e).__name__)
`))
	out := string(r.Stdout)
	if n := strings.Count(out, "refused"); n != len(targets)+5 || strings.Contains(out, "CONNECTED") || strings.Contains(out, "ANSWERED") || strings.Contains(out, "SLOW") {
		t.Errorf("%d of %d tries were refused at once:\n%s", n, len(targets)+5, out)
	}
	for _, to := range targets {
		if to.met != nil && to.met.Load() > 0 {
			t.Errorf("%s was reached", to.what)
		}
	}
	after, err := x.Stats(limit(t, 10*time.Second))
	if err != nil || after.OutboundRefused < before.OutboundRefused+uint64(len(targets)) {
		t.Errorf("%d tries were counted before, %d after, %v", before.OutboundRefused, after.OutboundRefused, err)
	}
}

// probeAgent: from inside, the agent takes orders from nobody without the
// token, and the token is nowhere.
func probeAgent(t *testing.T, x *client.Session) {
	for _, user := range []string{"user", "root"} {
		r := sh(t, x, user, python(fmt.Sprintf(`
import urllib.request, urllib.error
def ask(method, path, body=None, headers={}):
    req = urllib.request.Request('http://127.0.0.1:%d' + path, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(req, timeout=5) as r:
            print('ANSWERED', method, path, r.status, r.read(200))
    except urllib.error.HTTPError as e:
        print('refused', method, path, e.code)
json = {'Content-Type': 'application/json'}
ask('POST', '/init', b'{"accessToken":"mine","envVars":{"A":"b"}}', json)
ask('POST', '/init', b'{}', json)
ask('GET', '/files?path=/etc/shadow&username=root')
ask('POST', '/files?path=/etc/evil&username=root', b'x')
ask('POST', '/process.Process/List', b'{}', json)
ask('POST', '/process.Process/List', b'{}', {**json, 'X-Access-Token': ''})
ask('POST', '/process.Process/List', b'{}', {**json, 'X-Access-Token': 'mine'})
ask('POST', '/filesystem.Filesystem/ListDir', b'{"path":"/root"}', json)
ask('GET', '/metrics')
`, wire.Port)))
		out := string(r.Stdout)
		if strings.Count(out, "refused") != 9 || strings.Contains(out, "ANSWERED") {
			t.Errorf("as %s, without the token:\n%s", user, out)
		}
	}
	// The token is 64 hexadecimal digits. Whatever of that form a guest can
	// read is shown to be something else by using it.
	r := sh(t, x, "root", python(fmt.Sprintf(`
import os, re, urllib.request, urllib.error
seen = set()
def look(path, limit=1 << 20):
    try:
        with open(path, 'rb') as f:
            seen.update(re.findall(rb'(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])', f.read(limit)))
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('environ', 'cmdline', 'status'):
        look('/proc/%%s/%%s' %% (pid, name))
for top in ('/run', '/etc', '/tmp', '/home', '/root', '/var/log', '/dev/shm'):
    for dir, _, files in os.walk(top):
        for f in files:
            look(os.path.join(dir, f))
for token in seen:
    req = urllib.request.Request('http://127.0.0.1:%d/process.Process/List', data=b'{}', method='POST', headers={'Content-Type': 'application/json', 'X-Access-Token': token.decode()})
    try:
        urllib.request.urlopen(req, timeout=5); print('FOUND')
    except urllib.error.HTTPError as e:
        pass
print('looked', len(seen))
`, wire.Port)))
	if out := string(r.Stdout); !strings.Contains(out, "looked") || strings.Contains(out, "FOUND") {
		t.Errorf("the agent's token can be read inside:\n%s%s", out, r.Stderr)
	}
	if r := sh(t, x, "user", "echo still here"); string(r.Stdout) != "still here\n" {
		t.Errorf("the agent was harmed: %+v", r)
	}
}

// probeFiles: the file interface does what its user may do, and no more.
func probeFiles(t *testing.T, s *server, x *client.Session) {
	ctx := limit(t, 60*time.Second)
	user := client.FileOptions{User: "user"}
	sh(t, x, "user", "cd /home/user && ln -s /etc/shadow link && ln -s /etc dirlink && ln -s /proc/1/environ env && mkdir -p deep/a && ln -s ../../../../../../etc/shadow deep/a/up")
	read := func(path string) error {
		r, _, err := x.ReadFile(ctx, path, user)
		if err == nil {
			b, _ := io.ReadAll(r)
			r.Close()
			return fmt.Errorf("read %q", b)
		}
		var e *client.Error
		if !errors.As(err, &e) || e.Code == client.CodeInternal {
			return fmt.Errorf("not refused but failed: %w", err)
		}
		return nil
	}
	for _, path := range []string{"/etc/shadow", "link", "dirlink/shadow", "env", "deep/a/up", "../../etc/shadow", "/home/user/../../etc/shadow", "/root/.bashrc", "/proc/1/environ", "a\x00b", strings.Repeat("n", 300), strings.Repeat("d/", 3000) + "f"} {
		if err := read(path); err != nil {
			t.Errorf("read %.60q as user: %v", path, err)
		}
	}
	for _, path := range []string{"/etc/evil", "link", "dirlink/evil", "../../etc/evil", "/evil", "/root/evil", "/usr/bin/evil", "\x00", strings.Repeat("n", 300)} {
		_, err := x.WriteFile(ctx, path, strings.NewReader("evil"), user)
		var e *client.Error
		if !errors.As(err, &e) || e.Code == client.CodeInternal {
			t.Errorf("write %.60q as user: %v", path, err)
		}
	}
	if r := sh(t, x, "root", "ls /etc/evil /evil /root/evil /usr/bin/evil 2>/dev/null; grep -c evil /etc/shadow; true"); strings.TrimSpace(string(r.Stdout)) != "0" {
		t.Errorf("files of root were written as user:\n%s", r.Stdout)
	}
	// Names that are not UTF-8 come and go whole.
	const odd = "odd-\xff\xfe\x01 \n name"
	if _, err := x.WriteFile(ctx, "/home/user/"+odd, strings.NewReader("odd"), user); err != nil {
		t.Errorf("a name that is not UTF-8: %v", err)
	}
	list, err := x.ListDir(ctx, "/home/user", 1, user)
	found := false
	for _, f := range list {
		found = found || f.ExactPath() == "/home/user/"+odd
	}
	if err != nil || !found {
		t.Errorf("a name that is not UTF-8 is not listed as it is: %v", err)
	}

	// A copy out writes nowhere but below its destination.
	sh(t, x, "user", "cd /home/user && mkdir -p trap/sub && cd trap && ln -s /etc etc && ln -s "+s.h.home+" out && echo x > '`touch evil`' && echo x > '$(touch evil)' && mkfifo pipe; echo fine > fine && ln -s / sub/root")
	dst := filepath.Join(s.h.home, "copied")
	res := s.cli(t, "cp", x.ID+":/home/user/trap", dst)
	if b, err := os.ReadFile(filepath.Join(dst, "fine")); err != nil || string(b) != "fine\n" {
		t.Errorf("copy out: %v\n%s", err, res)
	}
	for _, evil := range []string{filepath.Join(s.h.home, "evil"), filepath.Join(dst, "out"), filepath.Join(dst, "etc"), filepath.Join(dst, "pipe")} {
		if _, err := os.Lstat(evil); err == nil {
			t.Errorf("%s was made", evil)
		}
	}
	if err := os.RemoveAll(dst); err != nil {
		t.Error(err)
	}
	if res := s.cli(t, "cp", x.ID+":/home/user/../../etc/shadow", filepath.Join(s.h.home, "shadow")); res.code == 0 {
		t.Errorf("root's file was copied out as user: %s", res)
	}
	if !bytes.Contains([]byte(s.cli(t, "show", x.ID).out), []byte(x.ID)) {
		t.Error("the session does not show")
	}
}

// TestClonesDiffer: sessions start from one snapshot, and what must be random
// in them is not the same in two.
func TestClonesDiffer(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	seen := map[string]string{}
	for range 3 {
		x := s.create(t, client.Spec{})
		r := sh(t, x, "root", `head -c 16 /dev/urandom | base64; head -c 16 /dev/random | base64; echo uuid-$(cat /proc/sys/kernel/random/uuid 2>/dev/null || python3 -c 'import uuid; print(uuid.uuid4())')
echo shell-$RANDOM-$RANDOM-$RANDOM; mktemp -u; mktemp -u; python3 -c 'import random, os, secrets; print(random.random(), os.getrandom(8).hex(), secrets.token_hex(4), hash("a"))'; echo $BIVY_SESSION_ID`)
		lines := strings.Split(strings.TrimSpace(string(r.Stdout)), "\n")
		if len(lines) != 8 {
			t.Fatalf("%q %s", lines, r.Stderr)
		}
		for _, line := range lines {
			if other := seen[line]; other != "" {
				t.Errorf("%q is in %s and in %s", line, other, x.ID)
			}
			seen[line] = x.ID
		}
		now := sh(t, x, "", "date +%s%N")
		var ns int64
		if _, err := fmt.Sscan(string(now.Stdout), &ns); err != nil || time.Since(time.Unix(0, ns)).Abs() > 3*time.Second {
			t.Errorf("the clock of %s says %s, %v", x.ID, now.Stdout, err)
		}
		s.end(t, x)
	}
	s.stop(t)
}
