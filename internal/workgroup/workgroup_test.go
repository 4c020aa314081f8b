package workgroup

import (
	"testing"
	"testing/synctest"
	"time"

	"bivy/internal/kind"
)

func TestStopWaitsForWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := New()
		var finished, cut bool
		g.Go(func() {
			<-g.Live().Done()
			time.Sleep(time.Second) // writes what it has to
			finished = g.Late().Err() == nil
		})
		g.Go(func() {
			<-g.Late().Done()
			cut = true
		})
		begun := time.Now()
		g.Stop(time.Minute)
		if took := time.Since(begun); took != time.Minute {
			t.Errorf("stopped after %s, want the whole patience for work that does not end", took)
		}
		if !finished || !cut {
			t.Errorf("finished %t, cut %t", finished, cut)
		}
	})
}

func TestNoWorkAfterStop(t *testing.T) {
	g := New()
	done, ok := g.Begin()
	if !ok || g.Stopping() {
		t.Fatal("a new group takes no work")
	}
	done()
	done() // counts once
	g.Stop(time.Hour)
	if _, ok := g.Begin(); ok || g.Go(func() { t.Error("it ran") }) || !g.Stopping() {
		t.Error("work began after Stop")
	}
	if g.Live().Err() == nil || g.Late().Err() == nil {
		t.Error("a context goes on after Stop")
	}
	if !kind.Is(StoppingError(), kind.Unavailable) || kind.Hint(StoppingError()) == "" {
		t.Error("the error does not say what to do")
	}
}
