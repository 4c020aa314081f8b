// Package api is bivy's REST interface, version 1. It authenticates requests,
// decodes them, calls the part that does the work and maps what comes back.
// What a caller may do is not decided here: every call carries the caller, and
// the part that does the work decides beside the intent that it records.
//
//	request ─▶ trace ─▶ Host ─▶ route ─▶ key ─▶ query ─▶ handler ─▶ Sessions, Workload, …
//	                                   Keys.Authenticate             decide, record, do
//	answer  ◀─ Traceparent, Bivy-Request-Id ◀─ JSON, JSON lines or frames ◀─ result or error
//
// Terms:
//
//   - A route is a method and a path pattern with its handler. table lists all.
//   - A call is one request on its way through its route.
//   - Updates are an answer in JSON lines: progress while something is being
//     done, then its result.
//   - A stream is a command's output, and in full duplex its input, as JSON
//     lines or as binary frames.
//
// Every request belongs to a trace (W3C Trace Context): that of its
// traceparent header, else a new one. The trace id stands in the answer, in
// the log and in the events that the request causes.
//
// The wire types are those of package client. openapi.yaml describes the
// interface, and tests compare the two.
package api
