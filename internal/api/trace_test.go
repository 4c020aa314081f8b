package api_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/api/apitest"
	"bivy/internal/trace"
)

// lockedBuffer is a log that requests of several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSpace(l.b.String()), "\n")
}

// TestTrace: every answer and every line of the log about a request have the
// trace that the caller named, or a new one when it named none or named it
// wrongly; so have the events that the request causes.
func TestTrace(t *testing.T) {
	var log lockedBuffer
	s := serve(t, func(o *api.Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	sess := s.session(t)
	const theirs = "4bf92f3577b34da6a3ce929d0e0e4736"
	const good = "00-" + theirs + "-00f067aa0ba902b7-01"
	at := "/v1/sessions/" + sess.ID
	for _, tc := range []struct {
		name, method, path, typ, body, send string
		kept                                bool
	}{
		{"an answer", "GET", "/v1/version", "", "", good, true},
		{"none", "GET", "/v1/version", "", "", "", false},
		{"malformed", "GET", "/v1/version", "", "", "00-" + theirs + "-00f067aa0ba902b7", false},
		{"all zero", "GET", "/v1/version", "", "", "00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01", false},
		{"a later version", "GET", "/v1/version", "", "", "01-" + theirs + "-00f067aa0ba902b7-01-more", true},
		{"a public route", "GET", "/v1/health", "", "", good, true},
		{"an error", "POST", at + "/timeout", "application/json", "{}", good, true},
		{"a fault", "POST", "/v1/sessions", "application/json", `{"template":"broken"}`, good, true},
		{"a panic", "POST", "/v1/sessions", "application/json", `{"template":"panic"}`, good, true},
		{"no such path", "GET", "/v2", "", "", good, true},
		{"no such method", "PUT", "/v1/sessions", "", "", good, true},
		{"a stream", "POST", at + "/commands", "application/json", `{"argv":["true"]}`, good, true},
		{"a record", "GET", at + "/record", "", "", good, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := len(log.lines())
			var header []string
			if tc.send != "" {
				header = []string{"traceparent", tc.send}
			}
			_, _, h := s.raw(t, tc.method, tc.path, tc.typ, tc.body, header...)
			id, ok := trace.Parse(h.Get("traceparent"))
			if !ok || (id == theirs) != tc.kept {
				t.Errorf("sent %q, answered %q", tc.send, h.Get("traceparent"))
			}
			if h.Get("traceparent") == tc.send {
				t.Error("the answer names the caller's own span as its parent")
			}
			lines := log.lines()[before:]
			if len(lines) == 0 {
				t.Error("the request is not in the log")
			}
			for _, line := range lines {
				if !strings.Contains(line, "trace="+string(id)) {
					t.Errorf("a line about the request without its trace: %s", line)
				}
			}
		})
	}
	seen := false
	ctx := client.WithTraceparent(t.Context(), good)
	for ev, err := range sess.Events(ctx, 0) {
		if err != nil {
			t.Fatal(err)
		}
		seen = seen || ev.Action == "command.intent" && ev.Trace == theirs
	}
	if !seen {
		t.Error("no event has the trace of the request that started a command")
	}
}

// TestTwoTraceHeaders: two headers name no trace.
func TestTwoTraceHeaders(t *testing.T) {
	h, err := backend(t, nil).Handler()
	if err != nil {
		t.Fatal(err)
	}
	req := httptest.NewRequest(http.MethodGet, "http://localhost/v1/version", nil)
	req.Header.Set("X-API-Key", apitest.AdminSecret)
	for _, id := range []string{"4bf92f3577b34da6a3ce929d0e0e4736", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		req.Header.Add("Traceparent", "00-"+id+"-00f067aa0ba902b7-01")
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	if id, ok := trace.Parse(w.Header().Get("Traceparent")); !ok || strings.HasPrefix(string(id), "4bf9") || strings.HasPrefix(string(id), "aaaa") {
		t.Errorf("two headers are answered with %q, want a new trace", w.Header().Get("Traceparent"))
	}
}
