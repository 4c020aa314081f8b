package guestclient_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
)

// hostile returns a client of a guest with the given handler.
func hostile(t *testing.T, handler http.HandlerFunc) *guestclient.Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	c := guestclient.New(guestclient.Config{Token: "secret", Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", server.Listener.Addr().String())
	}})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// proto writes frames of the binary protocol.
func proto(w http.ResponseWriter, frames ...string) {
	w.Header().Set("Content-Type", "application/connect+proto")
	for _, f := range frames {
		var head [5]byte
		binary.BigEndian.PutUint32(head[1:], uint32(len(f)))
		_, _ = io.WriteString(w, string(head[:])+f)
	}
	w.(http.Flusher).Flush()
}

// start is a StartResponse with a start event for process 7.
const start = "\x0a\x04\x0a\x02\x08\x07"

func TestHostileStreams(t *testing.T) {
	cut := func(w http.ResponseWriter, frames ...string) {
		proto(w, frames...)
		panic(http.ErrAbortHandler)
	}
	for name, tt := range map[string]struct {
		handler http.HandlerFunc
		want    kind.Kind
	}{
		"no start":      {func(w http.ResponseWriter, _ *http.Request) { proto(w, "") }, kind.Unavailable},
		"nothing":       {func(w http.ResponseWriter, _ *http.Request) { proto(w) }, kind.Unavailable},
		"cut at once":   {func(w http.ResponseWriter, _ *http.Request) { cut(w) }, kind.Unavailable},
		"not a message": {func(w http.ResponseWriter, _ *http.Request) { proto(w, "\xff\xff\xff") }, kind.Invalid},
		"a page":        {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }, kind.Internal},
		"too large": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/connect+proto")
			_, _ = io.WriteString(w, "\x00\xff\xff\xff\xff")
			zeros := make([]byte, 1<<20)
			for range 100 {
				if _, err := w.Write(zeros); err != nil {
					return
				}
			}
		}, kind.Exhausted},
		"bad gateway": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }, kind.Unavailable},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://203.0.113.1/", http.StatusTemporaryRedirect)
		}, kind.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := hostile(t, tt.handler).Exec(t.Context(), guestclient.Command{Argv: []string{"x"}})
			if err == nil {
				_ = p.Close()
				t.Fatal("it started")
			}
			if got := kind.Of(err); got != tt.want {
				t.Errorf("got %v (%v), want %v", err, got, tt.want)
			}
		})
	}
	t.Run("cut in the middle", func(t *testing.T) {
		p, err := hostile(t, func(w http.ResponseWriter, _ *http.Request) { cut(w, start) }).Exec(t.Context(), guestclient.Command{Argv: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if _, err := p.Next(); kind.Of(err) != kind.Unavailable || errors.Is(err, io.EOF) {
			t.Errorf("a broken stream ended with %v (%v)", err, kind.Of(err))
		}
	})
	t.Run("an end without an end event", func(t *testing.T) {
		p, err := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			proto(w, start)
			_, _ = io.WriteString(w, "\x02\x00\x00\x00\x02{}")
		}).Exec(t.Context(), guestclient.Command{Argv: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if _, err := p.Next(); kind.Of(err) != kind.Unavailable {
			t.Errorf("got %v", err)
		}
	})
}

func TestCloseEndsStreams(t *testing.T) {
	gone := make(chan struct{})
	c := hostile(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		proto(w, start)
		<-r.Context().Done()
		close(gone)
	})
	p, err := c.Exec(t.Context(), guestclient.Command{Argv: []string{"x"}})
	if err != nil || p.PID != 7 {
		t.Fatal(p, err)
	}
	next := make(chan error, 1)
	go func() { _, err := p.Next(); next <- err }()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-next; kind.Of(err) != kind.Unavailable {
		t.Errorf("got %v", err)
	}
	<-gone
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil { // twice is fine
		t.Error(err)
	}
}

func TestHostileAnswers(t *testing.T) {
	endless := func(w http.ResponseWriter, _ *http.Request) {
		text := []byte(strings.Repeat(`{"a":`, 1<<16))
		for {
			if _, err := w.Write(text); err != nil {
				return
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := hostile(t, endless)
	if _, err := c.WriteFile(ctx, "", "x", strings.NewReader("x"), 1); err == nil {
		t.Error("an endless response is accepted")
	}
	for name, answer := range map[string]struct {
		size int
		call func(*guestclient.Client) error
	}{
		"processes": {1<<20 + 1, func(c *guestclient.Client) error { _, err := c.AttachTag(ctx, "x"); return err }},
		"listing":   {8<<20 + 1, func(c *guestclient.Client) error { _, err := c.ListDir(ctx, "", "/", 1); return err }},
	} {
		c = hostile(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
			text := make([]byte, answer.size)
			if name == "processes" {
				binary.BigEndian.PutUint32(text[1:], uint32(answer.size))
			}
			_, _ = w.Write(text) // the client hangs up half way
		})
		if err := answer.call(c); kind.Of(err) != kind.Exhausted {
			t.Errorf("%s larger than their bound: %v", name, err)
		}
	}
	c = hostile(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		endless(w, r)
	})
	if err := c.Health(ctx); kind.Of(err) != kind.Internal || !strings.Contains(err.Error(), "teapot") {
		t.Errorf("got %v", err)
	}
	c = hostile(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(wire.HeaderGeneration, "-1")
		w.WriteHeader(http.StatusNoContent)
	})
	if _, err := c.Init(ctx, wire.InitRequest{AccessToken: "new"}); kind.Of(err) != kind.Internal || c.Token() != "secret" {
		t.Errorf("got %v, token %q", err, c.Token())
	}
	for _, answer := range []string{"[]", "[{},{}]", "{}", "null"} {
		c = hostile(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, answer)
		})
		if _, err := c.WriteFile(ctx, "", "x", strings.NewReader("x"), 1); err == nil {
			t.Errorf("response %s is accepted", answer)
		}
	}
}

func TestStatuses(t *testing.T) {
	for status, want := range map[int]kind.Kind{
		400: kind.Invalid, 401: kind.Unauthentic, 403: kind.Denied, 404: kind.NotFound, 406: kind.Invalid, 409: kind.Conflict, 416: kind.Invalid,
		429: kind.Exhausted, 500: kind.Internal, 502: kind.Unavailable, 503: kind.Unavailable, 507: kind.Exhausted, 200: kind.Internal,
	} {
		c := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(wire.HeaderReason, "some_reason")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, `{"code":1,"message":"told why"}`)
		})
		err := c.Health(t.Context())
		if kind.Of(err) != want || wire.ReasonOf(err) != "some_reason" || !strings.Contains(err.Error(), "health: told why") {
			t.Errorf("%d: got %v (%v)", status, err, kind.Of(err))
		}
	}
}

func TestDialFails(t *testing.T) {
	c := guestclient.New(guestclient.Config{Dial: func(context.Context) (net.Conn, error) {
		return nil, kind.Errorf(kind.NotFound, "no such sandbox")
	}})
	defer c.Close()
	if err := c.Health(t.Context()); kind.Of(err) != kind.NotFound || !strings.Contains(err.Error(), "no such sandbox") {
		t.Errorf("got %v", err)
	}
	if _, err := c.Exec(t.Context(), guestclient.Command{Argv: []string{"x"}}); kind.Of(err) != kind.NotFound || !strings.Contains(err.Error(), "no such sandbox") {
		t.Errorf("got %v", err)
	}
	if _, err := c.Exec(t.Context(), guestclient.Command{}); kind.Of(err) != kind.Invalid || kind.Field(err) != "argv" {
		t.Errorf("got %v", err)
	}
}
