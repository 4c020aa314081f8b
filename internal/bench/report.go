package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// Report is what a suite found; one file each.
type Report struct {
	Suite   string    `json:"suite"`
	At      time.Time `json:"at"`
	Host    Host      `json:"host"`
	Skipped []string  `json:"skipped,omitempty"` // comparators, with the reason
	Figures []Figure  `json:"figures"`
}

// table prints a report for people.
func table(w io.Writer, r Report) error {
	fmt.Fprintf(w, "\n%s (load average %.1f to %.1f on %d CPUs, %.0f%% of them busy elsewhere)\n",
		r.Suite, r.Host.LoadBefore, r.Host.LoadAfter, r.Host.CPUs, 100*r.Host.Elsewhere)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "n\tmin\tp50\tp95\tp99\tunit\tCPU ms\tratio\tbudget\tok\t  figure")
	for _, f := range r.Figures {
		ok := ""
		if f.OK != nil {
			ok = map[bool]string{true: "yes", false: "NO"}[*f.OK]
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t  %s\n", f.N, short(f.Min), short(f.P50), short(f.P95), short(f.P99), f.Unit,
			unlessZero(f.CPU), unlessZero(f.Ratio), f.bound(), ok, strings.TrimSpace(f.title()+"  "+f.Note))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, s := range r.Skipped {
		fmt.Fprintln(w, "skipped:", s)
	}
	return nil
}

// short prints about three significant digits.
func short(v float64) string {
	digits := 0
	switch a := max(v, -v); {
	case a < 1:
		digits = 3
	case a < 10:
		digits = 2
	case a < 100:
		digits = 1
	}
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
	}
	return s
}

func unlessZero(v float64) string {
	if v == 0 {
		return ""
	}
	return short(v)
}

// save writes a report to its file; nowhere without a directory.
func save(dir string, r Report) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, r.Suite+".json"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := encode(f, r); err != nil {
		return err
	}
	return f.Close()
}

func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	return e.Encode(v)
}
