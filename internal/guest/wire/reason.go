package wire

import (
	"errors"

	"connectrpc.com/connect"

	"bivy/internal/argv"
)

// Reason is a stable word for why the agent refused something. It travels
// beside the Connect code (in the error's metadata) or the HTTP status (in
// [HeaderReason]), so clients that know only the codes are not disturbed.
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

// Refusal is implemented by errors that know their reason without being
// Connect errors, such as those made from the plain HTTP endpoints.
type Refusal interface {
	error
	Reason() Reason
}

// ReasonOf returns the reason err carries, or "".
func ReasonOf(err error) Reason {
	var refusal Refusal
	if errors.As(err, &refusal) {
		return refusal.Reason()
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

// IsTimeout reports that the process was killed at its lifetime limit.
func IsTimeout(err error) bool { return ReasonOf(err) == ReasonTimeout }
