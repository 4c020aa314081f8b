package api

import (
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"bivy/client"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// decode reads the request's JSON body into v.
func (c *call) decode(v any) error {
	if err := c.wantType("application/json"); err != nil {
		return err
	}
	// A body must not arrive for ever; a deadline that cannot be set (a test's
	// recorder) is no reason to refuse.
	_ = c.ctl.SetReadDeadline(time.Now().Add(bodyTimeout))
	data, err := io.ReadAll(io.LimitReader(c.req.Body, maxBody+1))
	if err != nil {
		return kind.Errorf(kind.Invalid, "reading the body: %w", err)
	}
	cut := len(data) > maxBody
	if cut {
		data = data[:maxBody]
		c.drain()
	}
	_ = c.ctl.SetReadDeadline(time.Time{})
	return decodeStrict(data, cut, v)
}

func (c *call) wantType(want string) error {
	got, params, err := mime.ParseMediaType(c.req.Header.Get("Content-Type"))
	charset := params["charset"]
	if err != nil || got != want || (charset != "" && !strings.EqualFold(charset, "utf-8")) {
		return kind.Errorf(kind.Invalid, "%.100q; want %s", c.req.Header.Get("Content-Type"), want).WithField("Content-Type")
	}
	return nil
}

// noBody refuses a body where none belongs, rather than ignoring it.
func (c *call) noBody() error {
	var b [1]byte
	_ = c.ctl.SetReadDeadline(time.Now().Add(bodyTimeout))
	if n, err := c.req.Body.Read(b[:]); n > 0 || (err != nil && err != io.EOF) { //nolint:errorlint // Read's contract
		return kind.Errorf(kind.Invalid, "this request takes no body")
	}
	_ = c.ctl.SetReadDeadline(time.Time{})
	return nil
}

// accepts picks the first of offers, in the caller's order of preference,
// that the Accept header names; offers[0] when it names none or anything.
func (c *call) accepts(offers ...string) (string, error) {
	return negotiate(strings.Join(c.req.Header.Values("Accept"), ","), offers)
}

func negotiate(header string, offers []string) (string, error) {
	if strings.TrimSpace(header) == "" {
		return offers[0], nil
	}
	best, bestQ := "", 0.0
	for part := range strings.SplitSeq(header, ",") {
		typ, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		q := 1.0
		if s, ok := params["q"]; ok {
			if q, err = strconv.ParseFloat(s, 64); err != nil {
				continue
			}
		}
		for _, offer := range offers {
			prefix, _, _ := strings.Cut(offer, "/")
			if (typ == offer || typ == "*/*" || typ == prefix+"/*") && q > bestQ {
				best, bestQ = offer, q
				break
			}
		}
	}
	if best == "" {
		return "", kind.Errorf(kind.Invalid, "%.100q; there is %s", header, strings.Join(offers, ", ")).WithField("Accept")
	}
	return best, nil
}

// parseQuery reads a query strictly.
func parseQuery(raw string) (url.Values, error) {
	q, err := url.ParseQuery(raw)
	if err != nil {
		return nil, kind.Errorf(kind.Invalid, "query: %w", err)
	}
	return q, nil
}

func (c *call) param(name string) string { return c.req.URL.Query().Get(name) }

// number reads a parameter that is a whole number of lo to hi, or absent.
func (c *call) number(name string, absent, lo, hi int64) (int64, error) {
	s := c.param(name)
	if s == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < lo || n > hi {
		return 0, kind.Errorf(kind.Invalid, "%.40q; want a whole number from %d to %d", s, lo, hi).WithField(name)
	}
	return n, nil
}

func (c *call) boolean(name string) (bool, error) {
	switch s := c.param(name); s {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, kind.Errorf(kind.Invalid, "%.40q; want true or false", s).WithField(name)
	}
}

// filePath reads the parameter that names a file: any bytes but NUL.
func (c *call) filePath(name string) (string, error) {
	p := c.param(name)
	switch {
	case p == "":
		return "", kind.Errorf(kind.Invalid, "missing").WithField(name).WithHint("name a file, e.g. ?%s=/home/user/notes.txt", name)
	case strings.ContainsRune(p, 0):
		return "", kind.Errorf(kind.Invalid, "a path has no NUL").WithField(name)
	case len(p) > session.MaxPathLength:
		return "", kind.Errorf(kind.Invalid, "%d bytes, at most %d", len(p), session.MaxPathLength).WithField(name)
	}
	return p, nil
}

// page answers with a list that is complete.
func page[T any](c *call, items []T) error {
	if items == nil {
		items = []T{}
	}
	return c.reply(http.StatusOK, client.Page[T]{Items: items, Complete: true})
}
