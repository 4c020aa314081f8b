package template

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/config"
	"bivy/internal/kind"
)

const goodSpec = `# an application
version: 1
name: team/app:v1
from:
  image:
    ref: registry.example/team/app:1.2
    credentials:
      username: robot
      password_file: secrets/password
env:
  PORT: "8080"
  DEBUG: "true"
user: app
workdir: /srv
cmd: [/srv/app, --listen]
`

// parse reads a spec as the command line does.
func parse(text string) (Spec, error) {
	var s Spec
	if err := config.Decode([]byte(text), &s); err != nil {
		return Spec{}, err
	}
	return s, s.Validate()
}

func TestSpec(t *testing.T) {
	want := Spec{
		Version: 1, Name: "team/app:v1",
		From: From{Image: &Image{Ref: "registry.example/team/app:1.2", Credentials: &Credentials{Username: "robot", PasswordFile: "secrets/password"}}},
		Env:  map[string]string{"PORT": "8080", "DEBUG": "true"}, User: "app", Workdir: "/srv", Cmd: []string{"/srv/app", "--listen"},
	}
	got, err := parse(goodSpec)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	got, err = parse(`{"version": 1, "from": {"host_packages": {"packages": ["bash", "libstdc++6"]}}}`)
	if err != nil {
		t.Fatal(err)
	}
	if got.From.Kind() != "host_packages" || len(got.From.HostPackages.Packages) != 2 {
		t.Errorf("JSON: %+v", got)
	}
}

func TestBadSpec(t *testing.T) {
	dir := "version: 1\nfrom: {directory: {path: /x}}\n"
	for _, tc := range []struct{ name, spec, field, says string }{
		{"empty", "", "version", "version 0"},
		{"unknown field", "version: 1\nfrom:\n  image: {ref: a}\nuserr: bob\n", "userr", "line 4: unknown field"},
		{"unknown nested field", "version: 1\nfrom:\n  image:\n    reff: a\n", "from.image.reff", "line 4: unknown field"},
		{"password in the spec", "version: 1\nfrom: {image: {ref: a, credentials: {username: a, password: b}}}\n", "from.image.credentials.password", "line 2: unknown field"},
		{"duplicate field", dir + "user: a\nuser: b\n", "user", "line 4"},
		{"not YAML", "version: [1\n", "", "line"},
		{"a list", "- a\n- b\n", "", "line 1"},
		{"text for a number", "version: one\nfrom: {directory: {path: /x}}\n", "version", "line 1"},
		{"a list for a map", dir + "env: [a, b]\n", "env", "line 3"},
		{"two documents", dir + "---\nversion: 1\n", "", "second document"},
		{"no version", "from: {directory: {path: /x}}\n", "version", "version 0"},
		{"future version", "version: 2\nfrom: {directory: {path: /x}}\n", "version", "version 2"},
		{"no source", "version: 1\nname: a\n", "from", "exactly one"},
		{"two sources", "version: 1\nfrom: {directory: {path: /x}, tar: {path: /y}}\n", "from", "exactly one"},
		{"no path", "version: 1\nfrom: {tar: {}}\n", "from.tar.path", "empty"},
		{"no packages", "version: 1\nfrom: {host_packages: {packages: []}}\n", "from.host_packages.packages", "0 packages"},
		{"a package that is a path", "version: 1\nfrom: {host_packages: {packages: [../../etc/passwd]}}\n", "from.host_packages.packages", "Debian package"},
		{"a package that is an option", "version: 1\nfrom: {host_packages: {packages: [--force]}}\n", "from.host_packages.packages", "Debian package"},
		{"no ref", "version: 1\nfrom: {image: {ref: \"\"}}\n", "from.image.ref", "image reference"},
		{"two passwords", "version: 1\nfrom: {image: {ref: a, credentials: {username: a, password_env: A, password_file: b}}}\n", "from.image.credentials", "exactly one"},
		{"no username", "version: 1\nfrom: {image: {ref: a, credentials: {password_env: A}}}\n", "from.image.credentials", "username"},
		{"name with an empty tag", dir + "name: \"a:\"\n", "name", "tag is empty"},
		{"name without a name", dir + "name: \":x\"\n", "name", "name is empty"},
		{"upper case", dir + "name: App\n", "name", "character"},
		{"name that is a path", dir + "name: ../../etc\n", "name", "character"},
		{"relative workdir", dir + "workdir: srv\n", "workdir", "absolute"},
		{"bad user", dir + "user: \"a b\"\n", "user", "user name"},
		{"bad variable", dir + "env: {\"A=B\": c}\n", "env", "variable"},
		{"NUL in a variable", dir + "env: {A: \"b\\0c\"}\n", "env", "NUL"},
		{"NUL in an argument", dir + "cmd: [\"a\\0b\"]\n", "cmd", "NUL"},
		{"no program", dir + "cmd: [\"\", a]\n", "cmd", "no command"},
		{"big command", dir + "cmd: [a, " + strings.Repeat("x", 200<<10) + "]\n", "cmd", "at most"},
		{"big environment", dir + "env: {A: " + strings.Repeat("x", 200<<10) + "}\n", "env", "at most"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := parse(tc.spec)
			if !kind.Is(err, kind.Invalid) || kind.Field(err) != tc.field || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got field %q: %v", kind.Field(err), err)
			}
		})
	}
}

func TestParseRef(t *testing.T) {
	hex := strings.Repeat("a", 64)
	for s, want := range map[string]string{
		"base": "base:default", "base:v1.2": "base:v1.2", "team/app": "team/app:default", "a": "a:default", "my.app_x-1:t": "my.app_x-1:t",
		"": "", ":x": "", "name:": "", "a/b/c": "", "/a": "", "a/": "", "-a": "", "a-": "", "A": "", "a b": "", "a..b": "", "..": "", "../a": "",
		"a:b:c": "", "a:B": "", "a:..": "", "a:a/b": "", hex: "", "a:" + hex: "", "sha256:" + hex: "",
		"a:123e4567-e89b-12d3-a456-426614174000": "", strings.Repeat("a", 200): "", "a\n": "", "_/a": "",
	} {
		got, err := ParseRef(s)
		if want == "" {
			if !kind.Is(err, kind.Invalid) {
				t.Errorf("%q was taken as %v (%v)", s, got, err)
			}
			continue
		}
		if err != nil || got.String() != want {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
}

func FuzzSpec(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parse(string(data))
		if err != nil {
			if !kind.Is(err, kind.Invalid) {
				t.Fatalf("an error of kind %v: %v", kind.Of(err), err)
			}
			return
		}
		if s.From.Kind() == "" || s.Version != SpecVersion {
			t.Fatalf("accepted %+v", s)
		}
		if s.Name != "" {
			ref, err := ParseRef(s.Name)
			if err != nil || strings.Contains(ref.file(), "..") || strings.Count(ref.file(), "/") != 3 {
				t.Fatalf("the name %q is kept as %q (%v)", s.Name, ref.file(), err)
			}
		}
	})
}
