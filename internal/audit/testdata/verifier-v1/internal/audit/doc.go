// Package audit is the record: events that are numbered, chained by hash,
// signed, and verified offline by a reader who trusts nothing but a public key.
//
// # Terms
//
//   - A record is one chain of events. It is named by a [RecordID]: of a
//     session ("session/<id>"), of what became known after a session's seal
//     ("addenda/<id>"), or of a node ("system/<node>/<segment>").
//   - An [Event] is the skeleton of one entry. It is hashed and kept for ever.
//   - A payload holds the details. The skeleton commits to it with a random
//     salt: commit = SHA-256(salt ‖ payload). Deleting payload and salt erases
//     the details, while order, actions, outcomes and signatures still verify.
//   - An intent announces an effect before it happens. Its action ends in
//     ".intent", its outcome is "pending", and a later event concludes it by
//     naming its number.
//   - A seal is a signed statement (in-toto statement in a DSSE envelope) that
//     a record is complete. Nothing is added to a sealed record.
//   - Addenda are facts that arrive after the seal of a session's record. They
//     form a chain of their own, whose head is signed after each addition.
//   - Heads are the ends of all records of a node at one moment, signed. A
//     holder of an earlier statement detects deleted records, records that were
//     cut short, and an older copy of the database (see [VerifyHeads]).
//   - A rotation is a signed statement that one signing key replaces another.
//
// # Chains
//
//	session/<id>      0 ◀─ 1 ◀─ 2 ◀─ … ◀─ n ◀─ seal ─┐ root
//	addenda/<id>                                     └◀─ 1 ◀─ 2 ◀─ signed head
//
//	system/<node>/1   0 ◀─ 1 ◀─ … ◀─ n ◀─ seal ─┐ root
//	system/<node>/2                             └◀─ 1 ◀─ … ◀─ n ◀─ seal ─┐ root
//
// Every event holds the hash of the event before it. The first event of a
// session's record holds zeros; the first event of the addenda and of a later
// segment holds the root of the record that it continues.
//
// # Versions
//
// Events, statements and the export format carry version numbers. The rules of
// a version do not depend on a list of actions: a reader of version 1 verifies
// every record of version 1, also one with actions and sections that it does
// not know. A reader refuses a newer version with an error that names both.
package audit
