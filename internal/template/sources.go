package template

import (
	"io"
	"os"
	"strings"

	"bivy/internal/kind"
	"bivy/internal/template/debian"
	"bivy/internal/template/source"
)

// BaseName is the name of the default template.
const BaseName = "base"

// Base returns the spec of the default template: a shell, Python, git, curl
// and the usual tools from the packages of this host, and the account "user".
func Base() Spec {
	return Spec{
		Version: SpecVersion,
		Name:    BaseName,
		From:    From{HostPackages: &HostPackages{Packages: BasePackages()}},
	}
}

// BasePackages returns the Debian packages that must be installed for Base.
func BasePackages() []string { return debian.BasePackages() }

// source returns the source that f describes. f must be valid.
func (s *Store) source(f From) (source.Source, error) {
	switch {
	case f.HostPackages != nil:
		return debian.New(s.opts.HostRoot, f.HostPackages.Packages), nil
	case f.Image != nil:
		login, err := s.login(f.Image)
		if err != nil {
			return nil, err
		}
		return &source.Registry{
			Ref:       f.Image.Ref,
			PlainHTTP: f.Image.PlainHTTP,
			Auth:      login,
			Transport: s.opts.Transport,
			Limits:    s.opts.Limits,
		}, nil
	case f.Tarball != nil:
		return source.NewTarball(f.Tarball.Path, f.Tarball.Ref, s.opts.Limits), nil
	case f.Layout != nil:
		return source.NewLayout(f.Layout.Path, f.Layout.Ref, s.opts.Limits), nil
	case f.Directory != nil:
		return source.NewDirectory(f.Directory.Path), nil
	case f.Tar != nil:
		return source.NewTar(f.Tar.Path), nil
	}
	return nil, kind.Errorf(kind.Invalid, "no source").WithField("from")
}

// login reads the credentials from where the spec says.
func (s *Store) login(i *Image) (*source.Login, error) {
	c := i.Credentials
	if c == nil {
		return nil, nil
	}
	bad := func(format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField("from.image.credentials")
	}
	switch {
	case c.PasswordEnv != "":
		v := s.opts.Getenv(c.PasswordEnv)
		if v == "" {
			return nil, bad("environment variable %s is not set for the server", c.PasswordEnv)
		}
		return &source.Login{Username: c.Username, Password: v}, nil
	case c.PasswordFile != "":
		b, err := readCredential(c.PasswordFile)
		if err != nil {
			return nil, bad("password_file: %w", err)
		}
		return &source.Login{Username: c.Username, Password: strings.TrimRight(string(b), "\r\n")}, nil
	}
	b, err := readCredential(c.DockerConfig)
	if err != nil {
		return nil, bad("docker_config: %w", err)
	}
	host, err := source.RegistryHost(i.Ref)
	if err != nil {
		return nil, err
	}
	return source.DockerLogin(b, host)
}

func readCredential(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 1<<20))
}
