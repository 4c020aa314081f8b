package source

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// Archive is an image in an OCI image layout, in a directory or a tar file, or
// in a tar file of "docker save".
type Archive struct {
	path   string
	ref    string
	isTar  bool
	limits tree.Limits

	files archiveFiles
	image *ociImage
}

// NewLayout returns a source for an OCI image layout directory. ref chooses
// among several images by name or digest.
func NewLayout(path, ref string, limits tree.Limits) *Archive {
	return &Archive{path: path, ref: ref, limits: limits.WithDefaults()}
}

// NewTarball returns a source for an image in a tar file.
func NewTarball(path, ref string, limits tree.Limits) *Archive {
	return &Archive{path: path, ref: ref, isTar: true, limits: limits.WithDefaults()}
}

// String implements Source.
func (a *Archive) String() string {
	what := "layout "
	if a.isTar {
		what = "tarball "
	}
	if a.image == nil {
		return what + a.path
	}
	return fmt.Sprintf("%s%s (%s)", what, a.path, a.image.digest)
}

// archiveFiles opens the files of a layout by their slash-separated names;
// fs.ErrNotExist when there is none.
type archiveFiles interface {
	open(name string) (io.ReadCloser, int64, error)
	Close() error
}

// Key implements Source. It returns the digest of the manifest, or for "docker
// save" that of the configuration, which lists every layer.
func (a *Archive) Key(ctx context.Context) (string, error) {
	key, err := a.find(ctx)
	if err != nil {
		return "", fmt.Errorf("%s: %w", a.path, err)
	}
	return key, nil
}

func (a *Archive) find(ctx context.Context) (string, error) {
	var err error
	if a.isTar {
		a.files, err = indexTar(ctx, a.path, a.limits)
	} else {
		a.files, err = openLayout(a.path)
	}
	if err != nil {
		return "", err
	}
	raw, err := a.small("index.json")
	if errors.Is(err, fs.ErrNotExist) {
		return a.findDocker(ctx)
	}
	if err != nil {
		return "", err
	}
	index, err := v1.ParseIndexManifest(strings.NewReader(string(raw)))
	if err != nil {
		return "", kind.Errorf(kind.Invalid, "index.json: %w", err)
	}
	desc, err := a.choose(index.Manifests)
	if err != nil {
		return "", err
	}
	if a.image, err = resolve(ctx, a, desc, a.limits); err != nil {
		return "", err
	}
	return "oci " + a.image.digest.String(), nil
}

// choose returns the entry of index.json for ref. Without a ref there must be only
// one image, which may have several platforms.
func (a *Archive) choose(list []v1.Descriptor) (v1.Descriptor, error) {
	if a.ref == "" {
		if len(list) == 1 {
			return list[0], nil
		}
		return choose(list)
	}
	var have []string
	for _, d := range list {
		for _, key := range []string{"org.opencontainers.image.ref.name", "io.containerd.image.name"} {
			v := d.Annotations[key]
			if v == a.ref {
				return d, nil
			}
			if v != "" && len(have) < 16 {
				have = append(have, fmt.Sprintf("%.100q", v))
			}
		}
		if d.Digest.String() == a.ref {
			return d, nil
		}
	}
	return v1.Descriptor{}, kind.Errorf(kind.NotFound, "no image %.200q in index.json (available: %s)", a.ref, strings.Join(have, ", "))
}

// small reads a small file of the archive.
func (a *Archive) small(name string) ([]byte, error) {
	r, _, err := a.files.open(name)
	if err != nil {
		return nil, err
	}
	raw, err := readAll(r, a.limits.ConfigBytes, "")
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return raw, nil
}

// blob implements blobs.
func (a *Archive) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	// A parsed digest has a known algorithm and consists of hex digits, so it is
	// safe as a path.
	r, _, err := a.files.open("blobs/" + d.Digest.Algorithm + "/" + d.Digest.Hex)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, kind.Errorf(kind.Invalid, "blob %s is missing", d.Digest)
	}
	return r, err
}

// dockerBlobs opens the layers of "docker save", which have file names instead of
// digests, by the diff IDs in the configuration.
type dockerBlobs struct {
	*Archive
	names map[v1.Hash]string
}

func (b dockerBlobs) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	name := b.names[d.Digest]
	r, _, err := b.files.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, kind.Errorf(kind.Invalid, "%.200q is missing", name)
	}
	return r, err
}

// findDocker reads the manifest.json of "docker save".
func (a *Archive) findDocker(ctx context.Context) (string, error) {
	raw, err := a.small("manifest.json")
	if errors.Is(err, fs.ErrNotExist) {
		return "", kind.Errorf(kind.Invalid, "not an image: it has neither index.json nor manifest.json").
			WithHint("use from.tar or from.directory for a plain root file system")
	}
	if err != nil {
		return "", err
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return "", kind.Errorf(kind.Invalid, "manifest.json: %w", err)
	}
	at := -1
	var have []string
	for i, m := range list {
		for _, tag := range m.RepoTags {
			if tag == a.ref {
				at = i
			}
			if len(have) < 16 {
				have = append(have, fmt.Sprintf("%.100q", tag))
			}
		}
	}
	if a.ref == "" && len(list) == 1 {
		at = 0
	}
	if at < 0 {
		return "", kind.Errorf(kind.NotFound, "no image %.200q among the %d in manifest.json (available: %s)", a.ref, len(list), strings.Join(have, ", "))
	}
	m := list[at]
	if int64(len(m.Layers)) > a.limits.Layers {
		return "", kind.Wrap(kind.Exhausted, &tree.LimitError{Limit: "Layers", Max: a.limits.Layers})
	}
	rawConfig, err := a.small(m.Config)
	if errors.Is(err, fs.ErrNotExist) {
		return "", kind.Errorf(kind.Invalid, "config %.200q is missing", m.Config)
	}
	if err != nil {
		return "", err
	}
	digest, _, err := v1.SHA256(strings.NewReader(string(rawConfig)))
	if err != nil {
		return "", err
	}
	// "docker save" names the configuration by its digest.
	if stem := strings.TrimSuffix(path.Base(m.Config), ".json"); len(stem) == 64 && stem != digest.Hex {
		return "", kind.Errorf(kind.Invalid, "config %.200q: wrong digest: got %s", m.Config, digest)
	}
	c, err := parseConfig(rawConfig, len(m.Layers))
	if err != nil {
		return "", fmt.Errorf("config %.200q: %w", m.Config, err)
	}
	from := dockerBlobs{a, map[v1.Hash]string{}}
	img := &ociImage{from: from, config: c.Config, digest: digest}
	for i, file := range m.Layers {
		r, size, err := a.files.open(file)
		if errors.Is(err, fs.ErrNotExist) {
			return "", kind.Errorf(kind.Invalid, "layer %d: %.200q is missing", i, file)
		}
		if err == nil {
			err = r.Close()
		}
		if err != nil {
			return "", err
		}
		id := c.RootFS.DiffIDs[i]
		from.names[id] = file
		img.layers = append(img.layers, ociLayer{desc: v1.Descriptor{Digest: id, Size: size}, diffID: id, unlisted: true})
	}
	a.image = img
	return "docker " + digest.String(), ctx.Err()
}

// Load implements Source.
func (a *Archive) Load(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) (Defaults, error) {
	if err := a.image.merge(ctx, t, spool, progress); err != nil {
		return Defaults{}, fmt.Errorf("%s: %w", a.path, err)
	}
	return a.image.defaults()
}

// Close implements Source.
func (a *Archive) Close() error {
	if a.files == nil {
		return nil
	}
	f := a.files
	a.files = nil
	return f.Close()
}

// layoutDir is a layout directory. os.Root does not follow links that lead out of
// it.
type layoutDir struct{ root *os.Root }

func openLayout(dir string) (archiveFiles, error) {
	switch fi, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, kind.Errorf(kind.NotFound, "it does not exist")
	case err != nil:
		return nil, err
	case !fi.IsDir():
		return nil, kind.Errorf(kind.Invalid, "it is not a directory").WithHint("use from.tarball for an image in a file")
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return layoutDir{root}, nil
}

func (l layoutDir) open(name string) (io.ReadCloser, int64, error) {
	if !fs.ValidPath(name) {
		return nil, 0, kind.Errorf(kind.Invalid, "invalid file name %.200q in a layout", name)
	}
	f, err := l.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = kind.Errorf(kind.Invalid, "%s is not a regular file", name)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, fi.Size(), nil
}

func (l layoutDir) Close() error { return l.root.Close() }

// tarIndex opens the members of a tar file by name, without extracting them.
type tarIndex struct {
	file    *os.File
	members map[string]member
}

type member struct{ off, size int64 }

// indexTar reads the headers of an image's tar file. The file must not be
// compressed, because layers are read by their offset in it.
func indexTar(ctx context.Context, file string, limits tree.Limits) (archiveFiles, error) {
	f, size, err := openFile(file)
	if err != nil {
		return nil, err
	}
	idx := &tarIndex{file: f, members: map[string]member{}}
	if err := idx.scan(ctx, size, limits); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return idx, nil
}

func (x *tarIndex) scan(ctx context.Context, size int64, limits tree.Limits) error {
	var head [4]byte
	if n, err := x.file.ReadAt(head[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	} else if s := string(head[:n]); strings.HasPrefix(s, "\x1f\x8b") || s == "\x28\xb5\x2f\xfd" {
		return kind.Errorf(kind.Invalid, "the archive is compressed").WithHint("decompress it with gunzip or unzstd")
	}
	// The tar package skips a member by seeking when it can, so after Next the
	// position is that of the member's data.
	section := io.NewSectionReader(x.file, 0, size)
	tr := tar.NewReader(section)
	var links []*tar.Header
	for n := int64(0); ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return tarError(err)
		}
		if n >= limits.Entries {
			return kind.Wrap(kind.Exhausted, &tree.LimitError{Limit: "Entries", Max: limits.Entries, Entry: h.Name})
		}
		switch h.Typeflag {
		case tar.TypeReg:
			off, err := section.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			x.members[path.Clean(h.Name)] = member{off, h.Size}
		case tar.TypeSymlink, tar.TypeLink:
			links = append(links, h)
		}
	}
	// Old versions of "docker save" store equal layers as links.
	for _, h := range links {
		target := path.Clean(h.Linkname)
		if h.Typeflag == tar.TypeSymlink {
			target = path.Join(path.Dir(h.Name), h.Linkname)
		}
		if m, ok := x.members[target]; ok {
			x.members[path.Clean(h.Name)] = m
		}
	}
	return nil
}

func (x *tarIndex) open(name string) (io.ReadCloser, int64, error) {
	m, ok := x.members[path.Clean(name)]
	if !ok {
		return nil, 0, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return io.NopCloser(io.NewSectionReader(x.file, m.off, m.size)), m.size, nil
}

func (x *tarIndex) Close() error { return x.file.Close() }
