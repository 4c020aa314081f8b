package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"bivy/internal/kind"
)

// Figure is one thing measured. Of a single measurement all of min to p99 are
// the same.
type Figure struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	N    int     `json:"n"`
	Min  float64 `json:"min"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	// CPU is the median of all processor time an operation takes, measurer
	// included, from cgroups and getrusage; 0: not measured.
	CPU float64 `json:"cpu_ms,omitempty"`
	// Ratio is P50 over that of Against, from the same rounds.
	Ratio   float64   `json:"ratio,omitempty"`
	Against string    `json:"against,omitempty"`
	Budget  *float64  `json:"budget,omitempty"` // of Ratio where there is one, else of P50
	Floor   bool      `json:"floor,omitempty"`  // the budget is the least, not the most
	OK      *bool     `json:"ok,omitempty"`     // within Budget
	Note    string    `json:"note,omitempty"`
	Samples []float64 `json:"samples,omitempty"` // in order
}

// series is what repeated measuring gave, in order.
type series struct {
	values []float64
	cpu    []float64 // in ms
}

func (s *series) add(v float64)        { s.values = append(s.values, v) }
func (s *series) took(d time.Duration) { s.add(ms(d)) }
func (s *series) used(d time.Duration) { s.cpu = append(s.cpu, ms(d)) }
func (s *series) p50() float64         { return quantile(s.values, 0.5) }
func ms(d time.Duration) float64       { return float64(d.Nanoseconds()) / 1e6 }
func mib(bytes int64) float64          { return float64(bytes) / (1 << 20) }
func round(v float64) float64          { return math.Round(v*1000) / 1000 }
func (s *series) figure(name, unit string) Figure {
	f := Figure{Name: name, Unit: unit, N: len(s.values), Samples: make([]float64, len(s.values))}
	for i, v := range s.values {
		f.Samples[i] = round(v)
	}
	f.Min, f.P50 = round(quantile(s.values, 0)), round(s.p50())
	f.P95, f.P99 = round(quantile(s.values, 0.95)), round(quantile(s.values, 0.99))
	f.CPU = round(quantile(s.cpu, 0.5))
	return f
}

// against compares a figure with another of the same rounds.
func (f Figure) against(name string, other *series) Figure {
	f.Against, f.Ratio = name, round(f.P50/other.p50())
	return f
}

// single is a figure of one measurement.
func single(name, unit string, v float64) Figure {
	s := series{values: []float64{v}}
	f := s.figure(name, unit)
	f.Samples = nil
	return f
}

// quantile is the nearest-rank quantile: always a value that was measured.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(q * float64(len(s))))
	return s[min(max(rank-1, 0), len(s)-1)]
}

// Budget is what a figure may be at most, or must be at least.
type Budget struct {
	Suite   string   `json:"suite"`
	Name    string   `json:"name"`
	Against string   `json:"against,omitempty"` // the budget is then one of the ratio
	AtMost  *float64 `json:"at_most,omitempty"`
	AtLeast *float64 `json:"at_least,omitempty"`
}

// readBudgets reads budgets; none when there is no such file, as on a machine
// without the source tree.
func readBudgets(path string) ([]Budget, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []Budget
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, kind.Errorf(kind.Invalid, "%s: %w", path, err)
	}
	for i, b := range all {
		if (b.AtMost == nil) == (b.AtLeast == nil) {
			return nil, kind.Errorf(kind.Invalid, "%s: budget %d (%s) needs one of at_most and at_least", path, i, b.Name)
		}
	}
	return all, nil
}

// hold puts budgets on the figures of a suite and returns those missed, in
// words. A budget that has no figure is an error, so that renaming one does
// not lose the other, unless its comparator was skipped.
func hold(budgets []Budget, suite string, figures []Figure, skipped []string) ([]string, error) {
	var missed []string
	for _, b := range budgets {
		if b.Suite != suite {
			continue
		}
		i := slices.IndexFunc(figures, func(f Figure) bool { return f.Name == b.Name && f.Against == b.Against })
		if i < 0 {
			absent := func(s string) bool { return strings.HasPrefix(s, b.Against+":") }
			if b.Against != "" && slices.ContainsFunc(skipped, absent) {
				continue
			}
			return missed, kind.Errorf(kind.Internal, "%s: no figure %q of suite %s against %q", Budgets, b.Name, suite, b.Against)
		}
		f := &figures[i]
		got, ok := f.P50, false
		if b.Against != "" {
			got = f.Ratio
		}
		if b.AtMost != nil {
			f.Budget, ok = b.AtMost, got <= *b.AtMost
		} else {
			f.Budget, f.Floor, ok = b.AtLeast, true, got >= *b.AtLeast
		}
		f.OK = &ok
		if !ok {
			missed = append(missed, fmt.Sprintf("%s, %s: %s, not %s", suite, f.title(), short(got), f.bound()))
		}
	}
	return missed, nil
}

// title is a figure's name with what it is compared with.
func (f Figure) title() string {
	if f.Against == "" {
		return f.Name
	}
	return f.Name + " ÷ " + f.Against
}

// bound is the budget in words.
func (f Figure) bound() string {
	switch {
	case f.Budget == nil:
		return ""
	case f.Floor:
		return "≥ " + short(*f.Budget)
	}
	return "≤ " + short(*f.Budget)
}
