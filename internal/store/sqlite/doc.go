// Package sqlite keeps sessions, records and API keys in one SQLite database in
// a data directory.
//
// # Writing
//
//	callers ──▶ queue ──▶ writer: BEGIN  ▸ request ▸ request ▸ …  COMMIT ──▶ disk
//	                               └ each behind a savepoint
//
// One goroutine, the writer, takes all requests that wait, runs them in one
// transaction and commits them with one sync of the disk, so that many callers
// together cost about what one costs. A request that fails is undone alone.
// Readers have connections of their own and never wait for the writer.
//
// The writer remembers open records (their heads, open intents and counts), so
// that an append reads nothing. At the beginning of each transaction it asks
// SQLite whether another connection has written and, if so, forgets them.
//
// # Terms
//
//   - A fence is what a writer believes of the session it writes for: its node
//     and generation. A write with a wrong fence fails with Conflict and writes
//     nothing.
//   - A leaf is a seal's place in the Merkle tree of its node. Sealing costs
//     O(log n) for n earlier seals and O(m) for m live sessions.
//   - The moment is the reading of the host's clocks that all events of one
//     transaction carry.
//
// The schema is in migrations; triggers in it refuse what the code must never
// do, such as changing an event.
package sqlite
