package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func TestTurnsAreFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newFairSemaphore(1)
		first, err := q.take(t.Context(), "hog")
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		served := make(chan string)
		want := func(owner string, n int) {
			for i := range n {
				go func() {
					done, err := q.take(t.Context(), owner)
					if err != nil {
						t.Error(err)
						return
					}
					served <- fmt.Sprint(owner, i)
					done()
					done() // giving back twice gives once
				}()
				synctest.Wait() // so that they queue in this order
			}
		}
		want("hog", 4)
		want("ann", 1)
		want("bob", 2)
		first()
		for range 7 {
			order = append(order, <-served)
		}
		if got := strings.Join(order, " "); got != "hog0 ann0 bob0 hog1 bob1 hog2 hog3" {
			t.Errorf("served: %s", got)
		}
		synctest.Wait()
		if q.free != 1 || q.total != 0 || len(q.waiting) != 0 || len(q.owners) != 0 {
			t.Errorf("in the end: %+v", q)
		}
	})
}

func TestTurnsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newFairSemaphore(1)
		first, err := q.take(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error)
		go func() {
			_, err := q.take(ctx, "b")
			gaveUp <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Errorf("given up: %v", err)
		}
		first()
		done, err := q.take(t.Context(), "c")
		if err != nil {
			t.Fatal(err)
		}
		q.total = maxWaiting
		if _, err := q.take(t.Context(), "d"); !kind.Is(err, kind.Exhausted) {
			t.Errorf("one too many: %v", err)
		}
		q.total = 0
		done()
		if q.free != 1 || len(q.waiting) != 0 || len(q.owners) != 0 {
			t.Errorf("in the end: %+v", q)
		}
	})
}

func TestClockWatch(t *testing.T) {
	wall, passed := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), time.Duration(0)
	c := &clockWatch{wall: func() time.Time { return wall }, runs: func() time.Duration { return passed }}
	c.jumped()
	for _, step := range []struct{ wall, passed, want time.Duration }{
		{30 * time.Second, 30 * time.Second, 0},
		{31 * time.Second, 30 * time.Second, 0},
		{time.Hour, 30 * time.Second, time.Hour - 30*time.Second},
		{-time.Hour, 30 * time.Second, -time.Hour - 30*time.Second},
	} {
		wall, passed = wall.Add(step.wall), passed+step.passed
		by, jumped := c.jumped()
		if jumped != (step.want != 0) || (jumped && by != step.want) {
			t.Errorf("%+v: %s, %v", step, by, jumped)
		}
	}
}

func TestEveryStepHasItsUndoOrAReason(t *testing.T) {
	m := &Manager{b: Bounds{}.withDefaults()}
	e := &managed{id: "x"}
	end := m.endSteps(e, nil)
	create := (&creation{m: m, e: e}).steps()
	for _, s := range slices.Concat(create, end) {
		if (s.Undo == nil) == (s.NoUndo == "") {
			t.Errorf("step %s: want an undo or the reason it needs none", s.Name)
		}
	}
	if create[0].Joined || end[0].Joined {
		t.Error("the first step of a flow has none before it to join")
	}
}

// A path that a spec may name can be named in a call too, and the other way
// round: the guest, which knows no specs, has a bound of its own.
func TestOneLengthOfPaths(t *testing.T) {
	if session.MaxPathLength != wire.MaxPath {
		t.Errorf("%d in a spec, %d to the guest", session.MaxPathLength, wire.MaxPath)
	}
}
