package argv

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"bivy/internal/kind"
)

func TestCheck(t *testing.T) {
	fits := strings.Repeat("x", MaxStringBytes)
	for name, tt := range map[string]struct {
		c     Command
		field string
		part  Part
		index int
		text  string
	}{
		"good":                 {Command{Argv{"a", "", fits}, map[string]string{"A": "", "é": "\xff"}, "/"}, "", 0, 0, ""},
		"no argv":              {Command{}, "argv", Arguments, 0, "no command"},
		"empty program":        {Command{Argv: Argv{"", "a"}}, "argv", Arguments, 0, "no command"},
		"NUL in the program":   {Command{Argv: Argv{"a\x00"}}, "argv", Arguments, 0, "NUL"},
		"NUL in an argument":   {Command{Argv: Argv{"a", "b", "\x00"}}, "argv", Arguments, 2, "argument 2"},
		"long argument":        {Command{Argv: Argv{"a", fits + "x"}}, "argv", Arguments, 1, "argument 1 has 131072 bytes"},
		"too many bytes":       {Command{Argv: append(Argv{"a"}, slices.Repeat([]string{fits}, 8)...)}, "argv", Arguments, 8, "1048578 bytes in all"},
		"no variable name":     {Command{Argv: Argv{"a"}, Env: map[string]string{"": "x"}}, "env", Environment, 0, `name ""`},
		"equals sign in name":  {Command{Argv: Argv{"a"}, Env: map[string]string{"A=B": "x"}}, "env", Environment, 0, `"A=B"`},
		"NUL in a name":        {Command{Argv: Argv{"a"}, Env: map[string]string{"A\x00": "x"}}, "env", Environment, 0, `"A\x00"`},
		"NUL in a value":       {Command{Argv: Argv{"a"}, Env: map[string]string{"A": "\x00"}}, "env", Environment, 0, `value of "A"`},
		"NUL in the directory": {Command{Argv: Argv{"a"}, Dir: "/\x00"}, "cwd", Directory, 0, "NUL"},
		"long directory":       {Command{Argv: Argv{"a"}, Dir: strings.Repeat("x", MaxPath+1)}, "cwd", Directory, 0, "4096 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tt.c.Check()
			if tt.field == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e := Find(err)
			if !kind.Is(err, kind.Invalid) || kind.Field(err) != tt.field || e == nil {
				t.Fatalf("%v: kind %s, field %q; want field %q", err, kind.Of(err), kind.Field(err), tt.field)
			}
			if e.Part != tt.part || e.Index != tt.index || !strings.Contains(e.Text, tt.text) {
				t.Errorf("%+v; want part %d, index %d, %q", *e, tt.part, tt.index, tt.text)
			}
		})
	}
	if e := Find(kind.Errorf(kind.Invalid, "x")); e != nil {
		t.Errorf("found %v in another error", e)
	}
}

// TestEnvLimits: each limit allows what is exactly as large, and a process may
// have more than one given environment may.
func TestEnvLimits(t *testing.T) {
	of := func(total int) map[string]string {
		env := map[string]string{}
		for i := 0; total > 0; i++ {
			k := fmt.Sprintf("K%06d", i)
			n := min(total, 1000)
			if rest := total - n; rest > 0 && rest < 20 {
				n -= 20
			}
			env[k] = strings.Repeat("x", n-len(k)-2)
			total -= n
		}
		return env
	}
	for _, tt := range []struct {
		name         string
		check        func(string, map[string]string) error
		bytes        int
		good, hinted bool
	}{
		{"given", CheckEnv, MaxEnvBytes, true, false},
		{"given, one more", CheckEnv, MaxEnvBytes + 1, false, true},
		{"merged", CheckProcessEnv, MaxProcessEnvBytes, true, false},
		{"merged, one more", CheckProcessEnv, MaxProcessEnvBytes + 1, false, true},
	} {
		err := tt.check("place", of(tt.bytes))
		if (err == nil) != tt.good || (kind.Hint(err) != "") != tt.hinted || err != nil && kind.Field(err) != "place" {
			t.Errorf("%s: %v (hint %q)", tt.name, err, kind.Hint(err))
		}
	}
	many := map[string]string{}
	for i := range MaxEnvCount {
		many[fmt.Sprint(i)] = ""
	}
	if err := CheckEnv("env", many); err != nil {
		t.Errorf("%d variables: %v", MaxEnvCount, err)
	}
	many["one"] = ""
	if err := CheckEnv("env", many); err == nil {
		t.Errorf("%d variables are accepted", MaxEnvCount+1)
	}
	if err := CheckProcessEnv("env", many); err != nil {
		t.Errorf("%d merged variables: %v", MaxEnvCount+1, err)
	}
	if err := CheckProcessEnv("env", map[string]string{"A": strings.Repeat("x", MaxStringBytes)}); err == nil {
		t.Error("a variable longer than one string may be is accepted")
	}
}
