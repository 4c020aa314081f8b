package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"bivy/internal/kind"
)

// printable replaces characters that a terminal could act on.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return '�'
	}, s)
}

// oneLine is printable without line breaks and tabs.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		return r
	}, printable(s))
}

func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.Out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// printJSONLine prints one line, for output that is a stream.
func (a *app) printJSONLine(v any) error {
	enc := json.NewEncoder(a.Out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// table prints rows with aligned columns.
func table(w io.Writer, rows ...[]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		for i := range r {
			r[i] = oneLine(r[i])
		}
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

// formatSize formats a number of bytes.
func formatSize(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n), -1
	for f >= unit && i < 4 {
		f /= unit
		i++
	}
	return fmt.Sprintf("%.1f %ciB", f, "KMGTP"[i])
}

// formatDuration formats a duration in the largest unit that fits.
func formatDuration(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + formatDuration(-d)
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < 10*time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	}
	return fmt.Sprintf("%.0f d", d.Hours()/24)
}

// formatTime formats a time; "-" for the zero time.
func formatTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// parseCPU reads cores, such as 2 or 0.5, as thousandths.
func parseCPU(s string) (int64, error) {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f <= 0 || f > 1e6 || math.IsNaN(f) {
		return 0, kind.Errorf(kind.Invalid, "invalid value %q: must be a number of cores, e.g. 2 or 0.5", s).WithField("--cpu")
	}
	return int64(math.Round(f * 1000)), nil
}

// parseMiB reads a size in MiB, or with a unit.
func parseMiB(flag, s string) (int64, error) {
	digits := strings.TrimRight(s, "kKmMgGtTiIbB")
	unit := strings.ToUpper(strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(s[len(digits):]), "B"), "I"))
	factor, ok := map[string]float64{"": 1, "K": 1.0 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}[unit]
	f, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok || f <= 0 || math.IsInf(f, 0) {
		return 0, kind.Errorf(kind.Invalid, "invalid value %q: must be a size, e.g. 512M or 2G", s).WithField(flag)
	}
	mib := f * factor
	if mib != math.Trunc(mib) || mib > 1<<40 {
		return 0, kind.Errorf(kind.Invalid, "invalid value %q: must be a whole number of MiB", s).WithField(flag)
	}
	return int64(mib), nil
}

// parseSeconds reads a duration such as 90, 90s, 5m or 1h30m.
func parseSeconds(flag, s string) (int64, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		var n int64
		if n, err = strconv.ParseInt(s, 10, 32); err == nil {
			d = time.Duration(n) * time.Second
		}
	}
	if err != nil || d <= 0 || d%time.Second != 0 {
		return 0, kind.Errorf(kind.Invalid, "invalid value %q: must be a duration in whole seconds, e.g. 90s or 5m", s).WithField(flag)
	}
	return int64(d / time.Second), nil
}

// parsePairs reads KEY=VALUE texts. With lookup, the value of a KEY alone comes
// from it.
func parsePairs(flag string, texts []string, lookup func(string) (string, bool)) (map[string]string, error) {
	if len(texts) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(texts))
	for _, t := range texts {
		k, v, ok := strings.Cut(t, "=")
		if !ok && lookup != nil && k != "" {
			if v, ok = lookup(k); !ok {
				return nil, kind.Errorf(kind.Invalid, "%q is not set in this environment", k).WithField(flag).WithHint("set a value: %s %s=VALUE", flag, k)
			}
		}
		if !ok || k == "" {
			return nil, kind.Errorf(kind.Invalid, "invalid value %.100q: must be KEY=VALUE", t).WithField(flag)
		}
		out[k] = v
	}
	return out, nil
}
