package cli

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"bivy/internal/config"
	"bivy/internal/dirlock"
	"bivy/internal/kind"
)

// TestFind waits until the process that has locked the run directory announces an
// address or unlocks it.
func TestFind(t *testing.T) {
	for name, serves := range map[string]bool{"serves": true, "unlocks": false} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			lock, err := dirlock.Acquire(dir)
			if err != nil {
				t.Fatal(err)
			}
			unlock := sync.OnceValue(lock.Close)
			defer func() {
				if err := unlock(); err != nil {
					t.Error(err)
				}
			}()
			if !config.Held(dir) {
				t.Fatal("it is not locked")
			}
			found := make(chan error, 1)
			var r config.Running
			var alive bool
			go func() {
				var err error
				r, alive, err = (&app{}).find(t.Context(), dir, true, 0)
				found <- err
			}()
			if serves {
				if _, err := config.Announce(dir, config.Running{URL: "http://127.0.0.1:1"}); err != nil {
					t.Fatal(err)
				}
			} else if err := unlock(); err != nil {
				t.Fatal(err)
			}
			if err := <-found; err != nil || alive != serves || serves && r.URL != "http://127.0.0.1:1" {
				t.Errorf("%+v, %t, %v", r, alive, err)
			}
		})
	}
}

// TestHeld names the process that has locked a run directory.
func TestHeld(t *testing.T) {
	dir := t.TempDir()
	if config.Held(dir) {
		t.Error("an unused directory is locked")
	}
	lock, err := dirlock.Acquire(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := lock.Close(); err != nil {
			t.Error(err)
		}
	}()
	if !config.Held(dir) {
		t.Error("a locked directory is not")
	}
	err = config.HeldError(dir)
	if want := fmt.Sprintf("run directory %s is in use by process %d", dir, os.Getpid()); err.Error() != want || !kind.Is(err, kind.Conflict) || kind.Hint(err) == "" {
		t.Errorf("%v, hint %q; want %s", err, kind.Hint(err), want)
	}
}

func TestServerURL(t *testing.T) {
	for in, want := range map[string]string{"": "", "here:7171": "http://here:7171", "127.0.0.1:1": "http://127.0.0.1:1", "https://h": "https://h"} {
		if got, err := serverURL(in); err != nil || got != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"ftp://h", "http://", "://", "a b"} {
		if got, err := serverURL(in); !wrongFlag(err) {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	const served = "http://127.0.0.1:7171"
	for asked, want := range map[string]bool{
		served: true, served + "/": true, "http://localhost:7171": true, "http://localhost:7172": false,
		"https://localhost:7171": false, "http://[::1]:7171": false, "http://elsewhere:7171": false,
	} {
		if got := sameServer(asked, served); got != want {
			t.Errorf("%s: %t", asked, got)
		}
	}
	if sameServer("http://localhost:7171", "http://192.0.2.1:7171") {
		t.Error("localhost is treated as another machine")
	}
}
