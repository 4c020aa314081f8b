// Package poll waits for what gives no event: it tries, waits and tries again.
//
// It uses the time package and nothing else, so that testing/synctest controls
// its clock.
package poll

import (
	"context"
	"fmt"
	"time"
)

// Delays are the times between tries: First after the first try, then twice
// the time before, at most Max. A Max below First makes all of them First.
type Delays struct {
	First, Max time.Duration
}

// Every is a constant delay.
func Every(d time.Duration) Delays { return Delays{First: d} }

func (d Delays) after(last time.Duration) time.Duration {
	if last == 0 {
		return d.First
	}
	return max(d.First, min(2*last, d.Max))
}

// Until calls try, at once and then after each delay, until it reports that it
// is done, and returns the error of that last call. The error of a try that is
// not done says why it has to be repeated.
//
// When ctx ends first, Until does not try again and returns an error that wraps
// the cause of ctx and the error of the last try, if there is one. It tries
// once even if ctx has ended before: try decides by ctx itself.
func Until(ctx context.Context, delays Delays, try func() (done bool, err error)) error {
	var delay time.Duration
	for {
		done, err := try()
		if done {
			return err
		}
		delay = delays.after(delay)
		if ended := Sleep(ctx, delay); ended != nil {
			if err != nil {
				return fmt.Errorf("%w; last: %w", ended, err)
			}
			return ended
		}
	}
}

// Sleep waits for d. When ctx ends first it returns the cause of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
