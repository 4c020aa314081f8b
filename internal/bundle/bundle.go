// Package bundle embeds bivy-sentry and bivy-guest in bivy, so that a user installs
// one file. "make build" builds them first and puts them compressed into payload/.
// A tree without them still builds; Load then fails with a hint.
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

// Names of the embedded binaries.
const (
	Sentry = "bivy-sentry"
	Guest  = "bivy-guest"
)

// Manifest describes the payload; pack writes it.
type Manifest struct {
	// Build is a hash of the versions of gVisor and Go and of the sentry's
	// sources. A snapshot can only be restored by the build that saved it. It is
	// also the version string of bivy-sentry.
	Build  string            `json:"build"`
	SHA256 map[string]string `json:"sha256"` // hex, of the uncompressed binary
}

// errMissing means that this bivy was built without the binaries.
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

// Unpack writes the binary to <dir>/<first half of its SHA-256>/<name>, unless it is
// there, and returns the path. The file system of dir must not be mounted noexec,
// as /run often is.
func (m Manifest) Unpack(dir, name string) (string, error) {
	want := m.SHA256[name]
	if len(want) != hex.EncodedLen(sha256.Size) {
		return "", fmt.Errorf("%s is not in the payload manifest", name)
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
	// Accessible to all users: the sentry runs as an unprivileged user.
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
