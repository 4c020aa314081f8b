package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"strings"

	"bivy/client"
	"bivy/internal/api/apitest"
)

// exampleServer starts a server for an example.
func exampleServer() (url, key string, stop func()) {
	dir, err := os.MkdirTemp("", "bivy-example-*")
	if err != nil {
		panic(err)
	}
	b, err := apitest.Start(context.Background(), dir, apitest.Options{})
	if err != nil {
		panic(err)
	}
	h, err := b.Handler()
	if err != nil {
		panic(err)
	}
	s := httptest.NewServer(h)
	return s.URL, apitest.AdminSecret, func() {
		s.Close()
		if err := errors.Join(b.Close(), os.RemoveAll(dir)); err != nil {
			panic(err)
		}
	}
}

func Example() {
	url, key, stop := exampleServer()
	defer stop()
	ctx := context.Background()

	c, err := client.New(client.Options{URL: url, Key: key})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	s, err := c.CreateSession(ctx, client.CreateSession{Spec: client.Spec{Template: "base"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	result, err := s.Run(ctx, client.Command{Argv: []string{"sh", "-c", "echo $((6*7))"}})
	fmt.Printf("%s%d %v\n", result.Stdout, result.Status(), err)
	info, err := s.End(ctx)
	fmt.Println(info.State, info.Reason, err)
	// Output:
	// 42
	// 0 <nil>
	// ended requested <nil>
}

func ExampleSession_Start() {
	url, key, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	c, err := client.New(client.Options{URL: url, Key: key})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	s, err := c.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.End(ctx)

	p, err := s.Start(ctx, client.Command{Argv: []string{"tr", "a-z", "A-Z"}, Stdin: true, OnDisconnect: client.Kill})
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() {
		io.Copy(p, strings.NewReader("hello\n"))
		p.CloseStdin()
	}()
	var out bytes.Buffer
	exit, err := p.Wait(&out, os.Stderr)
	fmt.Print(out.String())
	fmt.Println(exit.Status(), err)
	// Output:
	// HELLO
	// 0 <nil>
}

func ExampleError() {
	url, key, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	c, err := client.New(client.Options{URL: url, Key: key})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	_, err = c.CreateSession(ctx, client.CreateSession{Spec: client.Spec{Template: "missing"}})
	var e *client.Error
	if errors.As(err, &e) {
		fmt.Println(e.Code, e.Field, "|", e.Hint)
	}
	fmt.Println(errors.Is(err, &client.Error{Code: client.CodeNotFound}))
	// Output:
	// not_found template | see bivy template ls
	// true
}

func ExampleSession_WriteFile() {
	url, key, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	c, err := client.New(client.Options{URL: url, Key: key})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	s, err := c.CreateSession(ctx, client.CreateSession{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.End(ctx)

	if _, err := s.WriteFile(ctx, "notes.txt", strings.NewReader("remember\n"), client.FileOptions{}); err != nil {
		fmt.Println(err)
		return
	}
	r, info, err := s.ReadFile(ctx, "notes.txt", client.FileOptions{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	fmt.Printf("%s: %s%v\n", info.Path, b, err)
	// Output:
	// notes.txt: remember
	// <nil>
}
