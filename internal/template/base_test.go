package template

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/kind"
)

// hostBase builds base from this host. It leaves out packages that are not
// installed and logs them; without a dpkg database the test is skipped.
func hostBase(t *testing.T, s *Store) Template {
	t.Helper()
	spec := Base()
	start := time.Now()
	tmpl, err := s.Build(t.Context(), spec, nil)
	if kind.Is(err, kind.NotFound) {
		missing := strings.Fields(err.Error()[strings.LastIndex(err.Error(), ":")+1:])
		t.Logf("without %v, which this host lacks; %s", missing, kind.Hint(err))
		spec.From.HostPackages.Packages = slices.DeleteFunc(BasePackages(), func(p string) bool { return slices.Contains(missing, p) })
		if len(spec.From.HostPackages.Packages) < len(BasePackages())/2 {
			t.Skip("most of base is not installed on this host")
		}
		start = time.Now()
		tmpl, err = s.Build(t.Context(), spec, nil)
	}
	if kind.Is(err, kind.Invalid) {
		t.Skipf("no host packages here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("base: %d bytes in %v", tmpl.ImageBytes, time.Since(start))
	for _, n := range tmpl.Notes {
		t.Log("note: ", n)
	}
	return tmpl
}

// chroot is an image mounted by the kernel, with the mounts that programs need.
type chroot struct {
	t   *testing.T
	dir string
}

func mountBase(t *testing.T, tmpl Template) chroot {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("chroot needs root")
	}
	dir := t.TempDir()
	mount := func(source, target, fstype, data string) error {
		if err := unix.Mount(source, target, fstype, 0, data); err != nil {
			return err
		}
		t.Cleanup(func() {
			if err := unix.Unmount(target, 0); err != nil {
				t.Errorf("unmount %s: %v", target, err)
			}
		})
		return nil
	}
	if err := unix.Mount(tmpl.Image, dir, "erofs", unix.MS_RDONLY, ""); err != nil {
		t.Skipf("the kernel mounts no EROFS file here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	for _, target := range []string{"/dev", "/tmp", "/run"} {
		if err := mount("tmpfs", dir+target, "tmpfs", "mode=1777"); err != nil {
			t.Fatal(err)
		}
	}
	if err := mount("proc", dir+"/proc", "proc", ""); err != nil {
		t.Fatal(err)
	}
	for name, minor := range map[string]uint32{"null": 3, "urandom": 9} {
		if err := unix.Mknod(dir+"/dev/"+name, unix.S_IFCHR, int(unix.Mkdev(1, minor))); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir+"/dev/"+name, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return chroot{t, dir}
}

// run runs a program as the account "user" with the template's environment.
func (c chroot) run(tmpl Template, argv ...string) (string, error) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), argv[0], argv[1:]...)
	cmd.Path, cmd.Err = argv[0], nil // in the image, not on this host
	cmd.Dir = "/tmp"
	cmd.Env = []string{"HOME=/home/user", "TERM=xterm"}
	for k, v := range tmpl.Config.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     c.dir,
		Credential: &syscall.Credential{Uid: 1000, Gid: 1000, Groups: []uint32{27, 100}},
	}
	// Set a host name that is in the image's /etc/hosts; otherwise sudo warns. The
	// thread stays locked, so it ends with its goroutine.
	type result struct {
		out []byte
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWUTS), unix.Sethostname([]byte("bivy"))); err != nil {
			done <- result{err: err}
			return
		}
		out, err := cmd.CombinedOutput()
		done <- result{out, err}
	}()
	r := <-done
	return string(r.out), r.err
}

func TestBaseRuns(t *testing.T) {
	tmpl := hostBase(t, open(t, t.TempDir(), Options{}))
	c := mountBase(t, tmpl)
	_, err := os.Stat(filepath.Join(c.dir, "usr/bin/sudo"))
	sudo := err == nil
	for _, tc := range []struct {
		script string
		want   string
		sudo   bool
	}{
		{"echo $0 $HOME $PATH", `/home/user /usr/local/sbin:/usr/local/bin`, false},
		{"id", `uid=1000\(user\) gid=1000\(user\) groups=.*27\(sudo\)`, false},
		{"python --version; python3 --version", `Python 3\..*\nPython 3\.`, false},
		{"python3 -c 'import ssl, sqlite3, asyncio, ctypes, json; print(len(ssl.create_default_context().get_ca_certs()) > 50)'", `^True$`, false},
		{"python3 -v -c 'import json, asyncio, urllib.request' 2>&1 | grep -c '^# code object from .*/usr/lib/python3.*py.$'", `^0$`, false},
		{"cd /tmp && git init -q r && cd r && echo x > f && git add f && git -c user.name=a -c user.email=a@b commit -qm one && git log --format=%s", `^one$`, false},
		{"curl -s file:///etc/hostname", `^bivy$`, false},
		{"curl --version | head -1", `^curl `, false},
		{"ss -Htln; echo $?", `0$`, false},
		{"tput -T xterm colors; stty --version | head -1", `^8\nstty`, false},
		{"pgrep -x bash > /dev/null && ps -o comm= -p $$; true", `^bash$`, false},
		{"getent hosts localhost", `localhost`, false},
		{"getent passwd user root | cut -d: -f1,7", `user:/bin/bash\nroot:/bin/bash`, false},
		{"sh -c 'echo sh $0'; awk 'BEGIN {print 6*7}'; perl -e 'print 42'", `sh sh\n42\n42`, false},
		{"echo hello | gzip | gzip -d | sed s/h/j/ | tee /tmp/f | xargs echo; find /tmp -maxdepth 1 -name f; tar -cf - -C /tmp f | tar -t; diff /tmp/f /tmp/f", `jello\n/tmp/f\nf`, false},
		{"locale | head -1; printf 'é' | wc -m", `LANG=C.UTF-8\n1`, false},
		{"cat /etc/shadow", `Permission denied`, false},
		{"dpkg-query -W bash 2>/dev/null | cut -f1", `^bash$`, false},
		{"ls -l /root", `Permission denied`, false},
		{"sudo -n id -u; sudo -n cat /etc/shadow | head -1", `^0\nroot:`, true},
	} {
		if tc.sudo && !sudo {
			t.Log("sudo is not installed on this host: not tried")
			continue
		}
		out, err := c.run(tmpl, "/bin/bash", "-l", "-c", tc.script)
		if !regexp.MustCompile(tc.want).MatchString(strings.TrimRight(out, "\n")) {
			t.Errorf("%s\n\t%v\n\t%s\n\twant %s", tc.script, err, out, tc.want)
		}
	}
}

// TestLoginShellForksNothing checks with strace that a login shell, which clients
// start for every command, starts no other program.
func TestLoginShellForksNothing(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed")
	}
	tmpl := hostBase(t, open(t, t.TempDir(), Options{}))
	c := mountBase(t, tmpl)
	for _, argv := range [][]string{{"/bin/bash", "-l", "-c", "true"}, {"/bin/bash", "-l", "-i", "-c", "true"}, {"/bin/sh", "-l", "-c", "true"}} {
		trace := filepath.Join(t.TempDir(), "trace")
		cmd := exec.CommandContext(t.Context(), strace, append([]string{"-f", "-o", trace, "-e", "trace=execve,clone,clone3,fork,vfork",
			"chroot", "--userspec=1000:1000", c.dir}, argv...)...)
		cmd.Env = []string{"HOME=/home/user", "PATH=" + os.Getenv("PATH")}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
		b, err := os.ReadFile(trace)
		if err != nil {
			t.Fatal(err)
		}
		execs := regexp.MustCompile(`execve\(.*= 0\n`).FindAllString(string(b), -1)
		if len(execs) != 2 || regexp.MustCompile(`\b(clone3?|v?fork)\(`).Match(b) { // chroot and the shell
			t.Errorf("%v runs more than itself:\n%s", argv, b)
		}
	}
}

func TestBaseIsTheSameTwice(t *testing.T) {
	a := hostBase(t, open(t, t.TempDir(), Options{}))
	b := hostBase(t, open(t, t.TempDir(), Options{}))
	if a.Digest != b.Digest {
		t.Errorf("built twice: %s and %s", a.Digest, b.Digest)
	}
}

// TestBaseHasNoHostIdentity looks for this host's own names in the image's
// configuration.
func TestBaseHasNoHostIdentity(t *testing.T) {
	tmpl := hostBase(t, open(t, t.TempDir(), Options{}))
	for _, name := range []string{"etc/passwd", "etc/group", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/machine-id"} {
		b, err := os.ReadFile("/" + name)
		if err != nil || len(b) == 0 {
			continue
		}
		if read(t, tmpl, name) == string(b) {
			t.Errorf("/%s is this host's", name)
		}
	}
}
