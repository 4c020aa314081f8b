package api_test

import (
	"bufio"
	"bytes"
	"io"
	"mime"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/api/apitest"
	"bivy/internal/kind"
)

func TestEdge(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	at := "/v1/sessions/" + sess.ID
	const j = "application/json"
	for _, tc := range []struct {
		name, method, path, typ, body string
		header                        []string
		status                        int
		code, field                   string
	}{
		{"no such path", "GET", "/v2", "", "", nil, 404, "not_found", ""},
		{"no such method", "PUT", "/v1/sessions", "", "", nil, 405, "invalid", ""},
		{"HEAD is not GET", "HEAD", at + "/commands/x", "", "", nil, 405, "", ""},
		{"unknown parameter", "GET", "/v1/sessions?sort=asc", "", "", nil, 400, "invalid", "sort"},
		{"parameter twice", "GET", "/v1/sessions?limit=1&limit=2", "", "", nil, 400, "invalid", "limit"},
		{"limit", "GET", "/v1/sessions?limit=0", "", "", nil, 400, "invalid", "limit"},
		{"limit not a number", "GET", "/v1/sessions?limit=x", "", "", nil, 400, "invalid", "limit"},
		{"state", "GET", "/v1/sessions?state=asleep", "", "", nil, 400, "invalid", "state"},
		{"label", "GET", "/v1/sessions?label=x", "", "", nil, 400, "invalid", "label"},
		{"cursor", "GET", "/v1/sessions?cursor=x", "", "", nil, 400, "invalid", "cursor"},
		{"escape", "GET", "/v1/sessions?cursor=%zz", "", "", nil, 400, "invalid", ""},
		{"session id", "GET", "/v1/sessions/..", "", "", nil, 404, "not_found", ""},
		{"session id form", "GET", "/v1/sessions/x", "", "", nil, 400, "invalid", "session"},
		{"no content type", "POST", "/v1/sessions", "", "{}", nil, 400, "invalid", "Content-Type"},
		{"content type", "POST", "/v1/sessions", "text/plain", "{}", nil, 400, "invalid", "Content-Type"},
		{"charset", "POST", "/v1/sessions", j + "; charset=latin1", "{}", nil, 400, "invalid", "Content-Type"},
		{"accept", "POST", "/v1/sessions", j, "{}", []string{"Accept", "text/html"}, 400, "invalid", "Accept"},
		{"field", "POST", "/v1/sessions", j, `{"memory":1}`, nil, 400, "invalid", "memory"},
		{"spec", "POST", "/v1/sessions", j, `{"resources":{"memory_mib":1}}`, nil, 400, "invalid", "resources.memory_mib"},
		{"version", "POST", "/v1/sessions", j, `{"version":9}`, nil, 400, "invalid", "version"},
		{"trigger", "POST", "/v1/sessions", j, `{"trigger":"` + strings.Repeat("x", 257) + `"}`, nil, 400, "invalid", "trigger"},
		{"a fault", "POST", "/v1/sessions", j, `{"template":"broken"}`, nil, 500, "internal", ""},
		{"a panic", "POST", "/v1/sessions", j, `{"template":"panic"}`, nil, 500, "internal", ""},
		{"large labels", "POST", "/v1/sessions", j, `{"labels":{"a":"` + strings.Repeat("x", 2<<20) + `"}}`, nil, 400, "invalid", "labels"},
		{"idempotency where none is", "POST", at + "/timeout", j, `{"timeout_seconds":1}`, []string{"Idempotency-Key", "x"}, 400, "invalid", "Idempotency-Key"},
		{"idempotency too long", "POST", "/v1/sessions", j, `{}`, []string{"Idempotency-Key", strings.Repeat("x", 256)}, 400, "invalid", "Idempotency-Key"},
		{"timeout", "POST", at + "/timeout", j, `{"timeout_seconds":0}`, nil, 400, "invalid", "timeout_seconds"},
		{"signal", "POST", at + "/commands/x/signal", j, `{"signal":65}`, nil, 400, "invalid", "signal"},
		{"no such command", "POST", at + "/commands/x/signal", j, `{"signal":15}`, nil, 404, "not_found", ""},
		{"no such command to describe", "GET", at + "/commands/x", "", "", []string{"Accept", j}, 404, "not_found", ""},
		{"first frame", "POST", at + "/commands", client.StreamType, "\x11\x00\x00\x00\x00", nil, 400, "invalid", ""},
		{"no frame", "POST", at + "/commands", client.StreamType, "", nil, 400, "invalid", ""},
		{"half a frame", "POST", at + "/commands", client.StreamType, "\x10\x00\x00\x00\x09{}", nil, 400, "invalid", ""},
		{"no path", "GET", at + "/files", "", "", nil, 400, "invalid", "path"},
		{"NUL in a path", "GET", at + "/files?path=%00", "", "", nil, 400, "invalid", "path"},
		{"long path", "GET", at + "/stat?path=" + strings.Repeat("x", 4096), "", "", nil, 400, "invalid", "path"},
		{"depth", "GET", at + "/dir?path=/&depth=65", "", "", nil, 400, "invalid", "depth"},
		{"upload type", "PUT", at + "/files?path=/x", j, "{}", nil, 400, "invalid", "Content-Type"},
		{"body where none is", "DELETE", at + "/files?path=/x", j, "{}", nil, 400, "invalid", ""},
		{"follow", "GET", at + "/events?follow=yes", "", "", nil, 400, "invalid", "follow"},
		{"template name", "GET", "/v1/templates/No/Such/..", "", "", nil, 400, "invalid", "name"},
		{"no such template", "GET", "/v1/templates/no/such", "", "", nil, 404, "not_found", ""},
		{"a lost key that is not lost", "POST", "/v1/audit/key/rotate", j, `{"lost":true}`, nil, 409, "conflict", "lost"},
		{"template source", "POST", "/v1/templates", j, `{"version":1,"from":{}}`, nil, 400, "invalid", "from"},
		{"role", "POST", "/v1/keys", j, `{"role":"god"}`, nil, 400, "invalid", "role"},
		{"no such key", "DELETE", "/v1/keys/zz", "", "", nil, 404, "not_found", "key"},
		{"another host", "GET", "/v1/health", "", "", []string{"Host", "evil.example"}, 403, "denied", ""},
		{"another host with a port", "GET", "/v1/health", "", "", []string{"Host", "evil.example:7171"}, 403, "denied", ""},
		{"loopback by number", "GET", "/v1/health", "", "", []string{"Host", "[::1]:99"}, 200, "", ""},
		{"loopback by name", "GET", "/v1/health", "", "", []string{"Host", "LocalHost"}, 200, "", ""},
		{"no key", "GET", "/v1/version", "", "", []string{"Authorization", ""}, 401, "unauthenticated", ""},
		{"wrong key", "GET", "/v1/version", "", "", []string{"Authorization", "Bearer e2b_0000000000000000000000000000000000000000"}, 401, "unauthenticated", ""},
		{"key in its own header", "GET", "/v1/version", "", "", []string{"Authorization", "", "X-API-Key", apitest.AuditorSecret}, 200, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.method == "HEAD" {
				resp, err := s.ts.Client().Head(s.url + tc.path)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if resp.StatusCode != tc.status {
					t.Errorf("status %d, want %d", resp.StatusCode, tc.status)
				}
				return
			}
			status, e, h := s.raw(t, tc.method, tc.path, tc.typ, tc.body, tc.header...)
			if status != tc.status || e.Code != tc.code || !strings.HasPrefix(e.Field, tc.field) || (tc.field == "") != (e.Field == "") {
				t.Errorf("status %d, code %q, field %q (%s); want %d, %q, %q", status, e.Code, e.Field, e.Message, tc.status, tc.code, tc.field)
			}
			if strings.Contains(e.Message+e.Hint, "secret detail") {
				t.Errorf("what is inside came out: %s %s", e.Message, e.Hint)
			}
			if status == 401 && h.Get("WWW-Authenticate") == "" {
				t.Error("401 without WWW-Authenticate")
			}
		})
	}
}

func TestListen(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", ":0", "[::]:0", "nonsense", "127.0.0.1"} {
		if l, err := api.Listen(t.Context(), address, nil, false); !kind.Is(err, kind.Invalid) || kind.Field(err) != "listen" || kind.Hint(err) == "" {
			t.Errorf("%s: %v, %v", address, l, err)
		}
	}
	l, err := api.Listen(t.Context(), "localhost:0", nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l2, err := api.Listen(t.Context(), l.Addr().String(), nil, false); !kind.Is(err, kind.Unavailable) || kind.Hint(err) == "" {
		t.Errorf("a port in use: %v, %v", l2, err)
	}
}

// TestRudeStream speaks the stream's protocol wrongly, after its beginning.
func TestRudeStream(t *testing.T) {
	s := serve(t)
	sess := s.session(t)
	for name, rest := range map[string][]byte{
		"unknown frame": client.AppendFrame(nil, 99, nil),
		"long frame":    {17, 0xff, 0xff, 0xff, 0xff},
		"bad resize":    client.AppendFrame(nil, client.FrameResize, []byte(`{"cols":"x"}`)),
		"bad signal":    client.AppendFrame(nil, client.FrameSignal, []byte(`{"signal":0}`)),
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			first, err := client.AppendFrameJSON(nil, client.FrameCommand, client.Command{Argv: []string{"sleep", "102"}, Stdin: true, OnDisconnect: client.Kill})
			if err != nil {
				t.Fatal(err)
			}
			body := append(first, rest...)
			req := "POST /v1/sessions/" + sess.ID + "/commands HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + apitest.AdminSecret +
				"\r\nContent-Type: " + client.StreamType + "\r\nAccept: " + client.StreamType + "\r\nContent-Length: 1000000\r\n\r\n"
			if _, err := conn.Write(append([]byte(req), body...)); err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(conn)
			if bytes.HasSuffix(b, []byte("0\r\n\r\n")) {
				t.Errorf("the stream ended as if all were well: %q, %v", b, err)
			}
			if !bytes.Contains(b, []byte(`{"code":"invalid"`)) {
				t.Errorf("the caller was not told what was wrong: %q, %v", b, err)
			}
		})
	}
}

// TestSilentUpload: a caller that promised more than it sends is told when its
// upload is refused, and is let go of.
func TestSilentUpload(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sess := s.session(t)
	if _, err := sess.WriteFile(t.Context(), "/tmp/file", strings.NewReader("x"), client.FileOptions{}); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ path, length, body, want string }{
		"refused":   {"/tmp/file/x", "Content-Length: 1000000", "abc", `"field":"path"`},
		"bad chunk": {"/tmp/x", "Transfer-Encoding: chunked", "zz\r\nabc", "reading the body"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
				t.Fatal(err)
			}
			req := "PUT /v1/sessions/" + sess.ID + "/files?path=" + c.path + " HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + apitest.AdminSecret +
				"\r\nContent-Type: application/octet-stream\r\n" + c.length + "\r\n\r\n" + c.body
			if _, err := conn.Write([]byte(req)); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(conn); err != nil || !bytes.Contains(b, []byte(c.want)) {
				t.Errorf("answered %q, %v; want %s and a closed connection", b, err, c.want)
			}
		})
	}
}

// TestRefusedBeforeTheBody: a caller that waits for the answer before it sends
// its stream is told no at once, whatever the reason.
func TestRefusedBeforeTheBody(t *testing.T) {
	s := serve(t)
	for name, c := range map[string]struct{ path, key, want string }{
		"no such session": {"/v1/sessions/aaaaaaaaaaaaaaaaaaaa/commands", apitest.AdminSecret, "404"},
		"no such path":    {"/v1/nothing", apitest.AdminSecret, "404"},
		"unknown caller":  {"/v1/sessions/aaaaaaaaaaaaaaaaaaaa/commands", "nobody", "401"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(4 * time.Second)); err != nil {
				t.Fatal(err)
			}
			req := "POST " + c.path + " HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + c.key +
				"\r\nContent-Type: " + client.StreamType + "\r\nAccept: " + client.StreamType + "\r\nTransfer-Encoding: chunked\r\n\r\n"
			if _, err := conn.Write([]byte(req)); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(conn).ReadString('\n')
			if err != nil || !strings.Contains(line, c.want) {
				t.Errorf("answered %q, %v; want %s", line, err, c.want)
			}
		})
	}
}

// checked holds every JSON answer of a test against the document.
type checked struct {
	http.RoundTripper
	t        *testing.T
	validate func(method, path string, status int, mediaType string, body []byte) error
}

func (c checked) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	typ, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	check := func(b []byte) {
		if err := c.validate(req.Method, req.URL.Path, resp.StatusCode, typ, b); err != nil {
			c.t.Errorf("%s %s: %v: %.300s", req.Method, req.URL.Path, err, b)
		}
	}
	switch {
	case typ == "application/json":
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return nil, err
		}
		resp.Body.Close()
		check(b)
		resp.Body = io.NopCloser(bytes.NewReader(b))
	case typ == client.NDJSONType && !strings.HasSuffix(req.URL.Path, "/record") && req.URL.Path != "/v1/audit/system":
		pr, pw := io.Pipe()
		body := resp.Body
		go func() {
			lines := bufio.NewScanner(io.TeeReader(body, pw))
			lines.Buffer(nil, 4<<20)
			for lines.Scan() {
				check(lines.Bytes())
			}
			pw.CloseWithError(lines.Err())
		}()
		resp.Body = struct {
			io.Reader
			io.Closer
		}{pr, closers{body, pr}}
	}
	return resp, nil
}

type closers []io.Closer

func (c closers) Close() error {
	for _, x := range c {
		x.Close()
	}
	return nil
}
