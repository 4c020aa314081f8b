// Package doctor checks whether this machine can run sandboxes, and reports for
// each requirement what it found and what that means.
package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/bundle"
	"bivy/internal/cgroup"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/template"
)

// Examine checks this machine for the given configuration. It changes nothing
// except that it creates an empty cgroup and removes it again.
func Examine(ctx context.Context, cfg config.Config) (client.Node, error) {
	checks := []func(config.Config) client.Fact{
		user, kernel, architecture, cgroups, payload, memory, dataDisk, runDisk, userNamespaces, sysResource, kvm, basePackages,
	}
	n := client.Node{Driver: cfg.Driver, OK: true}
	if b, err := os.ReadFile(filepath.Join(cfg.DataDir, "node-id")); err == nil {
		n.ID = strings.TrimSpace(string(b))
	}
	for _, check := range checks {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		f := check(cfg)
		n.Facts = append(n.Facts, f)
		n.OK = n.OK && f.Status != client.FactFail
	}
	return n, nil
}

func fact(name string, status client.FactStatus, found, means string) client.Fact {
	return client.Fact{Name: name, Status: status, Found: found, Means: means}
}

func user(config.Config) client.Fact {
	if uid := os.Geteuid(); uid != 0 {
		f := fact("user", client.FactFail, fmt.Sprintf("uid %d", uid), "gVisor sandboxes cannot be started")
		f.Hint = "run bivy as root, e.g. with sudo"
		return f
	}
	return fact("user", client.FactOK, "root", "sandboxes can be started")
}

func kernel(config.Config) client.Fact {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fact("kernel", client.FactFail, err.Error(), "the system cannot be identified")
	}
	release := string(u.Release[:bytes.IndexByte(u.Release[:], 0)])
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < 5 || major == 5 && minor < 10 {
		f := fact("kernel", client.FactFail, release, "Linux 5.10 or newer is required, for pidfds that do not block")
		f.Hint = "use a newer kernel"
		return f
	}
	return fact("kernel", client.FactOK, release, "supported")
}

func architecture(config.Config) client.Fact {
	if runtime.GOARCH != "amd64" {
		return fact("architecture", client.FactWarn, runtime.GOARCH, "tested on amd64 only; starts are slower elsewhere")
	}
	return fact("architecture", client.FactOK, fmt.Sprintf("%s, %d CPUs", runtime.GOARCH, runtime.NumCPU()), "precompiled seccomp programs are used")
}

func cgroups(config.Config) client.Fact {
	name := fmt.Sprintf("bivy-doctor-%d", os.Getpid())
	h, err := cgroup.Detect(name)
	if err == nil {
		defer func() { _ = h.Remove() }() // empty: nothing was put in
		g := h.Group("probe")
		want := cgroup.Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 64}
		got := cgroup.Limits{}
		if err = g.Create(want); err == nil {
			got, err = g.Limits()
			err = errors.Join(err, g.Remove())
		}
		if err == nil && got != want {
			err = fmt.Errorf("limits %+v read back as %+v", want, got)
		}
	}
	if err != nil {
		f := fact("cgroups", client.FactFail, err.Error(), "sandboxes cannot be limited, so none can be started")
		f.Hint = kind.Hint(err)
		return f
	}
	return fact("cgroups", client.FactOK, fmt.Sprintf("v%d", h.Version), "CPU, memory and processes are limited and read back")
}

func payload(config.Config) client.Fact {
	m, err := bundle.Load()
	if err != nil {
		f := fact("payload", client.FactFail, err.Error(), "this binary does not contain the guest kernel")
		f.Hint = kind.Hint(err)
		return f
	}
	return fact("payload", client.FactOK, m.Build, "bivy-sentry and bivy-guest are included")
}

func memory(config.Config) client.Fact {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fact("memory", client.FactWarn, err.Error(), "unknown")
	}
	var available int64
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			if _, err := fmt.Sscanf(rest, "%d", &available); err != nil {
				return fact("memory", client.FactWarn, err.Error(), "unknown")
			}
		}
	}
	found := fmt.Sprintf("%d MiB available", available>>10)
	if available < 512<<10 {
		return fact("memory", client.FactWarn, found, "not enough for more than a few sandboxes")
	}
	return fact("memory", client.FactOK, found, "an idle sandbox takes about 10 MiB beside what it runs")
}

func dataDisk(cfg config.Config) client.Fact {
	return disk("data_dir", cfg.DataDir, 2<<30, "templates and records are kept here")
}

func runDisk(cfg config.Config) client.Fact {
	return disk("run_dir", cfg.RunDir, 64<<20, "the state of running sandboxes is kept here")
}

func disk(name, dir string, want uint64, means string) client.Fact {
	at := dir
	for {
		if _, err := os.Stat(at); err == nil || at == "/" {
			break
		}
		at = filepath.Dir(at)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(at, &fs); err != nil {
		return fact(name, client.FactFail, err.Error(), means)
	}
	free := fs.Bavail * uint64(fs.Bsize) //nolint:gosec // a block size is positive
	f := fact(name, client.FactOK, fmt.Sprintf("%s, %d MiB free", dir, free>>20), means)
	if free < want {
		f.Status = client.FactWarn
		f.Hint = fmt.Sprintf("keep %d MiB free", want>>20)
	}
	return f
}

func userNamespaces(config.Config) client.Fact {
	b, err := os.ReadFile("/proc/sys/user/max_user_namespaces")
	if found := strings.TrimSpace(string(b)); err != nil || found == "0" {
		f := fact("user namespaces", client.FactFail, found, "sandbox processes cannot run as unprivileged users of the host")
		f.Hint = "sysctl user.max_user_namespaces=65536"
		return f
	}
	return fact("user namespaces", client.FactOK, "allowed", "sandbox processes run as unprivileged users of the host")
}

func sysResource(config.Config) client.Fact {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fact("CAP_SYS_RESOURCE", client.FactWarn, err.Error(), "unknown")
	}
	if data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		return fact("CAP_SYS_RESOURCE", client.FactWarn, "missing", "limits of bivy's own files and processes cannot be raised; everything else works")
	}
	return fact("CAP_SYS_RESOURCE", client.FactOK, "present", "limits can be raised")
}

func kvm(config.Config) client.Fact {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fact("KVM", client.FactOK, "none", "not needed: gVisor runs on systrap")
	}
	return fact("KVM", client.FactOK, "/dev/kvm", "not used yet: gVisor runs on systrap")
}

func basePackages(config.Config) client.Fact {
	missing := slices.DeleteFunc(template.BasePackages(), Installed)
	if len(missing) > 0 {
		f := fact("base template", client.FactWarn, "not installed: "+strings.Join(missing, " "), "the template base cannot be built; others can")
		f.Hint = "apt-get install " + strings.Join(missing, " ")
		return f
	}
	return fact("base template", client.FactOK, "its packages are installed", "it is built on first use, without a network")
}

// Installed reports whether dpkg lists a package as installed.
func Installed(name string) bool {
	for _, pattern := range []string{name + ".list", name + ":*.list"} {
		if m, err := filepath.Glob(filepath.Join("/var/lib/dpkg/info", pattern)); err == nil && len(m) > 0 {
			return true
		}
	}
	return false
}
