// Package client speaks to a bivy server over its REST interface, version 1.
//
// It owns the wire types: what is JSON on the wire is a struct here, and the
// server uses the same ones. It needs nothing but the standard library.
//
// A Client makes sessions; a Session runs commands and moves files:
//
//	c, err := client.New(client.Options{URL: "http://127.0.0.1:7171", Key: key})
//	s, err := c.CreateSession(ctx, client.CreateSession{Spec: client.Spec{Template: "base"}})
//	defer s.End(context.WithoutCancel(ctx))
//	result, err := s.Run(ctx, client.Command{Argv: []string{"python3", "-c", "print(6*7)"}})
//
// Every failure that the server reports is an *Error. Streams (output of
// commands, files, records) use constant memory: reading slowly slows the
// other side down.
package client
