package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"bivy/client"
	"bivy/internal/kind"
)

// Options of Run.
type Options struct {
	Suite    string // empty: all
	OutDir   string // for the figures; empty: DefaultOut where Budgets is, else nowhere
	JSON     bool   // figures to Stdout, instead of a table
	Stdout   io.Writer
	Stderr   io.Writer // progress
	Version  client.Version
	CacheDir string // for what is built to compare with; empty: the user's
}

const (
	// Budgets is where budgets are, seen from the root of the source tree.
	Budgets = "bench/budgets.json"
	// DefaultOut is where figures go, seen from there too.
	DefaultOut = "bench/out"
)

// suite is a group of figures that are measured together.
type suite struct {
	name string
	// limit bounds the measuring, set-up aside: a suite on a slow machine
	// gives figures of fewer rounds, which say so.
	limit time.Duration
	run   func(ctx context.Context, b *bench) ([]Figure, error)
}

func suites() []suite {
	return []suite{
		{"cold", 150 * time.Second, cold},
		{"destroy", 90 * time.Second, destroy},
		{"sustained", 70 * time.Second, sustained},
		{"memory", 90 * time.Second, memory},
		{"exec", 60 * time.Second, commands},
		{"stream", 90 * time.Second, stream},
	}
}

// bench is what the suites share.
type bench struct {
	o       Options
	dir     string // removed at the end
	host    Host
	groups  *groups
	server  *server       // nil: none runs
	data    string        // of every server here: the base template is built once
	limit   time.Duration // of the suite
	until   time.Time     // when it is over
	skipped []string      // comparators that are not there, with the reason
}

// Run measures, prints and writes figures. It fails with Exhausted when a
// budget is missed.
func Run(ctx context.Context, o Options) error {
	chosen, err := choose(o.Suite)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return kind.Errorf(kind.Unavailable, "gVisor sandboxes need root").WithHint("run bivy bench as root")
	}
	budgets, err := readBudgets(Budgets)
	if err != nil {
		return err
	}
	if o.OutDir == "" && budgets != nil {
		o.OutDir = DefaultOut
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b, err := open(o)
	if err != nil {
		return err
	}
	missed, err := b.measure(ctx, chosen, budgets)
	if err := errors.Join(err, b.close(context.WithoutCancel(ctx))); err != nil {
		return err
	}
	if len(missed) > 0 {
		return kind.Errorf(kind.Exhausted, "%d budgets are missed: %s", len(missed), strings.Join(missed, "; ")).
			WithHint("docs/performance.md says what each figure depends on; a loaded machine misses them all")
	}
	return nil
}

func choose(name string) ([]suite, error) {
	all := suites()
	if name == "" {
		return all, nil
	}
	var names []string
	for _, s := range all {
		if s.name == name {
			return []suite{s}, nil
		}
		names = append(names, s.name)
	}
	return nil, kind.Errorf(kind.Invalid, "there is no suite %q; there are %s", name, strings.Join(names, ", ")).WithField("suite")
}

func open(o Options) (*bench, error) {
	dir, err := os.MkdirTemp("", "bivy-bench-")
	if err != nil {
		return nil, err
	}
	// Sentries open themselves again as an unprivileged user, below it.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	b := &bench{o: o, dir: dir, data: filepath.Join(dir, "data")}
	if b.groups, err = openGroups(fmt.Sprintf("bivy-bench-%d", os.Getpid())); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	b.host = describe(dir, o.Version)
	return b, nil
}

func (b *bench) close(ctx context.Context) error {
	err := b.stopServer(ctx)
	return errors.Join(err, b.groups.close(), os.RemoveAll(b.dir))
}

// say tells of progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.o.Stderr, "bench: "+format+"\n", args...)
}

// measure runs suites and returns the budgets that were missed.
func (b *bench) measure(ctx context.Context, chosen []suite, budgets []Budget) ([]string, error) {
	var reports []Report
	var missed []string
	for _, s := range chosen {
		b.skipped = nil
		r := Report{Suite: s.name, At: time.Now().UTC(), Host: b.host}
		r.Host.LoadBefore = loadAverage()
		b.say("%s: starting, load average %.1f on %d CPUs", s.name, r.Host.LoadBefore, runtime.NumCPU())
		b.limit = s.limit
		b.begin()
		idle := startOthers(b)
		figures, err := s.run(ctx, b)
		if err != nil {
			return missed, fmt.Errorf("suite %s: %w", s.name, err)
		}
		r.Host.LoadAfter, r.Host.Elsewhere = loadAverage(), idle()
		r.Skipped = b.skipped
		m, err := hold(budgets, s.name, figures, b.skipped)
		if err != nil {
			return missed, err
		}
		missed = append(missed, m...)
		r.Figures = figures
		reports = append(reports, r)
		if !b.o.JSON {
			if err := table(b.o.Stdout, r); err != nil {
				return missed, err
			}
		}
		if err := save(b.o.OutDir, r); err != nil {
			return missed, err
		}
	}
	if b.o.JSON {
		return missed, encode(b.o.Stdout, reports)
	}
	return missed, nil
}

// begin starts the suite's time, anew once everything is set up.
func (b *bench) begin() { b.until = time.Now().Add(b.limit) }

// skip notes that a comparator is not there.
func (b *bench) skip(name string, err error) {
	b.skipped = append(b.skipped, fmt.Sprintf("%s: %v", name, err))
	b.say("%s is skipped: %v", name, err)
}

// sorted is for what is told in a map's order.
func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
