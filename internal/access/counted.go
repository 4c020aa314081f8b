package access

import (
	"context"

	"bivy/internal/audit"
)

// Counted is a Decider that counts what another one denies. Allowed actions
// are recorded by those who do them; nothing follows a denial that could be.
type Counted struct {
	Decider // that decides

	// Count is called for each denial, with the action that was asked for as
	// the reason and the subject of the caller. It is set before the first
	// decision.
	Count func(event audit.Action, reason, who string, d audit.Decision)
}

// Decide implements Decider.
func (c *Counted) Decide(ctx context.Context, r Request) (audit.Decision, error) {
	decision, err := c.Decider.Decide(ctx, r)
	if err != nil {
		c.Count(audit.AccessDenied, string(r.Action), r.Caller.Principal.Subject, decision)
	}
	return decision, err
}

// Scope implements Decider.
func (c *Counted) Scope(ctx context.Context, who Caller, a Action) (owner string, err error) {
	owner, err = c.Decider.Scope(ctx, who, a)
	if err != nil {
		// A list has no resource: its decision is that about the action alone.
		decision, _ := c.Decider.Decide(ctx, Request{Caller: who, Action: a})
		c.Count(audit.AccessDenied, string(a), who.Principal.Subject, decision)
	}
	return owner, err
}
