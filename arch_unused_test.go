package bivy_test

import (
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// Shipped code that only tests use is found on the syntax tree, by name and
// without types: a name counts as used when shipped code mentions a function,
// type, constant or variable of that name of the package, or any method or
// field of that name. So it misses some, and what it reports is true except for
// methods that another module calls through an interface of its own, which
// calledFromOutside lists.
//
// A package may have one hook for tests: a field, variable, function or type
// whose comment calls it a fail point. The members of such a type belong to it.

// knownTestOnly is what only tests use and is still there, each with the
// reason. An entry that is no longer needed fails.
var knownTestOnly = map[string]string{
	"internal/driver.CheckpointOptions.Leave":     "part of the contract of drivers, which a standby will use",
	"internal/driver/fake.Driver.Script":          "it takes the faults that are the package's fail point",
	"internal/driver/fake.Host.Forget":            "tests script failures of the fake driver",
	"internal/driver/fake.Host.Reboot":            "tests script failures of the fake driver",
	"internal/guest/guestclient.Unknown":          "it names the zero value",
	"internal/guest/guestclient.Exit.ShellCode":   "only tests need a shell's exit code",
	"internal/template/source.Registry.PlainHTTP": "template/sources.go sets it, in a method whose name hides the package's from this check",
}

// calledFromOutside are methods that the standard library or another module
// calls through an interface.
const calledFromOutside = `
	Accept Addr Close Write Read WriteTo ReadFrom Seek
	Open ReadDir ReadFile ReadLink Lstat Stat
`

// A declared name of shipped code.
type declared struct {
	key      string // package, type for members, and name
	dir      string
	name     string
	at       string
	what     string // "function", "method", "type", "constant", "variable" or "field"
	hook     bool   // its comment calls it a fail point
	tagged   bool   // a field that is encoded and decoded by its tag
	of       string // of a method or field: the name of its type
	exported bool
}

// usage is where names are mentioned and set. Each key is a package and a name.
type usage struct {
	names  map[[2]string]bool // what is declared in the package
	member map[[2]string]bool // methods and fields; the package is the one that mentions them, "" any
	vars   map[[2]string]bool // variables of the package that get a value
	fields map[[2]string]bool // fields that get a value; the package is the one that sets them, "" any
	whole  map[[2]string]bool // types of the package with literals that set every field
}

func newUsage() usage {
	return usage{map[[2]string]bool{}, map[[2]string]bool{}, map[[2]string]bool{}, map[[2]string]bool{}, map[[2]string]bool{}}
}

// scope is the package in which members of that name are looked for.
func (d declared) scope() [2]string {
	if d.exported {
		return [2]string{"", d.name}
	}
	return [2]string{d.dir, d.name}
}

// uses reports whether d is mentioned.
func (u usage) uses(d declared) bool {
	if d.what == "method" || d.what == "field" {
		return u.member[d.scope()]
	}
	return u.names[[2]string{d.dir, d.name}]
}

// sets reports whether d, a field or a variable, gets a value after its
// declaration.
func (u usage) sets(d declared) bool {
	if d.what == "field" {
		return u.fields[d.scope()] || u.whole[[2]string{d.dir, d.of}]
	}
	return u.vars[[2]string{d.dir, d.name}]
}

// collect adds what one file mentions.
func (u usage) collect(f *source) {
	imports := f.imports()
	pkg := func(x ast.Expr) (string, bool) {
		id, ok := x.(*ast.Ident)
		if !ok {
			return "", false
		}
		return local(imports[id.Name])
	}
	member := func(name string) {
		u.member[[2]string{f.dir, name}], u.member[[2]string{"", name}] = true, true
	}
	field := func(name string) {
		u.fields[[2]string{f.dir, name}], u.fields[[2]string{"", name}] = true, true
	}
	var locals map[string]bool // names that the function declares itself
	set := func(x ast.Expr) {
		for {
			switch e := x.(type) {
			case *ast.ParenExpr:
				x = e.X
				continue
			case *ast.IndexExpr:
				x = e.X
				continue
			case *ast.SelectorExpr:
				if dir, ok := pkg(e.X); ok {
					u.vars[[2]string{dir, e.Sel.Name}] = true
				} else {
					field(e.Sel.Name)
				}
			case *ast.Ident:
				if !locals[e.Name] {
					u.vars[[2]string{f.dir, e.Name}] = true
				}
			}
			return
		}
	}
	skip := map[*ast.Ident]bool{} // names where they are declared
	var own string                // function that is being read: calling itself is no use
	visit := func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			skip[n.Sel] = true
			if dir, ok := pkg(n.X); ok {
				u.names[[2]string{dir, n.Sel.Name}] = true
			} else {
				member(n.Sel.Name)
			}
		case *ast.KeyValueExpr:
			if id, ok := n.Key.(*ast.Ident); ok {
				member(id.Name)
				// A field that is copied from one of the same name is passed on, not set.
				if from, ok := n.Value.(*ast.SelectorExpr); !ok || from.Sel.Name != id.Name {
					field(id.Name)
				}
			}
		case *ast.CompositeLit:
			// A literal without keys sets every field.
			if len(n.Elts) > 0 {
				if _, keyed := n.Elts[0].(*ast.KeyValueExpr); !keyed {
					switch t := n.Type.(type) {
					case *ast.Ident:
						u.whole[[2]string{f.dir, t.Name}] = true
					case *ast.SelectorExpr:
						if dir, ok := pkg(t.X); ok {
							u.whole[[2]string{dir, t.Sel.Name}] = true
						}
					}
				}
			}
		case *ast.AssignStmt:
			if n.Tok != token.DEFINE {
				for _, x := range n.Lhs {
					set(x)
				}
			} else {
				for _, x := range n.Lhs {
					if id, ok := x.(*ast.Ident); ok {
						skip[id] = true
					}
				}
			}
		case *ast.IncDecStmt:
			set(n.X)
		case *ast.RangeStmt:
			if n.Tok == token.ASSIGN {
				set(n.Key)
				set(n.Value)
			}
		case *ast.UnaryExpr:
			if n.Op == token.AND {
				set(n.X)
			}
		case *ast.InterfaceType:
			for _, m := range n.Methods.List {
				for _, id := range m.Names {
					member(id.Name)
				}
			}
		case *ast.Field:
			for _, id := range n.Names {
				skip[id] = true
			}
			if len(n.Names) == 0 { // an embedded type is used by its methods
				ast.Inspect(n.Type, func(n ast.Node) bool {
					if id, ok := n.(*ast.Ident); ok {
						member(id.Name)
					}
					return true
				})
			}
		case *ast.ValueSpec:
			for _, id := range n.Names {
				skip[id] = true
			}
		case *ast.TypeSpec:
			skip[n.Name] = true
		case *ast.Ident:
			if !skip[n] && n.Name != own {
				u.names[[2]string{f.dir, n.Name}] = true
			}
		}
		return true
	}
	for _, d := range f.ast.Decls {
		own, locals = "", declaredIn(d)
		if fn, ok := d.(*ast.FuncDecl); ok {
			skip[fn.Name] = true
			if fn.Recv == nil {
				own = fn.Name.Name
			} else {
				skip[receiverIdent(fn)] = true // having methods is no use of a type
			}
		}
		ast.Inspect(d, visit)
	}
}

// declaredIn returns the names of parameters, variables and constants that a
// function declares.
func declaredIn(d ast.Decl) map[string]bool {
	names := map[string]bool{}
	fn, ok := d.(*ast.FuncDecl)
	if !ok {
		return names
	}
	add := func(xs ...ast.Expr) {
		for _, x := range xs {
			if id, ok := x.(*ast.Ident); ok {
				names[id.Name] = true
			}
		}
	}
	ast.Inspect(fn, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				add(n.Lhs...)
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				add(n.Key, n.Value)
			}
		case *ast.ValueSpec:
			for _, id := range n.Names {
				add(id)
			}
		case *ast.Field:
			for _, id := range n.Names {
				add(id)
			}
		}
		return true
	})
	return names
}

// receiverIdent returns the identifier of a method's type.
func receiverIdent(d *ast.FuncDecl) *ast.Ident {
	var found *ast.Ident
	ast.Inspect(d.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && found == nil {
			found = id
		}
		return found == nil
	})
	return found
}

// declarations lists what one shipped file declares.
func declarations(f *source) []declared {
	var all []declared
	add := func(id *ast.Ident, what, of string, docs ...*ast.CommentGroup) *declared {
		d := declared{dir: f.dir, name: id.Name, at: f.at(id.Pos()), what: what, exported: id.IsExported(), key: f.dir + "." + id.Name}
		if of != "" {
			d.key, d.of = f.dir+"."+of+"."+id.Name, of
		}
		for _, c := range docs {
			d.hook = d.hook || strings.Contains(strings.ToLower(strings.Join(strings.Fields(c.Text()), " ")), "fail point")
		}
		all = append(all, d)
		return &all[len(all)-1]
	}
	for _, d := range f.ast.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			switch {
			case d.Recv != nil:
				add(d.Name, "method", receiver(d), d.Doc)
			case d.Name.Name != "main" && d.Name.Name != "init":
				add(d.Name, "function", "", d.Doc)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.ValueSpec:
					what := "variable"
					if d.Tok == token.CONST {
						what = "constant"
					}
					for _, id := range s.Names {
						if id.Name != "_" {
							add(id, what, "", d.Doc, s.Doc, s.Comment)
						}
					}
				case *ast.TypeSpec:
					add(s.Name, "type", "", d.Doc, s.Doc, s.Comment)
					st, ok := s.Type.(*ast.StructType)
					if !ok {
						continue
					}
					for _, m := range st.Fields.List {
						for _, id := range m.Names {
							if id.Name != "_" {
								add(id, "field", s.Name.Name, m.Doc, m.Comment).tagged = m.Tag != nil
							}
						}
					}
				}
			}
		}
	}
	return all
}

// TestTestOnly checks on small packages what testOnly finds.
func TestTestOnly(t *testing.T) {
	for _, tt := range []struct {
		name, shipped, test string
		want                string
	}{
		{"function", "func F() { F() }", "var _ = F", "internal/x.F"},
		{"function that is used", "func F() int { return 1 }\nvar A = F()\nvar _ = A", "var _ = F", ""},
		{"function that nothing uses", "func F() {}", "", ""},
		{"function used by another package", "func F() {}", "var _ = F", ""},
		{"method", "type T struct{}\nfunc (T) M() {}\nvar _ T", "func f(t T) { t.M() }", "internal/x.T.M"},
		{"method of an interface", "type T struct{}\nfunc (T) M() {}\nvar _ T\ntype I interface{ M() }\nvar _ I", "func f(t T) { t.M() }", ""},
		{"method that the standard library calls", "type T struct{}\nfunc (T) String() string { return \"\" }\nvar _ T", "func f(t T) { t.String() }", ""},
		{"constant", "const c = 1", "var _ = c", "internal/x.c"},
		{"type", "type t struct{}\nfunc (t) String() string { return \"\" }", "var _ t", "internal/x.t"},
		{"field", "type T struct { n int }\nvar _ = T{}", "func f(t T) { t.n++ }", "internal/x.T.n"},
		{"field that is read and never set", "type T struct { now func() }\nfunc g(t T) { t.now() }\nvar _ = g", "var _ = T{now: nil}", "internal/x.T.now"},
		{"field that is passed on", "type T struct { Now func() }\ntype U struct { Now func() }\nfunc g(t T) U { return U{Now: t.Now} }\nvar _ = g", "var _ = T{Now: nil}", "internal/x.T.Now internal/x.U.Now"},
		{"field that is set", "type T struct { now func() }\nfunc g(t *T) { t.now = nil; t.now() }\nvar _ = g", "var _ = T{now: nil}", ""},
		{"field of a literal without names", "type T struct { now func() }\nfunc g() { T{nil}.now() }\nvar _ = g", "var _ = T{now: nil}", ""},
		{"field that is decoded", "type T struct { N int `json:\"n\"` }\nfunc g(t T) int { return t.N }\nvar _ = g", "var _ = T{N: 1}", ""},
		{"variable", "var limit = 1\nfunc g() int { return limit }\nvar _ = g", "func f() { limit = 2 }", "internal/x.limit"},
		{"variable of the same name in a test", "var limit = 1\nfunc g() int { return limit }\nvar _ = g", "func f() { limit := 1; limit = 2; _ = limit }", ""},
		{"fail point", "type T struct {\n\thook func() // a fail point\n}\nfunc g(t T) { t.hook() }\nvar _ = g", "var _ = T{hook: nil}", ""},
		{"second fail point", "// F is a fail\n// point.\nfunc F() {}\n// G is a fail point.\nfunc G() {}", "var _, _ = F, G", "internal/x.G"},
		{"type that is a fail point", "// T is a fail point.\ntype T struct { A, B int }\nfunc g(t T) int { return t.A + t.B }\nvar _ = g", "var _ = T{A: 1, B: 2}", ""},
	} {
		var files []*source
		for name, text := range map[string]string{
			"internal/x/x.go":      "package x\n" + tt.shipped,
			"internal/x/x_test.go": "package x\n" + tt.test,
			"internal/y/y.go":      "package y\nimport \"bivy/internal/x\"\n" + map[bool]string{true: "var _ = x.F"}[tt.name == "function used by another package"],
		} {
			f, err := parse(name, []byte(text))
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			files = append(files, f)
		}
		var got []string
		for _, x := range testOnly(files, calledFromOutside) {
			got = append(got, x.name)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: found %q, want %q", tt.name, got, tt.want)
		}
	}
}

// testOnly returns what shipped code declares and only tests use or set, except
// for one fail point in a package.
func testOnly(files []*source, outside string) []finding {
	shipped, tests := newUsage(), newUsage()
	var all []declared
	for _, f := range files {
		switch {
		case f.test || forTests(f.dir):
			tests.collect(f)
		default:
			shipped.collect(f)
			if !f.generated {
				all = append(all, declarations(f)...)
			}
		}
	}
	hooks := map[string]string{} // by package
	hookTypes := map[[2]string]bool{}
	for _, d := range all {
		if d.what == "type" && d.hook {
			hookTypes[[2]string{d.dir, d.name}] = true
		}
	}
	var found []finding
	for _, d := range all {
		if d.dir == "client" && d.exported || d.what == "method" && (ofStandardInterface(d.name) || slices.Contains(strings.Fields(outside), d.name)) {
			continue // used by other modules
		}
		var why string
		switch {
		case !shipped.uses(d) && tests.uses(d):
			why = "only tests use it"
		case (d.what == "field" || d.what == "variable") && !d.tagged && !shipped.sets(d) && tests.sets(d):
			why = "only tests set it"
		default:
			continue
		}
		hook := d.key
		if hookTypes[[2]string{d.dir, d.of}] {
			d.hook, hook = true, d.dir+"."+d.of // the type is the hook
		}
		if d.hook && (hooks[d.dir] == "" || hooks[d.dir] == hook) {
			hooks[d.dir] = hook
			continue
		}
		if d.hook {
			why += ", and the package has the fail point " + hooks[d.dir] + " already"
		}
		found = append(found, finding{name: d.key, at: fmt.Sprintf("%s: %s %s: %s", d.at, d.what, d.key, why)})
	}
	return found
}

func TestShippedCodeIsForUsers(t *testing.T) {
	found := testOnly(tree(t), calledFromOutside)
	for _, x := range found {
		if knownTestOnly[x.name] == "" {
			t.Error(x.at)
		}
	}
	for key := range knownTestOnly {
		if !slices.ContainsFunc(found, func(x finding) bool { return x.name == key }) {
			t.Errorf("knownTestOnly: %s is used, or does not exist: remove it", key)
		}
	}
}
