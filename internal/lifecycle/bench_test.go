package lifecycle_test

import (
	"bivy/internal/workload"
	"testing"
	"time"
)

// BenchmarkLife measures what the lifecycle itself costs: the driver is the
// fake one, the disk and the record are real.
func BenchmarkLife(b *testing.B) {
	w := newWorld(b)
	d := w.start()
	var create, exec, end time.Duration
	before := w.store.Stats().Commits
	for b.Loop() {
		at := time.Now()
		s := d.create()
		create += time.Since(at)

		at = time.Now()
		p, err := d.Start(b.Context(), alice, s.ID, workload.Command{Argv: []string{"true"}})
		if err != nil {
			b.Fatal(err)
		}
		for {
			ev, err := p.Next(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			if ev.Kind == workload.End {
				break
			}
		}
		p.Detach()
		exec += time.Since(at)

		at = time.Now()
		d.end(s.ID)
		end += time.Since(at)
	}
	n := float64(b.N)
	b.ReportMetric(float64(create.Microseconds())/n/1000, "create-ms")
	b.ReportMetric(float64(exec.Microseconds())/n/1000, "exec-ms")
	b.ReportMetric(float64(end.Microseconds())/n/1000, "end-ms")
	b.ReportMetric(float64(w.store.Stats().Commits-before)/n, "commits")
}
