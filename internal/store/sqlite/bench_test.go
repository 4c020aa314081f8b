package sqlite

import (
	"context"
	"sync/atomic"
	"testing"

	"bivy/internal/audit"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// BenchmarkAppend is the cost of one durable event of one caller, and of many
// at once; commits/op is syncs of the disk per event.
func BenchmarkAppend(b *testing.B) {
	bench := func(b *testing.B, callers int) {
		s := open(b, b.TempDir())
		ids := make([]session.ID, callers)
		for i := range ids {
			ids[i] = storetest.Created(b, s).ID
		}
		e := storetest.Entry(audit.CommandStarted)
		e.Payload = map[string]any{"argv": []string{"python3", "-c", "print(1)"}, "cwd": "/home/user", "user": "user"}
		before := s.Stats().Commits
		var next atomic.Int64
		b.ReportAllocs()
		b.SetParallelism(callers)
		b.ResetTimer()
		if callers == 1 {
			for b.Loop() {
				if err := s.Append(context.Background(), ids[0], e); err != nil {
					b.Fatal(err)
				}
			}
		} else {
			b.RunParallel(func(p *testing.PB) {
				id := ids[int(next.Add(1))%callers]
				for p.Next() {
					if err := s.Append(context.Background(), id, e); err != nil {
						b.Error(err)
					}
				}
			})
		}
		b.ReportMetric(float64(s.Stats().Commits-before)/float64(b.N), "commits/op")
	}
	b.Run("1", func(b *testing.B) { bench(b, 1) })
	b.Run("8", func(b *testing.B) { bench(b, 8) })
	b.Run("64", func(b *testing.B) { bench(b, 64) })
}

// BenchmarkLife is a short session's whole traffic: create, three
// transitions, a command, the seal.
func BenchmarkLife(b *testing.B) {
	s := open(b, b.TempDir())
	for b.Loop() {
		at := storetest.Moved(b, s, storetest.Created(b, s), session.Running)
		for _, a := range []audit.Action{audit.CommandIntent, audit.CommandStarted, audit.CommandEnded} {
			if err := s.Append(context.Background(), at.ID, storetest.Entry(a)); err != nil {
				b.Fatal(err)
			}
		}
		storetest.Sealed(b, s, at)
	}
}
