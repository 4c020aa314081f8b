package wire

import (
	"unicode/utf8"

	"connectrpc.com/connect"

	"bivy/internal/argv"
)

// MaxPath is the limit for one path, in bytes.
const MaxPath = argv.MaxPath

// EscapeCommand returns c as valid UTF-8, for messages and records. When all of c
// is valid UTF-8 it returns c itself and false; otherwise it applies [Escape] to
// every string and returns true.
func EscapeCommand(c argv.Command) (text argv.Command, escaped bool) {
	plain := utf8.ValidString(c.Dir)
	for _, s := range c.Argv {
		plain = plain && utf8.ValidString(s)
	}
	for k, v := range c.Env {
		plain = plain && utf8.ValidString(k) && utf8.ValidString(v)
	}
	if plain {
		return c, false
	}
	return convert(c, Escape), true
}

// UnescapeCommand reverses [EscapeCommand] of an escaped command.
func UnescapeCommand(text argv.Command) argv.Command { return convert(text, Unescape) }

func convert(c argv.Command, each func(string) string) argv.Command {
	out := argv.Command{Argv: make(argv.Argv, len(c.Argv)), Dir: each(c.Dir)}
	for i, s := range c.Argv {
		out.Argv[i] = each(s)
	}
	if c.Env != nil {
		out.Env = make(map[string]string, len(c.Env))
		for k, v := range c.Env {
			out.Env[each(k)] = each(v)
		}
	}
	return out
}

// reasonFor returns the reason for an error of package argv in part p.
func reasonFor(p argv.Part) Reason {
	switch p {
	case argv.Arguments:
		return ReasonArgs
	case argv.Environment:
		return ReasonEnv
	case argv.Directory:
		return ReasonCwd
	}
	return ""
}

// CommandError turns an error of package argv into the error for clients of the
// process service, which names the field of the request.
func CommandError(err error) *connect.Error {
	e := argv.Find(err)
	if e == nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	field := "args"
	switch {
	case e.Part == argv.Environment:
		field = "envs"
	case e.Part == argv.Directory:
		field = "cwd"
	case e.Index == 0:
		field = "cmd"
	}
	return NewError(connect.CodeInvalidArgument, reasonFor(e.Part), fieldError{field, e})
}

// fieldError names the field of a request before the error.
type fieldError struct {
	field string
	err   *argv.Error
}

func (f fieldError) Error() string { return f.field + ": " + f.err.Text }
func (f fieldError) Unwrap() error { return f.err }
