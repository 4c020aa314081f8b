package dirlock

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"bivy/internal/kind"
)

// holdEnv makes the test binary lock the directory it names and wait.
const holdEnv = "DIRLOCK_TEST_HOLD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holdEnv); dir != "" {
		if _, err := Acquire(dir); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("locked")
		select {} // until it is killed
	}
	os.Exit(m.Run())
}

func TestAcquire(t *testing.T) {
	dir := t.TempDir()
	if h := Holder(dir); h != nil {
		t.Errorf("a directory that was never locked: %v", h)
	}
	l, err := Acquire(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Acquire(dir)
	var held *HeldError
	if !kind.Is(err, kind.Conflict) || !errors.As(err, &held) || held.PID != os.Getpid() || held.Dir != dir {
		t.Errorf("a second lock: %v", err)
	}
	if want := fmt.Sprintf("in use by process %d", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	if h := Holder(dir); h == nil || h.PID != os.Getpid() {
		t.Errorf("holder: %v", h)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if h := Holder(dir); h != nil {
		t.Errorf("after the release: %v", h)
	}
	l, err = Acquire(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestKilledHolder: the lock ends with the process, and names it until then.
func TestKilledHolder(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holdEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("the other process: %q, %v", line, err)
	}
	var held *HeldError
	if _, err := Acquire(dir); !errors.As(err, &held) || held.PID != cmd.Process.Pid {
		t.Errorf("%v; want process %d", err, cmd.Process.Pid)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it reports the kill
	l, err := Acquire(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestUnreadableHolder(t *testing.T) {
	dir := t.TempDir()
	l, err := Acquire(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, text := range []string{"", "x", "-1", strings.Repeat("1", 100)} {
		if err := os.WriteFile(filepath.Join(dir, File), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if h := Holder(dir); h == nil || h.PID != 0 || !strings.Contains(h.Error(), "another process") {
			t.Errorf("lock file %.10q: %v", text, h)
		}
	}
}

func TestNoDirectory(t *testing.T) {
	if l, err := Acquire(filepath.Join(t.TempDir(), "none")); err == nil || kind.Is(err, kind.Conflict) {
		t.Errorf("%v, %v", l, err)
	}
	dir := t.TempDir()
	if err := os.Symlink("/dev/null", filepath.Join(dir, File)); err != nil {
		t.Fatal(err)
	}
	if l, err := Acquire(dir); err == nil {
		t.Errorf("a lock file that is a symbolic link: %v", l)
	}
}
