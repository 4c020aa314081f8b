// Package kind classifies errors by a closed set of kinds.
//
//	return kind.Errorf(kind.NotFound, "template %s does not exist", name).
//		WithHint("see bivy template ls")
//
// An error without a kind is Internal. The REST interface and the command line each
// map kinds to HTTP statuses and exit codes in one place, and do not show callers the
// text of an Internal error.
package kind

import (
	"errors"
	"fmt"
)

// Kind is the class of an error.
type Kind uint8

// The kinds. A new kind has to be added to every switch that maps them.
const (
	Internal    Kind = iota // a fault of bivy or its host; callers do not see the text
	Invalid                 // the request is wrong and fails again when repeated
	NotFound                // the named thing does not exist
	Conflict                // the thing exists in a state that does not allow this
	Denied                  // the caller is known and may not do this
	Unauthentic             // the caller is not known
	Exhausted               // a limit or a resource is used up
	Unavailable             // it may work later: starting, stopping, connection lost
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

// Error is an error with a kind and, optionally, a field and a hint.
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

// WithField sets the field and returns e.
func (e *Error) WithField(field string) *Error { e.Field = field; return e }

// WithHint sets the hint and returns e.
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
