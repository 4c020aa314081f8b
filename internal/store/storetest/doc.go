// Package storetest is the contract of a store as tests: of the store of
// sessions, of their records and addenda, and of the system record. Every store
// runs all of it, with one handle and with two handles on the same data, as two
// processes have them.
package storetest

import (
	"bivy/internal/journal"
	"bivy/internal/lifecycle"
	"context"
)

// Store is what the tests need: the interfaces of the packages that use a
// store, together. An error of any method means that nothing was written.
//
// Errors: NotFound for an unknown session or segment; Conflict for a wrong
// fence, an old version, a forbidden transition, an idempotency key that was
// used for another request, and a write to a sealed record; Invalid for entries
// and sessions that break a rule.
type Store interface {
	lifecycle.Store
	journal.SystemStore

	// HasSeals reports whether any record was ever sealed.
	HasSeals(ctx context.Context) (bool, error)
}
