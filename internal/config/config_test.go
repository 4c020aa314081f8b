package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/kind"
)

func TestDecode(t *testing.T) {
	type inner struct {
		Size int64 `yaml:"size"`
	}
	type target struct {
		Name  string            `yaml:"name"`
		On    bool              `yaml:"on"`
		Inner inner             `yaml:"inner"`
		Ptr   *inner            `json:"ptr,omitempty"`
		List  []string          `yaml:"list"`
		Map   map[string]string `yaml:"map"`
	}
	for _, tc := range []struct{ name, in, field, text string }{
		{"unknown", "name: a\nnope: 1\n", "nope", "line 2: unknown field"},
		{"unknown deep", "inner:\n  size: 1\n  sise: 2\n", "inner.sise", "line 3: unknown field"},
		{"twice", "name: a\nname: b\n", "name", "line 2: given twice"},
		{"twice in a map", "map:\n  a: x\n  a: y\n", "map.a", "line 3: given twice"},
		{"number for text", "name: 1\n", "name", "put it in quotes"},
		{"text for a number", "inner: {size: big}\n", "inner.size", "whole number"},
		{"fraction", "inner: {size: 1.5}\n", "inner.size", "whole number"},
		{"too large", "inner: {size: 99999999999999999999}\n", "inner.size", "whole number"},
		{"text for a boolean", "on: yes please\n", "on", "true or false"},
		{"null", "name:\n", "name", "line 1: the value is missing"},
		{"null list item", "list: [a, ~]\n", "list[1]", "missing"},
		{"list for a map", "map: [a]\n", "map", "must be a map"},
		{"map for a list", "list: {a: b}\n", "list", "must be a list"},
		{"scalar for a struct", "inner: 3\n", "inner", "must be fields"},
		{"scalar document", "hello\n", "", "must be fields"},
		{"alias", "name: &a x\nlist: [*a]\n", "name", "anchors"},
		{"merge", "<<: {name: x}\n", "<<", "unknown field"},
		{"tag", "name: !!binary aGk=\n", "name", "tags"},
		{"two documents", "name: a\n---\nname: b\n", "", "second document"},
		{"not YAML", "name: [\n", "", "line"},
		{"tab", "inner:\n\tsize: 1\n", "", "line"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var v target
			err := Decode([]byte(tc.in), &v)
			if !kind.Is(err, kind.Invalid) || kind.Field(err) != tc.field || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("field %q: %v; want %q and %q", kind.Field(err), err, tc.field, tc.text)
			}
		})
	}
	for _, in := range []string{"", "# nothing\n", "---\n", "{}\n"} {
		v := target{Name: "kept"}
		if err := Decode([]byte(in), &v); err != nil || v.Name != "kept" {
			t.Errorf("%q: %+v, %v", in, v, err)
		}
	}
	var v target
	if err := Decode([]byte("name: '1'\non: true\ninner: {size: 0}\nptr: {size: 7}\nlist: [a, \"b\"]\nmap: {k: v}\n"), &v); err != nil {
		t.Fatal(err)
	}
	want := target{Name: "1", On: true, Ptr: &inner{7}, List: []string{"a", "b"}, Map: map[string]string{"k": "v"}}
	if diff := cmp.Diff(want, v); diff != "" {
		t.Error(diff)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("listen: 127.0.0.1:1\nhosts: [a, b]\nallow_plaintext: true\ncreate_concurrency: 3\n"))
	f.Add([]byte("a: b\n---\nc"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c Config
		if err := Decode(data, &c); err != nil && !kind.Is(err, kind.Invalid) {
			t.Fatalf("%v is not invalid", err)
		}
	})
}

func TestConfig(t *testing.T) {
	if err := (Config{}).WithDefaults().Validate(); err != nil {
		t.Errorf("the zero configuration does not work: %v", err)
	}
	for _, tc := range []struct{ in, field string }{
		{"listen: nowhere\n", "listen"},
		{"data_dir: relative\n", "data_dir"},
		{"run_dir: relative\ndata_dir: relative\n", "data_dir"},
		{"tls_cert: /x\n", "tls_cert"},
		{"log_level: loud\n", "log_level"},
		{"log_format: xml\n", "log_format"},
		{"create_concurrency: -1\n", "create_concurrency"},
	} {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(tc.in), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Errorf("%q: %v", tc.in, err)
		}
		if err := c.WithDefaults().Validate(); kind.Field(err) != tc.field {
			t.Errorf("%q: %v; want field %s", tc.in, err, tc.field)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "missing")); !kind.Is(err, kind.Invalid) {
		t.Errorf("a file that was named and is missing: %v", err)
	}
}

func TestAnnounce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if _, ok, err := Find(dir); ok || err != nil {
		t.Errorf("nothing was announced: %t, %v", ok, err)
	}
	withdraw, err := Announce(dir, Running{URL: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	if r, ok, err := Find(dir); !ok || err != nil || r.URL != "http://127.0.0.1:1" {
		t.Errorf("%+v, %t, %v", r, ok, err)
	}
	if err := withdraw(); err != nil {
		t.Error(err)
	}
	if _, ok, err := Find(dir); ok || err != nil {
		t.Errorf("it was withdrawn: %t, %v", ok, err)
	}
	// The file of a process that has ended is ignored.
	if err := os.WriteFile(filepath.Join(dir, runningFile), []byte(`{"url":"http://127.0.0.1:1","pid":2147483647}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := Find(dir); ok || err != nil {
		t.Errorf("a dead server was found: %t, %v", ok, err)
	}
}
