package session

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/argv"
	"bivy/internal/kind"
)

// TestTransitionTable holds the whole rule; a change of it is a change of
// this test.
func TestTransitionTable(t *testing.T) {
	want := map[State][]State{
		Creating:    {Creating, Running, Ending},
		Running:     {Running, Pausing, Quarantined, Ending},
		Pausing:     {Running, Pausing, Standby, Quarantined, Ending},
		Standby:     {Standby, Resuming, Quarantined, Ending},
		Resuming:    {Running, Standby, Resuming, Quarantined, Ending},
		Quarantined: {Quarantined, Ending},
		Ending:      {Ending, Ended},
		Ended:       nil,
	}
	got := map[State][]State{}
	for _, from := range States() {
		got[from] = nil
		for _, to := range States() {
			if from.CanBecome(to) {
				got[from] = append(got[from], to)
			}
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("rule (-want +got):\n%s", d)
	}
	if len(States()) != len(want) {
		t.Errorf("%d states, want %d", len(States()), len(want))
	}
	for _, none := range []State{"", "gone"} {
		for _, s := range States() {
			if none.CanBecome(s) && s != Ending || s.CanBecome(none) {
				t.Errorf("%q and %s lead to one another", none, s)
			}
		}
	}
}

// TestEveryStateCanEnd: no state is a trap, and every state is reached.
func TestEveryStateCanEnd(t *testing.T) {
	reach := func(from State) map[State]bool {
		seen := map[State]bool{from: true}
		for queue := []State{from}; len(queue) > 0; queue = queue[1:] {
			for _, next := range States() {
				if queue[0].CanBecome(next) && !seen[next] {
					seen[next] = true
					queue = append(queue, next)
				}
			}
		}
		return seen
	}
	for _, s := range States() {
		if !reach(s)[Ended] {
			t.Errorf("%s never ends", s)
		}
		if !reach(Creating)[s] {
			t.Errorf("%s is never reached", s)
		}
		if s != Ended && !s.CanBecome(Ending) {
			t.Errorf("%s cannot be asked to end", s)
		}
		if s.Terminal() != (s == Ended) {
			t.Errorf("%s: terminal %v", s, s.Terminal())
		}
	}
	if got := slices.Sorted(maps.Keys(reach(Ended))); len(got) != 1 {
		t.Errorf("ended leads to %v", got)
	}
}

func TestIDs(t *testing.T) {
	seen := map[ID]bool{}
	counts := map[rune]int{}
	for range 2000 {
		id := NewID()
		if got, err := ParseID(string(id)); err != nil || got != id {
			t.Fatalf("%q: %v", id, err)
		}
		if seen[id] {
			t.Fatalf("%q twice", id)
		}
		seen[id] = true
		for _, c := range string(id) {
			counts[c]++
		}
	}
	// 40,000 characters of 36: about 1111 each, and 6 standard deviations.
	for _, c := range idAlphabet {
		if n := counts[c]; n < 900 || n > 1320 {
			t.Errorf("%q occurs %d times of about 1111", c, n)
		}
	}
	for _, bad := range []string{
		"", "a", strings.Repeat("a", 19), strings.Repeat("a", 21), strings.Repeat("A", 20), strings.Repeat("a", 19) + "-",
		strings.Repeat("a", 19) + "\n", strings.Repeat("é", 10), strings.Repeat("a", 19) + "\x00", "../../../etc/passwd1",
	} {
		if id, err := ParseID(bad); !kind.Is(err, kind.Invalid) || kind.Field(err) != "session" || id != "" {
			t.Errorf("%q: %q, %v", bad, id, err)
		}
	}
}

func TestSandboxIDs(t *testing.T) {
	id := NewID()
	for _, n := range []uint32{0, 1, 42, 1<<32 - 1} {
		s := id.Sandbox(n)
		if got, g, err := s.Split(); err != nil || got != id || g != n {
			t.Errorf("%s: %s %d %v", s, got, g, err)
		}
	}
	if got := (Session{ID: id, Generation: 7}).SandboxID(); got != id.Sandbox(7) {
		t.Errorf("got %s", got)
	}
	for _, bad := range []string{
		"", "-", "-1", string(id), string(id) + "-", string(id) + "-x", string(id) + "-01", string(id) + "-+1", string(id) + "--1",
		string(id) + "-1-1", string(id) + "-4294967296", string(id) + "-1 ", strings.ToUpper(string(id)) + "-1", "short-1",
	} {
		if got, g, err := SandboxID(bad).Split(); !kind.Is(err, kind.Invalid) || got != "" || g != 0 {
			t.Errorf("%q: %s %d %v", bad, got, g, err)
		}
	}
}

func valid() Spec { return Spec{}.WithDefaults() }

func TestDefaultsAreValid(t *testing.T) {
	s := valid()
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff(s, s.WithDefaults()); d != "" {
		t.Errorf("defaults of defaults differ:\n%s", d)
	}
	// What the caller holds stays the caller's.
	env := map[string]string{"A": "1"}
	copied := Spec{Env: env, Labels: env}.WithDefaults()
	copied.Env["A"], copied.Labels["B"] = "2", "3"
	if env["A"] != "1" || len(env) != 1 {
		t.Errorf("the caller's map was changed: %v", env)
	}
	if err := (Spec{}).Validate(); err == nil {
		t.Error("a spec without defaults passed")
	}
}

func TestValidateRefuses(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	many := func(n int) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprint("N", i)] = ""
		}
		return m
	}
	for _, c := range []struct {
		field  string
		change func(*Spec)
	}{
		{"version", func(s *Spec) { s.Version = 2 }},
		{"version", func(s *Spec) { s.Version = -1 }},
		{"template", func(s *Spec) { s.Template = "a b" }},
		{"template", func(s *Spec) { s.Template = "\x1b[0m" }},
		{"template", func(s *Spec) { s.Template = "é" }},
		{"template", func(s *Spec) { s.Template = long(MaxNameLength + 1) }},
		{"resources.cpu_millis", func(s *Spec) { s.Resources.CPUMillis = MinCPUMillis - 1 }},
		{"resources.cpu_millis", func(s *Spec) { s.Resources.CPUMillis = MaxCPUMillis + 1 }},
		{"resources.cpu_millis", func(s *Spec) { s.Resources.CPUMillis = -5 }},
		{"resources.memory_mib", func(s *Spec) { s.Resources.MemoryMiB = MinMemoryMiB - 1 }},
		{"resources.memory_mib", func(s *Spec) { s.Resources.MemoryMiB = MaxMemoryMiB + 1 }},
		{"resources.disk_mib", func(s *Spec) { s.Resources.DiskMiB = MinDiskMiB - 1 }},
		{"resources.disk_mib", func(s *Spec) { s.Resources.DiskMiB = MaxDiskMiB + 1 }},
		{"resources.pids", func(s *Spec) { s.Resources.PIDs = MinPIDs - 1 }},
		{"resources.pids", func(s *Spec) { s.Resources.PIDs = 1 << 62 }},
		{"timeout_seconds", func(s *Spec) { s.Timeout = -1 }},
		{"timeout_seconds", func(s *Spec) { s.Timeout = MaxTimeout + 1 }},
		{"env", func(s *Spec) { s.Env = map[string]string{"": "x"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A=B": "x"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A\x00": "x"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"\xff": "x"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A": "x\x00y"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A": "\xff"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A": long(argv.MaxEnvBytes)} }},
		{"env", func(s *Spec) { s.Env = many(argv.MaxEnvCount + 1) }},
		{"user", func(s *Spec) { s.User = "two words" }},
		{"user", func(s *Spec) { s.User = long(65) }},
		{"workdir", func(s *Spec) { s.Workdir = "relative" }},
		{"workdir", func(s *Spec) { s.Workdir = "/a\x00b" }},
		{"workdir", func(s *Spec) { s.Workdir = "/" + long(MaxPathLength) }},
		{"hostname", func(s *Spec) { s.Hostname = "-a" }},
		{"hostname", func(s *Spec) { s.Hostname = "a-" }},
		{"hostname", func(s *Spec) { s.Hostname = "A" }},
		{"hostname", func(s *Spec) { s.Hostname = "a.b" }},
		{"hostname", func(s *Spec) { s.Hostname = long(64) }},
		{"labels", func(s *Spec) { s.Labels = many(MaxLabels + 1) }},
		{"labels", func(s *Spec) { s.Labels = map[string]string{"": "x"} }},
		{"labels", func(s *Spec) { s.Labels = map[string]string{"a": long(MaxLabelLength + 1)} }},
		{"labels", func(s *Spec) { s.Labels = map[string]string{"\xff": ""} }},
	} {
		s := valid()
		c.change(&s)
		err := s.Validate()
		if !kind.Is(err, kind.Invalid) || kind.Field(err) != c.field {
			t.Errorf("want %s refused, got %v", c.field, err)
		}
		if err != nil && len(err.Error()) > 400 {
			t.Errorf("%s: a message of %d bytes", c.field, len(err.Error()))
		}
	}
}

func TestEnvBounds(t *testing.T) {
	// Exactly what is allowed, and one more.
	fits := map[string]string{"A": strings.Repeat("x", argv.MaxEnvBytes-3)}
	if err := ValidateEnv("env", fits); err != nil {
		t.Errorf("%d bytes: %v", argv.MaxEnvBytes, err)
	}
	fits["A"] += "x"
	if err := ValidateEnv("command.env", fits); !kind.Is(err, kind.Invalid) || kind.Field(err) != "command.env" || kind.Hint(err) == "" {
		t.Errorf("one byte more: %v", err)
	}
	many := map[string]string{}
	for i := range argv.MaxEnvCount {
		many[fmt.Sprint("N", i)] = "v"
	}
	if err := ValidateEnv("env", many); err != nil {
		t.Error(err)
	}
	many["ONE_MORE"] = ""
	if err := ValidateEnv("env", many); err == nil {
		t.Errorf("%d variables passed", len(many))
	}
	for _, ok := range []map[string]string{nil, {}, {"A": ""}, {"lower.case-and odd": "x"}, {"É": "漢"}, {"A": "a=b\nc"}} {
		if err := ValidateEnv("env", ok); err != nil {
			t.Errorf("%v: %v", ok, err)
		}
	}
}

func TestDigest(t *testing.T) {
	a, b := valid(), valid()
	a.Env = map[string]string{"A": "1", "B": "2", "C": "3"}
	b.Env = map[string]string{"C": "3", "B": "2", "A": "1"}
	da, err := a.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if db, err := b.Digest(); err != nil || da != db {
		t.Errorf("one spec, digests %s and %s, %v", da, db, err)
	}
	if len(da) != len("sha256:")+64 || !strings.HasPrefix(da, "sha256:") {
		t.Errorf("digest %s", da)
	}
	// A record shows the names of variables and this digest: it must not depend
	// on values, which could then be guessed.
	b.Env["C"] = "4"
	if db, err := b.Digest(); err != nil || da != db {
		t.Errorf("another value of a variable: digests %s and %s, %v", da, db, err)
	}
	shown, err := b.WithoutEnvValues().Digest()
	if err != nil || shown != da {
		t.Errorf("the spec as records show it has digest %s, want %s, %v", shown, da, err)
	}
	b.Env["D"] = ""
	if db, err := b.Digest(); err != nil || da == db {
		t.Errorf("another variable, the same digest %s, %v", da, err)
	}
	b = valid()
	b.Env, b.Hostname = a.Env, "other"
	if db, err := b.Digest(); err != nil || da == db {
		t.Errorf("two specs, one digest %s, %v", da, err)
	}
	if got := Seconds(90).Duration(); got != 90*time.Second {
		t.Errorf("90 seconds are %v", got)
	}
}
