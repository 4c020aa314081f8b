package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
)

func (a *app) templateCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "template", Short: "Build, list and remove templates"})
	cmd.AddCommand(a.templateLs(), a.templateShow(), a.templateBuild(), a.templateRm())
	return cmd
}

func (a *app) templateLs() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List templates", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			list, err := c.Templates(cmd.Context())
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(list)
			}
			rows := [][]string{{"NAME", "DIGEST", "SIZE", "CREATED", "IN USE", "SOURCE"}}
			for _, t := range list {
				name := strings.Join(t.Names, ",")
				if name == "" {
					name = "-"
				}
				source := t.Source
				if t.Broken != "" {
					source = "broken: " + t.Broken
				}
				rows = append(rows, []string{name, short(t.Digest), formatSize(t.ImageBytes), formatDuration(time.Since(t.CreatedAt)) + " ago", fmt.Sprint(t.InUse), source})
			}
			return table(a.Out, rows...)
		},
	}
}

// short returns the first digits of a digest.
func short(digest string) string { return digest[:min(len(digest), len("sha256:")+12)] }

func (a *app) templateShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME|DIGEST", Short: "Show a template", Args: want(false, "NAME|DIGEST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			t, err := c.Template(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printTemplate(t)
		},
	}
}

func (a *app) printTemplate(t client.Template) error {
	if a.json() {
		return a.printJSON(t)
	}
	rows := [][]string{{"digest", t.Digest}, {"names", strings.Join(t.Names, ", ")}, {"image", t.ImageDigest + " " + formatSize(t.ImageBytes)},
		{"source", t.Source}, {"user", t.User}, {"workdir", t.Workdir}, {"command", quoteArgv(t.Cmd)}, {"env", pairsText(t.Env)},
		{"created", formatTime(t.CreatedAt)}, {"in use", fmt.Sprint(t.InUse)}}
	if t.Broken != "" {
		rows = append(rows, []string{"broken", t.Broken})
	}
	for _, n := range t.Notes {
		rows = append(rows, []string{"note", n})
	}
	kept := rows[:0]
	for _, r := range rows {
		if r[1] != "" {
			kept = append(kept, r)
		}
	}
	return table(a.Out, kept...)
}

func (a *app) templateBuild() *cobra.Command {
	var file, name, image, tarball, layout, directory, tar string
	var packages []string
	cmd := &cobra.Command{
		Use: "build [flags]", Short: "Build a template", Args: atMost(0),
		Long: `Build a template from a template file (-f), or from one source given by a flag.
Paths are paths of the server's machine; in a template file they are relative to
the file.`,
		Example: "  bivy template build -f template.yaml\n  bivy template build --name tools --packages bash,jq",
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := client.BuildTemplate{Version: 1}
			if file != "" {
				if err := readTemplateFile(file, &b); err != nil {
					return err
				}
			}
			if name != "" {
				b.Name = name
			}
			from := func(p string) (string, error) {
				if p == "" {
					return "", nil
				}
				return filepath.Abs(p)
			}
			for _, f := range []struct {
				value string
				set   func(string)
			}{
				{tarball, func(p string) { b.From.Tarball = &client.OCIFile{Path: p} }},
				{layout, func(p string) { b.From.Layout = &client.OCIFile{Path: p} }},
				{directory, func(p string) { b.From.Directory = &client.PathSource{Path: p} }},
				{tar, func(p string) { b.From.Tar = &client.PathSource{Path: p} }},
			} {
				p, err := from(f.value)
				if err != nil {
					return err
				}
				if p != "" {
					f.set(p)
				}
			}
			if image != "" {
				b.From.Image = &client.OCIImage{Ref: image}
			}
			if len(packages) > 0 {
				b.From.HostPackages = &client.HostPackages{Packages: packages}
			}
			if b.From == (client.TemplateSource{}) {
				a.parsed = false
				return kind.Errorf(kind.Invalid, "no source was specified").WithHint("use -f FILE, or one source, e.g. --packages bash,jq")
			}
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			m := a.newMeter()
			t, err := c.BuildTemplate(cmd.Context(), b, m.progress)
			m.end()
			if err != nil {
				return err
			}
			return a.printTemplate(t)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "file", "f", "", "template `FILE` (YAML)")
	f.StringVar(&name, "name", "", "`NAME[:TAG]` of the template (default tag: default)")
	f.StringVar(&image, "image", "", "OCI image in a registry, a `REF` such as docker.io/library/debian:12")
	f.StringVar(&tarball, "tarball", "", "`FILE` with the tarball of an OCI or Docker image")
	f.StringVar(&layout, "layout", "", "`DIR` with an OCI image layout")
	f.StringVar(&directory, "directory", "", "`DIR` that becomes the root file system")
	f.StringVar(&tar, "tar", "", "`FILE` with the tarball of a root file system")
	f.StringSliceVar(&packages, "packages", nil, "Debian packages installed on the server's machine, `NAME,NAME`; with their dependencies")
	return cmd
}

func readTemplateFile(file string, b *client.BuildTemplate) error {
	f, err := os.Open(file)
	if err != nil {
		return kind.Errorf(kind.Invalid, "%w", err).WithField("--file")
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSpecFile+1))
	if err != nil {
		return kind.Errorf(kind.Invalid, "%w", err).WithField("--file")
	}
	if len(data) > maxSpecFile {
		return kind.Errorf(kind.Invalid, "%s is larger than %d bytes", file, maxSpecFile).WithField("--file")
	}
	b.Version = 0
	if err := config.Decode(data, b); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if b.Version == 0 {
		return kind.Errorf(kind.Invalid, "%s: missing", file).WithField("version").WithHint("start the file with: version: 1")
	}
	dir, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return err
	}
	var paths []*string
	for _, f := range []*client.OCIFile{b.From.Tarball, b.From.Layout} {
		if f != nil {
			paths = append(paths, &f.Path)
		}
	}
	for _, f := range []*client.PathSource{b.From.Directory, b.From.Tar} {
		if f != nil {
			paths = append(paths, &f.Path)
		}
	}
	if b.From.Image != nil && b.From.Image.Credentials != nil {
		paths = append(paths, &b.From.Image.Credentials.PasswordFile, &b.From.Image.Credentials.DockerConfig)
	}
	for _, p := range paths {
		if *p != "" && !filepath.IsAbs(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
	return nil
}

func (a *app) templateRm() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME|DIGEST", Short: "Remove the name of a template or, by digest, the template", Args: want(false, "NAME|DIGEST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			return c.DeleteTemplate(cmd.Context(), args[0])
		},
	}
}
