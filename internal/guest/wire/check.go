package wire

import (
	"fmt"
	"slices"
	"strings"
)

// Misuse is a request that is wrong before anything is tried. Field is the
// name of the input at fault.
type Misuse struct {
	Field string
	Why   Reason
	Text  string
}

// Error names the field first.
func (m *Misuse) Error() string { return m.Field + ": " + m.Text }

// Reason makes Misuse a [Refusal].
func (m *Misuse) Reason() Reason { return m.Why }

// CheckCommand returns what no process could be started with: an empty
// command, NUL bytes, names the environment cannot hold, too many bytes. The
// agent runs it on what arrives; the host may run it before sending.
func CheckCommand(cmd string, args []string, envs map[string]string, cwd string) *Misuse {
	if cmd == "" {
		return &Misuse{"cmd", ReasonArgs, "is empty"}
	}
	if m := checkString("cmd", ReasonArgs, cmd); m != nil {
		return m
	}
	total := len(cmd) + 1
	for i, a := range args {
		if m := checkString(fmt.Sprintf("args[%d]", i), ReasonArgs, a); m != nil {
			return m
		}
		total += len(a) + 1
	}
	if total > MaxArgsBytes {
		return &Misuse{"args", ReasonArgs, fmt.Sprintf("%d bytes in all, at most %d fit", total, MaxArgsBytes)}
	}
	if m := CheckEnv("envs", envs); m != nil {
		return m
	}
	if len(cwd) > MaxPath {
		return &Misuse{"cwd", ReasonCwd, fmt.Sprintf("%d bytes long, at most %d are possible", len(cwd), MaxPath)}
	}
	return checkString("cwd", ReasonCwd, cwd)
}

// CheckEnv is the part of [CheckCommand] about an environment.
func CheckEnv(field string, envs map[string]string) *Misuse {
	total := 0
	for k, v := range envs {
		total += len(k) + len(v) + 2
	}
	if total > MaxEnvBytes {
		return &Misuse{field, ReasonEnv, fmt.Sprintf("%d bytes in all, at most %d fit", total, MaxEnvBytes)}
	}
	names := make([]string, 0, len(envs))
	for k := range envs {
		names = append(names, k)
	}
	slices.Sort(names) // the same mistake is always reported the same way
	for _, k := range names {
		name := fmt.Sprintf("%s[%.64q]", field, k)
		if k == "" || strings.ContainsAny(k, "=\x00") {
			return &Misuse{name, ReasonEnv, "a name is not empty and has no '=' and no NUL byte"}
		}
		if m := checkString(name, ReasonEnv, envs[k]); m != nil {
			return m
		}
		if len(k)+len(envs[k])+1 > MaxStringBytes {
			return &Misuse{name, ReasonEnv, fmt.Sprintf("%d bytes long, at most %d are possible", len(k)+len(envs[k])+1, MaxStringBytes)}
		}
	}
	return nil
}

func checkString(field string, why Reason, s string) *Misuse {
	if strings.IndexByte(s, 0) >= 0 {
		return &Misuse{field, why, "contains a NUL byte"}
	}
	if len(s) > MaxStringBytes {
		return &Misuse{field, why, fmt.Sprintf("%d bytes long, at most %d are possible", len(s), MaxStringBytes)}
	}
	return nil
}
