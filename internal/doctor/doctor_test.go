package doctor

import (
	"strings"
	"testing"

	"bivy/client"
	"bivy/internal/config"
)

func TestFactsAreWhole(t *testing.T) {
	dir := t.TempDir()
	n, err := Examine(t.Context(), config.Config{DataDir: dir, RunDir: dir}.WithDefaults())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range n.Facts {
		if f.Name == "" || f.Means == "" || seen[f.Name] {
			t.Errorf("fact %+v: want a unique name and a meaning", f)
		}
		seen[f.Name] = true
		if f.Status == client.FactFail && n.OK {
			t.Errorf("%s has failed and the node is OK", f.Name)
		}
	}
	for _, name := range []string{"user", "kernel", "cgroups", "payload", "memory", "data_dir", "run_dir"} {
		if !seen[name] {
			t.Errorf("no fact about %s", name)
		}
	}
}

func TestMissingPackages(t *testing.T) {
	if Installed("no-such-package-of-anybody") {
		t.Error("a package that does not exist is installed")
	}
	f := basePackages(config.Config{})
	if (f.Status == client.FactOK) == strings.Contains(f.Hint, "apt-get install") {
		t.Errorf("%+v: want either all packages or how to install them", f)
	}
}
