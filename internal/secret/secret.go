// Package secret holds plaintext secrets in a type that does not show them.
//
// A Value prints, logs and encodes as Redacted by whatever road: fmt with any
// verb, slog, JSON, text, and also as a field deep inside another value. The
// only way to the plaintext is Reveal, which is easy to search for.
package secret

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is what a secret shows of itself.
const Redacted = "[redacted]"

// Value is a secret. Copies share one plaintext, so that Wipe through any of
// them reaches all. The zero Value is the empty secret.
//
// The plaintext is inside a closure on purpose: fmt does not call the methods
// of unexported fields but prints what it finds there, through pointers for
// some verbs, and no reflection sees into a closure. It also makes Values
// incomparable with ==, which would not be constant in time.
type Value struct {
	plain func() *[]byte
}

// New copies s into a Value. The string itself cannot be wiped; prefer
// FromBytes where the secret is not a string yet.
func New(s string) Value { return FromBytes([]byte(s)) }

// FromBytes takes b over: the caller must not use it again.
func FromBytes(b []byte) Value { return Value{func() *[]byte { return &b }} }

// Reveal returns the plaintext.
func (v Value) Reveal() string {
	if v.plain == nil {
		return ""
	}
	return string(*v.plain())
}

// IsEmpty reports whether there is no plaintext, or no longer.
func (v Value) IsEmpty() bool { return v.plain == nil || len(*v.plain()) == 0 }

// Equal compares in time that depends on neither the contents nor on where
// they differ.
func (v Value) Equal(o Value) bool { return v.EqualString(o.Reveal()) }

// EqualString is Equal for a plaintext that came from outside. Both sides are
// hashed first, so that not even the length of the secret shows in the time.
func (v Value) EqualString(s string) bool {
	a, b := sha256.Sum256([]byte(v.Reveal())), sha256.Sum256([]byte(s))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// Wipe overwrites the plaintext, for every copy of v. What Reveal returned
// before is out of its reach. It must not run beside other methods of v.
func (v Value) Wipe() {
	if v.plain == nil {
		return
	}
	b := v.plain()
	clear(*b)
	*b = nil
}

// String returns Redacted.
func (Value) String() string { return Redacted }

// GoString returns Redacted.
func (Value) GoString() string { return Redacted }

// Format writes Redacted for every verb and flag.
func (Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, Redacted) }

// MarshalText returns Redacted.
func (Value) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// MarshalJSON returns Redacted as a JSON string.
func (Value) MarshalJSON() ([]byte, error) { return []byte(`"` + Redacted + `"`), nil }

// LogValue returns Redacted.
func (Value) LogValue() slog.Value { return slog.StringValue(Redacted) }
