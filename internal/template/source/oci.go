package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"bivy/internal/kind"
	"bivy/internal/template/tree"
)

// The platform of the images that are used.
const (
	platformOS   = "linux"
	platformArch = "amd64"
)

// maxIndexDepth is how many indexes may point to indexes.
const maxIndexDepth = 4

// blobs opens the parts of one image. Its content is not trusted: every part is
// checked against its descriptor.
type blobs interface {
	// blob opens the part with the descriptor's digest.
	blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error)
}

// ociImage is one image of one platform, its manifest and configuration
// verified.
type ociImage struct {
	from   blobs
	layers []ociLayer
	config v1.Config
	digest v1.Hash // of the manifest, or of the configuration where there is none
}

type ociLayer struct {
	desc   v1.Descriptor
	diffID v1.Hash
	// unlisted layers are those of "docker save", known by diffID alone.
	unlisted bool
}

// resolve follows indexes from desc to the image for the platform.
func resolve(ctx context.Context, from blobs, desc v1.Descriptor, limits tree.Limits) (*ociImage, error) {
	for range maxIndexDepth {
		raw, err := readBlob(ctx, from, desc, limits.ConfigBytes)
		if err != nil {
			return nil, fmt.Errorf("manifest %s: %w", desc.Digest, err)
		}
		mediaType, err := manifestType(desc, raw)
		if err != nil {
			return nil, fmt.Errorf("manifest %s: %w", desc.Digest, err)
		}
		if mediaType.IsImage() {
			return parseImage(ctx, from, desc.Digest, raw, limits)
		}
		index, err := v1.ParseIndexManifest(bytes.NewReader(raw))
		if err != nil {
			return nil, kind.Errorf(kind.Invalid, "index %s: %w", desc.Digest, err)
		}
		next, err := choose(index.Manifests)
		if err != nil {
			return nil, fmt.Errorf("index %s: %w", desc.Digest, err)
		}
		desc = next
	}
	return nil, kind.Errorf(kind.Invalid, "indexes are nested more than %d deep", maxIndexDepth)
}

// manifestType returns whether a document is an image or an index. The document
// itself decides, because the descriptor of a registry can be wrong.
func manifestType(desc v1.Descriptor, raw []byte) (types.MediaType, error) {
	var doc struct {
		MediaType types.MediaType   `json:"mediaType"`
		Manifests []json.RawMessage `json:"manifests"`
		Layers    []json.RawMessage `json:"layers"`
		FSLayers  []json.RawMessage `json:"fsLayers"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return "", kind.Errorf(kind.Invalid, "not an image: %w", err)
	}
	switch {
	case doc.FSLayers != nil:
		return "", kind.Errorf(kind.Invalid, "Docker manifest schema 1 is not supported: it has no digests to check").WithHint("push it again with a current tool")
	case doc.Manifests != nil && doc.Layers != nil:
		return "", kind.Errorf(kind.Invalid, "it is both an index and an image")
	case doc.Manifests != nil:
		return types.OCIImageIndex, nil
	case doc.Layers != nil && (doc.MediaType == "" || doc.MediaType.IsImage()):
		return types.OCIManifestSchema1, nil
	}
	return "", kind.Errorf(kind.Invalid, "not an image (media type %.100q)", string(desc.MediaType))
}

// choose returns the manifest for the platform. If there is none, it returns the
// manifest without a platform if there is exactly one.
func choose(list []v1.Descriptor) (v1.Descriptor, error) {
	var have []string
	var open []v1.Descriptor
	for _, d := range list {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() && d.MediaType != "" {
			continue
		}
		if d.Platform == nil {
			open = append(open, d)
			continue
		}
		if d.Platform.OS == platformOS && d.Platform.Architecture == platformArch {
			return d, nil
		}
		if len(have) < 16 {
			have = append(have, fmt.Sprintf("%.40q", d.Platform.String()))
		}
	}
	if len(open) == 1 {
		return open[0], nil
	}
	return v1.Descriptor{}, kind.Errorf(kind.Invalid, "no image for %s/%s (available: %s)", platformOS, platformArch, strings.Join(have, ", "))
}

func parseImage(ctx context.Context, from blobs, digest v1.Hash, raw []byte, limits tree.Limits) (*ociImage, error) {
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, kind.Errorf(kind.Invalid, "manifest %s: %w", digest, err)
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, kind.Errorf(kind.Invalid, "manifest %s: an artifact of type %.100q, not an image", digest, string(m.Config.MediaType))
	}
	if int64(len(m.Layers)) > limits.Layers {
		return nil, kind.Wrap(kind.Exhausted, &tree.LimitError{Limit: "Layers", Max: limits.Layers})
	}
	rawConfig, err := readBlob(ctx, from, m.Config, limits.ConfigBytes)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", m.Config.Digest, err)
	}
	config, err := parseConfig(rawConfig, len(m.Layers))
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", m.Config.Digest, err)
	}
	img := &ociImage{from: from, config: config.Config, digest: digest}
	for i, d := range m.Layers {
		if !d.MediaType.IsDistributable() {
			return nil, kind.Errorf(kind.Invalid, "layer %d (%s) is not distributed with the image", i, d.Digest)
		}
		if !d.MediaType.IsLayer() {
			return nil, kind.Errorf(kind.Invalid, "layer %d (%s) is %.100q, not a file system layer", i, d.Digest, string(d.MediaType))
		}
		img.layers = append(img.layers, ociLayer{desc: d, diffID: config.RootFS.DiffIDs[i]})
	}
	return img, nil
}

func parseConfig(raw []byte, layers int) (*v1.ConfigFile, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return nil, kind.Errorf(kind.Invalid, "not an image configuration: %w", err)
	}
	if len(c.RootFS.DiffIDs) != layers {
		return nil, kind.Errorf(kind.Invalid, "it lists %d layers, but the manifest lists %d", len(c.RootFS.DiffIDs), layers)
	}
	if c.OS != platformOS || c.Architecture != platformArch {
		return nil, kind.Errorf(kind.Invalid, "the image is for %.40q, not %s/%s", c.OS+"/"+c.Architecture, platformOS, platformArch)
	}
	return c, nil
}

// readBlob reads and verifies a small part.
func readBlob(ctx context.Context, from blobs, d v1.Descriptor, limit int64) ([]byte, error) {
	r, err := from.blob(ctx, d)
	if err != nil {
		return nil, err
	}
	raw, err := readAll(&progressReader{ctx: ctx, r: r}, limit, "")
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	return raw, verify(d, hex.EncodeToString(sum[:]), int64(len(raw)))
}

// verify compares what was read with what its descriptor says.
func verify(d v1.Descriptor, sum string, n int64) error {
	if d.Digest.Algorithm != "sha256" {
		return kind.Errorf(kind.Invalid, "unsupported digest algorithm %.40q; want sha256", d.Digest.Algorithm)
	}
	if d.Digest.Hex != sum {
		return kind.Errorf(kind.Invalid, "wrong digest: want %s, got sha256:%s", d.Digest, sum)
	}
	// A size of 0 means that it is not known.
	if d.Size != 0 && d.Size != n {
		return kind.Errorf(kind.Invalid, "wrong size: want %d bytes, got %d", d.Size, n)
	}
	return nil
}

// merge reads every layer, in order, into t.
func (img *ociImage) merge(ctx context.Context, t *tree.Tree, spool *tree.Spool, progress Progress) error {
	var total, done int64
	for _, l := range img.layers {
		total += max(l.desc.Size, 0)
	}
	for i, l := range img.layers {
		name := fmt.Sprintf("layer %d (%s)", i, l.desc.Digest)
		if err := t.BeginLayer(name); err != nil {
			return err
		}
		n, err := img.mergeLayer(ctx, t, spool, l, name, func(n, _ int64) {
			if progress != nil {
				progress(done+n, total)
			}
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		done += n
	}
	return nil
}

// mergeLayer merges one layer and verifies its digest and diff ID. They are known
// at the end only; on an error the whole build is discarded.
func (img *ociImage) mergeLayer(ctx context.Context, t *tree.Tree, spool *tree.Spool, l ociLayer, name string, progress Progress) (int64, error) {
	blob, err := img.from.blob(ctx, l.desc)
	if err != nil {
		return 0, err
	}
	packedSum, rawSum := sha256.New(), sha256.New()
	in := &progressReader{ctx: ctx, r: newLimitedReader(blob, "StreamBytes", t.Limits().StreamBytes, name), progress: progress}
	err = func() error {
		packed := io.TeeReader(in, packedSum)
		u, err := decompress(packed)
		if err != nil {
			return err
		}
		defer u.Close()
		raw := io.TeeReader(newLimitedReader(u, "StreamBytes", t.Limits().StreamBytes, name), rawSum)
		if err := mergeTar(ctx, t, spool, raw, true); err != nil {
			return err
		}
		// Data after the end of the tar is part of both digests.
		if _, err := io.Copy(io.Discard, raw); err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, packed)
		return err
	}()
	if err := errors.Join(err, blob.Close()); err != nil {
		return 0, err
	}
	if !l.unlisted {
		if err := verify(l.desc, hex.EncodeToString(packedSum.Sum(nil)), in.done); err != nil {
			return 0, err
		}
	}
	if got := hex.EncodeToString(rawSum.Sum(nil)); l.diffID.Algorithm != "sha256" || l.diffID.Hex != got {
		return 0, kind.Errorf(kind.Invalid, "wrong diff ID: want %s, got sha256:%s", l.diffID, got)
	}
	return in.done, nil
}

// maxConfigItems bounds the lists of an image's configuration.
const maxConfigItems = 4096

// defaults turns the image's configuration into a template's.
func (img *ociImage) defaults() (Defaults, error) {
	c := img.config
	if len(c.Env) > maxConfigItems || len(c.Cmd)+len(c.Entrypoint) > maxConfigItems {
		return Defaults{}, kind.Errorf(kind.Invalid, "config: more than %d variables or arguments", maxConfigItems)
	}
	d := Defaults{User: c.User, Workdir: c.WorkingDir}
	for _, kv := range c.Env {
		k, v, _ := strings.Cut(kv, "=")
		if k == "" || strings.ContainsRune(kv, 0) {
			continue // not a valid variable
		}
		if d.Env == nil {
			d.Env = map[string]string{}
		}
		d.Env[k] = v
	}
	d.Cmd = append(append(d.Cmd, c.Entrypoint...), c.Cmd...)
	for _, s := range append([]string{d.User, d.Workdir}, d.Cmd...) {
		if strings.ContainsRune(s, 0) {
			return Defaults{}, kind.Errorf(kind.Invalid, "config: NUL in user, working directory or command")
		}
	}
	return d, nil
}
