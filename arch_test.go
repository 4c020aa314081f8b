package bivy_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	diff "github.com/google/go-cmp/cmp"
)

// The architecture, as tests: this file says who may import whom,
// arch_rules_test.go how files and packages look, and arch_unused_test.go finds
// shipped code that only tests use. They read the files of the tree in this
// process: a test that runs `go list` is cached by `go test` and misses changes
// of other packages, whereas files that are read here are part of the cache key.

const module = "bivy"

// edges lists the imports of each shipped package within this module, exactly:
// a package or an import that is missing here fails, and so does one that no
// longer exists. Names are relative to internal/; "client" is the public client.
// A new line is a decision; the reasons are in docs/architecture.md.
const edges = `
client                            :
cmd/bivy                          : cli client daemon
cmd/bivy-guest                    : guest
cmd/bivy-sentry                   : driver/gvisor/sentry
internal/access                   : audit kind session
internal/api                      : access audit auth client clip driver journal kind lifecycle secret session template trace workload
internal/api/apitest              : access api audit auth catalog client driver/fake journal kind lifecycle node nodeinfo sandbox session store/sqlite template workgroup
internal/argv                     : kind
internal/audit                    : clip durable kind session trace
internal/auth                     : access audit durable kind secret session trace
internal/bench                    : bundle cgroup client config kind poll
internal/bundle                   : durable kind
internal/bundle/pack              : bundle
internal/catalog                  : access audit kind session template
internal/cgroup                   : kind poll
internal/cli                      : audit client config kind session
internal/clip                     :
internal/config                   : dirlock durable kind
internal/daemon                   : access api audit auth bench bundle catalog cli client config dirlock doctor driver driver/fake driver/gvisor durable guest/guestclient guest/wire journal kind lifecycle node nodeinfo poll sandbox secret session snapshot store/sqlite template workgroup
internal/dirlock                  : kind
internal/doctor                   : bundle cgroup client config kind template
internal/doctor/missing           : doctor template
internal/driver                   : session
internal/driver/drivertest        : driver kind session
internal/driver/fake              : driver guest/wire guest/wire/gen/filesystem guest/wire/gen/filesystem/filesystemconnect guest/wire/gen/process guest/wire/gen/process/processconnect kind session
internal/driver/gvisor            : cgroup driver driver/gvisor/bootflags durable kind link session
internal/driver/gvisor/bootflags  :
internal/driver/gvisor/sentry     : driver/gvisor/bootflags
internal/driver/gvisor/sentry/gen :
internal/durable                  :
internal/guest                    : argv guest/accounts guest/files guest/proc guest/wire guest/wire/gen/filesystem/filesystemconnect guest/wire/gen/process/processconnect
internal/guest/accounts           : guest/wire
internal/guest/files              : guest/accounts guest/proc guest/watch guest/wire guest/wire/gen/filesystem
internal/guest/guestclient        : argv guest/wire guest/wire/gen/filesystem guest/wire/gen/filesystem/filesystemconnect guest/wire/gen/process guest/wire/gen/process/processconnect kind
internal/guest/notls              :
internal/guest/proc               : argv guest/accounts guest/wire guest/wire/gen/process
internal/guest/watch              : guest/accounts
internal/guest/wire               : argv
internal/guest/wire/gen/filesystem :
internal/guest/wire/gen/filesystem/filesystemconnect : guest/wire/gen/filesystem
internal/guest/wire/gen/process   :
internal/guest/wire/gen/process/processconnect : guest/wire/gen/process
internal/hostclock                :
internal/journal                  : access audit clip kind session trace workgroup
internal/kind                     :
internal/leakcheck                : poll
internal/lifecycle                : access audit clip driver hostclock journal kind poll sandbox session trace workgroup workload
internal/link                     :
internal/node                     : audit driver durable guest/guestclient guest/wire hostclock kind poll sandbox session
internal/nodeinfo                 : access audit client
internal/poll                     :
internal/sandbox                  : driver session
internal/secret                   :
internal/session                  : argv kind
internal/snapshot                 : driver durable kind poll session
internal/store/sqlite             : audit auth dirlock hostclock kind session
internal/store/storetest          : audit journal kind lifecycle session
internal/template                 : argv dirlock durable kind template/debian template/image template/source template/tree
internal/template/debian          : kind template/source template/tree
internal/template/image           : template/tree
internal/template/source          : kind template/tree
internal/template/tree            : kind
internal/testbed                  : template
internal/trace                    :
internal/workgroup                : kind
internal/workload                 : access argv audit clip driver guest/guestclient guest/wire journal kind poll session workgroup
`

// A fence limits everything that a part of the tree reaches, directly or by way
// of other packages, whatever edges says. It is around a package and every
// package below it, so that a package which is added there is behind the fence
// from its first line.
type fence struct {
	of      string // parts: a package with everything below it; "x/" is only what is below x
	except  string // parts that the fence is not around
	only    string // packages of this module that may be reached, exact names, or "x/" for what is below x; empty: any
	never   string // parts that must not be reached
	std     bool   // no packages of other modules
	pending bool   // no package of that name exists yet; fails once one does
	why     string
}

var fences = []fence{
	{of: "client", only: "client client/", std: true, why: "other modules import it: standard library only"},
	{of: "internal/kind", only: "internal/kind", std: true, why: "every package imports it: standard library only"},
	{of: "internal/session", only: "internal/session internal/argv internal/kind", std: true, why: "it is vocabulary"},
	{of: "internal/secret", only: "internal/secret", std: true, why: "a type that hides what it holds depends on nothing"},
	{of: "internal/trace", only: "internal/trace internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/durable", only: "internal/durable internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/poll", only: "internal/poll internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/clip", only: "internal/clip internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/dirlock", only: "internal/dirlock internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/argv", only: "internal/argv internal/kind", std: true, why: "it is a leaf: standard library and kind only"},
	{of: "internal/access", only: "internal/access internal/audit internal/trace internal/clip internal/durable internal/session internal/argv internal/kind", std: true, why: "a decision depends on the request, not on the part that asks"},
	{of: "internal/sandbox", only: "internal/sandbox internal/driver internal/session internal/kind internal/argv", std: true, why: "it is the vocabulary that node and lifecycle share"},
	{of: "internal/audit", only: "internal/audit internal/trace internal/clip internal/durable internal/session internal/argv internal/kind", std: true, why: "checking a record should take little code"},
	{of: "internal/guest cmd/bivy-guest", only: "cmd/bivy-guest internal/guest internal/guest/ internal/kind internal/argv internal/clip internal/poll", why: "the guest contains nothing of the control plane"},
	{of: "cmd/bivy-sentry", only: "cmd/bivy-sentry internal/driver/gvisor/sentry internal/driver/gvisor/bootflags", why: "every sandbox executes it: no SQL, no HTTP, no command line"},
	{of: "internal/journal", never: "internal/store internal/node internal/driver/ internal/api internal/daemon internal/lifecycle internal/workload", why: "it writes records through the store that the daemon gives it"},
	{of: "internal/workload", never: "internal/store internal/node internal/driver/ internal/api internal/daemon internal/link internal/cgroup internal/template", why: "commands and files reach the sandbox through interfaces that the daemon fills"},
	{of: "internal/lifecycle", never: "internal/store internal/node internal/driver/ internal/api internal/daemon internal/link internal/cgroup internal/template", why: "steps call interfaces; the daemon chooses what is behind them"},
	{of: "internal/node", never: "internal/journal internal/workload internal/store internal/auth internal/driver/ internal/api internal/daemon internal/link internal/cgroup internal/template", why: "a node knows sandboxes and the driver contract; it cannot reach the database"},
	{of: "internal/node", never: "internal/lifecycle", why: "a node does what it is asked to and does not know why it is asked"},
	{of: "internal/api", except: "internal/api/apitest", never: "internal/store internal/node internal/driver/ internal/daemon internal/link internal/cgroup internal/bundle", why: "the API cannot reach a driver, a node or a database: it calls lifecycle and workload"},
	{of: "internal/cli", only: "internal/cli client internal/config internal/audit internal/trace internal/session internal/kind internal/argv internal/clip internal/dirlock internal/durable internal/poll", why: "the command line is a client like any other: what REST does not offer, its caller passes in"},
	{of: "internal/store", except: "internal/store/storetest", never: "internal/lifecycle internal/workload internal/journal internal/node internal/driver internal/api internal/guest internal/link internal/cgroup internal/template internal/daemon", why: "a store keeps rows"},
	{of: "internal/driver", never: "internal/store internal/lifecycle internal/workload internal/journal internal/node internal/api internal/daemon internal/template", why: "a driver isolates, and knows sandboxes only"},
	{of: "internal/template", never: "internal/store internal/lifecycle internal/workload internal/journal internal/node internal/driver internal/api internal/daemon", why: "images are built from hostile input, by code that reaches no other part"},
	{of: "internal/snapshot", never: "internal/store internal/lifecycle internal/workload internal/journal internal/node internal/driver/ internal/api internal/daemon", why: "a template's snapshot belongs to no session"},
}

// knownBreaches are imports that a fence forbids and that are still there, each
// with the reason. An entry that is no longer needed fails.
var knownBreaches = map[string]string{}

// quarantined limits a package that is large, dangerous or without a stable
// interface to the packages that may import it.
type quarantined struct {
	imports string // an import path; with a "/" at the end, every path below it
	in      string // packages that may import it, exact names, or "x/" for what is below x
	tests   string // packages whose tests may import it too
	why     string
}

// quarantine: an entry that no file uses fails.
var quarantine = []quarantined{
	{"gvisor.dev/", "internal/driver/gvisor internal/driver/gvisor/ internal/link", "", "slow to compile, large, and of no stable interface"},
	{"database/sql", "internal/store/", "", "one place speaks SQL"},
	{"modernc.org/", "internal/store/sqlite", "", "one place names a database"},
	{"connectrpc.com/", "internal/guest internal/guest/ internal/driver/fake", "", "the protocol between host and guest"},
	{"google.golang.org/protobuf/", "internal/guest internal/guest/ internal/driver/fake", "", "generated code stays behind its adapter"},
	{"github.com/google/go-containerregistry/", "internal/template/ internal/template", "", "registries are read in one place"},
	{"github.com/erofs/", "internal/template/image internal/template", "", "images are written in one place"},
	{"github.com/opencontainers/runtime-spec/", "internal/driver/gvisor", "", "what gVisor reads"},
	{"go.yaml.in/yaml/", "internal/template internal/config", "internal/api", "files that people write are decoded strictly, in few places"},
	{"github.com/spf13/cobra", "internal/cli", "", "one place reads the command line"},
	{"github.com/schollz/", "internal/cli", "", "one place draws on terminals"},
	{"unsafe", "internal/driver/gvisor/sentry internal/guest/accounts internal/guest/watch internal/guest/wire/gen/", "", "go:linkname in one file, system calls that x/sys lacks in two, and generated code"},
	{"log", "internal/driver/gvisor/sentry/gen internal/bundle/pack", "internal/template internal/template/source", "generators, and tests whose registry accepts no other logger; everything else uses log/slog"},
}

// forTests reports whether a package is for tests only: no binary may reach it.
func forTests(dir string) bool {
	base := path.Base(dir)
	return strings.HasSuffix(base, "test") || base == "testbed" || base == "leakcheck"
}

// A source is one parsed Go file.
type source struct {
	name      string // slash-separated, from the root of the module
	dir       string
	test      bool
	generated bool
	lines     int
	fset      *token.FileSet
	ast       *ast.File
}

// at formats a position as file:line.
func (s *source) at(p token.Pos) string {
	return fmt.Sprintf("%s:%d", s.name, s.fset.Position(p).Line)
}

// imports maps the name of each import in the file to its path.
func (s *source) imports() map[string]string {
	m := map[string]string{}
	for _, spec := range s.ast.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic(err) // the parser accepted it
		}
		name := path.Base(p)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		if _, taken := m[name]; taken || name == "_" || name == "." {
			name = p // unnamed, but still an import
		}
		m[name] = p
	}
	return m
}

func parse(name string, src []byte) (*source, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	return &source{
		name: name, dir: path.Dir(name), fset: fset, ast: f,
		test: strings.HasSuffix(name, "_test.go"), generated: ast.IsGenerated(f),
		lines: strings.Count(string(src), "\n"),
	}, nil
}

// never reports whether no build includes the file.
func never(src []byte) bool {
	for line := range strings.Lines(string(src)) {
		if strings.HasPrefix(line, "package ") {
			return false
		}
		if expr, err := constraint.Parse(strings.TrimSpace(line)); err == nil {
			all := expr.Eval(func(string) bool { return true })
			return all && !expr.Eval(func(tag string) bool { return tag != "never" && tag != "ignore" })
		}
	}
	return false
}

// tree returns every Go file of the module, parsed once for all tests.
func tree(t *testing.T) []*source {
	t.Helper()
	files, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 100 {
		t.Fatalf("only %d Go files found: the tests of the architecture read the wrong directory", len(files))
	}
	return files
}

var parsed = sync.OnceValues(func() ([]*source, error) {
	var files []*source
	err := filepath.WalkDir(".", func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			if n := e.Name(); p != "." && (strings.HasPrefix(n, ".") || strings.HasPrefix(n, "_") || n == "testdata" || n == "bin" || n == "out") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		src, err := os.ReadFile(p)
		if err != nil || never(src) {
			return err
		}
		f, err := parse(filepath.ToSlash(p), src)
		if err == nil {
			files = append(files, f)
		}
		return err
	})
	return files, err
})

// within reports whether dir is named by one of the words of list: exactly,
// or below a word that ends in "/".
func within(dir, list string) bool {
	return slices.ContainsFunc(strings.Fields(list), func(w string) bool {
		return dir == w || strings.HasSuffix(w, "/") && strings.HasPrefix(dir+"/", w) && dir+"/" != w
	})
}

// partOf reports whether dir belongs to one of the parts of list: it is a word
// of it or below one; of a word that ends in "/" only what is below counts.
func partOf(dir, list string) bool {
	return slices.ContainsFunc(strings.Fields(list), func(w string) bool {
		return dir == w || strings.HasPrefix(dir, strings.TrimSuffix(w, "/")+"/")
	})
}

// local returns the directory of an import within this module.
func local(imp string) (string, bool) { return strings.CutPrefix(imp, module+"/") }

func thirdParty(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return strings.Contains(first, ".")
}

// graph returns the imports of the shipped files of each package.
func graph(files []*source) map[string]map[string]bool {
	g := map[string]map[string]bool{}
	for _, f := range files {
		if f.test {
			continue
		}
		if g[f.dir] == nil {
			g[f.dir] = map[string]bool{}
		}
		for _, imp := range f.imports() {
			g[f.dir][imp] = true
		}
	}
	return g
}

// reach returns every import of a package and of the packages of this module
// that it reaches, each with the chain of packages that leads to it.
func reach(g map[string]map[string]bool, from string) map[string]string {
	seen := map[string]string{}
	var visit func(dir, way string)
	visit = func(dir, way string) {
		for _, imp := range slices.Sorted(maps.Keys(g[dir])) {
			if _, ok := seen[imp]; ok {
				continue
			}
			seen[imp] = way
			if next, ok := local(imp); ok {
				visit(next, way+" → "+next)
			}
		}
	}
	visit(from, from)
	return seen
}

func parseEdges(t *testing.T) map[string][]string {
	t.Helper()
	m := map[string][]string{}
	for line := range strings.Lines(strings.TrimSpace(edges)) {
		dir, list, ok := strings.Cut(line, ":")
		dir = strings.TrimSpace(dir)
		if _, twice := m[dir]; !ok || twice {
			t.Fatalf("edges: line %q", line)
		}
		m[dir] = []string{}
		for _, w := range strings.Fields(list) {
			if w != "client" {
				w = "internal/" + w
			}
			m[dir] = append(m[dir], w)
		}
	}
	return m
}

func TestWhoImportsWhom(t *testing.T) {
	g, table := graph(tree(t)), parseEdges(t)
	for _, dir := range slices.Sorted(maps.Keys(g)) {
		want, listed := table[dir]
		if !listed {
			t.Errorf("package %s is not in the table: a new package is a decision; add its line to edges in arch_test.go:\n%s", dir, edgeLine(dir, g[dir]))
			continue
		}
		for imp := range g[dir] {
			if to, ok := local(imp); ok && !slices.Contains(want, to) {
				t.Errorf("%s imports %s: a new edge is a decision; add it to edges in arch_test.go, or do without the import", dir, to)
			}
		}
		for _, to := range want {
			if !g[dir][module+"/"+to] {
				t.Errorf("%s no longer imports %s: remove it from edges in arch_test.go", dir, to)
			}
		}
	}
	for dir := range table {
		if g[dir] == nil {
			t.Errorf("package %s does not exist: remove its line from edges in arch_test.go", dir)
		}
	}
}

// edgeLine returns the line of edges for a package.
func edgeLine(dir string, imports map[string]bool) string {
	var to []string
	for imp := range imports {
		if l, ok := local(imp); ok {
			to = append(to, strings.TrimPrefix(l, "internal/"))
		}
	}
	slices.Sort(to)
	return fmt.Sprintf("%-33s : %s", dir, strings.Join(to, " "))
}

func TestFences(t *testing.T) {
	g := graph(tree(t))
	found := breaches(g, fences)
	for _, b := range found {
		if knownBreaches[b.what] == "" {
			t.Errorf("%s by way of %s: %s", b.what, b.way, b.why)
		}
	}
	for what := range knownBreaches {
		if !slices.ContainsFunc(found, func(b breach) bool { return b.what == what }) {
			t.Errorf("knownBreaches: %q is no longer so: remove it", what)
		}
	}
	for _, f := range fences {
		exists := slices.ContainsFunc(slices.Collect(maps.Keys(g)), func(dir string) bool { return partOf(dir, f.of) })
		switch {
		case f.pending && exists:
			t.Errorf("the fence around %q is pending, and the package exists: remove the mark", f.of)
		case !f.pending && !exists:
			t.Errorf("no package is behind the fence around %q", f.of)
		}
	}
	for dir := range g {
		if strings.HasPrefix(dir, "cmd/") {
			for imp, way := range reach(g, dir) {
				if to, ok := local(imp); ok && forTests(to) {
					t.Errorf("%s ships %s, which is for tests, by way of %s", dir, to, way)
				}
			}
		}
		if g[dir][module+"/internal/daemon"] && !strings.HasPrefix(dir, "cmd/") {
			t.Errorf("%s imports internal/daemon: it assembles all parts, and only a main imports it", dir)
		}
	}
}

// A breach is one import that a fence forbids.
type breach struct {
	what string // "<package> reaches <package>"
	way  string // the packages between them
	why  string // of the fence
}

// breaches returns what the fences forbid in a graph of imports.
func breaches(g map[string]map[string]bool, fences []fence) []breach {
	var found []breach
	for _, f := range fences {
		for _, dir := range slices.Sorted(maps.Keys(g)) {
			if !partOf(dir, f.of) || partOf(dir, f.except) {
				continue
			}
			ways := reach(g, dir)
			for _, imp := range slices.Sorted(maps.Keys(ways)) {
				to, ours := local(imp)
				forbidden := f.std && thirdParty(imp)
				if ours {
					forbidden = f.only != "" && !within(to, f.only) || partOf(to, f.never) && !samePart(dir, to)
				} else {
					to = imp
				}
				if forbidden {
					found = append(found, breach{what: dir + " reaches " + to, way: ways[imp], why: f.why})
				}
			}
		}
	}
	return found
}

// samePart reports whether one package is below the other: a fence separates
// parts, not a part from its own packages.
func samePart(a, b string) bool {
	return strings.HasPrefix(b+"/", a+"/") || strings.HasPrefix(a+"/", b+"/")
}

// TestFencesHoldNewPackages adds a package that does not exist to the tree and
// checks that it is behind the fences of its part at once.
func TestFencesHoldNewPackages(t *testing.T) {
	for _, tt := range []struct {
		dir, imports string // what the new package imports
		want         string // what it must not reach; empty: it is as it should be
	}{
		{"internal/store/postgres", "internal/session internal/audit internal/kind", ""},
		{"internal/store/postgres", "internal/driver/gvisor", "internal/driver/gvisor"},
		{"internal/store/postgres", "internal/node", "internal/node"},
		{"internal/store/postgres/migrate", "internal/lifecycle", "internal/lifecycle"},
		{"internal/store/postgres", "internal/snapshot", "internal/driver"}, // by way of a package that imports it
		{"internal/api/e2b", "internal/lifecycle client internal/kind", ""},
		{"internal/api/e2b", "internal/node", "internal/node"},
		{"internal/api/e2b/envd", "internal/driver/fake", "internal/driver/fake"},
		{"internal/api/e2b", "internal/store/sqlite", "internal/store/sqlite"},
		{"internal/driver/microvm", "internal/driver internal/session internal/cgroup internal/link", ""},
		{"internal/driver/microvm", "internal/store/sqlite", "internal/store/sqlite"},
		{"internal/driver/microvm", "internal/lifecycle", "internal/lifecycle"},
		{"internal/driver/microvm/jailer", "internal/template", "internal/template"},
		{"internal/node/pool", "internal/driver internal/session", ""},
		{"internal/node/pool", "internal/store/sqlite", "internal/store/sqlite"},
		{"internal/node/pool", "internal/driver/gvisor", "internal/driver/gvisor"},
		{"internal/node/pool", "internal/journal", "internal/journal"},
		{"internal/lifecycle/steps", "internal/node", "internal/node"},
		{"internal/lifecycle/steps", "internal/store/postgres", "internal/store/postgres"},
		{"internal/journal", "internal/audit internal/session internal/access internal/trace internal/kind", ""},
		{"internal/journal", "internal/store/sqlite", "internal/store/sqlite"},
		{"internal/journal", "internal/node", "internal/node"},
		{"internal/journal", "internal/daemon", "internal/daemon"},
		{"internal/workload", "internal/audit internal/session internal/guest/guestclient", ""},
		{"internal/workload", "internal/driver/gvisor", "internal/driver/gvisor"},
		{"internal/workload", "internal/api", "internal/api"},
		{"internal/access/cedar", "internal/node", "internal/node"},
		{"internal/access/cedar", "github.com/cedar-policy/cedar-go", "github.com/cedar-policy/cedar-go"},
		{"internal/sandbox/shape", "internal/lifecycle", "internal/lifecycle"},
		{"internal/trace/w3c", "internal/session", "internal/session"},
		{"internal/poll", "internal/kind", ""},
		{"internal/poll", "internal/config", "internal/config"},
		{"internal/dirlock", "golang.org/x/sys/unix", "golang.org/x/sys/unix"},
		{"internal/argv", "internal/session", "internal/session"},
		{"internal/cli/tui", "internal/daemon", "internal/daemon"},
		{"internal/guest/dial", "internal/session", "internal/session"},
		{"internal/template/registry", "internal/store/sqlite", "internal/store/sqlite"},
		{"client/e2b", "internal/kind", "internal/kind"},
		{"client/e2b", "golang.org/x/net/http2", "golang.org/x/net/http2"},
	} {
		g := graph(tree(t))
		before := breaches(g, fences)
		g[tt.dir] = map[string]bool{}
		for imp := range strings.FieldsSeq(tt.imports) {
			if !thirdParty(imp) {
				imp = module + "/" + imp
			}
			g[tt.dir][imp] = true
		}
		var got []string
		for _, b := range breaches(g, fences) {
			if !slices.Contains(before, b) {
				got = append(got, b.what)
			}
		}
		switch want := tt.dir + " reaches " + tt.want; {
		case tt.want == "" && len(got) > 0:
			t.Errorf("a package %s that imports %s is refused: %s", tt.dir, tt.imports, strings.Join(got, ", "))
		case tt.want != "" && !slices.Contains(got, want):
			t.Errorf("a package %s that imports %s is accepted; want: %s", tt.dir, tt.imports, want)
		}
	}
	f, err := parse("internal/store/postgres/store.go", []byte("package postgres\nimport _ \"gvisor.dev/gvisor/pkg/log\""))
	if err != nil {
		t.Fatal(err)
	}
	if found, _ := outside([]*source{f}, quarantine[0]); len(found) != 1 {
		t.Errorf("a store that imports gVisor is accepted: %q", found)
	}
}

func TestQuarantine(t *testing.T) {
	files := tree(t)
	for _, q := range quarantine {
		found, used := outside(files, q)
		for _, f := range found {
			t.Error(f)
		}
		if !used {
			t.Errorf("no file imports %s: remove it from quarantine in arch_test.go", q.imports)
		}
	}
}

// outside returns the files that import what q forbids them to, and whether any
// file imports it.
func outside(files []*source, q quarantined) (found []string, used bool) {
	for _, f := range files {
		for _, imp := range f.imports() {
			if imp != q.imports && (!strings.HasSuffix(q.imports, "/") || !strings.HasPrefix(imp, q.imports)) {
				continue
			}
			used = true
			if !within(f.dir, q.in) && (!f.test || !within(f.dir, q.tests)) {
				found = append(found, fmt.Sprintf("%s imports %s, which belongs in %s: %s", f.name, imp, q.in, q.why))
			}
		}
	}
	return found, used
}

var update = flag.Bool("update", false, "write docs/deps/*.txt")

// TestDependencyLists compares the packages of other modules that each binary
// imports with the list in git, so that a new one is seen in review.
func TestDependencyLists(t *testing.T) {
	g := graph(tree(t))
	lists, err := filepath.Glob("docs/deps/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		if dir := "cmd/" + strings.TrimSuffix(filepath.Base(list), ".txt"); g[dir] == nil {
			t.Errorf("%s belongs to no binary", list)
		}
	}
	binaries := 0
	for _, dir := range slices.Sorted(maps.Keys(g)) {
		if !strings.HasPrefix(dir, "cmd/") {
			continue
		}
		binaries++
		file := "docs/deps/" + path.Base(dir) + ".txt"
		got := dependencies(g, dir)
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Errorf("%v (write it with: go test . -run DependencyLists -update)", err)
			continue
		}
		if d := diff.Diff(string(want), got); d != "" {
			t.Errorf("%s is out of date; if the difference is intended, run: go test . -run DependencyLists -update\n%s", file, d)
		}
	}
	if binaries < 2 {
		t.Errorf("only %d binaries under cmd/", binaries)
	}
}

// dependencies lists the packages of other modules that a main reaches, one a
// line, each with the packages of this module that import it.
func dependencies(g map[string]map[string]bool, main string) string {
	by := map[string][]string{}
	dirs := []string{main}
	for imp := range reach(g, main) {
		if dir, ok := local(imp); ok {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range dirs {
		for imp := range g[dir] {
			if thirdParty(imp) {
				by[imp] = append(by[imp], strings.TrimPrefix(dir, "internal/"))
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# What %s imports of other modules, and where. Checked by arch_test.go.\n", main)
	for _, imp := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[imp])
		fmt.Fprintf(&b, "%s  (%s)\n", imp, strings.Join(by[imp], ", "))
	}
	return b.String()
}
