package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"bivy/client"
	"bivy/internal/poll"
)

const (
	livesName = "cold lives a second, sustained for a minute"
	leaksName = "left on the host afterwards"
)

// sustained measures how many sessions a second are created, run a command
// and are ended, for a minute, by as many callers as there are CPUs, and what
// is left on the host afterwards.
func sustained(ctx context.Context, b *bench) ([]Figure, error) {
	s, err := b.serve(ctx)
	if err != nil {
		return nil, err
	}
	lives := func(ctx context.Context, d time.Duration) (*series, error) {
		return b.lives(ctx, s, d)
	}
	if _, err := lives(ctx, 3*time.Second); err != nil { // pools of connections and buffers reach their size
		return nil, err
	}
	before, err := b.count(s)
	if err != nil {
		return nil, err
	}
	cpu := s.cpu() + self()
	start := time.Now()
	each, err := lives(ctx, time.Minute)
	if err != nil {
		return nil, err
	}
	n := float64(len(each.values))
	rate := single(livesName, "1/s", round(n/time.Since(start).Seconds()))
	rate.N, rate.CPU = len(each.values), round(ms(s.cpu()+self()-cpu)/n)
	rate.Note = fmt.Sprintf("%d at a time", runtime.NumCPU())
	after, err := b.settled(ctx, s, before)
	if err != nil {
		return nil, err
	}
	grown := 0
	var what []string
	for _, name := range sorted(after) {
		if d := after[name] - before[name]; d > 0 {
			grown += d
			what = append(what, fmt.Sprintf("%d %s", d, name))
		}
	}
	leaks := single(leaksName, "things", float64(grown))
	leaks.N, leaks.Note = len(each.values), strings.Join(what, ", ")
	return []Figure{rate, leaks, each.figure("one life among them", "ms")}, nil
}

// lives makes lives, one after the other by each caller, until d is over.
func (b *bench) lives(ctx context.Context, s *server, d time.Duration) (*series, error) {
	until := time.Now().Add(d)
	took := make(chan time.Duration)
	group, ctx := errgroup.WithContext(ctx)
	for range runtime.NumCPU() {
		group.Go(func() error {
			for time.Now().Before(until) {
				start := time.Now()
				if _, _, err := s.life(ctx, client.CreateSession{}, []string{"/bin/true"}, nil); err != nil {
					return err
				}
				took <- time.Since(start)
			}
			return nil
		})
	}
	var err error
	go func() { // ends with the callers
		err = group.Wait()
		close(took)
	}()
	all := &series{}
	for d := range took {
		all.took(d)
	}
	return all, err
}

// count is what there is of the server and its sandboxes on the host. Rows of
// the store stay, and its files grow: only what is named here must not.
func (b *bench) count(s *server) (map[string]int, error) {
	n := map[string]int{}
	pid := s.cmd.Process.Pid
	for _, dir := range b.groups.host.Controllers() {
		entries, err := os.ReadDir(filepath.Join(filepath.Dir(dir), s.parent))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() {
				n["cgroups"]++
			}
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		if strings.Contains(fact(p), s.runDir) {
			n["processes"]++
		}
	}
	for name, dir := range map[string]string{"file descriptors": fmt.Sprintf("/proc/%d/fd", pid), "threads": fmt.Sprintf("/proc/%d/task", pid)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		n[name] = len(entries)
	}
	n["mounts"] = strings.Count(fact(fmt.Sprintf("/proc/%d/mountinfo", pid)), s.runDir)
	n["sockets"] = strings.Count(fact("/proc/net/unix"), s.runDir)
	files, err := named("", s.runDir, filepath.Join(b.data, "node"), filepath.Join(b.data, "templates"))
	n["files"] = len(files)
	return n, err
}

// settled counts until there is no more than before, at most for a few
// seconds: connections and threads that are idle go late.
func (b *bench) settled(ctx context.Context, s *server, before map[string]int) (map[string]int, error) {
	s.client.Close()
	var now map[string]int
	try := 0
	err := poll.Until(ctx, poll.Every(250*time.Millisecond), func() (bool, error) {
		var err error
		if now, err = b.count(s); err != nil {
			return true, err
		}
		// The runtime keeps its threads for ever; how many it once needed is
		// no leak while it stays small.
		now["threads"] = max(0, now["threads"]-before["threads"]-4*runtime.NumCPU()) + before["threads"]
		more := false
		for name := range now {
			more = more || now[name] > before[name]
		}
		try++
		return !more || try > 20, nil
	})
	if err != nil {
		return nil, err
	}
	return now, nil
}
