package audit

import (
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
	"strings"

	"bivy/internal/kind"
)

// Names of the files that LoadSigner keeps.
const (
	SigningKeyFile = "signing.key" // the private key, PKCS #8 in PEM, mode 0600
	PublicKeyFile  = "signing.pub" // the public key for pinning, mode 0644
)

// Signer seals records with an Ed25519 key.
type Signer struct {
	key ed25519.PrivateKey
}

// PublicKey is a key that seals are checked against. Keys to trust come from
// whoever verifies, never from what is verified.
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

// LoadSigner reads the signing key in dir, making it first where there is
// none, and writes the public key beside it for pinning. When two processes
// make it at the same time both get the same key. It refuses a private key
// that others than its owner may read.
func LoadSigner(dir string) (*Signer, error) {
	path := filepath.Join(dir, SigningKeyFile)
	s, err := readSigner(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = createSigningKey(dir, path); err == nil {
			s, err = readSigner(path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	public := filepath.Join(dir, PublicKeyFile)
	want := s.Public().Export()
	if have, err := os.ReadFile(public); err != nil || string(have) != string(want) {
		if err := writeFile(public, want, 0o644, os.Rename); err != nil {
			return nil, fmt.Errorf("public key: %w", err)
		}
	}
	return s, nil
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
			WithHint("find out who could have read it; if nobody did: chmod 600 %s", path)
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
	der, err := x509.MarshalPKCS8PrivateKey(GenerateSigner().key)
	if err != nil {
		return err
	}
	// A link, unlike a rename, does not replace a key that another process
	// made meanwhile.
	err = writeFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600, os.Link)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// writeFile makes the file durable under a name of its own first, then gives
// it its name with place, so that path never names half a file.
func writeFile(path string, data []byte, mode fs.FileMode, place func(from, to string) error) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := place(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Public returns the key that seals by s are checked against.
func (s *Signer) Public() PublicKey {
	return PublicKey{key: s.key.Public().(ed25519.PublicKey)}
}

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

// ParsePublicKeys reads one or more keys as Export writes them. Whatever is
// neither a key nor a line that begins with # is refused, so that a key that
// was mangled is not silently left out.
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
