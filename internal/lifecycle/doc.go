// Package lifecycle owns the lives of sessions: it creates and ends them, in
// steps that are recorded before and after, and it puts right what a crash
// left half done.
//
// Terms:
//
//   - A session is what a user owns. Its row is in the store.
//   - A managed session is what this process holds of a session that has not
//     ended: the lock of its row, the create or the end in progress, and its
//     current incarnation (package workload), which is nil while it has no
//     running sandbox.
//   - Reconciling compares the rows of this node with the sandboxes on it,
//     both ways, at start; a sweep does it again and again.
//
// A Manager is the only writer of the sessions of its node. Everything it does
// to a session goes through the Store, so that no change and no effect is
// without its event; everything it does to the machine goes through the Node.
//
//	Create ─▶ decision ─▶ flow "create": lease, start, bind, posture ─▶ running
//	End    ─▶ decision ─▶ flow "end": shut, freeze, measure, digest,
//	                      kill, dispose, release ─▶ seal
package lifecycle
