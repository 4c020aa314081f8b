// Package secret has the type for plaintext secrets, which does not print them.
//
// A Value prints, logs and encodes as [Redacted]: with every verb of fmt, in
// slog, JSON and text, and also as a field inside another value. Only
// [Value.Reveal] returns the plaintext, so that its uses are easy to find.
package secret

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is the text that stands for every secret.
const Redacted = "[redacted]"

// Value is a secret. The zero Value is the empty secret.
//
// The plaintext is inside a closure: fmt does not call the methods of unexported
// fields but prints their contents, through pointers for some verbs, and
// reflection cannot read a closure. It also makes Values incomparable with ==,
// which would not be constant in time.
type Value struct {
	plain func() string
}

// New returns s as a secret.
func New(s string) Value { return Value{func() string { return s }} }

// Reveal returns the plaintext.
func (v Value) Reveal() string {
	if v.plain == nil {
		return ""
	}
	return v.plain()
}

// Equal reports whether both plaintexts are the same. It compares hashes in constant
// time, so its duration does not depend on where they differ.
func (v Value) Equal(o Value) bool {
	a, b := sha256.Sum256([]byte(v.Reveal())), sha256.Sum256([]byte(o.Reveal()))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
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
