// Package bench measures bivy on the machine it runs on: a real server on
// loopback, called through the public client, beside the other container runtimes
// of the machine. One driver and one clock measure all of them, in rounds of
// random order, and each figure is compared with its budget in
// bench/budgets.json.
//
//	bench ─▶ server  (bivy serve, one process)   ─▶ figures ─▶ report
//	      ─▶ docker, runc, runsc, plain processes ─▶ figures ─▶ report
//
// # Terms
//
//   - Figure: one measured quantity, with its unit and its budget.
//   - Series: the samples that a figure is made from.
//   - Comparator: another runtime that is measured in the same rounds.
//   - Round: one sample of everything, in random order, so that a change of the
//     machine's load affects all alike.
package bench
