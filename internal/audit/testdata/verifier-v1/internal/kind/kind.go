// Package kind is the closed set of ways in which bivy can fail.
//
// Every error that crosses a package boundary either has a kind or is
// internal. The edge (REST, CLI) maps kinds to statuses and exit codes once;
// an error without a kind is shown as Internal and its text stays inside.
package kind

import (
	"errors"
	"fmt"
)

// Kind says what sort of failure an error is.
type Kind uint8

// The kinds. A new one is a decision: every edge has a switch over them.
const (
	Internal    Kind = iota // a fault of bivy or its host; the text is not for callers
	Invalid                 // the request is wrong and will stay wrong
	NotFound                // the named thing does not exist
	Conflict                // the thing exists but is in a state that forbids this
	Denied                  // the caller is known and may not do this
	Unauthentic             // the caller is not known
	Exhausted               // a limit or a resource is used up
	Unavailable             // it may work later: starting, stopping, cut off
)

// String returns the stable machine code used in API errors.
func (k Kind) String() string {
	switch k {
	case Internal:
		return "internal"
	case Invalid:
		return "invalid"
	case NotFound:
		return "not_found"
	case Conflict:
		return "conflict"
	case Denied:
		return "denied"
	case Unauthentic:
		return "unauthenticated"
	case Exhausted:
		return "exhausted"
	case Unavailable:
		return "unavailable"
	}
	return "internal"
}

// Error is an error with a kind and, optionally, what to do next.
type Error struct {
	Kind  Kind
	Field string // the input at fault, e.g. "resources.memory_mib"; may be empty
	Hint  string // the next step for a person; may be empty
	err   error
}

func (e *Error) Error() string {
	if e.Field != "" {
		return e.Field + ": " + e.err.Error()
	}
	return e.err.Error()
}

// Unwrap returns the wrapped cause.
func (e *Error) Unwrap() error { return e.err }

// Errorf is fmt.Errorf with a kind.
func Errorf(k Kind, format string, args ...any) *Error {
	return &Error{Kind: k, err: fmt.Errorf(format, args...)}
}

// Wrap gives err a kind; it returns nil for a nil err.
func Wrap(k Kind, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Kind: k, err: err}
}

// WithField names the input at fault and returns e.
func (e *Error) WithField(field string) *Error { e.Field = field; return e }

// WithHint says what to do next and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// Of returns the kind of the outermost Error in err's chain, or Internal.
func Of(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Internal
}

// Is reports whether err has kind k.
func Is(err error, k Kind) bool { return err != nil && Of(err) == k }

// Field returns the first non-empty Field in err's chain.
func Field(err error) string { return first(err, func(e *Error) string { return e.Field }) }

// Hint returns the first non-empty Hint in err's chain.
func Hint(err error) string { return first(err, func(e *Error) string { return e.Hint }) }

func first(err error, get func(*Error) string) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if s := get(e); s != "" {
			return s
		}
		err = e.err
	}
	return ""
}
