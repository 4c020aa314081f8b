package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bivy/internal/kind"
)

func TestQuantile(t *testing.T) {
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i))
	}
	for _, tt := range []struct {
		values []float64
		q      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.99, 7},
		{[]float64{3, 1, 2}, 0, 1},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 2, 3}, 0.5, 2},
		{hundred, 0.95, 95},
		{hundred, 0.99, 99},
	} {
		if got := quantile(tt.values, tt.q); got != tt.want {
			t.Errorf("quantile(%d values, %g) = %g, want %g", len(tt.values), tt.q, got, tt.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("quantile sorted what it was given")
	}
}

func TestSeries(t *testing.T) {
	var mine, other series
	for i := range 4 {
		mine.took(time.Duration(i+1) * time.Millisecond)
		mine.used(time.Duration(i) * time.Millisecond)
		other.took(8 * time.Millisecond)
	}
	got := mine.figure("life", "ms").against("runsc run", &other)
	want := Figure{Name: "life", Unit: "ms", N: 4, Min: 1, P50: 2, P95: 4, P99: 4, CPU: 1, Ratio: 0.25, Against: "runsc run", Samples: []float64{1, 2, 3, 4}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestHold(t *testing.T) {
	limit := func(v float64) *float64 { return &v }
	budgets := []Budget{
		{Suite: "cold", Name: "a", Against: "runsc run", AtMost: limit(0.8)},
		{Suite: "cold", Name: "a", Against: "docker run", AtMost: limit(0.45)},
		{Suite: "cold", Name: "rate", AtLeast: limit(5)},
		{Suite: "cold", Name: "size", AtMost: limit(9)},
		{Suite: "other", Name: "x", AtMost: limit(1)},
	}
	figures := []Figure{
		{Name: "a", P50: 100, Ratio: 0.9, Against: "runsc run"},
		{Name: "rate", P50: 5},
		{Name: "size", P50: 9.1},
		{Name: "free", P50: 1},
	}
	skipped := []string{"docker run: not installed"}
	missed, err := hold(budgets, "cold", figures, skipped)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"cold, a ÷ runsc run: 0.9, not ≤ 0.8", "cold, size: 9.1, not ≤ 9"}
	if d := cmp.Diff(want, missed); d != "" {
		t.Error(d)
	}
	var ok []any
	for _, f := range figures {
		if f.OK == nil {
			ok = append(ok, nil)
			continue
		}
		ok = append(ok, *f.OK)
	}
	if d := cmp.Diff([]any{false, true, false, nil}, ok); d != "" {
		t.Error(d)
	}
	// A comparator that is there, and a figure that has lost its name.
	if _, err := hold(budgets, "cold", figures, nil); !kind.Is(err, kind.Internal) {
		t.Errorf("a budget without a figure: %v", err)
	}
	if _, err := hold(budgets[4:], "other", nil, skipped); !kind.Is(err, kind.Internal) {
		t.Errorf("a budget without a figure, beside something skipped: %v", err)
	}
}

func TestBudgets(t *testing.T) {
	all, err := readBudgets(filepath.Join("..", "..", Budgets))
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Errorf("only %d budgets", len(all))
	}
	for _, b := range all {
		if _, err := choose(b.Suite); err != nil || b.Suite == "" {
			t.Errorf("budget of %q: %v", b.Name, err)
		}
	}
	if got, err := readBudgets(filepath.Join(t.TempDir(), "none")); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	for _, text := range []string{"{", `[{"suite":"cold","name":"x"}]`, `[{"suite":"cold","name":"x","at_most":1,"at_least":1}]`} {
		path := filepath.Join(t.TempDir(), "budgets.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readBudgets(path); !kind.Is(err, kind.Invalid) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestChoose(t *testing.T) {
	all, err := choose("")
	if err != nil || len(all) != 6 {
		t.Errorf("all suites: %d, %v", len(all), err)
	}
	_, err = choose("colt")
	if !kind.Is(err, kind.Invalid) || !strings.Contains(err.Error(), "cold, destroy") {
		t.Errorf("a suite that does not exist: %v", err)
	}
}

func TestRounds(t *testing.T) {
	var order []string
	member := func(name string, err error) *contestant {
		return &contestant{name: name, cpu: func() time.Duration { return 0 }, do: func(context.Context) (time.Duration, time.Duration, error) {
			order = append(order, name)
			return time.Millisecond, 2 * time.Millisecond, err
		}}
	}
	b := &bench{o: Options{Stderr: new(bytes.Buffer)}, limit: time.Hour}
	b.begin()
	a, c := member("a", nil), member("c", nil)
	if err := b.rounds(t.Context(), 12, a, c); err != nil {
		t.Fatal(err)
	}
	if len(a.first.values) != 12 || len(c.gone.values) != 12 || len(a.first.cpu) != 12 {
		t.Errorf("%d, %d and %d values of 12 rounds", len(a.first.values), len(c.gone.values), len(a.first.cpu))
	}
	if len(order) != 2*(12+warmUps) {
		t.Errorf("%d turns", len(order))
	}
	for i := 0; i < len(order); i += 2 {
		if order[i] == order[i+1] {
			t.Fatalf("round %d: %v twice", i/2, order[i])
		}
	}
	// Time that is up ends the rounds, but not before the fewest.
	b.limit = -time.Hour
	b.begin()
	a = member("a", nil)
	if err := b.rounds(t.Context(), 100, a); err != nil || len(a.first.values) != least {
		t.Errorf("%d rounds without time: %v", len(a.first.values), err)
	}
	boom := errors.New("boom")
	if err := b.rounds(t.Context(), 1, member("bad", boom)); !errors.Is(err, boom) || !strings.Contains(err.Error(), "bad") {
		t.Errorf("a failing contestant: %v", err)
	}
}

func TestReport(t *testing.T) {
	yes, budget := true, 20.0
	r := Report{Suite: "destroy", Host: Host{CPUs: 2}, Skipped: []string{"runc run: not installed"},
		Figures: []Figure{{Name: "DELETE", Unit: "ms", N: 50, Min: 1, P50: 12.345, P95: 100.5, P99: 0.1234, Budget: &budget, OK: &yes}}}
	var out bytes.Buffer
	if err := table(&out, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"12.3", "100", "0.123", "≤ 20", "yes", "DELETE", "skipped: runc run: not installed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	dir := filepath.Join(t.TempDir(), "out")
	if err := save(dir, r); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "destroy.json"))
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(r, back); d != "" {
		t.Error(d)
	}
	if err := save("", r); err != nil {
		t.Errorf("saving nowhere: %v", err)
	}
}

func TestNamed(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"one-1/root", "two-1"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got, err := named("one", dir, filepath.Join(dir, "missing"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	if d := cmp.Diff([]string{filepath.Join(dir, "one-1"), filepath.Join(dir, "one-1/root")}, got); d != "" {
		t.Error(d)
	}
}

func TestHostFacts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meminfo")
	if err := os.WriteFile(path, []byte("MemTotal:  16 kB\nPss:\t2 kB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := kib(path, "Pss"); got != 2048 {
		t.Errorf("Pss is %d", got)
	}
	if got := kib(path, "Rss"); got != 0 {
		t.Errorf("what is not there is %d", got)
	}
	if busy() <= 0 {
		t.Error("this machine has never been busy")
	}
}

func TestFirstByte(t *testing.T) {
	n := 0
	w := &firstByte{func() { n++ }}
	for _, s := range []string{"", "a", "b"} {
		if _, err := w.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	if n != 1 {
		t.Errorf("seen %d times", n)
	}
}
