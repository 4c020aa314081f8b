package source

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// parts is an image as its raw blobs, so that a test can break any of them.
type parts struct {
	layers   [][]byte // as stored
	config   v1.ConfigFile
	manifest v1.Manifest
	blobs    map[string][]byte // by digest
	raw      []byte            // the manifest
}

func sha(b []byte) v1.Hash {
	h, _, err := v1.SHA256(bytes.NewReader(b))
	if err != nil {
		panic(err)
	}
	return h
}

// image makes an image of the given layers and compresses the first with gzip, the
// second with zstd, the third not at all, and so on.
func image(t *testing.T, layers ...[]byte) *parts {
	t.Helper()
	p := &parts{config: v1.ConfigFile{OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers"}}}
	p.config.Config = v1.Config{Env: []string{"PATH=/bin", "A=b=c"}, User: "1000:1000", WorkingDir: "/srv", Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"true"}}
	for i, l := range layers {
		stored, mt := l, types.OCIUncompressedLayer
		switch i % 3 {
		case 0:
			stored, mt = gz(t, l), types.OCILayer
		case 1:
			stored, mt = zst(t, l), types.OCILayerZStd
		}
		p.layers = append(p.layers, stored)
		p.config.RootFS.DiffIDs = append(p.config.RootFS.DiffIDs, sha(l))
		p.manifest.Layers = append(p.manifest.Layers, v1.Descriptor{MediaType: mt, Size: int64(len(stored)), Digest: sha(stored)})
	}
	p.seal(t)
	return p
}

// seal updates the digests of the config and the manifest.
func (p *parts) seal(t *testing.T) {
	t.Helper()
	cfg, err := json.Marshal(p.config)
	if err != nil {
		t.Fatal(err)
	}
	p.blobs = map[string][]byte{}
	for i, l := range p.layers {
		p.blobs[p.manifest.Layers[i].Digest.String()] = l
	}
	p.blobs[sha(cfg).String()] = cfg
	p.manifest.SchemaVersion, p.manifest.MediaType = 2, types.OCIManifestSchema1
	p.manifest.Config = v1.Descriptor{MediaType: types.OCIConfigJSON, Size: int64(len(cfg)), Digest: sha(cfg)}
	if p.raw, err = json.Marshal(p.manifest); err != nil {
		t.Fatal(err)
	}
}

// reg is a registry on loopback.
type testRegistry struct {
	*httptest.Server
	host string
}

func newRegistry(t *testing.T, wrap func(http.Handler) http.Handler) *testRegistry {
	t.Helper()
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return &testRegistry{Server: s, host: u.Host}
}

func (r *testRegistry) put(t *testing.T, path, contentType string, body []byte) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, r.URL+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := r.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("PUT %s: %s %s", path, resp.Status, b)
	}
}

// push stores all parts under app:tag.
func (r *testRegistry) push(t *testing.T, p *parts, tag string) string {
	t.Helper()
	for d, b := range p.blobs {
		req, err := http.NewRequest(http.MethodPost, r.URL+"/v2/app/blobs/uploads/?digest="+d, bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode/100 != 2 {
			t.Fatalf("blob %s: %s", d, resp.Status)
		}
	}
	r.put(t, "/v2/app/manifests/"+tag, string(types.OCIManifestSchema1), p.raw)
	return r.host + "/app:" + tag
}

func (p *parts) pull(t *testing.T, limits tree.Limits) (map[string]string, Defaults, error) {
	t.Helper()
	r := newRegistry(t, nil)
	ref := r.push(t, p, "v1")
	got, d, _, err := load(t, &Registry{Ref: ref, Limits: limits}, limits)
	return got, d, err
}

// threeLayers is an image that uses every feature of layers.
func threeLayers(t *testing.T) *parts {
	return image(t,
		makeTar(t, dirent("usr/"), dirent("usr/lib/"), sym("lib", "usr/lib"), reg("usr/lib/libc", "libc"), reg("etc/gone", "1"), reg("etc/kept", "1"),
			reg("opt/old/a", "1"), reg("opt/old/b", "1"), reg("bin/tool", "tool v1"), reg("data/x", "x"), reg("was/dir/f", "1"), reg("wasfile", "1")),
		makeTar(t, reg("etc/.wh.gone", ""), dirent("opt/old"), reg("opt/old/.wh..wh..opq", ""), reg("opt/old/c", "2"),
			entry{name: "bin/tool", flag: tar.TypeReg, mode: 0o4755, text: "tool v2"}, hardlink("bin/alias", "bin/tool"), hardlink("bin/libc", "usr/lib/libc"),
			reg(".wh.data", ""), reg("was/.wh.dir", ""), reg("was/dir", "now a file"), dirent("wasfile"), reg("wasfile/f", "in it"), reg(".wh..wh.plnk", "")),
		makeTar(t, reg("lib/libm", "through the link"), reg("bin/.wh.tool", ""), reg("etc/kept", "3"),
			entry{name: "ping", flag: tar.TypeReg, mode: 0o755, text: "p", pax: map[string]string{"SCHILY.xattr.security.capability": "cap"}}),
	)
}

var threeLayersWant = map[string]string{
	"/bin": "40755 0", "/bin/alias": "104755 0 tool v2", "/bin/libc": "100644 0 links=2 libc",
	"/etc": "40755 0", "/etc/kept": "100644 0 3", "/lib": "120777 0 -> usr/lib",
	"/opt": "40755 0", "/opt/old": "40755 0", "/opt/old/c": "100644 0 2",
	"/ping": `100755 0 p security.capability="cap"`,
	"/usr":  "40755 0", "/usr/lib": "40755 0", "/usr/lib/libc": "100644 0 links=2 libc", "/usr/lib/libm": "100644 0 through the link",
	"/was": "40755 0", "/was/dir": "100644 0 now a file", "/wasfile": "40755 0", "/wasfile/f": "100644 0 in it",
}

var wantDefaults = Defaults{
	Env: map[string]string{"PATH": "/bin", "A": "b=c"}, User: "1000:1000", Workdir: "/srv", Cmd: []string{"/bin/sh", "-c", "true"},
}

func TestRegistry(t *testing.T) {
	got, d, err := threeLayers(t).pull(t, tree.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(threeLayersWant, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(wantDefaults, d); diff != "" {
		t.Error(diff)
	}
}

func TestRegistryByDigest(t *testing.T) {
	p := threeLayers(t)
	r := newRegistry(t, nil)
	r.push(t, p, "v1")
	s := &Registry{Ref: r.host + "/app@" + sha(p.raw).String()}
	got, _, _, err := load(t, s, tree.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(threeLayersWant, got); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(s.String(), sha(p.raw).String()) {
		t.Errorf("described as %s", s)
	}
}

func TestPlatform(t *testing.T) {
	p := threeLayers(t)
	r := newRegistry(t, nil)
	r.push(t, p, "amd64")
	other := image(t, makeTar(t, reg("wrong", "x")))
	other.config.Architecture = "arm64"
	other.seal(t)
	r.push(t, other, "arm64")
	desc := func(q *parts, arch string) v1.Descriptor {
		return v1.Descriptor{MediaType: types.OCIManifestSchema1, Size: int64(len(q.raw)), Digest: sha(q.raw), Platform: &v1.Platform{OS: "linux", Architecture: arch}}
	}
	index := func(tag string, list ...v1.Descriptor) string {
		raw, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: append([]v1.Descriptor{}, list...)})
		if err != nil {
			t.Fatal(err)
		}
		r.put(t, "/v2/app/manifests/"+tag, string(types.OCIImageIndex), raw)
		return r.host + "/app:" + tag
	}
	both := index("both", desc(other, "arm64"), desc(p, "amd64"))
	got, _, _, err := load(t, &Registry{Ref: both}, tree.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(threeLayersWant, got); diff != "" {
		t.Error(diff)
	}
	for ref, says := range map[string]string{
		index("none", desc(other, "arm64")):  "no image for linux/amd64",
		index("lying", desc(other, "amd64")): "is for",
		r.host + "/app:arm64":                "is for",
		index("nobody"):                      "no image for linux/amd64",
	} {
		if _, _, _, err := load(t, &Registry{Ref: ref}, tree.Limits{}); !kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

func TestCredentials(t *testing.T) {
	r := newRegistry(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			user, pass, _ := req.BasicAuth()
			if req.Method != http.MethodPut && req.Method != http.MethodPost && (user != "alice" || pass != "s3cret") {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, req)
		})
	})
	ref := r.push(t, threeLayers(t), "v1")
	for _, tc := range []struct {
		name  string
		login *Login
		ok    bool
	}{
		{"right", &Login{Username: "alice", Password: "s3cret"}, true},
		{"wrong", &Login{Username: "alice", Password: "wr0ng"}, false},
		{"none", nil, false},
	} {
		_, _, _, err := load(t, &Registry{Ref: ref, Auth: tc.login}, tree.Limits{})
		if tc.ok && err != nil || !tc.ok && !kind.Is(err, kind.Denied) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if err != nil && strings.Contains(err.Error(), "wr0ng") {
			t.Errorf("the password is in the error: %v", err)
		}
	}
}

func TestDockerLogin(t *testing.T) {
	auth := base64.StdEncoding.EncodeToString([]byte("alice:s3:cret"))
	for _, tc := range []struct {
		name, config, host string
		want               *Login
		says               string
	}{
		{"auth", fmt.Sprintf(`{"auths":{"r.example":{"auth":%q}}}`, auth), "r.example", &Login{Username: "alice", Password: "s3:cret"}, ""},
		{"fields", `{"auths":{"https://r.example/v2/":{"username":"bob","password":"p"}}}`, "r.example", &Login{Username: "bob", Password: "p"}, ""},
		{"token", `{"auths":{"r.example":{"identitytoken":"tok"}}}`, "r.example", &Login{Token: "tok"}, ""},
		{"hub", fmt.Sprintf(`{"auths":{"https://index.docker.io/v1/":{"auth":%q}}}`, auth), name.DefaultRegistry, &Login{Username: "alice", Password: "s3:cret"}, ""},
		{"another host", fmt.Sprintf(`{"auths":{"r.example":{"auth":%q}}}`, auth), "r.example.evil", nil, ""},
		{"helper", `{"auths":{"r.example":{}},"credsStore":"pass"}`, "r.example", nil, "helper"},
		{"not base64", `{"auths":{"r.example":{"auth":"!!"}}}`, "r.example", nil, "base64"},
		{"not JSON", `auths`, "r.example", nil, "config.json"},
	} {
		got, err := DockerLogin([]byte(tc.config), tc.host)
		if diff := cmp.Diff(tc.want, got); diff != "" || (err != nil) != (tc.says != "") || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v %s", tc.name, err, diff)
		}
	}
}

func TestNotThere(t *testing.T) {
	r := newRegistry(t, nil)
	if _, err := (&Registry{Ref: r.host + "/no/such:tag"}).Key(context.Background()); !kind.Is(err, kind.NotFound) {
		t.Errorf("missing image: %v", err)
	}
	r.Close()
	if _, err := (&Registry{Ref: r.host + "/app:v1", Transport: http.DefaultTransport}).Key(context.Background()); !kind.Is(err, kind.Unavailable) {
		t.Errorf("no registry: %v", err)
	}
	if _, err := (&Registry{Ref: "UPPER//case"}).Key(context.Background()); !kind.Is(err, kind.Invalid) {
		t.Errorf("bad reference: %v", err)
	}
}

// TestHostileImages changes an image in the ways that a malicious registry or
// publisher could.
func TestHostileImages(t *testing.T) {
	evil := []byte("evil")
	one := func(entries ...entry) *parts { return image(t, makeTar(t, reg("base", "x")), makeTar(t, entries...)) }
	for _, tc := range []struct {
		name   string
		parts  *parts
		break_ func(*parts)
		limits tree.Limits
		kind   kind.Kind
		says   []string
	}{
		{"a path out", one(reg("../../../etc/cron.d/evil", "x")), nil, tree.Limits{}, kind.Invalid, []string{"layer 1", `".."`, "cron.d"}},
		{"a hard link to the host", one(hardlink("shadow", "/etc/shadow")), nil, tree.Limits{}, kind.Invalid, []string{"layer 1", "hard link"}},
		{"a whiteout out", one(reg("../.wh.etc", "")), nil, tree.Limits{}, kind.Invalid, []string{`".."`}},
		{"a whiteout of ..", one(reg("a/.wh...", "")), nil, tree.Limits{}, kind.Invalid, []string{"whiteout"}},
		{"a whiteout of nothing", one(reg("a/.wh.", "")), nil, tree.Limits{}, kind.Invalid, []string{"whiteout"}},
		{"a symlink loop", one(sym("a", "b"), sym("b", "a"), reg("a/f", "x")), nil, tree.Limits{}, kind.Invalid, []string{"symlinks"}},
		{"a layer that is no tar", image(t, bytes.Repeat(evil, 1000)), nil, tree.Limits{}, kind.Invalid, []string{"layer 0", "tar"}},
		{"too many layers", image(t, makeTar(t), makeTar(t), makeTar(t)), nil, tree.Limits{Layers: 2}, kind.Exhausted, []string{"Layers"}},
		{"too many bytes", one(reg("big", strings.Repeat("x", 1000))), nil, tree.Limits{Bytes: 500}, kind.Exhausted, []string{"layer 1", "big", "Bytes", "500"}},
		{"too many files", one(reg("a", ""), reg("b", ""), reg("c", "")), nil, tree.Limits{Entries: 3}, kind.Exhausted, []string{"layer 1", `"c"`, "Entries"}},
		{"too long a stream", one(reg("big", strings.Repeat("x", 100_000))), nil, tree.Limits{StreamBytes: 50_000}, kind.Exhausted, []string{"layer 1", "StreamBytes"}},
		{"too many links", one(hardlink("a", "base"), hardlink("b", "base"), hardlink("c", "base")), nil, tree.Limits{Links: 3}, kind.Exhausted, []string{"Links", `"c"`}},
		{"big manifest", one(), nil, tree.Limits{ConfigBytes: 100}, kind.Exhausted, []string{"ConfigBytes"}},
		{"a wrong layer", one(), func(p *parts) {
			p.blobs[p.manifest.Layers[0].Digest.String()] = gz(t, makeTar(t, reg("swapped", "x")))
		}, tree.Limits{}, kind.Invalid, []string{"layer 0", "wrong"}},
		{"a layer with a tail", one(), func(p *parts) {
			d := p.manifest.Layers[0].Digest.String()
			p.blobs[d] = append(slices.Clone(p.blobs[d]), "tail"...)
		}, tree.Limits{}, kind.Invalid, []string{"layer 0"}},
		{"a wrong config", one(), func(p *parts) {
			d := p.manifest.Config.Digest.String()
			p.blobs[d] = bytes.Replace(p.blobs[d], []byte("1000:1000"), []byte("1001:1001"), 1)
		}, tree.Limits{}, kind.Invalid, []string{"config", "wrong digest"}},
		{"a wrong diff ID", one(), func(p *parts) {
			p.config.RootFS.DiffIDs[1] = sha(evil)
			p.seal(t)
		}, tree.Limits{}, kind.Invalid, []string{"layer 1", "diff ID"}},
		{"fewer diff IDs", one(), func(p *parts) {
			p.config.RootFS.DiffIDs = p.config.RootFS.DiffIDs[:1]
			p.seal(t)
		}, tree.Limits{}, kind.Invalid, []string{"1 layers"}},
		{"a wrong size", one(), func(p *parts) {
			p.manifest.Layers[0].Size--
			p.seal(t)
		}, tree.Limits{}, kind.Invalid, []string{"layer 0"}},
		{"no config", one(), func(p *parts) { p.raw = []byte(`{"schemaVersion":2,"layers":[]}`) }, tree.Limits{}, kind.Invalid, []string{"artifact"}},
		{"an artifact", one(), func(p *parts) {
			p.manifest.Config.MediaType = "application/vnd.cncf.helm.config.v1+json"
			p.raw, _ = json.Marshal(p.manifest)
		}, tree.Limits{}, kind.Invalid, []string{"artifact"}},
		{"a layer from elsewhere", one(), func(p *parts) {
			p.manifest.Layers[0].MediaType = types.DockerForeignLayer
			p.manifest.Layers[0].URLs = []string{"http://127.0.0.1:1/"}
			p.seal(t)
		}, tree.Limits{}, kind.Invalid, []string{"not distributed"}},
		{"a digest of another algorithm", one(), func(p *parts) {
			p.raw = bytes.ReplaceAll(p.raw, []byte(p.manifest.Layers[0].Digest.String()), []byte("sha512:"+strings.Repeat("a", 128)))
		}, tree.Limits{}, kind.NotFound, []string{"layer 0"}},
		{"a digest that is a path", one(), func(p *parts) {
			p.raw = bytes.ReplaceAll(p.raw, []byte(p.manifest.Layers[0].Digest.String()), []byte("sha256:../../../../etc/passwd"))
		}, tree.Limits{}, kind.Invalid, []string{"manifest"}},
		{"an index and an image", one(), func(p *parts) { p.raw = []byte(`{"schemaVersion":2,"layers":[],"manifests":[]}`) }, tree.Limits{}, kind.Invalid, []string{"both"}},
		{"schema 1", one(), func(p *parts) { p.raw = []byte(`{"schemaVersion":1,"fsLayers":[]}`) }, tree.Limits{}, kind.Invalid, []string{"schema 1"}},
		{"nothing like an image", one(), func(p *parts) { p.raw = []byte(`{"hello":"world"}`) }, tree.Limits{}, kind.Invalid, []string{"not an image"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := tc.parts
			if tc.break_ != nil {
				tc.break_(p)
			}
			// The library's registry refuses uploads with wrong digests, so this one
			// is separate.
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				_, id, isBlob := strings.Cut(req.URL.Path, "/blobs/")
				switch {
				case req.URL.Path == "/v2/":
				case isBlob && p.blobs[id] != nil:
					w.Write(p.blobs[id])
				case strings.Contains(req.URL.Path, "/manifests/"):
					w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
					w.Write(p.raw)
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			}))
			defer s.Close()
			u, err := url.Parse(s.URL)
			if err != nil {
				t.Fatal(err)
			}
			_, _, _, err = load(t, &Registry{Ref: u.Host + "/app:v1", Limits: tc.limits}, tc.limits)
			if !kind.Is(err, tc.kind) {
				t.Fatalf("got %v: %v", kind.Of(err), err)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%v does not say %q", err, s)
				}
			}
		})
	}
}

// TestDevices checks that device nodes of a layer are left out, also where
// they replace something, and that an overlay's 0:0 is no exception.
func TestDevices(t *testing.T) {
	p := image(t, makeTar(t, reg("dev/console", "a file"), reg("f", "1")),
		makeTar(t, entry{name: "dev/console", flag: tar.TypeChar, mode: 0o600}, entry{name: "f", flag: tar.TypeChar}, entry{name: "dev/sda", flag: tar.TypeBlock}))
	got, _, err := p.pull(t, tree.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"/dev": "40755 0"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestCutOff(t *testing.T) {
	p := threeLayers(t)
	layer := p.manifest.Layers[1].Digest.String()
	r := newRegistry(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Method == http.MethodGet && strings.HasSuffix(req.URL.Path, layer) {
				w.Header().Set("Content-Length", fmt.Sprint(len(p.blobs[layer])))
				w.Write(p.blobs[layer][:10])
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
				panic(http.ErrAbortHandler)
			}
			h.ServeHTTP(w, req)
		})
	})
	r.Config.ErrorLog = log.New(io.Discard, "", 0)
	ref := r.push(t, p, "v1")
	if _, _, _, err := load(t, &Registry{Ref: ref}, tree.Limits{}); !kind.Is(err, kind.Unavailable) || !strings.Contains(err.Error(), "layer 1") {
		t.Errorf("got %v: %v", kind.Of(err), err)
	}
}

func TestCancelled(t *testing.T) {
	p := threeLayers(t)
	r := newRegistry(t, nil)
	s := &Registry{Ref: r.push(t, p, "v1")}
	if _, err := s.Key(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f, err := os.Create(filepath.Join(t.TempDir(), "spool"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := s.Load(ctx, tree.New(tree.Limits{}), tree.NewSpool(f), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// writeLayout writes parts as an OCI layout.
func (p *parts) writeLayout(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	for d, b := range p.blobs {
		files["blobs/"+strings.Replace(d, ":", "/", 1)] = b
	}
	files["blobs/sha256/"+sha(p.raw).Hex] = p.raw
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, Manifests: []v1.Descriptor{{
		MediaType: types.OCIManifestSchema1, Digest: sha(p.raw), Size: int64(len(p.raw)),
		Annotations: map[string]string{"org.opencontainers.image.ref.name": "latest", "path": "../../../etc/passwd"},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	files["index.json"] = index
	for name, b := range files {
		full := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func tarOf(t *testing.T, dir string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(f)
	if err := errors.Join(w.AddFS(os.DirFS(dir)), w.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestLayoutAndArchive(t *testing.T) {
	p := threeLayers(t)
	dir := p.writeLayout(t)
	for name, s := range map[string]Source{
		"layout":         NewLayout(dir, "", tree.Limits{}),
		"layout, named":  NewLayout(dir, "latest", tree.Limits{}),
		"layout, digest": NewLayout(dir, sha(p.raw).String(), tree.Limits{}),
		"archive":        NewTarball(tarOf(t, dir), "", tree.Limits{}),
	} {
		got, d, _, err := load(t, s, tree.Limits{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(threeLayersWant, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if diff := cmp.Diff(wantDefaults, d); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestDockerSave reads a "docker save" file that the library has written.
func TestDockerSave(t *testing.T) {
	lp, err := layout.FromPath(threeLayers(t).writeLayout(t))
	if err != nil {
		t.Fatal(err)
	}
	idx, err := lp.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	m, err := idx.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	img, err := lp.Image(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("example.com/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "save.tar")
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"", "example.com/app:v1"} {
		got, _, _, err := load(t, NewTarball(file, ref, tree.Limits{}), tree.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(threeLayersWant, got); diff != "" {
			t.Error(diff)
		}
	}
	if _, _, _, err := load(t, NewTarball(file, "other:tag", tree.Limits{}), tree.Limits{}); !kind.Is(err, kind.NotFound) || !strings.Contains(err.Error(), "example.com/app:v1") {
		t.Errorf("another tag: %v", err)
	}
}

func TestBadArchives(t *testing.T) {
	write := func(name string, b []byte) string {
		f := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return f
	}
	layer := makeTar(t, reg("f", "x"))
	cfg := func(p *parts) string { b, _ := json.Marshal(p.config); return string(b) }
	good := image(t, layer)
	save := func(manifest string, more ...entry) []byte {
		return makeTar(t, append([]entry{reg("manifest.json", manifest)}, more...)...)
	}
	missing := threeLayers(t).writeLayout(t)
	entries, err := os.ReadDir(filepath.Join(missing, "blobs/sha256"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(missing, "blobs/sha256", e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	linked := threeLayers(t).writeLayout(t)
	if err := errors.Join(os.Remove(filepath.Join(linked, "index.json")), os.Symlink("/etc/passwd", filepath.Join(linked, "index.json"))); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		s    Source
		kind kind.Kind
		says string
	}{
		"no file":           {NewTarball("/no/such", "", tree.Limits{}), kind.NotFound, "not exist"},
		"no directory":      {NewLayout("/no/such", "", tree.Limits{}), kind.NotFound, "not exist"},
		"a file as layout":  {NewLayout(write("f", []byte("x")), "", tree.Limits{}), kind.Invalid, "not a directory"},
		"empty layout":      {NewLayout(t.TempDir(), "", tree.Limits{}), kind.Invalid, "not an image"},
		"blobs missing":     {NewLayout(missing, "", tree.Limits{}), kind.Invalid, "missing"},
		"index leads out":   {NewLayout(linked, "", tree.Limits{}), kind.Invalid, ""},
		"a plain tar":       {NewTarball(write("t", layer), "", tree.Limits{}), kind.Invalid, "not an image"},
		"no tar":            {NewTarball(write("t", bytes.Repeat([]byte("x"), 2000)), "", tree.Limits{}), kind.Invalid, "tar"},
		"packed":            {NewTarball(write("t", gz(t, layer)), "", tree.Limits{}), kind.Invalid, "compressed"},
		"bad manifest":      {NewTarball(write("t", save("[")), "", tree.Limits{}), kind.Invalid, "manifest.json"},
		"no images":         {NewTarball(write("t", save("[]")), "", tree.Limits{}), kind.NotFound, "no image"},
		"config missing":    {NewTarball(write("t", save(`[{"Config":"c.json","Layers":["l"]}]`)), "", tree.Limits{}), kind.Invalid, "missing"},
		"layer missing":     {NewTarball(write("t", save(`[{"Config":"c.json","Layers":["l"]}]`, reg("c.json", cfg(good)))), "", tree.Limits{}), kind.Invalid, "missing"},
		"wrong layer":       {NewTarball(write("t", save(`[{"Config":"c.json","Layers":["l"]}]`, reg("c.json", cfg(good)), reg("l", string(makeTar(t, reg("evil", "x")))))), "", tree.Limits{}), kind.Invalid, "diff ID"},
		"wrong config name": {NewTarball(write("t", save(`[{"Config":"`+strings.Repeat("a", 64)+`.json","Layers":["l"]}]`, reg(strings.Repeat("a", 64)+".json", cfg(good)))), "", tree.Limits{}), kind.Invalid, "wrong digest"},
		"big config":        {NewTarball(write("t", save(`[{"Config":"c.json","Layers":[]}]`, reg("c.json", strings.Repeat(" ", 5000)))), "", tree.Limits{ConfigBytes: 1000}), kind.Exhausted, "ConfigBytes"},
		"many members":      {NewTarball(write("t", save("[]", reg("a", ""), reg("b", ""))), "", tree.Limits{Entries: 2}), kind.Exhausted, "Entries"},
	} {
		_, _, _, err := load(t, tc.s, tree.Limits{})
		if name == "index leads out" {
			if err == nil || strings.Contains(err.Error(), "root:") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !kind.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: got %v: %v", name, kind.Of(err), err)
		}
	}
}
