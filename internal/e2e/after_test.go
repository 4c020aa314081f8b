package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/session"
)

// TestOrphans: what has bivy's marks and belongs to no session goes at the
// next start; what only lies beside it stays.
func TestOrphans(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	id := string(session.NewID().Sandbox(0)) // as slots are named
	var ours, foreign []string
	var parents []string
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		root := filepath.Join("/sys/fs/cgroup", controller)
		if _, err := os.Stat(root); err != nil {
			root = "/sys/fs/cgroup" // cgroup v2 has one tree
		}
		if p := filepath.Join(root, h.groups); !slices.Contains(parents, p) {
			parents = append(parents, p)
			ours, foreign = append(ours, filepath.Join(p, id)), append(foreign, filepath.Join(p, "somebody-else"))
		}
	}
	ours = append(ours, filepath.Join(h.run, "gvisor", "bundles", id))
	foreign = append(foreign, filepath.Join(h.run, "somebody-else"))
	t.Cleanup(func() {
		for _, d := range slices.Concat(ours, foreign, parents) {
			_ = syscall.Rmdir(d) // most are gone
		}
	})
	for _, d := range slices.Concat(ours, foreign) {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// A process in the group, as a start that was cut short leaves it.
	stray := exec.Command("sleep", "600")
	if err := stray.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- stray.Wait() }() // ends with the process
	for _, d := range ours[:len(parents)] {
		if err := os.WriteFile(filepath.Join(d, "cgroup.procs"), fmt.Appendf(nil, "%d", stray.Process.Pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := h.serve(t)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the stray process lives on")
		_ = stray.Process.Kill()
	}
	eventually(t, 20*time.Second, func() error {
		for _, d := range ours {
			if _, err := os.Lstat(d); err == nil {
				return fmt.Errorf("%s is still there", d)
			}
		}
		return nil
	})
	for _, d := range foreign {
		if _, err := os.Lstat(d); err != nil {
			t.Errorf("what is not bivy's was touched: %v", err)
		}
	}
	s.stop(t)
}

// TestDeadlineWithoutServer: time that runs out while no server lives ends a
// session at the next start, for that reason.
func TestDeadlineWithoutServer(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{TimeoutSeconds: 2})
	due := x.Info.Deadline
	s.kill()
	pause(time.Until(due) + 100*time.Millisecond)
	s = h.serve(t)
	x = s.Session(x.ID)
	eventually(t, 20*time.Second, func() error {
		info, err := x.Get(limit(t, 10*time.Second))
		if err == nil && info.State != client.Ended {
			err = fmt.Errorf("session is %s", info.State)
		}
		if err == nil && info.Reason != "deadline" {
			t.Errorf("it ended for %s (%s)", info.Reason, info.Detail)
		}
		return err
	})
	s.verify(t, x.ID, false)
	s.onlyOf(t)
	s.stop(t)
}

// TestRunWithoutServer: run makes a server of its own. When it is killed, the
// next one clears away what it left.
func TestRunWithoutServer(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	config := filepath.Join(h.home, "config.yaml")
	if err := os.WriteFile(config, []byte("data_dir: "+h.data+"\nrun_dir: "+h.run+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(config) })
	bivy := func(args ...string) []string { return append([]string{h.b.bivy, "--config", config}, args...) }

	r := h.invoke(t, func(c *exec.Cmd) { c.Stdin = strings.NewReader("in\n") }, bivy("run", "--", "bash", "-c", "cat; echo out; echo err >&2; exit 3")...)
	if r.code != 3 || r.out != "in\nout\n" || r.err != "err\n" {
		t.Errorf("run: %s", r)
	}
	s, err := h.start(h.b.bivy, bivy("run", "--", "bash", "-c", "echo begun; sleep 600")[1:]...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	if line, err := s.out.ReadString('\n'); err != nil || line != "begun\n" {
		t.Fatalf("%q, %v\n%s", line, err, s.log)
	}
	s.kill()
	if r := h.invoke(t, nil, bivy("run", "--", "echo", "next")...); r.code != 0 || r.out != "next\n" {
		t.Errorf("run after a run that was killed: %s", r)
	}

	// Its session is taken back, as one whose caller is gone. A server that
	// starts later has it too, and can end it.
	s = h.serve(t)
	for info, err := range s.Sessions(limit(t, 20*time.Second), client.ListOptions{States: []client.State{client.Running}}) {
		if err != nil {
			t.Fatal(err)
		}
		s.end(t, s.Session(info.ID))
	}
	s.onlyOf(t)
	s.stop(t)

	// A signal is the command's, and what it does with it is run's own end.
	s, err = h.start(h.b.bivy, bivy("run", "--", "bash", "-c", "trap 'echo caught; exit 9' INT; echo begun; while :; do sleep 0.1; done")[1:]...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	if line, err := s.out.ReadString('\n'); err != nil || line != "begun\n" {
		t.Fatalf("%q, %v\n%s", line, err, s.log)
	}
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	line, err := s.out.ReadString('\n')
	if !s.died(20*time.Second) || s.state.ExitCode() != 9 || line != "caught\n" {
		t.Errorf("after an interrupt: %q, %v, %v\n%s", line, err, s.state, s.log)
	}
}

// TestAuditVerify: a record is checked offline by the command line, and one
// that was touched is not taken.
func TestAuditVerify(t *testing.T) {
	h := needBed(t).host
	h.warm(t)
	h.noLeaks(t)
	s := h.serve(t)
	x := s.create(t, client.Spec{})
	sh(t, x, "", "echo something > /home/user/made")
	s.end(t, x)
	r := s.cli(t, "audit", "export", x.ID)
	if r.code != 0 {
		t.Fatal(r)
	}
	s.stop(t)
	key := filepath.Join(h.data, "signing.pub")
	verify := func(text string) result {
		t.Helper()
		path := filepath.Join(h.home, "record")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(path)
		return h.bivy(t, "audit", "verify", "--key", key, path)
	}
	if v := verify(r.out); v.code != 0 || !strings.HasPrefix(v.out, "verified: ") {
		t.Errorf("as it was exported: %s", v)
	}
	lines := strings.SplitAfter(r.out, "\n")
	for name, text := range map[string]string{
		"edited":    strings.Replace(r.out, "something", "nothing!!", 1),
		"cut":       strings.Join(lines[:len(lines)/2], ""),
		"reordered": strings.Join(append(append([]string{lines[0], lines[2], lines[1]}, lines[3:]...), ""), ""),
		"empty":     "",
	} {
		if v := verify(text); v.code != 1 || strings.Contains(v.out, "verified: ") {
			t.Errorf("%s: %s", name, v)
		}
	}
}
