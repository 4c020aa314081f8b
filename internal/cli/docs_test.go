package cli

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"bivy/internal/config"
	"bivy/internal/session"
	"bivy/internal/template"
)

// TestDocumentation compares docs/cli.md with the commands: each has a section,
// and its flags are in it or in that of run, which other commands share.
func TestDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	section := func(path string) string {
		_, rest, ok := strings.Cut(doc, "\n### "+path)
		if !ok {
			return ""
		}
		body, _, _ := strings.Cut(rest, "\n### ")
		return body
	}
	seen := map[string]bool{}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		if c.Hidden || c.Name() == "help" || c.HasSubCommands() && c.Annotations[onlyGroup] != "" || c == c.Root() {
			return
		}
		body := section(c.CommandPath())
		if body == "" {
			t.Errorf("docs/cli.md has no section on %s", c.CommandPath())
		}
		seen[c.CommandPath()] = true
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name == "help" {
				return
			}
			known := body
			if c.Name() == "create" || c.Name() == "shell" {
				known += section("bivy run")
			}
			if !regexp.MustCompile(`--`+f.Name+`\b`).MatchString(known) || f.Shorthand != "" && !strings.Contains(known, "`-"+f.Shorthand+"`") {
				t.Errorf("docs/cli.md does not describe %s --%s (-%s)", c.CommandPath(), f.Name, f.Shorthand)
			}
		})
	}
	root := (&app{}).root()
	walk(root)
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(doc, "`--"+f.Name) {
			t.Errorf("docs/cli.md does not describe --%s", f.Name)
		}
	})
	for _, m := range regexp.MustCompile(`(?m)^### (bivy [a-z]+(?: [a-z]+){0,2})`).FindAllStringSubmatch(doc, -1) {
		if !seen[m[1]] && m[1] != "bivy completion" {
			t.Errorf("docs/cli.md has a section on %s, which does not exist", m[1])
		}
	}
	// The configuration that is shown has every field and is valid.
	_, block, _ := strings.Cut(doc, "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	var c config.Config
	if err := config.Decode([]byte(block), &c); err != nil {
		t.Errorf("the configuration in docs/cli.md: %v", err)
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[config.Config]()) {
		if !strings.Contains(block, f.Tag.Get("yaml")+":") {
			t.Errorf("docs/cli.md does not show %s", f.Tag.Get("yaml"))
		}
	}
	if err := c.WithDefaults().Validate(); err != nil {
		t.Errorf("the configuration in docs/cli.md: %v", err)
	}
}

// TestSpecDocumentation reads the spec that docs/spec.md shows.
func TestSpecDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/spec.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	path := t.TempDir() + "/spec.yaml"
	if err := os.WriteFile(path, []byte(block), 0o600); err != nil {
		t.Fatal(err)
	}
	spec, err := readSpec(path)
	if err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(spec)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the spec in docs/spec.md does not show %s", v.Type().Field(i).Name)
		}
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[session.Spec](), reflect.TypeFor[session.Resources]()} {
		for _, f := range reflect.VisibleFields(typ) {
			if name := f.Tag.Get("yaml"); name != "resources" && !regexp.MustCompile("`(resources\\.)?"+name+"`").Match(text) {
				t.Errorf("docs/spec.md does not describe %s", name)
			}
		}
	}
}

// TestTemplateDocumentation reads the template that docs/templates.md shows.
func TestTemplateDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/templates.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "<<'END'\n")
	block, _, _ = strings.Cut(block, "END\n")
	var spec template.Spec
	if err := config.Decode([]byte(block), &spec); err != nil {
		t.Fatal(err)
	}
	if err := spec.Validate(); err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(spec)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the template in docs/templates.md does not show %s", v.Type().Field(i).Name)
		}
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[template.Spec](), reflect.TypeFor[template.From](), reflect.TypeFor[template.HostPackages](),
		reflect.TypeFor[template.Image](), reflect.TypeFor[template.Credentials](), reflect.TypeFor[template.Tarball](), reflect.TypeFor[template.Layout]()} {
		for _, f := range reflect.VisibleFields(typ) {
			if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); !strings.Contains(string(text), "`"+name+"`") {
				t.Errorf("docs/templates.md does not describe %s", name)
			}
		}
	}
}
