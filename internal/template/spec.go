package template

import (
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"bivy/internal/argv"
	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// SpecVersion is the version of Spec this build reads.
const SpecVersion = 1

// Spec describes a template: its source and the defaults of its processes. Exactly
// one field of From is set.
type Spec struct {
	Version int               `yaml:"version" json:"version"`
	Name    string            `yaml:"name,omitempty" json:"name,omitempty"` // [namespace/]name[:tag]; empty: the template has only a digest
	From    From              `yaml:"from" json:"from"`
	Env     map[string]string `yaml:"env,omitempty" json:"env,omitempty"`         // added to the source's; takes precedence
	User    string            `yaml:"user,omitempty" json:"user,omitempty"`       // empty: the source's, else root
	Workdir string            `yaml:"workdir,omitempty" json:"workdir,omitempty"` // empty: the source's
	Cmd     []string          `yaml:"cmd,omitempty" json:"cmd,omitempty"`         // empty: the source's entrypoint and command
}

// From is the source of a template's files.
type From struct {
	HostPackages *HostPackages `yaml:"host_packages,omitempty" json:"host_packages,omitempty"`
	Image        *Image        `yaml:"image,omitempty" json:"image,omitempty"`
	Tarball      *Tarball      `yaml:"tarball,omitempty" json:"tarball,omitempty"`
	Layout       *Layout       `yaml:"layout,omitempty" json:"layout,omitempty"`
	Directory    *Directory    `yaml:"directory,omitempty" json:"directory,omitempty"`
	Tar          *Tar          `yaml:"tar,omitempty" json:"tar,omitempty"`
}

// HostPackages takes the files of Debian packages, and of all they depend on,
// as they are installed on this host. It needs no network.
type HostPackages struct {
	Packages []string `yaml:"packages" json:"packages"`
}

// Image is an OCI or Docker image in a registry.
type Image struct {
	Ref         string       `yaml:"ref" json:"ref"`                                     // e.g. registry.example/team/app:1.2 or …@sha256:…
	PlainHTTP   bool         `yaml:"plain_http,omitempty" json:"plain_http,omitempty"`   // no TLS; always the case for loopback registries
	Credentials *Credentials `yaml:"credentials,omitempty" json:"credentials,omitempty"` // empty: anonymous
}

// Credentials says where a registry's credentials are. The spec must not contain
// them, because it is kept in repositories and in records.
type Credentials struct {
	Username     string `yaml:"username,omitempty" json:"username,omitempty"`
	PasswordEnv  string `yaml:"password_env,omitempty" json:"password_env,omitempty"`   // an environment variable of the server
	PasswordFile string `yaml:"password_file,omitempty" json:"password_file,omitempty"` // a file on the server
	DockerConfig string `yaml:"docker_config,omitempty" json:"docker_config,omitempty"` // a Docker config.json; its helpers are not run
}

// Tarball is an image in a tar file, made by "docker save" or an OCI archive.
type Tarball struct {
	Path string `yaml:"path" json:"path"`
	Ref  string `yaml:"ref,omitempty" json:"ref,omitempty"` // which image, when it holds several
}

// Layout is an image in an OCI image layout directory.
type Layout struct {
	Path string `yaml:"path" json:"path"`
	Ref  string `yaml:"ref,omitempty" json:"ref,omitempty"` // a ref name or a digest, when it holds several
}

// Directory is a root file system in a directory of this host.
type Directory struct {
	Path string `yaml:"path" json:"path"`
}

// Tar is a root file system in a tar file, plain or compressed with gzip or zstd.
type Tar struct {
	Path string `yaml:"path" json:"path"`
}

// Kind returns the name of the source: "host_packages", "image", "tarball", "layout",
// "directory", "tar", or "" when there is not exactly one.
func (f From) Kind() string {
	name, n := "", 0
	for _, s := range []struct {
		set  bool
		name string
	}{
		{f.HostPackages != nil, "host_packages"},
		{f.Image != nil, "image"},
		{f.Tarball != nil, "tarball"},
		{f.Layout != nil, "layout"},
		{f.Directory != nil, "directory"},
		{f.Tar != nil, "tar"},
	} {
		if s.set {
			name = s.name
			n++
		}
	}
	if n != 1 {
		return ""
	}
	return name
}

// paths returns every field of f that names a file of this host.
func (f *From) paths() []*string {
	var out []*string
	if f.Tarball != nil {
		out = append(out, &f.Tarball.Path)
	}
	if f.Layout != nil {
		out = append(out, &f.Layout.Path)
	}
	if f.Directory != nil {
		out = append(out, &f.Directory.Path)
	}
	if f.Tar != nil {
		out = append(out, &f.Tar.Path)
	}
	if f.Image != nil && f.Image.Credentials != nil {
		out = append(out, &f.Image.Credentials.PasswordFile, &f.Image.Credentials.DockerConfig)
	}
	return out
}

// maxPackages is how many packages one template may list.
const maxPackages = 4096

var (
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`)
	userName    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$`)
)

// Validate returns an error for the first invalid field of s.
func (s Spec) Validate() error {
	bad := func(field, format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField(field)
	}
	if s.Version != SpecVersion {
		return kind.Errorf(kind.Invalid, "unsupported version %d; this bivy reads version %d", s.Version, SpecVersion).
			WithField("version").WithHint("set version: %d, or use a newer bivy", SpecVersion)
	}
	if s.Name != "" {
		if _, err := ParseRef(s.Name); err != nil {
			return err
		}
	}
	if err := s.From.validate(); err != nil {
		return err
	}
	if err := argv.CheckEnv("env", s.Env); err != nil {
		return err
	}
	for k, v := range s.Env {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return bad("env", "variable %.64q: name and value must be UTF-8", k)
		}
	}
	if s.User != "" && !userName.MatchString(s.User) {
		return bad("user", "invalid user name %.64q", s.User)
	}
	if s.Workdir != "" && (!path.IsAbs(s.Workdir) || len(s.Workdir) > tree.MaxPath || strings.ContainsRune(s.Workdir, 0)) {
		return bad("workdir", "%.64q is not an absolute path", s.Workdir)
	}
	if len(s.Cmd) > 0 {
		if err := argv.Argv(s.Cmd).Check("cmd"); err != nil {
			return err
		}
	}
	return nil
}

func (f From) validate() error {
	bad := func(field, format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField("from." + field)
	}
	name := f.Kind()
	if name == "" {
		return kind.Errorf(kind.Invalid, "want exactly one of host_packages, image, tarball, layout, directory, tar").WithField("from")
	}
	for _, p := range f.paths() {
		if len(*p) > tree.MaxPath || strings.ContainsRune(*p, 0) {
			return bad(name, "invalid path %.64q", *p)
		}
	}
	need := func(v string) error {
		if v == "" {
			return bad(name+".path", "must not be empty")
		}
		return nil
	}
	switch {
	case f.HostPackages != nil:
		if n := len(f.HostPackages.Packages); n == 0 || n > maxPackages {
			return bad("host_packages.packages", "%d packages, want 1 to %d", n, maxPackages)
		}
		for _, p := range f.HostPackages.Packages {
			if !packageName.MatchString(p) {
				return bad("host_packages.packages", "invalid Debian package name %.64q", p)
			}
		}
	case f.Image != nil:
		if f.Image.Ref == "" || len(f.Image.Ref) > 1024 || strings.ContainsAny(f.Image.Ref, " \t\r\n\x00") {
			return bad("image.ref", "invalid image reference %.64q", f.Image.Ref)
		}
		if c := f.Image.Credentials; c != nil {
			return c.validate()
		}
	case f.Tarball != nil:
		return need(f.Tarball.Path)
	case f.Layout != nil:
		return need(f.Layout.Path)
	case f.Directory != nil:
		return need(f.Directory.Path)
	case f.Tar != nil:
		return need(f.Tar.Path)
	}
	return nil
}

func (c *Credentials) validate() error {
	bad := func(format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField("from.image.credentials")
	}
	n := 0
	for _, v := range []string{c.PasswordEnv, c.PasswordFile, c.DockerConfig} {
		if v != "" {
			n++
		}
	}
	if n != 1 {
		return bad("want exactly one of password_env, password_file, docker_config")
	}
	if (c.DockerConfig == "") != (c.Username != "") {
		return bad("username is required with password_env and password_file, and not allowed with docker_config")
	}
	return nil
}
