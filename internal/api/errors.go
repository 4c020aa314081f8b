package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"bivy/client"
	"bivy/internal/clip"
	"bivy/internal/kind"
	"bivy/internal/workload"
)

// statusOf is the one place where kinds become statuses.
func statusOf(k kind.Kind) int {
	switch k {
	case kind.Invalid:
		return http.StatusBadRequest
	case kind.NotFound:
		return http.StatusNotFound
	case kind.Conflict:
		return http.StatusConflict
	case kind.Denied:
		return http.StatusForbidden
	case kind.Unauthentic:
		return http.StatusUnauthorized
	case kind.Exhausted:
		return http.StatusTooManyRequests
	case kind.Unavailable:
		return http.StatusServiceUnavailable
	case kind.Internal:
		return http.StatusInternalServerError
	}
	return http.StatusInternalServerError
}

// statusClientGone is what the log shows for a caller that did not wait.
const statusClientGone = 499

const maxErrorText = 4 << 10

// wireError maps an error to the one that callers get. The text of an error
// without a kind is not shown.
func wireError(err error, request string) client.Error {
	k := kind.Of(err)
	e := client.Error{Code: k.String(), Hint: clip.Text(kind.Hint(err), maxErrorText), RequestID: request,
		Field: clip.Text(kind.Field(err), 256), ExitCode: workload.ExitCodeOf(err)}
	if k == kind.Internal {
		e.Message, e.Field = "internal error", ""
		if e.Hint != "" {
			e.Hint += "; "
		}
		e.Hint += "the server's log has the cause, under request id " + request
		return e
	}
	// The field has its own place; the text is not to begin with it again.
	e.Message = clip.Text(strings.TrimPrefix(err.Error(), kind.Field(err)+": "), maxErrorText)
	return e
}

// fail answers with an error, or cuts an answer that has begun.
func (h *Handler) fail(w *response, req *http.Request, err error) {
	if errors.Is(err, context.Canceled) && req.Context().Err() != nil {
		if w.status == 0 {
			w.status = statusClientGone
		}
		panic(http.ErrAbortHandler)
	}
	h.logInternal(w, req, err)
	if w.status != 0 {
		panic(http.ErrAbortHandler)
	}
	stopReading(w, req)
	w.Header().Del(dispositionHeader)
	e := wireError(err, w.request)
	k := kind.Of(err)
	if k == kind.Unavailable {
		w.Header().Set("Retry-After", "1")
	}
	h.failStatus(w, statusOf(k), e)
}

// stopReading lets a refusal out although its request's body may never end:
// the HTTP server reads on before it answers, for ever where it is let, and a
// caller whose body is a stream sends nothing before it has heard.
func stopReading(w *response, req *http.Request) {
	if req.ContentLength == 0 {
		return
	}
	// Neither is possible on every kind of connection, and where not there is
	// nothing to wait for.
	ctl := http.NewResponseController(w)
	if t, _, err := mime.ParseMediaType(req.Header.Get("Content-Type")); err == nil && t == client.StreamType {
		_ = ctl.EnableFullDuplex()
	}
	_ = ctl.SetReadDeadline(time.Now().Add(lingerTime))
}

// logInternal logs errors whose text callers do not get.
func (h *Handler) logInternal(w *response, req *http.Request, err error) {
	if kind.Of(err) == kind.Internal {
		h.logOf(w).Error("request failed", "method", req.Method, "path", req.URL.Path, "error", err)
	}
}

func (h *Handler) failStatus(w *response, status int, e client.Error) {
	e.RequestID = w.request
	h.write(w, status, e)
}

func (h *Handler) write(w *response, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // wire types always encode
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(append(b, '\n')); err != nil {
		h.logOf(w).Debug("answer not delivered", "error", err)
	}
}

// reply answers with JSON.
func (c *call) reply(status int, v any) error {
	c.h.write(c.w, status, v)
	return nil
}

// nothing answers that all is well.
func (c *call) nothing() error {
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// drain reads on for a while, because a caller that is still sending does not
// listen. One that has fallen silent is not waited for.
func (c *call) drain() {
	_ = c.ctl.SetReadDeadline(time.Now().Add(lingerTime))
	io.Copy(io.Discard, io.LimitReader(c.req.Body, maxDrained)) //nolint:errcheck // the request is refused either way
}
