package source

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// Registry is an image in a registry.
type Registry struct {
	Ref       string            // e.g. registry.example/app:1.2
	PlainHTTP bool              // use HTTP, as always for loopback registries
	Auth      *Login            // nil: anonymous
	Transport http.RoundTripper // nil: the default
	Limits    tree.Limits

	image *ociImage
	repo  name.Repository
	opts  []remote.Option
}

// Login is a user name and password, or a token, for a registry.
type Login struct {
	Username, Password string
	Token              string // an identity token instead of a password
}

// String implements Source.
func (r *Registry) String() string {
	if r.image == nil {
		return "image " + r.Ref
	}
	return fmt.Sprintf("image %s (%s)", r.Ref, r.image.digest)
}

// Key implements Source. It fetches the manifest and the configuration and returns
// the manifest's digest.
func (r *Registry) Key(ctx context.Context) (string, error) {
	r.Limits = r.Limits.WithDefaults()
	var opts []name.Option
	if r.PlainHTTP {
		opts = append(opts, name.Insecure)
	}
	ref, err := name.ParseReference(r.Ref, opts...)
	if err != nil {
		return "", kind.Errorf(kind.Invalid, "image reference %.200q: %w", r.Ref, err).WithField("from.image.ref")
	}
	auth := authn.Anonymous
	if r.Auth != nil {
		auth = authn.FromConfig(authn.AuthConfig{Username: r.Auth.Username, Password: r.Auth.Password, IdentityToken: r.Auth.Token})
	}
	r.repo = ref.Context()
	r.opts = []remote.Option{remote.WithContext(ctx), remote.WithAuth(auth), remote.WithUserAgent("bivy")}
	if r.Transport != nil {
		r.opts = append(r.opts, remote.WithTransport(r.Transport))
	}
	desc, err := remote.Get(ref, r.opts...)
	if err != nil {
		return "", registryError(r.Ref, err)
	}
	// The library computes the digest of a tag's manifest from its bytes, and has
	// checked that of a digest reference.
	img, err := resolve(ctx, &remoteBlobs{Registry: r, first: desc}, desc.Descriptor, r.Limits)
	if err != nil {
		return "", fmt.Errorf("image %s: %w", r.Ref, err)
	}
	r.image = img
	return "oci " + img.digest.String(), nil
}

// Load implements Source.
func (r *Registry) Load(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) (Defaults, error) {
	r.opts[0] = remote.WithContext(ctx) // a build may continue after the call that started it
	if err := r.image.merge(ctx, t, spool, progress); err != nil {
		return Defaults{}, fmt.Errorf("image %s: %w", r.Ref, err)
	}
	return r.image.defaults()
}

// Close implements Source.
func (r *Registry) Close() error { return nil }

type remoteBlobs struct {
	*Registry
	first *remote.Descriptor // of the reference, fetched already
}

func (b *remoteBlobs) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	if d.Digest == b.first.Digest {
		return io.NopCloser(strings.NewReader(string(b.first.Manifest))), nil
	}
	ref := b.repo.Digest(d.Digest.String())
	if d.MediaType.IsImage() || d.MediaType.IsIndex() {
		m, err := remote.Get(ref, b.opts...)
		if err != nil {
			return nil, registryError(ref.String(), err)
		}
		return io.NopCloser(strings.NewReader(string(m.Manifest))), nil
	}
	layer, err := remote.Layer(ref, b.opts...)
	if err != nil {
		return nil, registryError(ref.String(), err)
	}
	r, err := layer.Compressed()
	if err != nil {
		return nil, registryError(ref.String(), err)
	}
	return remoteReader{r}, nil
}

// remoteReader gives errors of a download a kind. The library checks digests too,
// and has no exported type for that error.
type remoteReader struct{ io.ReadCloser }

func (r remoteReader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b)
	switch {
	case err == nil || errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		return n, err
	case strings.Contains(err.Error(), "error verifying"):
		return n, kind.Errorf(kind.Invalid, "wrong digest: %w", err)
	}
	return n, kind.Errorf(kind.Unavailable, "download: %w", err)
}

// registryError gives the errors of a registry a kind and a hint.
func registryError(ref string, err error) error {
	var te *transport.Error
	if errors.As(err, &te) {
		switch te.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return kind.Errorf(kind.Denied, "image %s: the registry denied access: %w", ref, err).
				WithHint("check from.image.credentials")
		case http.StatusNotFound:
			return kind.Errorf(kind.NotFound, "image %s: not found in the registry: %w", ref, err)
		case http.StatusTooManyRequests:
			return kind.Errorf(kind.Unavailable, "image %s: rate limit of the registry reached: %w", ref, err).
				WithHint("try later, or sign in with from.image.credentials")
		}
		if te.StatusCode >= 500 {
			return kind.Errorf(kind.Unavailable, "image %s: %w", ref, err)
		}
	}
	return kind.Errorf(kind.Unavailable, "image %s: %w", ref, err)
}

// RegistryHost returns the registry host of ref, by which credentials are found.
func RegistryHost(ref string) (string, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return "", kind.Errorf(kind.Invalid, "image reference %.200q: %w", ref, err).WithField("from.image.ref")
	}
	return r.Context().RegistryStr(), nil
}

// DockerLogin finds the login for host in a Docker config.json. Credential
// helpers are programs and are not run: a config that has only those is an error
// with a hint. It returns nil for a host that is not in the config.
func DockerLogin(config []byte, host string) (*Login, error) {
	var c struct {
		Auths map[string]struct {
			Auth          string `json:"auth"`
			Username      string `json:"username"`
			Password      string `json:"password"`
			IdentityToken string `json:"identitytoken"`
		} `json:"auths"`
		CredsStore  string            `json:"credsStore"`
		CredHelpers map[string]string `json:"credHelpers"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, kind.Errorf(kind.Invalid, "not a Docker config.json: %w", err)
	}
	keys := []string{host, "https://" + host, "https://" + host + "/v1/", "https://" + host + "/v2/"}
	if host == name.DefaultRegistry {
		keys = append(keys, "docker.io", "https://docker.io", "registry-1.docker.io")
	}
	for _, k := range keys {
		a, ok := c.Auths[k]
		if !ok {
			continue
		}
		l := &Login{Username: a.Username, Password: a.Password, Token: a.IdentityToken}
		if a.Auth != "" {
			b, err := base64.StdEncoding.DecodeString(a.Auth)
			if err != nil {
				return nil, kind.Errorf(kind.Invalid, "Docker config.json: auth of %s is not base64", k)
			}
			user, pass, ok := strings.Cut(string(b), ":")
			if !ok {
				return nil, kind.Errorf(kind.Invalid, "Docker config.json: auth of %s has no colon", k)
			}
			l.Username, l.Password = user, strings.TrimRight(pass, "\x00")
		}
		if l.Username != "" || l.Token != "" {
			return l, nil
		}
	}
	if c.CredsStore != "" || c.CredHelpers[host] != "" {
		return nil, kind.Errorf(kind.Invalid, "Docker config.json: the login for %s is in a credential helper, which bivy does not run", host).
			WithHint("use username with password_env or password_file")
	}
	return nil, nil
}
