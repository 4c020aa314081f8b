package bivy_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	diff "github.com/google/go-cmp/cmp"

	"bivy/internal/kind"
)

// The documentation, as tests. Every block fenced as sh is run, in order, by
// bash -eu in an empty directory with the built bivy first in PATH. A comment
// before the block says otherwise:
//
//	<!-- test: skip WHY -->   is not run; the reason is logged
//	<!-- test: session -->    runs with a server of the test
//	<!-- test: exit=N -->     must end with exit code N; can be combined with session
//
// Variables and the working directory are kept from block to block of a file. A
// block fenced as output that directly follows is what it must print, on stdout
// and stderr together; "..." matches anything in a line and, alone on a line, any
// number of lines.

// block is one shell block of a document.
type block struct {
	file    string
	line    int // of the opening fence
	text    string
	skip    string // why it is not run; empty: it is
	session bool
	exit    int
	output  *string
}

func (b block) at() string { return fmt.Sprintf("%s:%d", b.file, b.line) }

var directive = regexp.MustCompile(`^<!--\s*test:\s*(.*?)\s*-->$`)

// blocks returns the shell blocks of a document.
func blocks(file, text string) ([]block, error) {
	var found []block
	var next block // of the last directive
	directed := false
	lines := strings.Split(text, "\n")
	bad := func(n int, format string, args ...any) ([]block, error) {
		return nil, fmt.Errorf("%s:%d: %s", file, n, fmt.Sprintf(format, args...))
	}
	after := false // nothing but blank lines since the last sh block
	for i := 0; i < len(lines); i++ {
		line := strings.TrimSpace(lines[i])
		if m := directive.FindStringSubmatch(line); m != nil {
			var err error
			if directed {
				return bad(i+1, "two directives for one block")
			}
			if next, err = parseDirective(m[1]); err != nil {
				return bad(i+1, "directive %q: %v", m[1], err)
			}
			directed, after = true, false
			continue
		}
		if !strings.HasPrefix(line, "```") {
			if line != "" {
				if directed {
					return bad(i+1, "a test directive must be directly before a sh block")
				}
				after = false
			}
			if strings.HasPrefix(lines[i], "    bivy ") {
				return bad(i+1, "commands must be fenced as sh, so that they are run")
			}
			continue
		}
		info, start, indent := strings.TrimLeft(line, "`"), i, strings.Index(lines[i], "`")
		var body []string
		for i++; ; i++ {
			if i == len(lines) {
				return bad(start+1, "the block is not closed")
			}
			if strings.TrimSpace(lines[i]) == "```" {
				break
			}
			body = append(body, lines[i][min(indent, len(lines[i])-len(strings.TrimLeft(lines[i], " "))):])
		}
		content := strings.Join(body, "\n") + "\n"
		switch info {
		case "sh":
			next.file, next.line, next.text = file, start+1, content
			found = append(found, next)
			next, directed, after = block{}, false, true
			continue
		case "output":
			if !after {
				return bad(start+1, "output must directly follow the sh block that prints it")
			}
			found[len(found)-1].output = &content
		case "bash", "shell", "console", "zsh", "shell-session":
			return bad(start+1, "shell must be fenced as sh, so that it is run")
		}
		if directed {
			return bad(start+1, "a test directive must be directly before a sh block")
		}
		after = false
	}
	if directed {
		return bad(len(lines), "a test directive must be directly before a sh block")
	}
	return found, nil
}

func parseDirective(text string) (block, error) {
	var b block
	if why, ok := strings.CutPrefix(text, "skip"); ok {
		if b.skip = strings.TrimSpace(why); b.skip == "" {
			return b, errors.New("skip needs a reason")
		}
		return b, nil
	}
	words := strings.Fields(text)
	for _, w := range words {
		if w == "session" {
			b.session = true
		} else if n, err := fmt.Sscanf(w, "exit=%d", &b.exit); n != 1 || err != nil {
			return b, fmt.Errorf("unknown word %q", w)
		}
	}
	if len(words) == 0 {
		return b, errors.New("it is empty")
	}
	return b, nil
}

// matches compares output with a pattern in which "..." matches anything.
func matches(pattern, output string) bool {
	var re strings.Builder
	re.WriteString(`\A`)
	lines := strings.Split(strings.TrimRight(pattern, "\n"), "\n")
	for _, line := range lines {
		if strings.TrimSpace(line) == "..." {
			re.WriteString(`(?:[^\n]*\n)*?`)
			continue
		}
		parts := strings.Split(strings.TrimRight(line, " \t"), "...")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		re.WriteString(strings.Join(parts, `[^\n]*`) + `[ \t\r]*\n`)
	}
	re.WriteString(`\z`)
	output = strings.TrimRight(output, "\n") + "\n"
	return regexp.MustCompile(re.String()).MatchString(output)
}

// documents returns the documents for users, by file name. Design decisions are
// not among them.
func documents(t *testing.T) map[string]string {
	t.Helper()
	files := []string{"README.md", "CONTRIBUTING.md", "SECURITY.md"}
	more, err := filepath.Glob("docs/*.md")
	if err != nil || len(more) < 3 {
		t.Fatalf("docs/*.md: %d files, %v", len(more), err)
	}
	texts := map[string]string{}
	for _, f := range append(files, more...) {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		texts[f] = string(b)
	}
	return texts
}

func TestDocsParser(t *testing.T) {
	const doc = "text\n\n<!-- test: session exit=3 -->\n\n```sh\na\n```\n\n```output\nb ... c\n```\n\n1. item\n\n   ```sh\n   x\n     y\n   ```\n<!-- test: skip needs hardware -->\n```sh\nz\n```\n```yaml\nsh: no\n```\n"
	got, err := blocks("d.md", doc)
	if err != nil || len(got) != 3 {
		t.Fatalf("%d blocks, %v", len(got), err)
	}
	if b := got[0]; b.text != "a\n" || !b.session || b.exit != 3 || b.output == nil || *b.output != "b ... c\n" || b.line != 5 {
		t.Errorf("first: %+v", b)
	}
	if b := got[1]; b.text != "x\n  y\n" || b.session || b.output != nil {
		t.Errorf("second: %+v", b)
	}
	if got[2].skip != "needs hardware" {
		t.Errorf("third: %+v", got[2])
	}
	for _, wrong := range []string{
		"```sh\nnever closed\n", "```bash\nx\n```\n", "<!-- test: skip -->\n```sh\n```\n", "<!-- test: sesion -->\n```sh\n```\n",
		"<!-- test: session -->\ntext\n", "```output\nof nothing\n```\n", "    bivy run\n", "```sh\na\n```\ntext\n```output\nx\n```\n", "<!-- test: session -->\n",
	} {
		if _, err := blocks("d.md", wrong); err == nil {
			t.Errorf("nothing wrong with %q", wrong)
		}
	}
	for _, tt := range []struct {
		pattern, output string
		want            bool
	}{
		{"a\n", "a\n", true}, {"a\n", "a", true}, {"a\n", "a\nb\n", false}, {"a\n...\n", "a\nb\nc\n", true}, {"a\n...\nd\n", "a\nd\n", true},
		{"a ... d\n", "a b c d\n", true}, {"a ... d\n", "a\nd\n", false}, {"...\n", "", true}, {"1.5\n", "1x5\n", false}, {"a\n", "", false},
	} {
		if got := matches(tt.pattern, tt.output); got != tt.want {
			t.Errorf("matches(%q, %q) = %v", tt.pattern, tt.output, got)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestDocsLinks checks that links to files of this tree lead to a file, and that
// every shell block can be parsed.
func TestDocsLinks(t *testing.T) {
	texts := documents(t)
	for _, glob := range []string{"*.md", "docs/*/*.md"} {
		more, err := filepath.Glob(glob)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range more {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			texts[f] = string(b)
		}
	}
	checked := 0
	for file, text := range texts {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			checked++
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", file, target)
			}
		}
		if _, err := blocks(file, text); err != nil {
			t.Error(err)
		}
	}
	if checked < 10 {
		t.Errorf("only %d links checked", checked)
	}
}

// TestDocs runs the shell blocks of the documents. It needs root, and a built
// bivy, whose path is in BIVY_BIN.
func TestDocs(t *testing.T) {
	bin := os.Getenv("BIVY_BIN")
	if bin == "" {
		t.Skip("BIVY_BIN is not set to a built bivy")
	}
	if os.Geteuid() != 0 {
		t.Skip("sandboxes need root")
	}
	bin, err := filepath.Abs(bin)
	if err != nil {
		t.Fatal(err)
	}
	host := docsHost(t)
	ran, skipped := 0, 0
	texts := documents(t)
	names := make([]string, 0, len(texts))
	for f := range texts {
		names = append(names, f)
	}
	slices.Sort(names)
	for _, file := range names {
		all, err := blocks(file, texts[file])
		if err != nil {
			t.Error(err)
			continue
		}
		t.Run(strings.ReplaceAll(file, "/", "_"), func(t *testing.T) {
			r := newReader(t, bin, host)
			for _, b := range all {
				if b.skip != "" {
					skipped++
					t.Logf("%s: skipped: %s", b.at(), b.skip)
					continue
				}
				ran++
				if !r.follow(t, b) {
					t.Fatalf("%s: the remaining blocks were not run", b.at())
				}
			}
		})
	}
	t.Run("leftovers", func(t *testing.T) {
		// After a failure, sessions of a document may still run.
		r := newReader(t, bin, host)
		r.follow(t, block{file: "all documents", session: true, text: "for id in $(bivy ls -q); do bivy end $id; done\n"})
	})
	t.Logf("%d blocks run, %d skipped", ran, skipped)
	if ran == 0 {
		t.Error("no block was run")
	}
}

// A reader runs the blocks of one document.
type reader struct {
	bin    string
	host   string // directory with the server's files, shared by all documents: one template is built
	dir    string // temporary; work/ in it is the working directory
	env    []string
	server []string // environment variables for the running server; nil: none
	groups []int    // process groups of the blocks, to end what is left of them
}

func newReader(t *testing.T, bin, host string) *reader {
	dir := t.TempDir()
	work := filepath.Join(dir, "work")
	if err := os.MkdirAll(work, 0o755); err != nil {
		t.Fatal(err)
	}
	r := &reader{bin: bin, host: host, dir: dir, env: []string{
		"PATH=" + filepath.Dir(bin) + ":" + os.Getenv("PATH"),
		"HOME=" + dir, "LANG=C.UTF-8", "TERM=dumb",
		"DOCS=" + dir, "BIVY_CONFIG=" + filepath.Join(host, "config.yaml"),
	}}
	if err := os.WriteFile(r.path("cwd"), []byte(work), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pgid := range r.groups {
			// ESRCH: the block left no process.
			_ = syscall.Kill(-pgid, syscall.SIGTERM)
		}
	})
	return r
}

func (r *reader) path(name string) string { return filepath.Join(r.dir, name) }

// docsHost writes a configuration with directories of its own. They are not in
// TempDir, which the unprivileged users of sandboxes cannot enter.
func docsHost(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bivy-docs-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error("remove the files of the documents:", err)
		}
		// The names of the daemon's groups contain a hash of its run directory.
		sum := sha256.Sum256([]byte(filepath.Join(dir, "run")))
		groups, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/bivy-%x*", sum[:4]))
		for _, g := range groups {
			err = errors.Join(err, os.Remove(g))
		}
		if err != nil {
			t.Error("remove the groups of the documents:", err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	conf := fmt.Sprintf("listen: 127.0.0.1:0\ndata_dir: %q\nrun_dir: %q\n", filepath.Join(dir, "data"), filepath.Join(dir, "run"))
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// serve starts a server for the rest of a document, waits until it has announced
// its address, and returns the environment variables for it.
func (r *reader) serve(t *testing.T) []string {
	t.Helper()
	log, err := os.Create(r.path("server.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(r.bin, "serve")
	cmd.Env, cmd.Stdout, cmd.Stderr = r.env, log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	died := make(chan error, 1)
	go func() { died <- cmd.Wait() }() // ends with the server
	t.Cleanup(func() {
		defer log.Close()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error("the server ended early:", err)
		}
		select {
		case err := <-died:
			if err != nil {
				t.Error("the server:", err)
			}
		case <-time.After(blockLimit):
			t.Error("the server does not stop")
			_ = cmd.Process.Kill()
		}
		if t.Failed() {
			text, err := os.ReadFile(log.Name())
			t.Logf("the server's log (%v):\n%s", err, text)
		}
	})
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(blockLimit)
	for {
		var at struct {
			URL     string `json:"url"`
			KeyFile string `json:"key_file"`
		}
		text, err := os.ReadFile(filepath.Join(r.host, "run", "server.json"))
		if err == nil {
			if err := json.Unmarshal(text, &at); err != nil {
				t.Fatal(err)
			}
			key, err := os.ReadFile(at.KeyFile)
			if err != nil {
				t.Fatal(err)
			}
			return []string{"BIVY_SERVER=" + at.URL, "BIVY_API_KEY=" + strings.TrimSpace(string(key))}
		}
		select {
		case <-tick.C:
		case err := <-died:
			died <- err
			text, _ := os.ReadFile(log.Name())
			t.Fatalf("the server ended: %v\n%s", err, text)
		case <-limit:
			t.Fatal("the server does not start")
		}
	}
}

// blockLimit is the time limit of one block. Building a template takes longest.
const blockLimit = 3 * time.Minute

// wrap runs a block in the working directory and with the variables of the block
// before it, and saves its own for the next.
const wrap = `
cd "$(cat "$DOCS/cwd")"
[ ! -e "$DOCS/vars" ] || . "$DOCS/vars"
trap 'declare -p | grep -E "^declare -[x-]+ [A-Za-z_]+=" | grep -v " BASH" > "$DOCS/vars" || :; pwd > "$DOCS/cwd"' EXIT
set -eu -o pipefail
. "$DOCS/block"
`

// follow runs a block and reports whether output and exit code are as documented.
func (r *reader) follow(t *testing.T, b block) bool {
	t.Helper()
	env := r.env
	if b.session {
		if r.server == nil {
			r.server = r.serve(t)
		}
		env = append(slices.Clone(env), r.server...)
	}
	out, err := os.Create(r.path("output"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := os.WriteFile(r.path("block"), []byte(b.text), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), blockLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", wrap)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.groups = append(r.groups, cmd.Process.Pid)
	err = cmd.Wait()
	printed, readErr := os.ReadFile(r.path("output"))
	if readErr != nil {
		t.Fatal(readErr)
	}
	switch code := cmd.ProcessState.ExitCode(); {
	case ctx.Err() != nil:
		t.Errorf("%s: not done after %s; it printed:\n%s", b.at(), blockLimit, printed)
	case code != b.exit:
		t.Errorf("%s: exit code %d, want %d (%v); it printed:\n%s", b.at(), code, b.exit, err, printed)
	case b.output != nil && !matches(*b.output, string(printed)):
		t.Errorf("%s: it printed\n%[3]s\nwant\n%[2]s", b.at(), *b.output, printed)
	default:
		return true
	}
	return false
}

// TestDocsName checks that the documents list every kind of failure and every
// action of records, and no others.
func TestDocsName(t *testing.T) {
	listed := func(file, section string) []string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), section)
		var names []string
		for line := range strings.Lines(rest) {
			if strings.HasPrefix(line, "## ") {
				break
			}
			if cell, _, ok := strings.Cut(strings.TrimPrefix(line, "| `"), " | "); ok && strings.HasPrefix(line, "| `") {
				for name := range strings.SplitSeq(cell, ",") {
					names = append(names, strings.Trim(name, " `"))
				}
			}
		}
		slices.Sort(names)
		return names
	}
	var kinds []string
	for k := kind.Internal; k <= kind.Unavailable; k++ {
		kinds = append(kinds, k.String())
	}
	slices.Sort(kinds)
	if d := diff.Diff(kinds, listed("docs/exit-codes.md", "## Errors of the interface")); d != "" {
		t.Error("kinds of failure in docs/exit-codes.md:", d)
	}
	// A verifier knows of erasures; no command of this version erases.
	actions := append(writtenActions(t), "payload.erased")
	slices.Sort(actions)
	documented := slices.Concat(listed("docs/record.md", "## What is in a session's record"), listed("docs/record.md", "## What is in a node's record"))
	slices.Sort(documented)
	if d := diff.Diff(actions, slices.Compact(documented)); d != "" {
		t.Error("actions in docs/record.md:", d)
	}
}

// writtenActions returns the actions of internal/audit that shipped code uses.
func writtenActions(t *testing.T) []string {
	t.Helper()
	src, err := os.ReadFile("internal/audit/event.go")
	if err != nil {
		t.Fatal(err)
	}
	action := map[string]string{} // by the constant's name
	for _, m := range regexp.MustCompile(`(?m)^\s*(\w+)\s+Action\s+= "([^"]+)"`).FindAllStringSubmatch(string(src), -1) {
		action[m[1]] = m[2]
	}
	if len(action) < 20 {
		t.Fatalf("only %d actions found", len(action))
	}
	var used []string
	for _, f := range tree(t) {
		if f.test || f.dir == "internal/audit" || forTests(f.dir) {
			continue
		}
		names := f.imports()
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if id, ok := sel.X.(*ast.Ident); ok && names[id.Name] == module+"/internal/audit" && action[sel.Sel.Name] != "" {
					used = append(used, action[sel.Sel.Name])
				}
			}
			return true
		})
	}
	slices.Sort(used)
	used = slices.Compact(used)
	for name, a := range action {
		if !slices.Contains(used, a) {
			t.Logf("nothing writes %s (audit.%s)", a, name)
		}
	}
	return used
}
