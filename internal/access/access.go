// Package access decides who may do what.
//
// Every action of a caller is decided once, beside the intent that announces
// it in the record, by the one Decider of the process. The interfaces that
// callers come through (REST and others) only authenticate: they say who calls
// and leave the decision to the package that does the work.
//
//	Caller ──▶ Request{Caller, Action, Resource} ──▶ Decider ──▶ Decision
//	                                                  (Roles)     in the event
package access

import (
	"context"

	"bivy/internal/audit"
	"bivy/internal/session"
)

// Caller is an authenticated principal and the role of its key. It is
// comparable. The zero Caller may do nothing.
type Caller struct {
	Principal session.Principal // who calls
	Role      Role              // of the key that was sent
}

// Resource is what an action is about. The zero value stands for actions that
// are about no session.
type Resource struct {
	Session session.ID        // which session; empty: none
	Owner   session.Principal // of that session
}

// Of returns the resource that s is.
func Of(s session.Session) Resource { return Resource{Session: s.ID, Owner: s.Owner} }

// Request asks for one decision.
type Request struct {
	Caller   Caller   // who asks
	Action   Action   // for what
	Resource Resource // on what
}

// Decider is a set of rules. Its methods are safe for concurrent use, take no
// locks that callers hold, and fail closed: whatever they cannot evaluate is
// denied.
type Decider interface {
	// Decide answers a request. The decision is to be recorded with the event
	// of the action, whether it allows or not. The error is nil if and only if
	// the action may go on; otherwise it is Denied or, where the caller must
	// not learn that the resource exists, NotFound.
	Decide(ctx context.Context, r Request) (audit.Decision, error)

	// Scope narrows a list to what the caller may use an action on: "" for
	// everything, else the Principal.Subject of the owner whose sessions the
	// list must be limited to. The error is Denied when that is nothing.
	Scope(ctx context.Context, c Caller, a Action) (owner string, err error)
}
