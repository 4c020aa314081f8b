package wire

import (
	"errors"

	"connectrpc.com/connect"

	"bivy/internal/argv"
)

// Reason is a stable word for why the agent refused a request. It is sent in the
// metadata of a Connect error or in the HTTP header [HeaderReason], beside the
// code or status that clients without knowledge of it use.
type Reason string

// The reasons.
const (
	ReasonCommandNotFound      Reason = "command_not_found"
	ReasonCommandNotExecutable Reason = "command_not_executable"
	ReasonCwd                  Reason = "cwd"
	ReasonUser                 Reason = "user"
	ReasonArgs                 Reason = "args"
	ReasonEnv                  Reason = "envs"
	ReasonPath                 Reason = "path"
	ReasonNoProcess            Reason = "no_process"
	ReasonStdin                Reason = "stdin"
	ReasonTimeout              Reason = "timeout"
	ReasonStalled              Reason = "reader_stalled"
	ReasonNoSpace              Reason = "no_space"
	ReasonLimit                Reason = "limit"
)

// NewError returns a Connect error that carries reason.
func NewError(code connect.Code, reason Reason, cause error) *connect.Error {
	e := connect.NewError(code, cause)
	if reason != "" {
		e.Meta().Set(HeaderReason, string(reason))
	}
	return e
}

// ReasonError is implemented by errors that have a reason and are not Connect
// errors, such as those of the plain HTTP endpoints.
type ReasonError interface {
	error
	// Reason returns the reason, or "".
	Reason() Reason
}

// ReasonOf returns the reason of err, or "".
func ReasonOf(err error) Reason {
	var withReason ReasonError
	if errors.As(err, &withReason) {
		return withReason.Reason()
	}
	if e := argv.Find(err); e != nil {
		return reasonFor(e.Part)
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return Reason(ce.Meta().Get(HeaderReason))
	}
	return ""
}

// IsTimeout reports whether err means that the process was killed at its timeout.
func IsTimeout(err error) bool { return ReasonOf(err) == ReasonTimeout }
