package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// samples is how often each contestant has its turn, after warm-up.
const (
	samples = 50
	warmUps = 3
	// least is how many rounds a suite has even when its time is up.
	least = 10
	// patience bounds a single turn.
	patience = 30 * time.Second
)

// contestant is one of those who do the same thing in turns.
type contestant struct {
	name string
	// do does the thing once and returns when it was seen to work and when
	// nothing of it was left.
	do  func(ctx context.Context) (first, gone time.Duration, err error)
	cpu func() time.Duration // used so far by everybody who works for it

	first, gone series
}

// rounds gives everybody a turn n times, in a new order each round: what
// disturbs the machine for a while disturbs everybody alike.
func (b *bench) rounds(ctx context.Context, n int, all ...*contestant) error {
	for r := -warmUps; r < n; r++ {
		if r >= least && time.Now().After(b.until) {
			b.say("time is up after %d of %d rounds", r, n)
			return nil
		}
		if r > 0 && r%10 == 0 {
			b.say("round %d of %d", r, n)
		}
		for _, i := range rand.Perm(len(all)) { //nolint:gosec // an order of turns, not a secret
			if err := all[i].turn(ctx, r >= 0); err != nil {
				return fmt.Errorf("%s: %w", all[i].name, err)
			}
		}
	}
	return nil
}

func (c *contestant) turn(ctx context.Context, counts bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	before := self()
	if c.cpu != nil {
		before += c.cpu()
	}
	first, gone, err := c.do(ctx)
	if err != nil || !counts {
		return err
	}
	c.first.took(first)
	c.gone.took(gone)
	if c.cpu != nil {
		c.first.used(c.cpu() + self() - before)
	}
	return nil
}
