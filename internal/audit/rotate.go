package audit

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"bivy/internal/durable"
	"bivy/internal/kind"
)

// Rotation states that one signing key replaces another. It is signed by the
// old key. When the old key was lost it is not signed, and a verifier does not
// trust the new key because of it.
type Rotation struct {
	Version int       `json:"version"`           // StatementVersion
	Old     string    `json:"old,omitempty"`     // fingerprint of the key that is replaced; empty when it is not known
	OldKey  []byte    `json:"old_key,omitempty"` // that public key, 32 bytes
	New     string    `json:"new"`               // fingerprint of the key that replaces it
	NewKey  []byte    `json:"new_key"`           // that public key, 32 bytes
	Time    time.Time `json:"time"`              // when
	Lost    bool      `json:"lost"`              // the old private key was lost
}

// MaxRotations bounds the history of one signing key.
const MaxRotations = 1000

// Rotation decodes a statement of a rotation. It does not check the signature.
func (s Seal) Rotation() (Rotation, error) {
	var r Rotation
	if _, err := s.open(RotationType, &r); err != nil {
		return Rotation{}, err
	}
	if len(r.NewKey) != ed25519.PublicKeySize || r.New != (PublicKey{key: r.NewKey}).Fingerprint() {
		return Rotation{}, errors.New("rotation: the new key does not have the fingerprint beside it")
	}
	if len(r.OldKey) > 0 && (len(r.OldKey) != ed25519.PublicKeySize || r.Old != (PublicKey{key: r.OldKey}).Fingerprint()) {
		return Rotation{}, errors.New("rotation: the old key does not have the fingerprint beside it")
	}
	return r, nil
}

// Rotate replaces the signing key in dir by a new one, records that in
// RotationsFile with a signature by s, and returns a signer with the new key.
// After a crash in between, LoadSigner finds either the old key and no trace of
// the new one, or finishes the replacement. The caller makes sure that no other
// process uses dir.
func (s *Signer) Rotate(dir string) (*Signer, error) {
	next, err := s.rotate(dir, false, s.Public())
	if err != nil {
		return nil, fmt.Errorf("rotate the signing key: %w", err)
	}
	return next, nil
}

// RotateLost makes a new signing key in dir in place of one that was lost. The
// statement of it is not signed: verifiers have to pin the new key by hand. It
// fails with Conflict when the key is there.
func RotateLost(dir string) (*Signer, error) {
	path := filepath.Join(dir, SigningKeyFile)
	if _, err := os.Lstat(path); err == nil {
		return nil, kind.Errorf(kind.Conflict, "rotate the signing key: %s is not lost", path).
			WithHint("rotate it without --lost, so that the old key signs the new one")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("rotate the signing key: %w", err)
	}
	rotations, err := readRotations(dir)
	if err != nil {
		return nil, fmt.Errorf("rotate the signing key: %w", err)
	}
	// The last key that is known by its public half, if there is one.
	var old PublicKey
	if text, err := os.ReadFile(filepath.Join(dir, PublicKeyFile)); err == nil {
		if keys, err := ParsePublicKeys(text); err == nil {
			old = keys[0]
		}
	}
	next, err := (&Signer{rotations: rotations}).rotate(dir, true, old)
	if err != nil {
		return nil, fmt.Errorf("rotate the signing key: %w", err)
	}
	return next, nil
}

func (s *Signer) rotate(dir string, lost bool, old PublicKey) (*Signer, error) {
	if len(s.rotations) >= MaxRotations {
		return nil, kind.Errorf(kind.Exhausted, "the key was replaced %d times already", len(s.rotations))
	}
	next := GenerateSigner()
	public := next.Public()
	digest := sha256.Sum256(public.key)
	about := Subject{Name: "key/" + public.Fingerprint(), Digest: map[string]string{"sha256": hex.EncodeToString(digest[:])}}
	r := Rotation{Version: StatementVersion, New: public.Fingerprint(), NewKey: public.key, Time: micro(time.Now()), Lost: lost}
	if len(old.key) > 0 {
		r.Old, r.OldKey = old.Fingerprint(), old.key
	}
	var seal Seal
	var err error
	if lost {
		seal, err = unsigned(RotationType, about, r)
	} else {
		seal, err = s.envelope(RotationType, about, r)
	}
	if err != nil {
		return nil, err
	}
	next.rotations = append(s.Rotations(), seal)
	private, err := next.private()
	if err != nil {
		return nil, err
	}
	if err := durable.WriteFile(filepath.Join(dir, nextKeyFile), private, 0o600); err != nil {
		return nil, err
	}
	var lines bytes.Buffer
	for _, r := range next.rotations {
		if err := json.NewEncoder(&lines).Encode(r); err != nil {
			return nil, err
		}
	}
	// From here on the new key is the one: finishRotation does the rest.
	if err := durable.WriteFile(filepath.Join(dir, RotationsFile), lines.Bytes(), 0o644); err != nil {
		return nil, err
	}
	if err := finishRotation(dir, next.rotations); err != nil {
		return nil, err
	}
	return next, next.writePublicKeys(dir)
}

// finishRotation ends a rotation that a crash interrupted: a new key that the
// history names takes the place of the old one, any other is removed.
func finishRotation(dir string, rotations []Seal) error {
	path := filepath.Join(dir, nextKeyFile)
	next, err := readSigner(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if n := len(rotations); n > 0 {
		last, err := rotations[n-1].Rotation()
		if err != nil {
			return err
		}
		if last.New == next.Public().Fingerprint() {
			if err := os.Rename(path, filepath.Join(dir, SigningKeyFile)); err != nil {
				return err
			}
			return durable.SyncDir(dir)
		}
	}
	return os.Remove(path)
}

func readRotations(dir string) ([]Seal, error) {
	data, err := os.ReadFile(filepath.Join(dir, RotationsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := ParseRotations(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, RotationsFile), err)
	}
	return all, nil
}

// ParseRotations reads the text of RotationsFile. It fails with Invalid for
// everything but statements of rotations, one to a line; it does not check
// their signatures.
func ParseRotations(data []byte) ([]Seal, error) {
	var all []Seal
	for line := range bytes.Lines(data) {
		var s Seal
		if err := strict(line, &s); err != nil {
			return nil, kind.Errorf(kind.Invalid, "rotation %d does not decode: %w", len(all)+1, err)
		}
		if _, err := s.Rotation(); err != nil {
			return nil, kind.Errorf(kind.Invalid, "rotation %d: %w", len(all)+1, err)
		}
		if all = append(all, s); len(all) > MaxRotations {
			return nil, kind.Errorf(kind.Invalid, "more than %d rotations", MaxRotations)
		}
	}
	return all, nil
}

// trusted is the keys that a verifier accepts.
type trusted struct {
	all []PublicKey
	by  map[string]string // fingerprint of each → of the pinned key that it follows from
}

// trust returns the pinned keys and those that they lead to: the new key of a
// rotation that a trusted key signed. Rotations are in the order in which they
// were made; one that is not signed adds nothing.
func trust(pinned []PublicKey, rotations []Seal) (trusted, error) {
	if len(rotations) > MaxRotations {
		return trusted{}, fmt.Errorf("more than %d rotations", MaxRotations)
	}
	t := trusted{by: make(map[string]string)}
	for _, k := range pinned {
		if len(k.key) == ed25519.PublicKeySize {
			t.all = append(t.all, k)
			t.by[k.Fingerprint()] = k.Fingerprint()
		}
	}
	for i, s := range rotations {
		r, err := s.Rotation()
		if err != nil {
			return trusted{}, fmt.Errorf("rotation %d: %w", i+1, err)
		}
		key, ok := s.signedBy(t.all)
		if r.Lost || !ok || key.Fingerprint() != r.Old || t.by[r.New] != "" {
			continue
		}
		t.all = append(t.all, PublicKey{key: r.NewKey})
		t.by[r.New] = t.by[r.Old]
	}
	return t, nil
}
