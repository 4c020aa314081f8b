package template

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"

	"bivy/internal/durable"
	"bivy/internal/kind"
)

var holderForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// Lease keeps the template from being collected or removed until holder releases
// it, also across restarts. The same holder may take it again. An unknown template
// is kind.NotFound.
func (s *Store) Lease(digest Digest, holder string) error {
	if !holderForm.MatchString(holder) {
		return kind.Errorf(kind.Invalid, "lease of %s: invalid holder %.64q: want 1 to 128 of letters, digits, '.', '_', '-'", digest, holder)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.load(digest); err != nil {
		return fmt.Errorf("lease for %s: %w", holder, err)
	}
	dir := digest.Hex() + "/" + leasesDir
	f, err := s.root.OpenFile(dir+"/"+holder, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lease of %s for %s: %w", digest, holder, err)
	}
	if err := errors.Join(f.Close(), durable.SyncDirIn(s.root, dir)); err != nil {
		return fmt.Errorf("lease of %s for %s: %w", digest, holder, err)
	}
	return nil
}

// Release gives up a lease. It is no error if holder has none, or if the template
// does not exist any more.
func (s *Store) Release(digest Digest, holder string) error {
	if !holderForm.MatchString(holder) {
		return nil // such a holder cannot have a lease
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := durable.RemoveIn(s.root, digest.Hex()+"/"+leasesDir+"/"+holder); err != nil {
		return fmt.Errorf("lease of %s for %s: %w", digest, holder, err)
	}
	return nil
}

// Leases returns the holders of leases on the template, sorted. A restarted daemon
// releases those whose holder does not exist any more.
func (s *Store) Leases(digest Digest) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leasesLocked(digest)
}

func (s *Store) leasesLocked(digest Digest) ([]string, error) {
	entries, err := fs.ReadDir(s.root.FS(), digest.Hex()+"/"+leasesDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("leases of %s: %w", digest, err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, nil
}
