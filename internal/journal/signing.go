package journal

import (
	"sync/atomic"
	"time"

	"bivy/internal/audit"
)

// Signing holds the key that signs records, which can be replaced while the
// process runs. Its methods may be called from any goroutine.
type Signing struct {
	dir    string
	signer atomic.Pointer[audit.Signer]
}

// NewSigning returns the holder of a signer that was loaded from dir.
func NewSigning(dir string, s *audit.Signer) *Signing {
	h := &Signing{dir: dir}
	h.signer.Store(s)
	return h
}

// Signer returns the signer in use.
func (h *Signing) Signer() *audit.Signer { return h.signer.Load() }

// Seal is audit.Signer.Seal with the key in use.
func (h *Signing) Seal(head audit.Head, before audit.Heads, c audit.Closeout) (audit.Seal, error) {
	return h.Signer().Seal(head, before, c)
}

// SealAddenda is audit.Signer.SealAddenda with the key in use.
func (h *Signing) SealAddenda(head audit.Head, at time.Time) (audit.Seal, error) {
	return h.Signer().SealAddenda(head, at)
}

// Rotations are the statements by which earlier keys vouch for the one in use.
func (h *Signing) Rotations() []audit.Seal { return h.Signer().Rotations() }

// rotate replaces the key in use by a new one that the old one has signed.
func (h *Signing) rotate() error {
	next, err := h.Signer().Rotate(h.dir)
	if err != nil {
		return err
	}
	h.signer.Store(next)
	return nil
}
