package audit

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"bivy/internal/durable"
	"bivy/internal/kind"
)

// Names of the files that LoadSigner and Rotate keep.
const (
	SigningKeyFile = "signing.key"       // the private key, PKCS #8 in PEM, mode 0600
	PublicKeyFile  = "signing.pub"       // the current public key and the former ones, for pinning, mode 0644
	RotationsFile  = "signing.rotations" // signed statements of each replacement of the key, JSON Lines, mode 0644

	nextKeyFile = "signing.key.next" // the new private key while Rotate replaces the old one
)

// Signer signs statements with an Ed25519 key.
type Signer struct {
	key       ed25519.PrivateKey
	rotations []Seal // oldest first
}

// PublicKey is a key that signatures are checked against. The person who
// verifies chooses the keys to trust; keys inside an export are never trusted
// by themselves.
type PublicKey struct {
	key ed25519.PublicKey
}

// GenerateSigner returns a signer with a new key that is kept nowhere.
func GenerateSigner() *Signer {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		panic(err) // the system's randomness cannot fail
	}
	return &Signer{key: key}
}

// LoadSigner reads the signing key in dir and the history of its rotations, and
// writes the public keys beside it for pinning. When there is no key it makes
// one, but only when haveSeals is false and no public key is there: a key that was
// lost is never replaced in silence, and LoadSigner fails with Conflict. When two processes make the
// first key at the same time both get the same one. It refuses a private key
// that others than its owner may read.
func LoadSigner(dir string, haveSeals bool) (*Signer, error) {
	s, err := loadSigner(dir, haveSeals)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	return s, nil
}

func loadSigner(dir string, haveSeals bool) (*Signer, error) {
	rotations, err := readRotations(dir)
	if err != nil {
		return nil, err
	}
	if err := finishRotation(dir, rotations); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, SigningKeyFile)
	s, err := readSigner(path)
	// Heads are signed before anything is sealed, and may be kept by those who
	// pinned the public key. Where that is there, another process may have made
	// both keys just now.
	published := false
	if errors.Is(err, fs.ErrNotExist) {
		if _, bad := os.Lstat(filepath.Join(dir, PublicKeyFile)); bad == nil {
			published = true
			s, err = readSigner(path)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		if haveSeals || len(rotations) > 0 || published {
			return nil, kind.Errorf(kind.Conflict, "%s is missing, but records are signed with it", path).
				WithHint("restore %s from a backup; if it is lost for good: bivy audit key rotate --lost", path)
		}
		if err = createSigningKey(dir, path); err == nil {
			s, err = readSigner(path)
		}
	}
	if err != nil {
		return nil, err
	}
	s.rotations = rotations
	return s, s.writePublicKeys(dir)
}

func readSigner(path string) (*Signer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, kind.Errorf(kind.Conflict, "%s has mode %v: a signing key must be a file that only its owner can read", path, info.Mode()).
			WithHint("check who could have read it; if no other user did: chmod 600 %s", path)
	}
	data := make([]byte, 4096)
	n, err := f.Read(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	block, _ := pem.Decode(data[:n])
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, kind.Errorf(kind.Conflict, "%s holds no private key in PEM", path)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, kind.Errorf(kind.Conflict, "%s: %w", path, err)
	}
	ed, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, kind.Errorf(kind.Conflict, "%s holds a %T, want an Ed25519 key", path, key)
	}
	return &Signer{key: ed}, nil
}

func createSigningKey(dir, path string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	text, err := GenerateSigner().private()
	if err != nil {
		return err
	}
	// A key that another process made meanwhile is not replaced.
	err = durable.WriteFile(path, text, 0o600, durable.CreateOnly)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// private returns the private key as the text of SigningKeyFile.
func (s *Signer) private() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(s.key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// writePublicKeys writes the current public key and the former ones, newest
// first, unless the file holds them already.
func (s *Signer) writePublicKeys(dir string) error {
	keys := []PublicKey{s.Public()}
	add := func(k PublicKey) {
		known := slices.ContainsFunc(keys, func(have PublicKey) bool { return have.Fingerprint() == k.Fingerprint() })
		if len(k.key) > 0 && !known {
			keys = append(keys, k)
		}
	}
	for _, r := range slices.Backward(s.rotations) {
		d, err := r.Rotation()
		if err != nil {
			return err
		}
		add(PublicKey{key: d.NewKey})
		add(PublicKey{key: d.OldKey})
	}
	var want []byte
	for _, k := range keys {
		want = append(want, k.Export()...)
	}
	path := filepath.Join(dir, PublicKeyFile)
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, want) {
		return nil
	}
	if err := durable.WriteFile(path, want, 0o644); err != nil {
		return fmt.Errorf("public key: %w", err)
	}
	return nil
}

// Public returns the key that signatures by s are checked against.
func (s *Signer) Public() PublicKey {
	return PublicKey{key: s.key.Public().(ed25519.PublicKey)}
}

// Rotations returns the statements of how the key came to be, oldest first. An
// export carries them, so that a verifier who pinned a former key accepts seals
// by the current one.
func (s *Signer) Rotations() []Seal { return slices.Clone(s.rotations) }

func (s *Signer) sign(message []byte) []byte { return ed25519.Sign(s.key, message) }

// Fingerprint names the key: "ed25519:" and the first 32 hex digits of the
// SHA-256 of its 32 bytes.
func (k PublicKey) Fingerprint() string {
	sum := sha256.Sum256(k.key)
	return "ed25519:" + hex.EncodeToString(sum[:])[:32]
}

// Export returns the key as the text to pin: its fingerprint in a comment and
// its PEM encoding, which openssl reads too.
func (k PublicKey) Export() []byte {
	der, err := x509.MarshalPKIXPublicKey(k.key)
	if err != nil {
		panic(err) // an Ed25519 key always encodes
	}
	head := "# bivy record signing key " + k.Fingerprint() + "\n"
	return append([]byte(head), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})...)
}

func (k PublicKey) verify(message, sig []byte) bool {
	return len(k.key) == ed25519.PublicKeySize && ed25519.Verify(k.key, message, sig)
}

// ParsePublicKeys reads one or more keys as Export writes them. It refuses text
// that is neither a key nor a line that begins with #, so that a damaged key is
// not left out in silence.
func ParsePublicKeys(data []byte) ([]PublicKey, error) {
	bad := func(format string, args ...any) ([]PublicKey, error) {
		return nil, kind.Errorf(kind.Invalid, "public key file: "+format, args...).
			WithHint("use the %s file of the data directory that made the record", PublicKeyFile)
	}
	var keys []PublicKey
	rest := string(data)
	for {
		rest = strings.TrimLeft(rest, " \t\r\n")
		if rest == "" {
			break
		}
		if rest[0] == '#' {
			_, rest, _ = strings.Cut(rest, "\n")
			continue
		}
		if !strings.HasPrefix(rest, "-----BEGIN PUBLIC KEY-----") {
			return bad("unexpected %.40q", rest)
		}
		block, after := pem.Decode([]byte(rest))
		if block == nil || block.Type != "PUBLIC KEY" {
			return bad("broken PEM at %.40q", rest)
		}
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return bad("%w", err)
		}
		ed, ok := key.(ed25519.PublicKey)
		if !ok {
			return bad("holds a %T, want an Ed25519 key", key)
		}
		keys = append(keys, PublicKey{key: ed})
		rest = string(after)
	}
	if len(keys) == 0 {
		return bad("it holds no key")
	}
	return keys, nil
}
