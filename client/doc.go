// Package client is the Go client of a bivy server's REST interface, version 1.
// It needs only the standard library.
//
// # Terms
//
//   - A session is an isolated environment that a user owns. It is created from
//     a template, runs commands, and ends at the latest at its deadline.
//   - A sandbox is what a session runs in on one machine. It is identified by
//     the session's id and a generation number.
//   - A template is an immutable file system image with defaults.
//   - A record is the list of events of a session. It is signed when the session
//     ends and can be verified without a server: bivy audit verify.
//
// # Use
//
// A [Client] creates sessions; a [Session] runs commands and transfers files; a
// [Process] is a running command:
//
//	c, err := client.New(client.Options{URL: "http://127.0.0.1:7171", Key: key})
//	s, err := c.CreateSession(ctx, client.CreateSession{Spec: client.Spec{Template: "base"}})
//	defer s.End(context.WithoutCancel(ctx))
//	result, err := s.Run(ctx, client.Command{Argv: []string{"python3", "-c", "print(6*7)"}})
//
// The examples of this package run as tests.
//
// # Errors
//
// A failure that the server reports is an *[Error]; errors.Is compares its code:
//
//	errors.Is(err, &client.Error{Code: client.CodeNotFound})
//
// Every other error comes from the connection.
//
// # Streams
//
// Output of commands, files and records are streamed: memory use is constant,
// and a slow reader slows the sender down.
//
// # Tracing
//
// [WithTraceparent] makes requests part of the caller's trace. The trace id is in
// the events of records, in the server's log and in [Error.TraceID].
//
// # Wire types
//
// The structs with JSON tags are the wire format. The server uses the same ones.
package client
