package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"bivy/client"
	"bivy/internal/poll"
)

const goneName = "DELETE to nothing left"

// destroy measures from before the request that ends a session until nothing
// of it is on the host, seen from outside by looking every millisecond.
func destroy(ctx context.Context, b *bench) ([]Figure, error) {
	s, err := b.serve(ctx)
	if err != nil {
		return nil, err
	}
	answer, steps := &series{}, map[string]*series{}
	c := &contestant{name: "bivy", do: func(ctx context.Context) (time.Duration, time.Duration, error) {
		return b.endOne(ctx, s, answer, steps)
	}}
	if err := b.rounds(ctx, samples, c); err != nil {
		return nil, err
	}
	// The first rounds were for warming up.
	answer.values = answer.values[len(answer.values)-len(c.gone.values):]
	figures := []Figure{
		c.gone.figure(goneName, "ms"),
		answer.figure("DELETE to the answer, record sealed", "ms"),
	}
	for _, name := range sorted(steps) {
		steps[name].values = steps[name].values[len(steps[name].values)-len(c.gone.values):]
		figures = append(figures, steps[name].figure("end: "+name, "ms"))
	}
	return figures, nil
}

// endOne makes a session that ran a command, ends it and watches it go.
func (b *bench) endOne(ctx context.Context, s *server, answer *series, steps map[string]*series) (first, gone time.Duration, err error) {
	session, err := s.client.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		return 0, 0, err
	}
	if _, err := session.Run(ctx, client.Command{Argv: []string{"/bin/true"}}); err != nil {
		return 0, 0, err
	}
	t, err := b.traces(s, session)
	if err != nil {
		return 0, 0, err
	}
	// Every kind of trace that is looked for must have been there.
	if missing := t.missing(); missing != "" {
		return 0, 0, fmt.Errorf("session %s has no %s to watch", session.ID, missing)
	}
	ended := make(chan error, 1)
	start := time.Now()
	go func() { // received from below
		_, err := session.End(ctx)
		answer.took(time.Since(start))
		ended <- err
	}()
	left := "everything"
	err = poll.Until(ctx, poll.Every(time.Millisecond/2), func() (bool, error) {
		if left = t.left(); left != "" {
			return false, nil
		}
		gone = time.Since(start)
		return true, nil
	})
	if err != nil {
		return 0, 0, errors.Join(fmt.Errorf("session %s: %s is left: %w", session.ID, left, err), <-ended)
	}
	if err := <-ended; err != nil {
		return 0, 0, err
	}
	for ev, err := range session.Events(ctx, 0) {
		if err != nil {
			return 0, 0, err
		}
		var p struct {
			Flow, Step string
			MS         float64
		}
		if ev.Action != "step.done" || json.Unmarshal(ev.Payload, &p) != nil || p.Flow != "end" {
			continue
		}
		if steps[p.Step] == nil {
			steps[p.Step] = &series{}
		}
		steps[p.Step].add(p.MS)
	}
	return gone, gone, nil
}

// traces are what a session has on the host.
type traces struct {
	slot      string
	processes []string // directories in /proc
	groups    []string
	files     []string
	sockets   bool
}

func (b *bench) traces(s *server, session *client.Session) (*traces, error) {
	slot, err := s.slot(session)
	if err != nil {
		return nil, err
	}
	t := &traces{slot: slot}
	for _, dir := range b.groups.host.Controllers() {
		group := filepath.Join(filepath.Dir(dir), s.parent, slot)
		if _, err := os.Stat(group); err == nil {
			t.groups = append(t.groups, group)
		}
		if len(t.processes) == 0 {
			for pid := range strings.FieldsSeq(fact(filepath.Join(group, "cgroup.procs"))) {
				t.processes = append(t.processes, "/proc/"+pid)
			}
		}
	}
	for _, name := range []string{slot, session.ID} {
		files, err := named(name, s.runDir, filepath.Join(b.data, "node"))
		if err != nil {
			return nil, err
		}
		t.files = append(t.files, files...)
	}
	t.sockets = strings.Contains(fact("/proc/net/unix"), slot)
	return t, nil
}

// named finds the files whose names hold id, with what is below them.
func named(id string, dirs ...string) ([]string, error) {
	var found []string
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if strings.Contains(strings.TrimPrefix(path, dir), id) {
				found = append(found, path)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

func (t *traces) missing() string {
	switch {
	case len(t.processes) == 0:
		return "process"
	case len(t.groups) == 0:
		return "cgroup"
	case len(t.files) == 0:
		return "file"
	case !t.sockets:
		return "socket"
	}
	return ""
}

// left names something that is still there; empty when nothing is. What goes
// last is looked at first, to look little while the machine is at work.
func (t *traces) left() string {
	for what, paths := range map[string][]string{"a file": t.files, "a cgroup": t.groups, "a process": t.processes} {
		for _, p := range paths {
			if _, err := os.Lstat(p); err == nil {
				return what + ", " + p
			}
		}
	}
	if strings.Contains(fact("/proc/net/unix"), t.slot) {
		return "a socket"
	}
	if strings.Contains(fact("/proc/self/mountinfo"), t.slot) {
		return "a mount"
	}
	return ""
}
