package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/kind"
)

// comparators are whatever else starts containers here, each with the same
// files, the same command and no network. done takes away what they needed.
func (b *bench) comparators(ctx context.Context, s *server) (all []*contestant, done func(), err error) {
	done = func() {}
	root, archive, err := b.rootfs(ctx, s)
	if err != nil {
		return nil, done, fmt.Errorf("the base template's files: %w", err)
	}
	if c, err := b.runsc(ctx, root); err != nil {
		b.skip(runscName, err)
	} else {
		all, done = append(all, c), b.afterRunsc
	}
	if c, err := b.runc(ctx, root); err != nil {
		b.skip(runcName, err)
	} else {
		all = append(all, c)
	}
	d, err := b.startDocker(ctx, archive)
	if err != nil {
		b.skip(dockerName, err)
		b.skip(engineName, err)
		return all, done, nil
	}
	done = func() {
		if err := d.close(); err != nil {
			b.say("stopping docker: %v", err)
		}
		b.afterRunsc()
	}
	return append(all, d.contestants()...), done, nil
}

// rootfs takes the files of the base template out of a sandbox, as a tar and
// unpacked.
func (b *bench) rootfs(ctx context.Context, s *server) (root, archive string, err error) {
	b.say("taking the base template's files for the comparators")
	root, archive = filepath.Join(b.dir, "rootfs"), filepath.Join(b.dir, "rootfs.tar")
	if _, err := os.Stat(archive); err == nil {
		return root, archive, nil
	}
	session, err := s.client.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		return "", "", err
	}
	defer func() {
		_, endErr := session.End(context.WithoutCancel(ctx))
		err = errors.Join(err, endErr)
	}()
	f, err := os.Create(archive)
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	p, err := session.Start(ctx, client.Command{User: "root", Argv: []string{"tar", "-C", "/", "--one-file-system", "-cf", "-", "."}})
	if err != nil {
		return "", "", err
	}
	var complaints bytes.Buffer
	exit, err := p.Wait(f, &complaints)
	if err != nil || exit.Status() != 0 {
		return "", "", errors.Join(fmt.Errorf("tar: exit %d: %.500s", exit.Status(), complaints.String()), err, os.Remove(archive))
	}
	if err := os.Mkdir(root, 0o755); err != nil {
		return "", "", err
	}
	out, err := exec.CommandContext(ctx, "tar", "-C", root, "-xpf", archive).CombinedOutput() //nolint:gosec // paths of ours
	if err != nil {
		return "", "", fmt.Errorf("unpacking: %w: %.500s", err, out)
	}
	return root, archive, f.Close()
}

// spawn runs a program in a group: when its first output came and when it had
// ended, from before its start.
func (b *bench) spawn(group string, cmd *exec.Cmd) (first, gone time.Duration, err error) {
	read, write, err := os.Pipe()
	if err != nil {
		return 0, 0, err
	}
	defer read.Close()
	var complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = write, &complaints
	start := time.Now()
	err = b.groups.start(group, cmd)
	write.Close()
	if err != nil {
		return 0, 0, err
	}
	seen := &firstByte{func() { first = time.Since(start) }}
	_, copyErr := io.Copy(seen, read)
	err = cmd.Wait()
	gone = time.Since(start)
	if err != nil || copyErr != nil {
		return 0, 0, fmt.Errorf("%s: %w: %.500s", filepath.Base(cmd.Path), errors.Join(err, copyErr), complaints.String())
	}
	if first == 0 {
		return 0, 0, fmt.Errorf("%s printed nothing: %.500s", filepath.Base(cmd.Path), complaints.String())
	}
	return first, gone, nil
}

// runsc measures gVisor's own command: of the very version that bivy embeds,
// built with the tree's toolchain, or else the one that is installed.
func (b *bench) runsc(ctx context.Context, root string) (*contestant, error) {
	exe, err := b.buildRunsc(ctx)
	if err != nil {
		return nil, err
	}
	// Sandboxes open it again as nobody, who may not enter root's cache.
	if exe, err = copied(exe, filepath.Join(b.dir, "runsc.exe")); err != nil {
		return nil, err
	}
	state := b.runscState()
	bundle, err := writeBundle(filepath.Join(b.dir, "runsc-bundle"), root, b.groups.path("runsc-boxes"))
	if err != nil {
		return nil, err
	}
	n := 0
	return &contestant{name: runscName, cpu: func() time.Duration { return b.used("runsc") }, do: func(ctx context.Context) (time.Duration, time.Duration, error) {
		n++
		return b.spawn("runsc", exec.CommandContext(ctx, exe, "--root", state, "--ignore-cgroups", "--network", "none", //nolint:gosec // ours
			"run", "--bundle", bundle, fmt.Sprintf("bench-%d-%d", os.Getpid(), n)))
	}}, nil
}

func (b *bench) runscState() string { return filepath.Join(b.dir, "runsc") }

// afterRunsc takes away the mount that runsc keeps for its next start.
func (b *bench) afterRunsc() {
	err := unix.Unmount(filepath.Join(b.runscState(), "null-netns"), unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		b.say("unmounting what runsc left: %v", err)
	}
}

// copied copies a program.
func copied(from, to string) (string, error) {
	in, err := os.Open(from)
	if err != nil {
		return "", err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755) //nolint:gosec // others execute it
	if err != nil {
		return "", err
	}
	_, err = io.Copy(out, in)
	return to, errors.Join(err, out.Close())
}

const gvisorModule = "gvisor.dev/gvisor"

func (b *bench) buildRunsc(ctx context.Context) (string, error) {
	installed, installedErr := exec.LookPath("runsc")
	version := b.host.Versions["gvisor"]
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Version}}", gvisorModule).Output()
	if err != nil || strings.TrimSpace(string(out)) != version {
		if installedErr == nil {
			b.host.Versions["runsc"] = firstLine(ctx, installed, "--version")
			return installed, nil
		}
		return "", kind.Errorf(kind.Unavailable, "not in bivy's source tree with Go to build it, and no runsc is installed")
	}
	cache := b.o.CacheDir
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			dir = b.dir
		}
		cache = filepath.Join(dir, "bivy", "bench")
	}
	exe := filepath.Join(cache, "runsc-"+version)
	b.host.Versions["runsc"] = version + ", built here"
	if _, err := os.Stat(exe); err == nil {
		return exe, nil
	}
	b.say("building runsc %s to compare with; this is done once and takes minutes", version)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", exe+".new", gvisorModule+"/runsc") //nolint:gosec // as above
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building runsc: %w: %.500s", err, text)
	}
	return exe, os.Rename(exe+".new", exe)
}

// runc measures a plain container, which shares the host's kernel: less
// isolation than everybody else here, and a floor for what processes cost.
func (b *bench) runc(ctx context.Context, root string) (*contestant, error) {
	exe, err := exec.LookPath("runc")
	if err != nil {
		return nil, err
	}
	b.host.Versions["runc"] = firstLine(ctx, exe, "--version")
	if _, err := b.groups.group("runc-boxes"); err != nil {
		return nil, err
	}
	state := filepath.Join(b.dir, "runc")
	bundle, err := writeBundle(filepath.Join(b.dir, "runc-bundle"), root, b.groups.path("runc-boxes/one"))
	if err != nil {
		return nil, err
	}
	n := 0
	return &contestant{name: runcName, cpu: func() time.Duration { return b.used("runc") + b.used("runc-boxes") }, do: func(ctx context.Context) (time.Duration, time.Duration, error) {
		n++
		return b.spawn("runc", exec.CommandContext(ctx, exe, "--root", state, "run", "--bundle", bundle, //nolint:gosec // ours
			fmt.Sprintf("bench-%d-%d", os.Getpid(), n)))
	}}, nil
}

// firstLine is what a program says of itself.
func firstLine(ctx context.Context, exe string, args ...string) string {
	out, err := exec.CommandContext(ctx, exe, args...).Output()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}

// writeBundle writes what OCI runtimes read: the command on the files of
// root, in namespaces of its own, without a network.
func writeBundle(dir, root, group string) (string, error) {
	type object = map[string]any
	mount := func(to, typ string, options ...string) object {
		return object{"destination": to, "type": typ, "source": typ, "options": options}
	}
	var namespaces []object
	for _, n := range []string{"pid", "ipc", "uts", "mount", "network"} {
		namespaces = append(namespaces, object{"type": n})
	}
	text, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"process": object{
			"args": command(), "cwd": "/", "env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			"user": object{"uid": 0, "gid": 0}, "noNewPrivileges": true,
			"capabilities": object{"bounding": []string{"CAP_KILL"}, "effective": []string{"CAP_KILL"}, "permitted": []string{"CAP_KILL"}},
		},
		"root": object{"path": root}, "hostname": "bench",
		"mounts": []object{
			mount("/proc", "proc"), mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
			mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
			mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
			mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
		},
		"linux": object{"namespaces": namespaces, "cgroupsPath": group},
	})
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
}
