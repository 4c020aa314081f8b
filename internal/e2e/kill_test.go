package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/leakcheck"
)

// bystander is a session that lives through other people's crashes.
type bystander struct {
	*client.Session
	last int64 // how far its counter had come
}

// counting runs in the background of a session and never ends.
const counting = `exec 9>>/home/user/count; echo canary > /dev/shm/canary; while :; do echo . >&9; sleep 0.05; done`

func newBystander(t *testing.T, s *server) *bystander {
	t.Helper()
	b := &bystander{Session: s.create(t, client.Spec{TimeoutSeconds: 3600, Labels: map[string]string{"e2e": "bystander"}})}
	if _, err := b.StartDetached(limit(t, 30*time.Second), client.Command{Argv: []string{"bash", "-c", counting}}); err != nil {
		t.Fatal(err)
	}
	b.check(t, s)
	return b
}

// check proves that the session runs on as it was: its process still counts,
// from where it was, and its memory and files are what they were.
func (b *bystander) check(t *testing.T, s *server) {
	t.Helper()
	b.Session = s.Session(b.ID)
	eventually(t, 20*time.Second, func() error {
		r, err := b.Run(limit(t, 20*time.Second), client.Command{Argv: []string{"bash", "-c", "stat -c %s /home/user/count; cat /dev/shm/canary; pgrep -c -f home/user/count || ps ax"}})
		if err != nil {
			return err
		}
		f := strings.Fields(string(r.Stdout))
		if len(f) < 3 || f[1] != "canary" {
			return fmt.Errorf("the bystander says %q, %q", r.Stdout, r.Stderr)
		}
		n, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			return err
		}
		if n <= b.last {
			return fmt.Errorf("the counter is at %d after %d", n, b.last)
		}
		b.last = n
		return nil
	})
}

// life does a bit of everything with a session, and does not care whether it
// works: the server may be dead by any step.
func life(ctx context.Context, c *client.Client, tag string) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	label := map[string]string{"e2e": tag}
	// One that cannot be made, for the way back.
	_, err := c.CreateSessionWith(ctx, client.CreateSession{Spec: client.Spec{User: "nobody-here", Labels: label}},
		client.CreateOptions{IdempotencyKey: tag + "-fails"})
	if err == nil {
		return errors.New("a session for a user that does not exist was made")
	}
	s, err := c.CreateSessionWith(ctx, client.CreateSession{Spec: client.Spec{Labels: label}}, client.CreateOptions{IdempotencyKey: tag})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	o := client.FileOptions{}
	steps := []func() error{
		func() error { _, err := s.WriteFile(ctx, "a", strings.NewReader("hello"), o); return err },
		func() error {
			r, _, err := s.ReadFile(ctx, "a", o)
			if err == nil {
				r.Close()
			}
			return err
		},
		func() error { _, err := s.MakeDir(ctx, "d", o); return err },
		func() error { _, err := s.Move(ctx, "a", "d/a", o); return err },
		func() error { return s.Remove(ctx, "d", o) },
		func() error {
			_, err := s.StartDetached(ctx, client.Command{Argv: []string{"bash", "-c", counting}})
			return err
		},
		func() error {
			_, err := s.Run(ctx, client.Command{Argv: []string{"bash", "-c", "echo ran >> /home/user/ran"}, OnDisconnect: client.Detach})
			return err
		},
		func() error { _, err := s.End(ctx); return err },
	}
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// point is the nth time that a life passes a point of that name: the end of a
// create that failed is another moment than the end of a session that ran.
type point struct {
	name string
	nth  int
}

func (p point) String() string { return fmt.Sprintf("%s-%d", p.name, p.nth) }

// points runs a life once and returns, in order, every point it passed.
func points(t *testing.T, h *host) []point {
	t.Helper()
	trace := filepath.Join(h.dir, "trace")
	s := h.serveKiller(t, "-trace", trace)
	if err := life(t.Context(), s.Client, "trace"); err != nil {
		t.Fatalf("%v\n%s", err, s.log)
	}
	s.stop(t)
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(trace); err != nil {
		t.Fatal(err)
	}
	var all []point
	seen := map[string]int{}
	for _, p := range strings.Fields(string(text)) {
		seen[p]++
		all = append(all, point{p, seen[p]})
	}
	return all
}

// TestKilledAtEveryStep kills the server at every point of a life, starts the
// shipped one, and looks at what became of everything.
func TestKilledAtEveryStep(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	all := points(t, h)
	for _, must := range []point{{"create.start.do", 2}, {"create.start.undo", 1}, {"create.running.intent", 1}, {"exec.do", 2}, {"exec.end.intent", 1}, {"file.write.do", 1}, {"end.freeze.done", 2}, {"end.kill.do", 2}, {"end.seal.do", 2}} {
		if !slices.Contains(all, must) {
			t.Errorf("a life does not pass %s any more: it passes %v", must, all)
		}
	}
	s := h.serve(t)
	by := newBystander(t, s)
	s.stop(t)
	for _, point := range all {
		t.Run(point.String(), func(t *testing.T) { killedAt(t, h, by, point) })
		if t.Failed() {
			break
		}
	}
	s = h.serve(t)
	by.check(t, s)
	s.end(t, s.Session(by.ID))
	s.stop(t)
	t.Logf("%d points", len(all))
}

func killedAt(t *testing.T, h *host, by *bystander, p point) {
	tag := "at-" + p.String()
	s := h.serveKiller(t, "-kill", p.name, "-nth", strconv.Itoa(p.nth))
	lifeErr := life(t.Context(), s.Client, tag)
	if !s.died(5 * time.Second) {
		t.Fatalf("the point was not reached; the life: %v", lifeErr)
	}
	if ws, ok := s.state.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("the server died of %v, not of the point:\n%s", s.state, s.log)
	}

	began := time.Now()
	s = h.serve(t)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the next server took %s to be ready:\n%s", took, s.log)
	}
	by.check(t, s)
	settled(t, s, tag)
	// Whoever did not learn what became of a create asks again.
	again, err := s.CreateSessionWith(limit(t, 60*time.Second), client.CreateSession{Spec: client.Spec{Labels: map[string]string{"e2e": tag}}},
		client.CreateOptions{IdempotencyKey: tag})
	if err != nil {
		t.Errorf("asking again: %v", err)
	} else {
		s.end(t, again)
	}
	if n := len(settled(t, s, tag)); n > 2 {
		t.Errorf("there are %d sessions, not the one that works and the one that fails", n)
	}
	s.onlyOf(t, by.ID)
	s.verify(t, by.ID, true)
	s.stop(t)
}

// settled waits until every session of a tag runs or has ended, and checks
// that each says so rightly. What runs is used once and ended.
func settled(t *testing.T, s *server, tag string) []client.SessionInfo {
	t.Helper()
	var all []client.SessionInfo
	eventually(t, 30*time.Second, func() error {
		all = nil
		for info, err := range s.Sessions(limit(t, 30*time.Second), client.ListOptions{Labels: map[string]string{"e2e": tag}}) {
			if err != nil {
				return err
			}
			if info.State != client.Running && info.State != client.Ended {
				return fmt.Errorf("session %s is still %s", info.ID, info.State)
			}
			all = append(all, info)
		}
		return nil
	})
	for _, info := range all {
		x := s.Session(info.ID)
		if info.State == client.Running {
			r := sh(t, x, "", "cat /home/user/ran 2>/dev/null | wc -l")
			if n := strings.TrimSpace(string(r.Stdout)); n != "0" && n != "1" {
				t.Errorf("a command that was asked for once ran %s times", n)
			}
			if got := happened(events(t, x), audit.SandboxRecovered); len(got) == 0 {
				t.Errorf("the record of %s does not say that it was recovered", x.ID)
			}
			s.end(t, x)
			continue
		}
		if info.Reason == "" {
			t.Errorf("session %s has ended for no reason", info.ID)
		}
		s.verify(t, info.ID, false)
	}
	return all
}

// sandboxFile matches the paths of files that are of one sandbox or session.
var sandboxFile = regexp.MustCompile(`/(runsc-)?[a-z0-9]{20}(-[0-9]+)?([./_]|$)`)

// onlyOf checks that the host has exactly the sandboxes of these sessions.
func (s *server) onlyOf(t *testing.T, sessions ...string) {
	t.Helper()
	eventually(t, 15*time.Second, func() error {
		ids := slices.Clone(sessions) // names on the host: of sessions, and of their slots
		for _, id := range sessions {
			ids = append(ids, s.h.slots(t, id)...)
		}
		found, err := leakcheck.Take(s.h.where())
		if err != nil {
			return err
		}
		for kind, names := range found {
			for name := range names {
				ofSession := kind != leakcheck.Process && (kind != leakcheck.File || sandboxFile.MatchString(name))
				if ofSession && !slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(name, id) }) {
					return fmt.Errorf("left behind: %s %s", kind, name)
				}
			}
		}
		sentries := 0
		for pid := range s.h.processes() {
			group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			if err != nil {
				continue
			}
			known := false
			for _, id := range ids {
				known = known || strings.Contains(string(group), id)
			}
			if !known {
				return fmt.Errorf("process %d belongs to nobody:\n%s", pid, group)
			}
			if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.HasPrefix(string(line), "runsc-sandbox\x00") {
				sentries++
			}
		}
		if sentries != len(sessions) {
			return fmt.Errorf("%d sentries for %d sessions", sentries, len(sessions))
		}
		return nil
	})
}

// warm makes the template and its snapshot, which stay.
func (h *host) warm(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(h.data, "signing.pub")); err == nil {
		return
	}
	s := h.serve(t)
	s.end(t, s.create(t, client.Spec{}))
	s.stop(t)
}

// TestCommandAcrossKill: a command that runs while the server is killed ends
// later, and the record has its end.
func TestCommandAcrossKill(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	cmd, err := x.StartDetached(limit(t, 30*time.Second), client.Command{Argv: []string{"bash", "-c", "until [ -e /tmp/go ]; do sleep 0.05; done; exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	s.kill()

	s = h.serve(t)
	x = s.Session(x.ID)
	running, err := x.Commands(limit(t, 30*time.Second))
	if err != nil || len(running) != 1 || running[0].ID != cmd.ID || !running[0].Running {
		t.Errorf("commands after the restart: %+v, %v", running, err)
	}
	if r := sh(t, x, "", "touch /tmp/go"); r.Status() != 0 {
		t.Errorf("touch: %+v", r)
	}
	eventually(t, 20*time.Second, func() error {
		for _, e := range happened(events(t, x), audit.CommandEnded) {
			if e.Ref == cmd.ID && strings.Contains(string(e.Payload), `"exit":7`) {
				return nil
			}
		}
		return fmt.Errorf("the end of the command is not in the record:\n%s", told(events(t, x)))
	})
	all := events(t, x)
	for _, a := range []audit.Action{audit.SandboxRecovered, audit.SandboxRelinked} {
		if len(happened(all, a)) != 1 {
			t.Errorf("%s is not in the record once:\n%s", a, told(all))
		}
	}
	s.end(t, x)
	s.stop(t)
}
