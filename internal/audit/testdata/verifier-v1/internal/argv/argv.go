// Package argv has commands as argument vectors: a program, its arguments, the
// environment and the working directory of one process, and the one check that
// every side applies to them, from the API to the agent inside a sandbox.
//
//	argv.Command{
//		Argv: argv.Argv{"python3", "-c", "print(1)"}, // no shell in between
//		Env:  map[string]string{"TZ": "UTC"},         // added to what the sandbox sets
//		Dir:  "/srv",
//	}
//
// Strings are bytes, as on Linux: everything but NUL is possible.
package argv

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"bivy/internal/kind"
)

// The limits, in bytes. A string counts with the NUL that ends it, a variable
// also with its "=". The kernel takes 2 MiB for arguments and environment
// together, and 128 KiB for one string.
const (
	MaxBytes       = 1 << 20     // of all arguments together
	MaxStringBytes = 128<<10 - 1 // of one argument or variable
	MaxPath        = 4095        // of one path

	// MaxEnvBytes and MaxEnvCount bound one environment as it is given: that
	// of a template, of a session or of a command.
	MaxEnvBytes = 128 << 10
	MaxEnvCount = 1024

	// MaxProcessEnvBytes bounds the environment that a process starts with,
	// which is merged from several given ones.
	MaxProcessEnvBytes = 1 << 20
)

// Argv is a program and its arguments. The program, element 0, is a path or a
// name that is looked up in PATH.
type Argv []string

// Command is what one process is started with.
type Command struct {
	Argv Argv
	Env  map[string]string // added to the environment that the sandbox gives
	Dir  string            // working directory; empty: the default one
}

// Part is a part of a command.
type Part uint8

// The parts.
const (
	Arguments Part = iota // Command.Argv
	Environment
	Directory
)

// Error says what is wrong with a command before anything is tried. The checks
// return it inside of an error of [kind.Invalid].
type Error struct {
	Part  Part
	Index int // of the element of Argv at fault; 0 for the program and for the other parts
	Text  string
}

// Error returns what is wrong, without the part.
func (e *Error) Error() string { return e.Text }

// Find returns the Error inside of err, or nil.
func Find(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return nil
}

func bad(field string, part Part, index int, format string, args ...any) *kind.Error {
	return kind.Errorf(kind.Invalid, "%w", &Error{part, index, fmt.Sprintf(format, args...)}).WithField(field)
}

// Check reports the first thing that makes c impossible to start: no program,
// a NUL byte, a name that an environment cannot hold, or too many bytes. The
// error is of [kind.Invalid], wraps an [*Error], and its field is "argv",
// "env" or "cwd".
func (c Command) Check() error {
	if err := c.Argv.Check("argv"); err != nil {
		return err
	}
	if err := CheckEnv("env", c.Env); err != nil {
		return err
	}
	switch {
	case strings.IndexByte(c.Dir, 0) >= 0:
		return bad("cwd", Directory, 0, "contains a NUL byte")
	case len(c.Dir) > MaxPath:
		return bad("cwd", Directory, 0, "%d bytes, at most %d", len(c.Dir), MaxPath)
	}
	return nil
}

// Check is the part of [Command.Check] about the program and its arguments.
func (a Argv) Check(field string) error {
	if len(a) == 0 || a[0] == "" {
		return bad(field, Arguments, 0, "no command given")
	}
	total := 0
	for i, s := range a {
		what := "the program's name"
		if i > 0 {
			what = fmt.Sprintf("argument %d", i)
		}
		switch {
		case strings.IndexByte(s, 0) >= 0:
			return bad(field, Arguments, i, "%s contains a NUL byte", what)
		case len(s) > MaxStringBytes:
			return bad(field, Arguments, i, "%s has %d bytes, at most %d", what, len(s), MaxStringBytes).
				WithHint(hint)
		}
		total += len(s) + 1
	}
	if total > MaxBytes {
		return bad(field, Arguments, len(a)-1, "%d bytes in all, at most %d", total, MaxBytes).WithHint(hint)
	}
	return nil
}

// hint is the next step for somebody whose command is too large.
const hint = "write large values to a file and upload it"

// CheckEnv checks one environment as it is given.
func CheckEnv(field string, env map[string]string) error {
	if len(env) > MaxEnvCount {
		return bad(field, Environment, 0, "%d variables, at most %d", len(env), MaxEnvCount)
	}
	return checkEnv(field, env, MaxEnvBytes)
}

// CheckProcessEnv checks an environment that was merged from several.
func CheckProcessEnv(field string, env map[string]string) error {
	return checkEnv(field, env, MaxProcessEnvBytes)
}

func checkEnv(field string, env map[string]string, limit int) error {
	total := 0
	for k, v := range env {
		total += len(k) + len(v) + 2
	}
	if total > limit {
		return bad(field, Environment, 0, "%d bytes in all, at most %d", total, limit).WithHint(hint)
	}
	for _, k := range slices.Sorted(maps.Keys(env)) { // the same mistake gives the same error each time
		switch v := env[k]; {
		case k == "" || strings.ContainsAny(k, "=\x00"):
			return bad(field, Environment, 0, "variable name %.64q: must not be empty or contain '=' or NUL", k)
		case strings.IndexByte(v, 0) >= 0:
			return bad(field, Environment, 0, "value of %.64q contains a NUL byte", k)
		case len(k)+len(v)+1 > MaxStringBytes:
			return bad(field, Environment, 0, "variable %.64q has %d bytes, at most %d", k, len(k)+len(v)+1, MaxStringBytes).WithHint(hint)
		}
	}
	return nil
}
