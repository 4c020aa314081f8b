package bivy_test

import (
	"cmp"
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
	"testing"

	diff "github.com/google/go-cmp/cmp"
)

// The architecture, as tests. They read the tree's files in this process:
// a test that asks `go list` is cached by `go test` and goes stale when other
// packages change, whereas the files read here are part of the cache's key.

const module = "bivy"

// edges is who imports whom in shipped code, exactly: a package or an import
// that is not here fails, and so does a line that nothing stands for any
// more. Names are of internal/, and "client" is the public client. A new line
// is a decision; the reasons are in docs/architecture.md.
const edges = `
client                            :
cmd/bivy                          : cli client daemon
cmd/bivy-guest                    : guest
cmd/bivy-sentry                   : driver/gvisor/sentry
internal/access                   : audit kind session
internal/api                      : access audit auth client driver kind lifecycle secret session template
internal/api/apitest              : access api audit auth client driver kind lifecycle session template
internal/argv                     : kind
internal/audit                    : kind session
internal/auth                     : access durable kind secret session
internal/bench                    : bundle cgroup client config kind poll
internal/bundle                   : durable kind
internal/bundle/pack              : bundle
internal/cgroup                   : kind
internal/cli                      : audit client config kind session
internal/clip                     :
internal/config                   : dirlock durable kind
internal/daemon                   : access api audit auth bench bundle cli client config doctor driver driver/fake driver/gvisor durable guest/guestclient guest/wire kind lifecycle node secret session snapshot store/sqlite template
internal/dirlock                  : kind
internal/doctor                   : bundle cgroup client config kind template
internal/doctor/missing           : doctor template
internal/driver                   : session
internal/driver/drivertest        : driver kind session
internal/driver/fake              : driver guest/wire guest/wire/gen/filesystem guest/wire/gen/filesystem/filesystemconnect guest/wire/gen/process guest/wire/gen/process/processconnect kind session
internal/driver/gvisor            : cgroup driver driver/gvisor/bootflags kind link session
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
internal/kind                     :
internal/leakcheck                : poll
internal/lifecycle                : audit driver guest/guestclient guest/wire hostclock kind session
internal/link                     :
internal/node                     : driver guest/guestclient guest/wire hostclock kind lifecycle session
internal/poll                     :
internal/sandbox                  : driver session
internal/secret                   :
internal/session                  : argv kind
internal/snapshot                 : driver durable kind session
internal/store/sqlite             : audit auth hostclock kind session
internal/store/storetest          : audit kind lifecycle session
internal/template                 : argv dirlock durable kind template/debian template/image template/source template/tree
internal/template/debian          : kind template/source template/tree
internal/template/image           : template/tree
internal/template/source          : kind template/tree
internal/template/tree            : kind
internal/testbed                  : template
internal/trace                    :
`

// fences hold whatever edges says, over everything a package reaches.
var fences = []struct {
	of    string // a package, or a folder of them when it ends in /
	only  string // what of this module it may reach; empty: anything
	never string // what it must not reach
	std   bool   // and nothing of other modules
	why   string
}{
	{of: "client", only: "client", std: true, why: "it is what others import: standard library only"},
	{of: "internal/kind", only: "internal/kind", std: true, why: "everyone imports it: standard library only"},
	{of: "internal/durable", only: "internal/durable", std: true, why: "a leaf that everything may use: standard library only"},
	{of: "internal/poll", only: "internal/poll", std: true, why: "a leaf that everything may use: standard library only"},
	{of: "internal/clip", only: "internal/clip", std: true, why: "a leaf that everything may use: standard library only"},
	{of: "internal/dirlock", only: "internal/dirlock internal/kind", std: true, why: "a leaf that everything may use"},
	{of: "internal/argv", only: "internal/argv internal/kind", std: true, why: "the guest and the vocabulary import it"},
	{of: "internal/session", only: "internal/session internal/argv internal/kind", std: true, why: "it is vocabulary"},
	{of: "internal/secret", only: "internal/secret", std: true, why: "a type that does not show what it holds needs nobody's help"},
	{of: "internal/audit", only: "internal/audit internal/session internal/argv internal/kind internal/durable internal/clip", std: true, why: "who checks a record should have little to read"},
	{of: "internal/guest", only: "internal/guest internal/guest/ internal/argv internal/kind", why: "the guest contains nothing of the control plane"},
	{of: "internal/guest/", only: "internal/guest internal/guest/ internal/argv internal/kind", why: "the guest contains nothing of the control plane"},
	{of: "cmd/bivy-guest", only: "cmd/bivy-guest internal/guest internal/guest/ internal/argv internal/kind", why: "the guest contains nothing of the control plane"},
	{of: "cmd/bivy-sentry", only: "cmd/bivy-sentry internal/driver/gvisor/sentry internal/driver/gvisor/bootflags", why: "every sandbox executes it: no SQL, no HTTP, no CLI"},
	{of: "internal/lifecycle", never: "internal/store/ internal/node internal/driver/ internal/api internal/daemon internal/link internal/cgroup internal/template", why: "steps speak to ports; parts are chosen by the daemon"},
	{of: "internal/node", never: "internal/store/ internal/auth internal/driver/ internal/api internal/daemon internal/link internal/cgroup internal/template", why: "a node knows sandboxes and a driver's contract; it cannot reach the database"},
	{of: "internal/api", never: "internal/store/ internal/node internal/driver/ internal/daemon internal/link internal/cgroup internal/bundle", why: "the API cannot reach a driver, a node or a database: it calls the lifecycle"},
	{of: "internal/cli", only: "internal/cli client internal/config internal/audit internal/session internal/argv internal/kind internal/durable internal/clip internal/dirlock internal/poll", why: "the command line is a client like any other: what it cannot do over REST, its caller injects"},
	{of: "internal/store/sqlite", never: "internal/lifecycle internal/node internal/driver internal/driver/ internal/api internal/guest internal/guest/", why: "a store keeps rows and knows no work"},
	{of: "internal/driver/", never: "internal/store/ internal/lifecycle internal/node internal/api internal/daemon internal/template", why: "a driver isolates, and knows sandboxes only"},
	{of: "internal/template", never: "internal/store/ internal/lifecycle internal/node internal/driver internal/driver/ internal/api internal/daemon", why: "an image is made from hostile input, far from everything else"},
	{of: "internal/snapshot", never: "internal/store/ internal/lifecycle internal/node internal/driver/ internal/api internal/daemon", why: "a snapshot is nobody's session"},
}

// quarantine is where what is heavy or dangerous may be imported; tests may in
// their own list too. An entry that nobody uses any more fails.
var quarantine = []struct{ imports, in, tests, why string }{
	{"gvisor.dev/", "internal/driver/gvisor internal/driver/gvisor/ internal/link", "", "slow to compile, large, and of no stable interface"},
	{"database/sql", "internal/store/", "", "one place speaks SQL"},
	{"modernc.org/", "internal/store/sqlite", "", "one place names a database"},
	{"connectrpc.com/", "internal/guest internal/guest/ internal/driver/fake", "", "the protocol between host and guest"},
	{"google.golang.org/protobuf/", "internal/guest internal/guest/ internal/driver/fake", "", "generated code stays behind its adapter"},
	{"github.com/google/go-containerregistry/", "internal/template/ internal/template", "", "registries are read in one place"},
	{"github.com/erofs/", "internal/template/image internal/template", "", "images are written in one place"},
	{"github.com/opencontainers/runtime-spec/", "internal/driver/gvisor", "", "what gVisor reads"},
	{"go.yaml.in/yaml/", "internal/config", "internal/api", "files that people write are decoded strictly, in few places"},
	{"github.com/spf13/cobra", "internal/cli", "", "one place reads the command line"},
	{"github.com/schollz/", "internal/cli", "", "one place draws on terminals"},
	{"unsafe", "internal/driver/gvisor/sentry internal/guest/accounts internal/guest/watch internal/guest/wire/gen/", "", "go:linkname in one file, system calls that x/sys lacks in two, and generated code"},
	{"log", "internal/driver/gvisor/sentry/gen internal/bundle/pack", "internal/template internal/template/source", "generators, and tests whose registry takes no other; everything else has log/slog"},
}

// bans are names that no file may use, but for the places in except.
var bans = []struct {
	pkg, names string
	tests      bool // concerns test files; else shipped code
	except     string
	why        string
}{
	{pkg: "time", names: "Sleep", tests: true, why: "a test waits for an event, or runs in testing/synctest"},
	{pkg: "os", names: "Getenv LookupEnv ExpandEnv", except: "internal/config cmd/", why: "configuration is read in one place and passed on"},
	{pkg: "net/http", names: "DefaultClient DefaultTransport Get Head Post PostForm DefaultServeMux Handle HandleFunc ListenAndServe", why: "a shared client has no timeout and a shared mux no owner"},
	{pkg: "net/http", names: "DefaultClient Get Head Post PostForm DefaultServeMux Handle HandleFunc", tests: true, why: "a test uses its server's client"},
	{pkg: "log/slog", names: "Default SetDefault Debug Info Warn Error", except: "cmd/", why: "loggers are passed, not shared"},
}

// longFiles and longFuncs are above the tripwires of 800 lines a file and 130
// a function of shipped code, each with the reason why it stays whole. A test
// may be as long as its table.
var (
	longFiles = map[string]string{}
	longFuncs = map[string]string{}
)

const (
	maxFileLines = 800
	maxFuncLines = 130
)

// forTests are packages that tests alone may use: no binary reaches them.
func forTests(dir string) bool {
	return strings.HasSuffix(path.Base(dir), "test") || path.Base(dir) == "testbed"
}

// A source is one parsed file.
type source struct {
	name      string // slash-separated, from the root of the module
	dir       string
	test      bool
	generated bool
	lines     int
	fset      *token.FileSet
	ast       *ast.File
}

// at is a position as people and editors read it.
func (s *source) at(p token.Pos) string {
	return fmt.Sprintf("%s:%d", s.name, s.fset.Position(p).Line)
}

// imports maps the name by which each import is known in the file to its path.
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

// never reports whether no build at all takes the file in.
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

// tree reads every Go file of the module.
func tree(t *testing.T) []*source {
	t.Helper()
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
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 100 {
		t.Fatalf("only %d Go files found: the tests of the architecture are looking at the wrong place", len(files))
	}
	return files
}

// within reports whether dir is named by one of the words of list: exactly,
// or below a word that ends in "/".
func within(dir, list string) bool {
	return slices.ContainsFunc(strings.Fields(list), func(w string) bool {
		return dir == w || strings.HasSuffix(w, "/") && strings.HasPrefix(dir+"/", w) && dir+"/" != w
	})
}

// local returns the directory of an import of this module.
func local(imp string) (string, bool) { return strings.CutPrefix(imp, module+"/") }

func thirdParty(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return strings.Contains(first, ".")
}

// graph is what the shipped files of each package import.
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

// reach is every import of a package and of the packages of this module that
// it reaches, with the way to it.
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
			t.Errorf("package %s is not in the table: a new package is a decision, add its line to edges in arch_test.go:\n%s", dir, edgeLine(dir, g[dir]))
			continue
		}
		for imp := range g[dir] {
			if to, ok := local(imp); ok && !slices.Contains(want, to) {
				t.Errorf("%s imports %s: a new edge is a decision, add it to edges in arch_test.go or go another way", dir, to)
			}
		}
		for _, to := range want {
			if !g[dir][module+"/"+to] {
				t.Errorf("%s does not import %s any more: take it out of edges in arch_test.go", dir, to)
			}
		}
	}
	for dir := range table {
		if g[dir] == nil {
			t.Errorf("package %s has disappeared: take its line out of edges in arch_test.go", dir)
		}
	}
}

// edgeLine is what edges would say of a package.
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
	for _, fence := range fences {
		found := false
		for dir := range g {
			if !within(dir, fence.of) {
				continue
			}
			found = true
			for imp, way := range reach(g, dir) {
				to, ours := local(imp)
				if !ours {
					if fence.std && thirdParty(imp) {
						t.Errorf("%s reaches %s by %s: %s", dir, imp, way, fence.why)
					}
					continue
				}
				if fence.only != "" && !within(to, fence.only) {
					t.Errorf("%s reaches %s by %s: %s", dir, to, way, fence.why)
				}
				if within(to, fence.never) && !samePart(dir, to) {
					t.Errorf("%s reaches %s by %s: %s", dir, to, way, fence.why)
				}
			}
		}
		if !found {
			t.Errorf("nothing is behind the fence of %q any more", fence.of)
		}
	}
	for dir := range g {
		if strings.HasPrefix(dir, "cmd/") {
			for imp, way := range reach(g, dir) {
				if to, ok := local(imp); ok && forTests(to) {
					t.Errorf("%s ships %s, which is for tests, by %s", dir, to, way)
				}
			}
		}
		if g[dir][module+"/internal/daemon"] && !strings.HasPrefix(dir, "cmd/") {
			t.Errorf("%s imports internal/daemon: it assembles parts and nobody but a main is above it", dir)
		}
	}
}

// samePart: a fence keeps parts apart, not a part from its own folders.
func samePart(a, b string) bool {
	return strings.HasPrefix(b+"/", a+"/") || strings.HasPrefix(a+"/", b+"/")
}

func TestQuarantine(t *testing.T) {
	files := tree(t)
	for _, q := range quarantine {
		used := false
		for _, f := range files {
			for _, imp := range f.imports() {
				if imp != q.imports && (!strings.HasSuffix(q.imports, "/") || !strings.HasPrefix(imp, q.imports)) {
					continue
				}
				used = true
				if !within(f.dir, q.in) && (!f.test || !within(f.dir, q.tests)) {
					t.Errorf("%s imports %s, which belongs in %s: %s", f.name, imp, q.in, q.why)
				}
			}
		}
		if !used {
			t.Errorf("nobody imports %s any more: take it out of quarantine in arch_test.go", q.imports)
		}
	}
}

// checks look at one file and return what is wrong with it.
var checks = map[string]func(*source) []string{
	"bans":       banned,
	"init":       initialisers,
	"interfaces": bareInterfaces,
	"exported":   bareExported,
	"size":       oversize,
}

func TestHouseRules(t *testing.T) {
	files := tree(t)
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		t.Run(name, func(t *testing.T) {
			for _, f := range files {
				for _, finding := range checks[name](f) {
					t.Error(finding)
				}
			}
		})
	}
	for key := range longFiles {
		if !slices.ContainsFunc(files, func(f *source) bool { return f.name == key && f.lines > maxFileLines }) {
			t.Errorf("longFiles: %s is not too long any more", key)
		}
	}
	for key := range longFuncs {
		if !slices.ContainsFunc(files, func(f *source) bool {
			return slices.ContainsFunc(f.ast.Decls, func(d ast.Decl) bool {
				fn, ok := d.(*ast.FuncDecl)
				return ok && f.dir+"."+fn.Name.Name == key && length(f, fn) > maxFuncLines
			})
		}) {
			t.Errorf("longFuncs: %s is not too long any more", key)
		}
	}
}

// TestChecksBite proves that each check still finds what it is for.
func TestChecksBite(t *testing.T) {
	bubble, err := parse("internal/x/x_test.go", []byte("package x\nimport (\"time\"; \"testing/synctest\")\nfunc f() { synctest.Test(nil, func() { time.Sleep(1) }) }"))
	if err != nil || len(banned(bubble)) > 0 {
		t.Errorf("sleeping in a bubble is allowed: %v", err)
	}
	for _, tt := range []struct{ check, name, src string }{
		{"bans", "internal/x/x_test.go", "package x\nimport \"time\"\nfunc f() { time.Sleep(1) }"},
		{"bans", "internal/x/x.go", "package x\nimport env \"os\"\nvar x = env.Getenv(\"HOME\")"},
		{"bans", "internal/x/x.go", "package x\nimport \"net/http\"\nvar c = http.DefaultClient"},
		{"bans", "internal/x/x_test.go", "package x\nimport \"net/http\"\nvar _, _ = http.Get(\"\")"},
		{"init", "internal/x/x.go", "package x\nfunc init() {}"},
		{"interfaces", "internal/x/x.go", "package x\ntype i interface{ M() }"},
		{"exported", "internal/x/x.go", "package x\nfunc F() {}"},
		{"exported", "internal/x/x.go", "package x\ntype T struct{}"},
		{"exported", "internal/x/x.go", "package x\nconst C = 1"},
		{"size", "internal/x/x.go", "package x\n" + strings.Repeat("\n", maxFileLines)},
		{"size", "internal/x/x.go", "package x\nfunc f() {" + strings.Repeat("\n", maxFuncLines+1) + "}"},
	} {
		f, err := parse(tt.name, []byte(tt.src))
		if err != nil {
			t.Fatal(err)
		}
		if len(checks[tt.check](f)) == 0 {
			t.Errorf("%s finds nothing wrong with %q", tt.check, tt.src)
		}
	}
	if !never([]byte("//go:build never\n\npackage x\n")) || never([]byte("//go:build linux && !race\n\npackage x\n")) {
		t.Error("build constraints are misread")
	}
}

func banned(f *source) []string {
	var found []string
	names := f.imports()
	ast.Inspect(f.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		id, ok := sel.X.(*ast.Ident)
		if !ok {
			return true
		}
		for _, b := range bans {
			if names[id.Name] == b.pkg && f.test == b.tests && slices.Contains(strings.Fields(b.names), sel.Sel.Name) && !within(f.dir, b.except) && !inBubble(f, n) {
				found = append(found, fmt.Sprintf("%s: %s.%s: %s", f.at(n.Pos()), b.pkg, sel.Sel.Name, b.why))
			}
		}
		return true
	})
	return found
}

// inBubble reports whether n is inside a call of synctest.Test, where sleeping
// moves a clock and takes no time.
func inBubble(f *source, n ast.Node) bool {
	inside := false
	ast.Inspect(f.ast, func(m ast.Node) bool {
		if call, ok := m.(*ast.CallExpr); ok && call.Pos() <= n.Pos() && n.End() <= call.End() {
			if sel, ok := call.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Test" {
				id, ok := sel.X.(*ast.Ident)
				inside = inside || ok && f.imports()[id.Name] == "testing/synctest"
			}
		}
		return !inside
	})
	return inside
}

func initialisers(f *source) []string {
	if f.generated {
		return nil
	}
	var found []string
	for _, d := range f.ast.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
			found = append(found, f.at(fn.Pos())+": func init: importing a package has no effect here; call a constructor")
		}
	}
	return found
}

func bareInterfaces(f *source) []string {
	if f.generated {
		return nil
	}
	var found []string
	ast.Inspect(f.ast, func(n ast.Node) bool {
		d, ok := n.(*ast.GenDecl)
		if !ok {
			return true
		}
		for _, s := range d.Specs {
			ts, ok := s.(*ast.TypeSpec)
			if !ok {
				continue
			}
			if _, ok := ts.Type.(*ast.InterfaceType); ok && ts.Doc == nil && d.Doc == nil {
				found = append(found, fmt.Sprintf("%s: interface %s has no comment, and the comment is the contract", f.at(ts.Pos()), ts.Name.Name))
			}
		}
		return true
	})
	return found
}

// bareExported finds exported names of shipped code without a comment: of
// the package itself and methods on its exported types.
func bareExported(f *source) []string {
	if f.generated || f.test {
		return nil
	}
	var found []string
	missing := func(id *ast.Ident, docs ...*ast.CommentGroup) {
		if id.IsExported() && !slices.ContainsFunc(docs, func(c *ast.CommentGroup) bool { return c != nil }) {
			found = append(found, fmt.Sprintf("%s: %s is exported without a comment", f.at(id.Pos()), id.Name))
		}
	}
	for _, d := range f.ast.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil || ast.IsExported(receiver(d)) && !ofStandardInterface(d.Name.Name) {
				missing(d.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					missing(s.Name, d.Doc, s.Doc, s.Comment)
				case *ast.ValueSpec:
					for _, id := range s.Names {
						missing(id, d.Doc, s.Doc, s.Comment)
					}
				}
			}
		}
	}
	return found
}

// ofStandardInterface: methods whose meaning the standard library gives.
func ofStandardInterface(name string) bool {
	return slices.Contains([]string{"Error", "Unwrap", "Is", "As", "String", "GoString", "Format", "LogValue", "Read", "Write", "Close",
		"Len", "Less", "Swap", "MarshalJSON", "UnmarshalJSON", "MarshalText", "UnmarshalText", "UnmarshalYAML", "ServeHTTP"}, name)
}

func receiver(d *ast.FuncDecl) string {
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

func oversize(f *source) []string {
	if f.generated {
		return nil
	}
	var found []string
	if f.lines > maxFileLines && longFiles[f.name] == "" {
		found = append(found, fmt.Sprintf("%s has %d lines: split it, or give the reason in longFiles", f.name, f.lines))
	}
	for _, d := range f.ast.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if ok && !f.test && length(f, fn) > maxFuncLines && longFuncs[f.dir+"."+fn.Name.Name] == "" {
			found = append(found, fmt.Sprintf("%s: %s has %d lines: split it, or give the reason in longFuncs", f.at(fn.Pos()), fn.Name.Name, length(f, fn)))
		}
	}
	return found
}

func length(f *source, fn *ast.FuncDecl) int {
	return f.fset.Position(fn.End()).Line - f.fset.Position(fn.Pos()).Line + 1
}

func TestPackageComments(t *testing.T) {
	comments, seen := map[string]int{}, map[string]bool{}
	for _, f := range tree(t) {
		if f.test {
			continue
		}
		seen[f.dir] = seen[f.dir] || !f.generated
		if f.ast.Doc != nil {
			comments[f.dir]++
			if want := cmp.Or(map[bool]string{true: "Command "}[f.ast.Name.Name == "main"], "Package "+f.ast.Name.Name+" "); !f.generated && !strings.HasPrefix(f.ast.Doc.Text(), want) {
				t.Errorf("%s: the package comment does not begin with %q", f.name, want)
			}
		}
	}
	for dir, written := range seen {
		if written && comments[dir] != 1 {
			t.Errorf("package %s has %d package comments, not one", dir, comments[dir])
		}
	}
}

var update = flag.Bool("update", false, "write docs/deps/*.txt anew")

// TestDependencyLists holds the packages of other modules that each binary's
// own code imports against the list in git, so that a new one is seen in review.
func TestDependencyLists(t *testing.T) {
	g := graph(tree(t))
	lists, err := filepath.Glob("docs/deps/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		if dir := "cmd/" + strings.TrimSuffix(filepath.Base(list), ".txt"); g[dir] == nil {
			t.Errorf("%s is the list of no binary", list)
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
			t.Errorf("%s is stale; if what follows is meant: go test . -run DependencyLists -update\n%s", file, d)
		}
	}
	if binaries < 2 {
		t.Errorf("only %d binaries under cmd/", binaries)
	}
}

// dependencies lists, a line each, what of other modules the closure of a
// main imports, and which of our packages do.
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
