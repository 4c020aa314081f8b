package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"bivy/internal/poll"
)

// docker is an engine of our own, with its own state and without a network:
// nothing of one that is installed is touched.
type docker struct {
	b      *bench
	dir    string
	daemon *exec.Cmd
	exited chan struct{}
	cli    string
	socket string
	http   *http.Client
	boxes  string // name of the group of its containers
}

const dockerImage = "bivy-bench"

// startDocker starts the engine and gives it the files of archive as an image.
func (b *bench) startDocker(ctx context.Context, archive string) (_ *docker, err error) {
	exe, err := exec.LookPath("dockerd")
	if err != nil {
		return nil, err
	}
	// The client that came with the engine, before another one in the path.
	d := &docker{b: b, dir: filepath.Join(b.dir, "docker"), cli: "/usr/bin/docker", exited: make(chan struct{}), boxes: "docker-boxes"}
	if _, err := os.Stat(d.cli); err != nil {
		if d.cli, err = exec.LookPath("docker"); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(d.dir, 0o711); err != nil {
		return nil, err
	}
	d.socket = filepath.Join(d.dir, "s")
	d.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.dial(ctx) }}}
	if _, err := b.groups.group(d.boxes); err != nil {
		return nil, err
	}
	config := filepath.Join(d.dir, "daemon.json")
	if err := os.WriteFile(config, []byte("{}\n"), 0o600); err != nil {
		return nil, err
	}
	d.daemon = exec.Command(exe, "--config-file", config, "--data-root", filepath.Join(d.dir, "data"), "--exec-root", filepath.Join(d.dir, "x"), //nolint:gosec // installed
		"--pidfile", filepath.Join(d.dir, "pid"), "--host", "unix://"+d.socket, "--bridge=none", "--iptables=false", "--ip-forward=false",
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", b.groups.path(d.boxes), "--log-level=error")
	log, err := os.Create(filepath.Join(d.dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	d.daemon.Stdout, d.daemon.Stderr = log, log
	d.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := b.groups.start("docker", d.daemon); err != nil {
		return nil, err
	}
	go func() { _ = d.daemon.Wait(); close(d.exited) }() // how it ended is in its log; close waits
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if err := d.await(ctx, log.Name()); err != nil {
		return nil, err
	}
	b.host.Versions["docker"] = firstLine(ctx, exe, "--version")
	b.say("giving docker the same files")
	out, err := exec.CommandContext(ctx, d.cli, "-H", "unix://"+d.socket, "import", archive, dockerImage).CombinedOutput() //nolint:gosec // installed
	if err != nil {
		return nil, fmt.Errorf("docker import: %w: %.500s", err, out)
	}
	return d, nil
}

func (d *docker) dial(ctx context.Context) (net.Conn, error) {
	var nd net.Dialer
	return nd.DialContext(ctx, "unix", d.socket)
}

func (d *docker) await(ctx context.Context, log string) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	err := poll.Until(ctx, poll.Every(20*time.Millisecond), func() (bool, error) {
		if d.call(ctx, http.MethodGet, "/_ping", nil, nil) == nil {
			return true, nil
		}
		select {
		case <-d.exited:
			return true, errors.New("dockerd ended")
		default:
			return false, errors.New("dockerd is not ready")
		}
	})
	if err != nil {
		return fmt.Errorf("%w: %.500s", err, fact(log))
	}
	return nil
}

// close stops the engine, and with it the containerd that it started.
func (d *docker) close() error {
	err := d.daemon.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(15 * time.Second)
	defer timer.Stop()
	select {
	case <-d.exited:
	case <-timer.C:
		err = errors.Join(err, errors.New("dockerd does not stop"), d.daemon.Process.Kill())
		<-d.exited
	}
	d.http.CloseIdleConnections()
	return errors.Join(err, os.RemoveAll(d.dir))
}

func (d *docker) cpu() time.Duration {
	return d.b.used("docker") + d.b.used("docker-cli") + d.b.used(d.boxes)
}

func (d *docker) contestants() []*contestant {
	return []*contestant{
		{name: dockerName, cpu: d.cpu, do: func(ctx context.Context) (time.Duration, time.Duration, error) {
			args := append([]string{"-H", "unix://" + d.socket, "run", "--rm", "--network=none", dockerImage}, command()...)
			return d.b.spawn("docker-cli", exec.CommandContext(ctx, d.cli, args...)) //nolint:gosec // installed
		}},
		{name: engineName, cpu: d.cpu, do: d.life},
	}
}

// call is one request of the engine's API.
func (d *docker) call(ctx context.Context, method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("docker: %s %s: %s: %.300s", method, path, resp.Status, text)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}

// life is what "docker run --rm" does, without a process of its own.
func (d *docker) life(ctx context.Context) (first, gone time.Duration, err error) {
	start := time.Now()
	var box struct{ ID string }
	err = d.call(ctx, http.MethodPost, "/containers/create", map[string]any{
		"Image": dockerImage, "Cmd": command(), "AttachStdout": true, "AttachStderr": true,
		"HostConfig": map[string]any{"NetworkMode": "none"},
	}, &box)
	if err != nil {
		return 0, 0, err
	}
	path := "/containers/" + box.ID
	conn, err := d.dial(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return 0, 0, err
		}
	}
	fmt.Fprintf(conn, "POST %s/attach?stream=1&stdout=1&stderr=1 HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n", path)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		return 0, 0, err
	}
	resp.Body.Close()
	if err := d.call(ctx, http.MethodPost, path+"/start", nil, nil); err != nil {
		return 0, 0, err
	}
	if _, err := in.ReadByte(); err != nil {
		return 0, 0, fmt.Errorf("docker: no output: %w", err)
	}
	first = time.Since(start)
	if err := d.call(ctx, http.MethodPost, path+"/wait", nil, nil); err != nil {
		return 0, 0, err
	}
	err = d.call(ctx, http.MethodDelete, path+"?force=1", nil, nil)
	return first, time.Since(start), err
}
