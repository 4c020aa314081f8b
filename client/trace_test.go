package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

const (
	testTrace       = "4bf92f3577b34da6a3ce929d0e0e4736"
	testTraceparent = "00-" + testTrace + "-00f067aa0ba902b7-01"
)

// serve starts a server of one handler and returns a client of it.
func serve(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	c, err := New(Options{URL: s.URL, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestTraceparentIsSent(t *testing.T) {
	var got string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Traceparent")
		io.WriteString(w, "{}")
	})
	for _, tt := range []struct {
		name string
		ctx  context.Context
		want string
	}{
		{"none", t.Context(), ""},
		{"one", WithTraceparent(t.Context(), testTraceparent), testTraceparent},
		{"later version with more fields", WithTraceparent(t.Context(), "01-"+testTrace+"-00f067aa0ba902b7-01-x"), "01-" + testTrace + "-00f067aa0ba902b7-01-x"},
		{"empty", WithTraceparent(t.Context(), ""), ""},
		{"not a traceparent", WithTraceparent(t.Context(), "trace 1"), ""},
		{"line break", WithTraceparent(t.Context(), testTraceparent+"\r\nX-Other: 1"), ""},
		{"upper case", WithTraceparent(t.Context(), strings.ToUpper(testTraceparent)), ""},
		{"zero trace", WithTraceparent(t.Context(), "00-"+strings.Repeat("0", 32)+"-00f067aa0ba902b7-01"), ""},
		{"version ff", WithTraceparent(t.Context(), "ff-"+testTrace+"-00f067aa0ba902b7-01"), ""},
	} {
		if _, err := c.Version(tt.ctx); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if got != tt.want {
			t.Errorf("%s: sent %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestErrorsNameTheTrace checks errors in the status, in lines and in frames.
func TestErrorsNameTheTrace(t *testing.T) {
	const body = `{"code":"internal","message":"internal error"}`
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Traceparent", testTraceparent)
		switch r.URL.Path {
		case "/v1/templates":
			io.WriteString(w, `{"error":`+body+"}\n")
		case "/v1/sessions/s/commands":
			w.Header().Set("Content-Type", StreamType)
			w.Write(AppendFrame(nil, FrameError, []byte(body)))
		default:
			w.WriteHeader(http.StatusInternalServerError)
			io.WriteString(w, body)
		}
	})
	_, statusErr := c.Version(t.Context())
	_, lineErr := c.BuildTemplate(t.Context(), BuildTemplate{}, nil)
	_, frameErr := c.Session("s").Start(t.Context(), Command{Argv: []string{"x"}})
	for name, err := range map[string]error{"status": statusErr, "line": lineErr, "frame": frameErr} {
		var e *Error
		if !errors.As(err, &e) || e.TraceID != testTrace || !strings.HasSuffix(err.Error(), "(trace "+testTrace+")") {
			t.Errorf("%s: %v, trace %+v", name, err, e)
		}
	}
	// What the caller can mend does not need the server's log.
	e := &Error{Code: CodeInvalid, Message: "wrong", TraceID: testTrace}
	if e.Error() != "wrong" {
		t.Errorf("%q", e.Error())
	}
}

func TestAuditRoutes(t *testing.T) {
	var asked []string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		asked = append(asked, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(body)))
		switch r.URL.Path {
		case "/v1/audit/head":
			io.WriteString(w, `{"payloadType":"x","payload":"e30="}`)
		case "/v1/audit/key", "/v1/audit/key/rotate":
			io.WriteString(w, `{"algorithm":"ed25519","fingerprint":"new","former":[{"fingerprint":"old","lost":true}]}`)
		case "/v1/audit/listing":
			io.WriteString(w, `{"record":"session/a","seq":4,"hash":"ab","sealed":true}`+"\n"+`{"record":"system/n/1","seq":2,"hash":"cd","sealed":false}`+"\n")
		default:
			io.WriteString(w, "a line\n")
		}
	})
	read := func(r io.ReadCloser, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := read(c.SystemRecord(t.Context())); got != "a line\n" {
		t.Errorf("system record %q", got)
	}
	var listed []string
	for r, err := range c.RecordListing(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		listed = append(listed, fmt.Sprintf("%s %d %s %t", r.Record, r.Seq, r.Hash, r.Sealed))
	}
	if got := strings.Join(listed, ", "); got != "session/a 4 ab true, system/n/1 2 cd false" {
		t.Errorf("listing %q", got)
	}
	for range c.RecordListing(t.Context()) {
		break // the rest of the answer is not read
	}
	if head, err := c.AuditHead(t.Context()); err != nil || string(head) != `{"payloadType":"x","payload":"e30="}` {
		t.Errorf("head %s, %v", head, err)
	}
	if k, err := c.AuditKey(t.Context()); err != nil || k.Fingerprint != "new" || len(k.Former) != 1 || !k.Former[0].Lost {
		t.Errorf("key %+v, %v", k, err)
	}
	if k, err := c.RotateAuditKey(t.Context(), RotateAuditKey{Lost: true}); err != nil || k.Fingerprint != "new" {
		t.Errorf("rotated key %+v, %v", k, err)
	}
	want := "GET /v1/audit/system, GET /v1/audit/listing, GET /v1/audit/listing, GET /v1/audit/head, GET /v1/audit/key, POST /v1/audit/key/rotate {\"lost\":true}"
	if got := strings.Join(asked, ", "); got != want {
		t.Errorf("asked for\n%s, want\n%s", got, want)
	}
}

// TestListingThatIsCut ends with an error: what is listed until then is not all.
func TestListingThatIsCut(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"record":"session/a","seq":4,"hash":"ab","sealed":true}`+"\n"+`{"record":"sess`)
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	var n int
	var last error
	for _, err := range c.RecordListing(t.Context()) {
		n, last = n+1, err
	}
	if n != 2 || last == nil {
		t.Errorf("%d items, the last with error %v", n, last)
	}
}
