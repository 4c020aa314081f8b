package sqlite

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"bivy/internal/audit"
	"bivy/internal/session"
	"bivy/internal/store/storetest"
)

// BenchmarkAppend is the cost of one durable event of one caller, and of many
// at once; commits/op is syncs of the disk per event.
func BenchmarkAppend(b *testing.B) {
	bench := func(b *testing.B, callers int) {
		s := open(b, b.TempDir())
		all := make([]session.Session, callers)
		for i := range all {
			all[i] = storetest.Created(b, s)
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
				if err := storetest.Append(context.Background(), s, all[0], e); err != nil {
					b.Fatal(err)
				}
			}
		} else {
			b.RunParallel(func(p *testing.PB) {
				at := all[int(next.Add(1))%callers]
				for p.Next() {
					if err := storetest.Append(context.Background(), s, at, e); err != nil {
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
		seq, err := s.Append(context.Background(), at.ID, at.Fence(), storetest.Entry(audit.CommandIntent))
		if err != nil {
			b.Fatal(err)
		}
		for _, e := range []audit.Entry{storetest.Entry(audit.CommandStarted), storetest.Concluding(audit.CommandEnded, seq)} {
			if err := storetest.Append(context.Background(), s, at, e); err != nil {
				b.Fatal(err)
			}
		}
		storetest.Sealed(b, s, at)
	}
}

// BenchmarkSeal is the cost of one seal after many: the tree grows by O(log n),
// the list of open records is as long as there are live sessions.
func BenchmarkSeal(b *testing.B) {
	bench := func(b *testing.B, past, live int) {
		s := open(b, b.TempDir())
		signer := audit.GenerateSigner()
		for range past {
			seal(b, s, signer, ending(b, s))
		}
		for range live {
			storetest.Created(b, s)
		}
		ready := make([]session.Session, b.N)
		for i := range ready {
			ready[i] = ending(b, s)
		}
		b.ResetTimer()
		for _, at := range ready {
			seal(b, s, signer, at)
		}
	}
	b.Run("past=0", func(b *testing.B) { bench(b, 0, 0) })
	b.Run("past=1000", func(b *testing.B) { bench(b, 1000, 0) })
	b.Run("past=10000", func(b *testing.B) { bench(b, 10000, 0) })
	b.Run("live=300", func(b *testing.B) { bench(b, 0, 300) })
}

func ending(b *testing.B, s *Store) session.Session {
	b.Helper()
	return storetest.Moved(b, s, storetest.Created(b, s), session.Ending)
}

func seal(b testing.TB, s *Store, signer *audit.Signer, at session.Session) {
	b.Helper()
	at.State, at.EndedAt = session.Ended, time.Now()
	if _, err := s.Seal(context.Background(), at.Fence(), at, storetest.SignWith(signer, at), storetest.Entry(audit.SessionEnded)); err != nil {
		b.Fatal(err)
	}
}
