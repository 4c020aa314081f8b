package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"bivy/client"
)

// TestKilledAtRandom kills the server at random moments, starting and in the
// middle of the work of four callers, again and again.
func TestKilledAtRandom(t *testing.T) {
	const rounds, callers, seed = 20, 4, 7
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	by := newBystander(t, s)
	s.kill()

	random := rand.New(rand.NewPCG(seed, seed))
	asked, slowest := 0, time.Duration(0)
	for round := range rounds {
		s, err := h.start(h.b.bivy, "--data", h.data, "serve", "--run", h.run, "--listen", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		killIn := func(ms int) {
			time.AfterFunc(time.Duration(random.IntN(ms))*time.Millisecond, func() { _ = s.cmd.Process.Kill() })
		}
		early := round%4 == 0 // while it starts, most likely
		if early {
			killIn(400)
		}
		began := time.Now()
		if err := s.await(30 * time.Second); err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, time.Since(began))
		if !early {
			killIn(1200)
		}
		if s.Client != nil {
			var work sync.WaitGroup
			for caller := range callers {
				asked++
				work.Go(func() { churn(t.Context(), s, fmt.Sprintf("random-%d-%d", round, caller)) })
			}
			work.Wait()
		}
		if !s.died(10 * time.Second) {
			t.Fatal("the server was not killed")
		}
		s.kill()
	}

	s = h.serve(t)
	by.check(t, s)
	eventually(t, 60*time.Second, func() error {
		for info, err := range s.Sessions(limit(t, 30*time.Second), client.ListOptions{}) {
			if err != nil {
				return err
			}
			if info.State != client.Running && info.State != client.Ended {
				return fmt.Errorf("session %s is still %s", info.ID, info.State)
			}
		}
		return nil
	})
	seen := map[string]int{}
	survived := 0
	for info, err := range s.Sessions(limit(t, 30*time.Second), client.ListOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		tag := info.Spec.Labels["e2e"]
		if !strings.HasPrefix(tag, "random-") {
			continue
		}
		if seen[tag]++; seen[tag] > 1 {
			t.Errorf("%s was made %d times", tag, seen[tag])
		}
		x := s.Session(info.ID)
		if info.State == client.Running {
			survived++
			if r := sh(t, x, "", "echo alive"); string(r.Stdout) != "alive\n" {
				t.Errorf("session %s runs and does not work: %+v", x.ID, r)
			}
			s.end(t, x)
			continue
		}
		if info.Reason == "" {
			t.Errorf("session %s has ended for no reason", info.ID)
		}
		s.verify(t, info.ID, false)
	}
	s.onlyOf(t, by.ID)
	s.end(t, by.Session)
	s.stop(t)
	t.Logf("seed %d: %d callers made %d sessions, %d of them ran at the end, the slowest start took %s", seed, asked, len(seen), survived, slowest)
	if slowest > 10*time.Second {
		t.Errorf("a start took %s", slowest)
	}
}

// churn lives sessions one after the other until the server is gone.
func churn(ctx context.Context, s *server, name string) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for i := 0; ctx.Err() == nil; i++ {
		tag := fmt.Sprintf("%s-%d", name, i)
		x, err := s.CreateSessionWith(ctx, client.CreateSession{Spec: client.Spec{Labels: map[string]string{"e2e": tag}}},
			client.CreateOptions{IdempotencyKey: tag})
		if err != nil {
			return
		}
		_, err = x.Run(ctx, client.Command{Argv: []string{"bash", "-c", "echo $RANDOM > /tmp/x; cat /tmp/x"}})
		if err == nil {
			_, err = x.WriteFile(ctx, "f", strings.NewReader(tag), client.FileOptions{})
		}
		if err == nil {
			_, err = x.End(ctx)
		}
		if err != nil {
			return
		}
	}
}

// TestManyLives: three hundred lives leave nothing, on the host or in the
// server.
func TestManyLives(t *testing.T) {
	const warmUp, lives, callers = 10, 300, 2
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serveKiller(t)
	runLives(t, s, warmUp, callers)
	before := stock(t, s)
	began := time.Now()
	runLives(t, s, lives, callers)
	took := time.Since(began)
	after := stock(t, s)
	t.Logf("%d lives in %s, %.1f a second; before %+v, after %+v", lives, took.Round(time.Millisecond), lives/took.Seconds(), before, after)
	for _, held := range []map[string]int{before.files, after.files} {
		// A pool of a bounded number of connections.
		maps.DeleteFunc(held, func(name string, _ int) bool { return strings.HasPrefix(name, h.data+"/store/") })
	}
	if d := diffOf(before.files, after.files); d != "" {
		t.Errorf("open files of the server, before and after:\n%s", d)
	}
	// Of goroutines a few are always on their way.
	if after.goroutines > before.goroutines+3 {
		t.Errorf("%d goroutines before, %d after", before.goroutines, after.goroutines)
	}
	// The runtime keeps threads it once needed.
	if after.threads > before.threads+6 {
		t.Errorf("%d threads before, %d after", before.threads, after.threads)
	}
	s.stop(t)
}

// holdings is what a server has open.
type holdings struct {
	files               map[string]int
	goroutines, threads int
	resident            string
}

// stock counts when nobody is connected and everything has settled.
func stock(t *testing.T, s *server) holdings {
	t.Helper()
	s.Close()
	pid := s.cmd.Process.Pid
	var got holdings
	last := ""
	eventually(t, 20*time.Second, func() error {
		files, err := descriptors(pid)
		if err != nil {
			return err
		}
		n, err := s.goroutines()
		if err != nil {
			return err
		}
		threads, err := threads(pid)
		if err != nil {
			return err
		}
		got = holdings{files: files, goroutines: n, threads: threads}
		this := fmt.Sprint(got)
		if this != last {
			defer func() { last = this }()
			return fmt.Errorf("the server does not come to rest: %s", this)
		}
		return nil
	})
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			got.resident = strings.TrimSpace(v)
		}
	}
	return got
}

func runLives(t *testing.T, s *server, lives, callers int) {
	t.Helper()
	var work sync.WaitGroup
	jobs := make(chan int)
	for range callers {
		work.Go(func() {
			for range jobs {
				ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
				if err := oneLife(ctx, s.Client); err != nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	for i := range lives {
		jobs <- i
	}
	close(jobs)
	work.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

func oneLife(ctx context.Context, c *client.Client) error {
	x, err := c.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	r, err := x.Run(ctx, client.Command{Argv: []string{"bash", "-c", "echo hello > f; cat f"}})
	if err != nil || string(r.Stdout) != "hello\n" {
		return fmt.Errorf("run in %s: %+v, %w", x.ID, r, err)
	}
	info, err := x.End(ctx)
	if err != nil || info.State != client.Ended || len(info.Residuals) > 0 {
		return fmt.Errorf("end of %s: %+v, %w", x.ID, info, err)
	}
	return nil
}
