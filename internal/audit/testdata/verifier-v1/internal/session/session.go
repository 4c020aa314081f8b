// Package session is bivy's vocabulary: what a session is, what it may ask
// for, which states it passes through and by which rule.
//
// It imports nothing but the standard library and kind, knows no storage and
// no API, and holds no behaviour that touches the world.
package session

import (
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"time"

	"bivy/internal/kind"
)

// ID names a session: 20 characters of [a-z0-9], never reused.
type ID string

// SandboxID names one incarnation of a session: "<ID>-<generation>". The
// generation only grows, so that the holder of an old id can tell that memory
// or disk may have been lost.
type SandboxID string

// NodeID names the machine a sandbox is on.
type NodeID string

const idLength = 20
const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// NewID returns a fresh random ID (103 bits).
func NewID() ID {
	var b [idLength]byte
	for i := 0; i < idLength; {
		var r [64]byte
		rand.Read(r[:])
		for _, c := range r {
			// 252 = 7*36: rejecting the rest keeps the choice uniform.
			if c < 252 && i < idLength {
				b[i] = idAlphabet[c%36]
				i++
			}
		}
	}
	return ID(b[:])
}

// ParseID checks that s has the shape of an ID.
func ParseID(s string) (ID, error) {
	if len(s) != idLength || strings.Trim(s, idAlphabet) != "" {
		return "", kind.Errorf(kind.Invalid, "%.64q is not a session id: want 20 characters of a-z and 0-9", s).WithField("session")
	}
	return ID(s), nil
}

// Sandbox returns the id of the session's incarnation number generation.
func (id ID) Sandbox(generation uint32) SandboxID {
	return SandboxID(fmt.Sprintf("%s-%d", id, generation))
}

// Split takes a SandboxID apart; it fails on anything Sandbox did not make.
func (s SandboxID) Split() (ID, uint32, error) {
	head, tail, ok := strings.Cut(string(s), "-")
	n, err := strconv.ParseUint(tail, 10, 32)
	id, idErr := ParseID(head)
	if !ok || err != nil || idErr != nil || id.Sandbox(uint32(n)) != s {
		return "", 0, kind.Errorf(kind.Invalid, "%.64q is not a sandbox id", string(s)).WithField("sandbox")
	}
	return id, uint32(n), nil
}

// Session is the unit that a user owns and that rules apply to. It is a value:
// every change of it goes through a store's Transition, together with its
// audit event.
type Session struct {
	ID         ID        // never used again
	Version    int64     // for compare-and-swap; grows by one with each Transition
	State      State     // where it is in its life
	Reason     Reason    // why it is ending or ended; empty before
	Detail     string    // one sentence for people beside Reason; may be empty
	Spec       Spec      // what was asked for, with defaults
	SpecDigest string    // Spec.Digest
	Owner      Principal // who created it
	Node       NodeID    // the machine that has it
	Generation uint32    // of the current or last sandbox; 0 before the first
	Boot       string    // boot id of the machine when that sandbox was started there
	Template   string    // digest of the image that the sandbox runs, once resolved
	CreatedAt  time.Time // when it was asked for
	StartedAt  time.Time // zero until running
	EndedAt    time.Time // zero until ended
	Deadline   time.Time // when it ends by itself
	Residuals  []string  // what the end could not prove; empty when all was
}

// SandboxID returns the id of the current or last incarnation.
func (s Session) SandboxID() SandboxID { return s.ID.Sandbox(s.Generation) }

// Fence is what a writer believes of the session that it writes for. A store
// refuses a write whose fence is out of date, so that a node that has lost a
// session cannot write on.
type Fence struct {
	Node       NodeID // the machine that has the session
	Generation uint32 // of its current sandbox
}

// Fence returns the fence of a writer that has read s.
func (s Session) Fence() Fence { return Fence{Node: s.Node, Generation: s.Generation} }

// Principal is who is behind a call or a session: an id, and what the caller
// says of those behind it, which is kept and not interpreted. It is
// comparable.
type Principal struct {
	Subject    string `json:"subject"`                // e.g. "key:ab12…", "local:0" (a user id)
	OnBehalfOf string `json:"on_behalf_of,omitempty"` // whom a service acts for, as it says
	Trigger    string `json:"trigger,omitempty"`      // what set it off, as it says
}
