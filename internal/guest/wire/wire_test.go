package wire_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"bivy/internal/argv"
	"bivy/internal/guest/wire"
)

func TestSign(t *testing.T) {
	// The test vector of E2B's clients.
	got := wire.Sign("hello.txt", wire.SignRead, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", time.Time{})
	if want := "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if later := wire.Sign("hello.txt", wire.SignRead, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", time.Unix(1, 0)); later == got {
		t.Error("the expiry is not signed")
	}
}

func TestEscape(t *testing.T) {
	for raw, want := range map[string]string{
		"": "", "plain": "plain", "日本": "日本", "\xff": "\U0010FEFF", "a\x80b": "a\U0010FE80b",
		"\U0010FE80": "\U0010FEF4\U0010FE8F\U0010FEBA\U0010FE80", "\uFFFD": "\uFFFD", "\U0010FFFF": "\U0010FFFF",
	} {
		if got := wire.Escape(raw); got != want {
			t.Errorf("Escape(%q) = %q, want %q", raw, got, want)
		}
	}
}

func FuzzEscape(f *testing.F) {
	for _, s := range []string{"", "a", "\xff\xfe", "\U0010FE80", "é\xe9", "\xf4\x8f\xba", "\xed\xa0\x80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e := wire.Escape(s)
		if !utf8.ValidString(e) {
			t.Errorf("Escape(%q) is not UTF-8", s)
		}
		if back := wire.Unescape(e); back != s {
			t.Errorf("Unescape(Escape(%q)) = %q", s, back)
		}
		_ = wire.Unescape(s) // must accept any text
	})
}

func TestStatus(t *testing.T) {
	for signal := 1; signal <= 64; signal++ {
		for _, core := range []bool{false, true} {
			if got := wire.StatusSignal(wire.SignalStatus(signal, core)); got != signal {
				t.Errorf("signal %d came back as %d", signal, got)
			}
		}
	}
	for _, s := range []string{"", "exit status 9", "signal: ", "signal: signal x", "signal: signal 65", "killed"} {
		if got := wire.StatusSignal(s); got != 0 {
			t.Errorf("%q is signal %d", s, got)
		}
	}
	if wire.SignalStatus(9, false) != "signal: killed" || wire.SignalStatus(11, true) != "signal: segmentation fault (core dumped)" || wire.ExitStatus(1) != "exit status 1" {
		t.Error("the texts are not those of the protocol")
	}
}

func TestReasons(t *testing.T) {
	err := error(wire.NewError(connect.CodeInvalidArgument, wire.ReasonCommandNotFound, errors.New("x")))
	if wire.ReasonOf(err) != wire.ReasonCommandNotFound || wire.IsTimeout(err) {
		t.Error("a reason is taken for another")
	}
	if wire.ReasonOf(nil) != "" || wire.ReasonOf(errors.New("x")) != "" || wire.ReasonOf(connect.NewError(connect.CodeNotFound, nil)) != "" {
		t.Error("an error without a reason has one")
	}
}

func TestEscapeCommand(t *testing.T) {
	plain := argv.Command{Argv: argv.Argv{"a", "é"}, Env: map[string]string{"A": "b"}, Dir: "/"}
	if got, escaped := wire.EscapeCommand(plain); escaped || !cmp.Equal(got, plain) {
		t.Errorf("%+v, %t", got, escaped)
	}
	for _, c := range []argv.Command{
		{Argv: argv.Argv{"\xff", "a"}},
		{Argv: argv.Argv{"a", "\U0010FE80", "\xff"}},
		{Argv: argv.Argv{"a"}, Env: map[string]string{"\xff": "b"}},
		{Argv: argv.Argv{"a"}, Env: map[string]string{"A": "\xff"}},
		{Argv: argv.Argv{"a"}, Dir: "/\xff"},
	} {
		text, escaped := wire.EscapeCommand(c)
		if !escaped {
			t.Errorf("%q is not escaped", c)
		}
		if again, twice := wire.EscapeCommand(text); twice {
			t.Errorf("%q is not UTF-8: %q", text, again)
		}
		if back := wire.UnescapeCommand(text); !cmp.Equal(back, c) {
			t.Errorf("%q came back as %q", c, back)
		}
	}
}

// TestCommandError: what package argv refuses has the reason and the field of
// the process service.
func TestCommandError(t *testing.T) {
	for _, tt := range []struct {
		c      argv.Command
		field  string
		reason wire.Reason
	}{
		{argv.Command{}, "cmd: ", wire.ReasonArgs},
		{argv.Command{Argv: argv.Argv{"a", "\x00"}}, "args: ", wire.ReasonArgs},
		{argv.Command{Argv: argv.Argv{"a"}, Env: map[string]string{"": ""}}, "envs: ", wire.ReasonEnv},
		{argv.Command{Argv: argv.Argv{"a"}, Dir: "\x00"}, "cwd: ", wire.ReasonCwd},
	} {
		err := tt.c.Check()
		if got := wire.ReasonOf(err); got != tt.reason {
			t.Errorf("%v: reason %q, want %q", err, got, tt.reason)
		}
		ce := wire.CommandError(err)
		if ce.Code() != connect.CodeInvalidArgument || wire.ReasonOf(ce) != tt.reason || !strings.HasPrefix(ce.Message(), tt.field) {
			t.Errorf("%v: code %s, reason %q; want field %q, reason %q", ce, ce.Code(), wire.ReasonOf(ce), tt.field, tt.reason)
		}
	}
	if ce := wire.CommandError(errors.New("x")); ce.Code() != connect.CodeInternal {
		t.Errorf("another error: %v", ce)
	}
}

// TestGenerated generates the code and compares it, if protoc is installed.
func TestGenerated(t *testing.T) {
	version, err := exec.Command("protoc", "--version").Output()
	if err != nil {
		t.Skip("protoc is not installed (Debian: protobuf-compiler)")
	}
	dir := t.TempDir()
	for _, name := range []string{"generate.sh", "proto/process.proto", "proto/filesystem.proto"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "gen"), 0o755); err != nil {
		t.Fatal(err)
	}
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "generate.sh"))
	cmd.Env = append(os.Environ(), "BIVY_MODULE="+filepath.Dir(strings.TrimSpace(string(mod))))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	err = filepath.WalkDir(filepath.Join(dir, "gen"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		made, err1 := os.ReadFile(path)
		kept, err2 := os.ReadFile(name)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !bytes.Equal(withoutVersion(made), withoutVersion(kept)) {
			t.Errorf("%s is stale: run go generate (here with %s)", name, bytes.TrimSpace(version))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// withoutVersion drops the line that names the compiler's version.
func withoutVersion(text []byte) []byte {
	var out []byte
	for line := range bytes.Lines(text) {
		if !bytes.HasPrefix(line, []byte("// \tprotoc")) {
			out = append(out, line...)
		}
	}
	return out
}
