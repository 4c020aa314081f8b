// Package bundle carries bivy-sentry and bivy-guest inside bivy, so that a
// user installs one file. They are built first (make build) and lie
// compressed in payload/; a tree without them still builds and vets, and says
// at run time what to do.
package bundle

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"

	"bivy/internal/durable"
	"bivy/internal/kind"
)

//go:embed payload
var payload embed.FS

// Names of the carried binaries.
const (
	Sentry = "bivy-sentry"
	Guest  = "bivy-guest"
)

// Manifest describes the payload; pack writes it.
type Manifest struct {
	// Build names what decides whether a snapshot can be restored: gVisor's
	// version, Go's, and the sentry's own sources, by hash. It is also the
	// version string inside bivy-sentry.
	Build  string            `json:"build"`
	SHA256 map[string]string `json:"sha256"` // hex, of the uncompressed binary
}

// errMissing says that this bivy was built without its payload.
var errMissing = kind.Errorf(kind.Unavailable, "this bivy was built without %s and %s", Sentry, Guest).
	WithHint("build it with: make build")

// Load reads the manifest.
func Load() (Manifest, error) {
	var m Manifest
	b, err := payload.ReadFile("payload/manifest.json")
	if errors.Is(err, fs.ErrNotExist) {
		return m, errMissing
	}
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(b, &m)
}

// Unpack puts the binary at <dir>/<first half of its SHA-256>/<name>, unless
// it is there, and returns the path. The directory must be on a file system
// that allows execution, which /run often is not.
func (m Manifest) Unpack(dir, name string) (string, error) {
	want := m.SHA256[name]
	if len(want) != hex.EncodedLen(sha256.Size) {
		return "", fmt.Errorf("payload manifest names no %s", name)
	}
	home := filepath.Join(dir, want[:32])
	path := filepath.Join(home, name)
	if sum, err := fileDigest(path); err == nil && sum == want {
		return path, nil
	}
	data, err := m.Open(name)
	if err != nil {
		return "", err
	}
	// For everyone: the sentry runs as an unprivileged user of the host.
	if err := os.MkdirAll(home, 0o755); err != nil {
		return "", err
	}
	if err := durable.WriteFile(path, data, 0o755); err != nil {
		return "", fmt.Errorf("unpack %s: %w", name, err)
	}
	return path, nil
}

// Open returns the binary's bytes, checked against the manifest.
func (m Manifest) Open(name string) ([]byte, error) {
	packed, err := payload.ReadFile("payload/" + name + ".zst")
	if err != nil {
		return nil, errMissing
	}
	dec, err := zstd.NewReader(nil)
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	data, err := dec.DecodeAll(packed, nil)
	if err != nil {
		return nil, fmt.Errorf("payload %s: %w", name, err)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != m.SHA256[name] {
		return nil, fmt.Errorf("payload %s does not match its manifest", name)
	}
	return data, nil
}

func fileDigest(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}
