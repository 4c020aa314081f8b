package bivy_test

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
)

// Rules for the source text of files and packages. Where the tree breaks one,
// the exception is listed here with its reason, and fails once it is not needed.

// bans are names of other packages that no file may use, except in the
// packages of except.
var bans = []struct {
	pkg, names string
	tests      bool // about test files; false: about shipped code
	except     string
	why        string
}{
	{pkg: "time", names: "Sleep", tests: true, why: "a test waits for an event or runs in testing/synctest"},
	{pkg: "os", names: "Getenv LookupEnv ExpandEnv", except: "internal/config cmd/", why: "configuration is read in one place and passed on"},
	{pkg: "net/http", names: "DefaultClient DefaultTransport Get Head Post PostForm DefaultServeMux Handle HandleFunc ListenAndServe", why: "a shared client has no timeout and a shared mux no owner"},
	{pkg: "net/http", names: "DefaultClient Get Head Post PostForm DefaultServeMux Handle HandleFunc", tests: true, why: "a test uses its server's client"},
	{pkg: "log/slog", names: "Default SetDefault Debug Info Warn Error", except: "cmd/", why: "loggers are passed, not shared"},
}

// Limits of size. Generated files do not count.
const (
	maxFileLines    = 800  // of any file
	maxFuncLines    = 130  // of a function of shipped code
	maxPackageLines = 4000 // of the shipped files of a package together
	maxPlainFiles   = 4    // shipped files of a package without a doc.go
)

// What is above a limit, each with the reason why it stays whole.
var (
	longFiles   = map[string]string{} // by name
	longFuncs   = map[string]string{} // by package and name
	bigPackages = map[string]string{} // by package
)

// withoutDoc are packages of more than maxPlainFiles files that have no doc.go
// yet.
const withoutDoc = ``

// bareMethods are methods of exported interfaces that have no comment yet, by
// package, type and name.
const bareMethods = ``

// domain are the packages in which every exported field of an exported struct
// has a comment: its own above it, one at the end of its line, or one at the
// beginning of its group of lines, which a blank line ends.
const domain = "client internal/access internal/audit internal/driver internal/sandbox internal/session"

// bareFields are fields of the domain that have no comment yet, by package,
// type and name.
const bareFields = ``

// checks look at one file and return what is wrong with it.
var checks = map[string]func(*source) []string{
	"methods": func(f *source) []string {
		return except(undocumentedMethods(f), bareMethods, "method of an exported interface without a comment")
	},
	"fields": func(f *source) []string {
		return except(undocumentedFields(f), bareFields, "exported field without a comment")
	},
	"bans":       banned,
	"init":       initFuncs,
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
			t.Errorf("longFiles: %s has at most %d lines: remove it", key, maxFileLines)
		}
	}
	for key := range longFuncs {
		if !slices.ContainsFunc(files, func(f *source) bool {
			return slices.ContainsFunc(f.ast.Decls, func(d ast.Decl) bool {
				fn, ok := d.(*ast.FuncDecl)
				return ok && f.dir+"."+fn.Name.Name == key && length(f, fn) > maxFuncLines
			})
		}) {
			t.Errorf("longFuncs: %s has at most %d lines: remove it", key, maxFuncLines)
		}
	}
	for name, list := range map[string]struct {
		known string
		find  func(*source) []finding
	}{"bareMethods": {bareMethods, undocumentedMethods}, "bareFields": {bareFields, undocumentedFields}} {
		found := map[string]bool{}
		for _, f := range files {
			for _, x := range list.find(f) {
				found[x.name] = true
			}
		}
		for key := range strings.FieldsSeq(list.known) {
			if !found[key] {
				t.Errorf("%s: %s has a comment, or does not exist: remove it", name, key)
			}
		}
	}
}

// A finding is something that breaks a rule.
type finding struct {
	name string // package, type and name, e.g. internal/driver.Driver.Start
	at   string // file and line
}

// except turns findings that are not in the list of known ones into messages.
func except(found []finding, known, what string) []string {
	var out []string
	for _, x := range found {
		if !slices.Contains(strings.Fields(known), x.name) {
			out = append(out, fmt.Sprintf("%s: %s: %s", x.at, x.name, what))
		}
	}
	return out
}

// TestPackageSize limits what one package may hold.
func TestPackageSize(t *testing.T) {
	files := tree(t)
	for _, msg := range oversizePackages(files, bigPackages) {
		t.Error(msg)
	}
	for _, msg := range missingDocs(files, withoutDoc) {
		t.Error(msg)
	}
	// The checks find what they are for.
	some := func(n, lines int) []*source {
		var fs []*source
		for i := range n {
			fs = append(fs, &source{name: fmt.Sprintf("internal/x/%d.go", i), dir: "internal/x", lines: lines})
		}
		return fs
	}
	for _, tt := range []struct {
		name  string
		files []*source
		want  bool
	}{
		{"too many lines", some(5, maxPackageLines/5+1), true},
		{"as many as there may be", some(5, maxPackageLines/5), false},
		{"generated and test files", append(some(4, 1000), &source{name: "internal/x/x_test.go", dir: "internal/x", test: true, lines: 9000}, &source{name: "internal/x/g.go", dir: "internal/x", generated: true, lines: 9000}), false},
	} {
		if got := len(oversizePackages(tt.files, nil)) > 0; got != tt.want {
			t.Errorf("%s: refused: %t", tt.name, got)
		}
	}
	if len(oversizePackages(some(1, 1), map[string]string{"internal/x": "it was large"})) == 0 {
		t.Error("an exception that is not needed is accepted")
	}
	withDoc := append(some(maxPlainFiles, 1), &source{name: "internal/x/doc.go", dir: "internal/x"})
	for _, tt := range []struct {
		name  string
		files []*source
		known string
		want  bool
	}{
		{"five files, no doc.go", some(maxPlainFiles+1, 1), "", true},
		{"five files, no doc.go, listed", some(maxPlainFiles+1, 1), "internal/x", false},
		{"four files", some(maxPlainFiles, 1), "", false},
		{"doc.go", withDoc, "", false},
		{"doc.go, listed", withDoc, "internal/x", true},
	} {
		if got := len(missingDocs(tt.files, tt.known)) > 0; got != tt.want {
			t.Errorf("%s: refused: %t", tt.name, got)
		}
	}
}

// oversizePackages returns packages with too many lines of shipped code, and
// exceptions that are not needed.
func oversizePackages(files []*source, known map[string]string) []string {
	lines := map[string]int{}
	for _, f := range files {
		if !f.test && !f.generated {
			lines[f.dir] += f.lines
		}
	}
	var found []string
	for _, dir := range slices.Sorted(maps.Keys(lines)) {
		if lines[dir] > maxPackageLines && known[dir] == "" {
			found = append(found, fmt.Sprintf("package %s has %d lines of shipped code, the limit is %d: split it, or give the reason in bigPackages", dir, lines[dir], maxPackageLines))
		}
	}
	for dir := range known {
		if lines[dir] <= maxPackageLines {
			found = append(found, fmt.Sprintf("bigPackages: %s has %d lines, the limit is %d: remove it", dir, lines[dir], maxPackageLines))
		}
	}
	return found
}

// missingDocs returns packages of many files without a doc.go, and exceptions
// that are not needed.
func missingDocs(files []*source, known string) []string {
	count, doc := map[string]int{}, map[string]bool{}
	for _, f := range files {
		if f.test || f.generated {
			continue
		}
		if path.Base(f.name) == "doc.go" {
			doc[f.dir] = true
		} else {
			count[f.dir]++
		}
	}
	missing := func(dir string) bool { return count[dir] > maxPlainFiles && !doc[dir] }
	var found []string
	for _, dir := range slices.Sorted(maps.Keys(count)) {
		if missing(dir) && !slices.Contains(strings.Fields(known), dir) {
			found = append(found, fmt.Sprintf("package %s has %d files: put its comment, terms and an example in a doc.go", dir, count[dir]))
		}
	}
	for dir := range strings.FieldsSeq(known) {
		if !missing(dir) {
			found = append(found, fmt.Sprintf("withoutDoc: %s has a doc.go or needs none: remove it", dir))
		}
	}
	return found
}

// TestChecksFindViolations checks that each check finds what it is for.
func TestChecksFindViolations(t *testing.T) {
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
		{"methods", "internal/x/x.go", "package x\ntype I interface {\n\t// A has a comment.\n\tA()\n\tB()\n}"},
		{"fields", "client/x.go", "package client\ntype T struct {\n\tA int // has a comment\n\tB int\n}"},
		{"fields", "client/x.go", "package client\ntype T struct {\n\t// A and B have one.\n\tA int\n\tB int\n\n\tC int\n}"},
		{"fields", "client/x.go", "package client\ntype T struct {\n\tA struct {\n\t\tB int // of the inner struct\n\t}\n}"},
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
	for _, tt := range []struct{ check, name, src string }{
		{"methods", "internal/x/x.go", "package x\ntype I interface {\n\t// A has a comment.\n\tA()\n\tB() // so has B\n\tError\n}\ntype i interface { C() }"},
		{"fields", "client/x.go", "package client\ntype T struct {\n\tA int // has a comment\n\tE\n\tb int\n\n\t// C and D have one.\n\tC int\n\tD, F int\n}\ntype t struct { A int }"},
		{"fields", "internal/x/x.go", "package x\ntype T struct { A int }"},
	} {
		f, err := parse(tt.name, []byte(tt.src))
		if err != nil {
			t.Fatal(err)
		}
		if found := checks[tt.check](f); len(found) > 0 {
			t.Errorf("%s refuses %q: %q", tt.check, tt.src, found)
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

func initFuncs(f *source) []string {
	if f.generated {
		return nil
	}
	var found []string
	for _, d := range f.ast.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
			found = append(found, f.at(fn.Pos())+": func init: importing a package must have no effect; use a constructor")
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
				found = append(found, fmt.Sprintf("%s: interface %s has no comment; the comment is its contract", f.at(ts.Pos()), ts.Name.Name))
			}
		}
		return true
	})
	return found
}

// undocumentedMethods finds methods of exported interfaces of shipped code
// without a comment. Embedded interfaces have their own.
func undocumentedMethods(f *source) []finding {
	return membersOf(f, func(typ string, t ast.Expr) []finding {
		i, ok := t.(*ast.InterfaceType)
		if !ok {
			return nil
		}
		var found []finding
		for _, m := range i.Methods.List {
			if m.Doc == nil && m.Comment == nil {
				for _, id := range m.Names {
					found = append(found, finding{name: typ + "." + id.Name, at: f.at(id.Pos())})
				}
			}
		}
		return found
	})
}

// undocumentedFields finds exported fields of exported structs of the domain
// without a comment.
func undocumentedFields(f *source) []finding {
	if !within(f.dir, domain) {
		return nil
	}
	return membersOf(f, func(typ string, t ast.Expr) []finding {
		st, ok := t.(*ast.StructType)
		if !ok {
			return nil
		}
		var found []finding
		group, end := false, 0 // whether the lines up to end are below a comment
		for _, m := range st.Fields.List {
			first := f.fset.Position(m.Pos()).Line
			if m.Doc != nil {
				group = true
			} else if first != end+1 {
				group = false
			}
			end = f.fset.Position(m.End()).Line
			if group || m.Comment != nil {
				continue
			}
			for _, id := range m.Names { // an embedded field has none: its type has the comment
				if id.IsExported() {
					found = append(found, finding{name: typ + "." + id.Name, at: f.at(id.Pos())})
				}
			}
		}
		return found
	})
}

// membersOf calls find for each exported type of a shipped file, with the name
// of package and type.
func membersOf(f *source, find func(typ string, t ast.Expr) []finding) []finding {
	if f.generated || f.test || forTests(f.dir) {
		return nil
	}
	var found []finding
	for _, d := range f.ast.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.TYPE {
			continue
		}
		for _, s := range g.Specs {
			if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.IsExported() {
				found = append(found, find(f.dir+"."+ts.Name.Name, ts.Type)...)
			}
		}
	}
	return found
}

// bareExported finds exported names of shipped code without a comment: those
// of the package, and methods of its exported types.
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

// ofStandardInterface reports whether the standard library says what the method
// does.
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

// length returns the lines of a function.
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
