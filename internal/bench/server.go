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
	"syscall"
	"time"

	"bivy/client"
	"bivy/internal/cgroup"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/poll"
)

// server is a bivy serve of our own, on loopback.
type server struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it is gone
	err    error         // valid after exited
	log    string        // file
	runDir string
	client *client.Client
	key    string
	url    string
	ready  time.Duration // from start to taking work

	own    *cgroup.Group // of the server
	boxes  *cgroup.Group // of its sandboxes
	parent string        // name of boxes
}

// startLimit bounds the start of a server that does not build anything yet.
const startLimit = 30 * time.Second

// serve returns the server, started when none runs, with the base template
// built.
func (b *bench) serve(ctx context.Context) (*server, error) {
	if b.server != nil {
		return b.server, nil
	}
	s, err := b.startServer(ctx)
	if err != nil {
		return nil, err
	}
	if s.boxes != nil {
		return s, nil
	}
	b.say("making the base template on first use")
	first, err := s.client.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		return nil, fmt.Errorf("first session: %w", err)
	}
	// Where the server has its sandboxes' groups is seen, not assumed.
	slot, err := s.slot(first)
	if err != nil {
		return nil, err
	}
	dirs, err := filepath.Glob(filepath.Join(b.mountOf(), "*", slot))
	if err != nil || len(dirs) != 1 {
		return nil, fmt.Errorf("sandbox %s has %d cgroups where one is expected: %w", first.Info.Sandbox, len(dirs), err)
	}
	s.parent = filepath.Base(filepath.Dir(dirs[0]))
	if s.boxes, err = b.groups.watch(s.parent); err != nil {
		return nil, err
	}
	_, err = first.End(ctx)
	return s, err
}

// slot returns the name of what a session's sandbox has on the host, which the
// label in its bundle directory leads to.
func (s *server) slot(session *client.Session) (string, error) {
	labels, err := filepath.Glob(filepath.Join(s.runDir, "gvisor", "bundles", "*", "sandbox"))
	if err != nil {
		return "", err
	}
	for _, path := range labels {
		var label struct {
			Sandbox string `json:"sandbox"`
		}
		data, err := os.ReadFile(path)
		if err == nil && json.Unmarshal(data, &label) == nil && label.Sandbox == session.Info.Sandbox {
			return filepath.Base(filepath.Dir(path)), nil
		}
	}
	return "", fmt.Errorf("sandbox %s has no bundle below %s", session.Info.Sandbox, s.runDir)
}

// mountOf is where groups are mounted.
func (b *bench) mountOf() string {
	all := b.groups.host.Controllers()
	for _, c := range sorted(all) {
		return filepath.Dir(all[c])
	}
	return ""
}

// startServer starts a server on the suite's data, without any session.
func (b *bench) startServer(ctx context.Context) (*server, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s := &server{exited: make(chan struct{}), log: filepath.Join(b.dir, "server.log"), runDir: filepath.Join(b.dir, "run")}
	file := filepath.Join(b.dir, "config.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:0\ndata_dir: %s\nrun_dir: %s\nlog_level: warn\n", b.data, s.runDir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.cmd = exec.Command(exe, "--config", file, "serve") //nolint:gosec // this program
	s.cmd.Stdout, s.cmd.Stderr = log, log
	// An interrupt from the terminal is for this process, which stops the
	// server once its sessions are ended.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start := time.Now()
	if err := b.groups.start("server", s.cmd); err != nil {
		return nil, err
	}
	go func() { s.err = s.cmd.Wait(); close(s.exited) }() // waited for by stopServer
	b.server = s
	if s.own, err = b.groups.group("server"); err != nil {
		return nil, err
	}
	if err := s.own.PlaceTree(s.cmd.Process.Pid); err != nil {
		return nil, err
	}
	running, err := s.await(ctx)
	if err != nil {
		return nil, err
	}
	s.ready = time.Since(start)
	if s.key, err = b.key(running); err != nil {
		return nil, err
	}
	s.url = running.URL
	s.client, err = client.New(client.Options{URL: running.URL, Key: s.key, UserAgent: "bivy-bench"})
	return s, err
}

// key is the first admin's, which is written by the first start.
func (b *bench) key(r config.Running) (string, error) {
	path := r.KeyFile
	if path == "" {
		return "", kind.Errorf(kind.Internal, "the server at %s does not say where its key is", r.URL)
	}
	return config.ReadKey(path)
}

// await waits until the server takes work.
func (s *server) await(ctx context.Context) (config.Running, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	var running config.Running
	err := poll.Until(ctx, poll.Every(2*time.Millisecond), func() (bool, error) {
		r, ok, err := config.Find(s.runDir)
		if err != nil || ok && r.PID == s.cmd.Process.Pid {
			running = r
			return true, err
		}
		select {
		case <-s.exited:
			return true, fmt.Errorf("the server ended: %w\n%s", s.err, s.tail())
		default:
			return false, nil
		}
	})
	if ctx.Err() != nil {
		err = fmt.Errorf("the server is not ready: %w\n%s", err, s.tail())
	}
	return running, err
}

// tail is the end of the server's log.
func (s *server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-2000):])
}

// stopServer ends every session and the server, and removes what a server
// leaves for its next start.
func (b *bench) stopServer(ctx context.Context) error {
	s := b.server
	if s == nil {
		return nil
	}
	b.server = nil
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var errs []error
	if s.client != nil {
		errs = append(errs, s.endAll(ctx))
		s.client.Close()
	}
	errs = append(errs, s.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-s.exited:
		errs = append(errs, s.err)
	case <-ctx.Done():
		errs = append(errs, ctx.Err(), s.cmd.Process.Kill())
		<-s.exited
	}
	if b, err := os.ReadFile(s.log); err == nil && len(bytes.TrimSpace(b)) > 0 {
		errs = append(errs, fmt.Errorf("the server complained: %s", s.tail()))
	}
	b.groups.unwatch()
	if s.parent != "" {
		for _, name := range []string{s.parent, s.parent + "-snapshots"} {
			if h, err := cgroup.Detect(name); err == nil {
				errs = append(errs, h.Remove())
			}
		}
	}
	return errors.Join(errs...)
}

func (s *server) endAll(ctx context.Context) error {
	live := client.ListOptions{States: []client.State{client.Creating, client.Running, client.Ending}}
	for info, err := range s.client.Sessions(ctx, live) {
		if err != nil {
			return err
		}
		if _, err := s.client.Session(info.ID).End(ctx); err != nil {
			return err
		}
	}
	return nil
}

// cpu is what the server and its sandboxes have used.
func (s *server) cpu() time.Duration { return used(s.own, s.boxes) }

// firstByte calls seen when the first byte comes, and drops what comes.
type firstByte struct{ seen func() }

func (w *firstByte) Write(p []byte) (int, error) {
	if w.seen != nil && len(p) > 0 {
		w.seen()
		w.seen = nil
	}
	return len(p), nil
}

// life creates a session, runs a command and ends the session.
func (s *server) life(ctx context.Context, want client.CreateSession, argv []string, note func(*client.Session)) (first, gone time.Duration, err error) {
	start := time.Now()
	session, err := s.client.CreateSession(ctx, want)
	if err != nil {
		return 0, 0, err
	}
	if note != nil {
		note(session)
	}
	p, err := session.Start(ctx, client.Command{Argv: argv})
	if err == nil {
		var exit client.Exit
		exit, err = p.Wait(&firstByte{func() { first = time.Since(start) }}, io.Discard)
		if err == nil && exit.Status() != 0 {
			err = fmt.Errorf("%s: exit %d", strings.Join(argv, " "), exit.Status())
		}
	}
	if _, endErr := session.End(ctx); err == nil {
		err = endErr
	}
	return first, time.Since(start), err
}
