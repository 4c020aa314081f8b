// Package journal writes what is done into records: the intent before an
// effect, the outcome after it.
//
// Terms:
//
//   - An intent is an event that announces an effect. It is durable before the
//     effect begins.
//   - An outcome is an event that concludes an intent, by its sequence number.
//   - A pending outcome is an intent whose outcome is not in the record yet.
//   - A flow is a list of steps, each with its intent, its effect and its
//     outcome.
//   - The history of a record is what it tells a process that takes up the
//     work of an earlier one: which intents are open, which steps are done.
//
// The parts need a Store, and nothing of the packages that use them:
//
//	lifecycle ──▶ Flow ─┐                    ┌─▶ Store (session records)
//	workload ───▶ Log ──┼──▶ Journal ────────┤
//	node ──▶ Recorder ──┘    │               └─▶ SystemStore (record of the node)
//	                         └─▶ followers of a record
//
// One command, from its intent to its outcome:
//
//	p, err := log.Begin(ctx, intent, lost) // the intent is on disk, or nothing happens
//	…                                      // the effect
//	err = log.Conclude(p, outcome)         // written also when the caller has gone
//
// An outcome that cannot be written stays pending: it is written later, or by
// the end of the session. A write that failed may still have been stored, so
// the record is read before the write is repeated.
package journal
