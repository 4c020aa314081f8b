package client

import (
	"context"
	"net/http"
	"strings"
)

// TraceparentHeader is the header of the W3C recommendation "Trace Context" in
// requests and in every answer.
const TraceparentHeader = "Traceparent"

type traceKey struct{}

// WithTraceparent returns a context whose requests carry the traceparent, e.g.
// "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", so that they belong
// to the caller's trace. Without it, or when it is not a traceparent, the server
// starts a new trace for each request.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return context.WithValue(ctx, traceKey{}, traceparent)
}

// setTrace adds the header that the context of a request carries.
func setTrace(req *http.Request) {
	if v, ok := req.Context().Value(traceKey{}).(string); ok && traceID(v) != "" {
		req.Header.Set(TraceparentHeader, v)
	}
}

// traced adds the trace id of an answer to an error that was reported in it.
func traced(err error, resp *http.Response) error {
	if e, ok := err.(*Error); ok { //nolint:errorlint // it was decoded from the answer and nothing wraps it
		e.TraceID = traceID(resp.Header.Get(TraceparentHeader))
	}
	return err
}

// traceID returns the trace id of a traceparent, or "" when it is malformed.
func traceID(traceparent string) string {
	part := strings.Split(traceparent, "-")
	if len(part) < 4 || len(part[0]) != 2 || part[0] == "ff" || part[0] == "00" && len(part) != 4 ||
		len(part[1]) != 32 || len(part[2]) != 16 || len(part[3]) != 2 {
		return ""
	}
	for _, p := range part[:4] {
		if strings.Trim(p, "0123456789abcdef") != "" {
			return ""
		}
	}
	if strings.Trim(part[1], "0") == "" || strings.Trim(part[2], "0") == "" {
		return ""
	}
	return part[1]
}
