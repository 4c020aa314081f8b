// Package trace identifies the request that an event, a log line or an answer
// belongs to, by a trace id of the W3C recommendation "Trace Context"
// (https://www.w3.org/TR/trace-context/).
package trace

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strings"
)

// ID is a trace id: 32 hexadecimal digits in lower case, not all zero. The
// zero value is no trace.
type ID string

// New returns a random ID.
func New() ID {
	var b [16]byte
	rand.Read(b[:])
	return ID(hex.EncodeToString(b[:]))
}

// Valid reports whether id has the form of a trace id.
func (id ID) Valid() bool {
	return len(id) == 32 && isHex(string(id)) && strings.Trim(string(id), "0") != ""
}

// Parse returns the trace id of a traceparent header of any version:
// "<version>-<trace id>-<parent id>-<flags>". ok is false for a header that
// the recommendation tells the receiver to ignore.
func Parse(traceparent string) (id ID, ok bool) {
	part := strings.Split(traceparent, "-")
	if len(part) < 4 || len(part[0]) != 2 || !isHex(part[0]) || part[0] == "ff" {
		return "", false
	}
	if part[0] == "00" && len(part) != 4 {
		return "", false // version 00 has exactly four fields
	}
	parent, flags := part[2], part[3]
	if len(parent) != 16 || !isHex(parent) || strings.Trim(parent, "0") == "" || len(flags) != 2 || !isHex(flags) {
		return "", false
	}
	id = ID(part[1])
	return id, id.Valid()
}

// Traceparent returns the header that continues the trace with a new parent
// id, not sampled.
func (id ID) Traceparent() string {
	var b [8]byte
	rand.Read(b[:])
	return "00-" + string(id) + "-" + hex.EncodeToString(b[:]) + "-00"
}

type contextKey struct{}

// NewContext returns a context that carries id.
func NewContext(ctx context.Context, id ID) context.Context {
	return context.WithValue(ctx, contextKey{}, id)
}

// FromContext returns the id that ctx carries, or "".
func FromContext(ctx context.Context) ID {
	id, _ := ctx.Value(contextKey{}).(ID)
	return id
}

func isHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }
