package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Options configure a Client.
type Options struct {
	URL        string       // of the server, e.g. http://127.0.0.1:7171
	Key        string       // API key; only Health works without one
	HTTPClient *http.Client // nil: a new one, without a total timeout
	UserAgent  string       // empty: "bivy-go"
}

// Client makes requests to one server. It is safe for concurrent use.
type Client struct {
	base  *url.URL
	key   string
	http  *http.Client
	agent string
}

// New returns a client. It checks the options and makes no connection.
func New(o Options) (*Client, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, fmt.Errorf("server address %q: %w", o.URL, err)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("server address %q: want http://HOST:PORT or https://HOST", o.URL)
	}
	if strings.ContainsAny(o.Key, "\r\n\x00") {
		return nil, errors.New("the API key contains a line break")
	}
	c := &Client{base: u, key: o.Key, http: o.HTTPClient, agent: o.UserAgent}
	if c.http == nil {
		c.http = &http.Client{Transport: newTransport()}
	}
	if c.agent == "" {
		c.agent = "bivy-go"
	}
	return c, nil
}

// newTransport returns a transport for streams: without compression, with
// buffers of the size of a pipe, and without a limit on how long an answer takes.
func newTransport() *http.Transport {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		ForceAttemptHTTP2:   true,
		DisableCompression:  true,
		MaxIdleConns:        64,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     90 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
		ReadBufferSize:      64 << 10,
		WriteBufferSize:     64 << 10,
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// call describes one request.
type call struct {
	method string
	path   string // escaped where needed
	query  url.Values
	body   io.Reader
	typ    string // media type of body
	accept string // media type of the answer
	key    string // idempotency key
}

// send makes the request and returns an answer with status 2xx, whose body the
// caller closes. Any other answer becomes an *Error.
func (c *Client) send(ctx context.Context, r call) (*http.Response, error) {
	u := *c.base
	escaped := strings.TrimSuffix(u.EscapedPath(), "/") + r.path
	plain, err := url.PathUnescape(escaped)
	if err != nil {
		return nil, err
	}
	u.Path, u.RawPath, u.RawQuery = plain, escaped, r.query.Encode()
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), r.body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", c.agent)
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	if r.typ != "" {
		req.Header.Set("Content-Type", r.typ)
	}
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	if r.key != "" {
		// The transport retries a request with this header by itself when an
		// idle connection turns out to be closed.
		req.Header.Set("Idempotency-Key", r.key)
	}
	setTrace(req)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// readError returns the error that an answer reports.
func readError(resp *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("answer %s: %w", resp.Status, err)
	}
	e := &Error{}
	if json.Unmarshal(body, e) != nil || e.Code == "" {
		e = unexpected(resp.StatusCode, fmt.Sprintf("%s, %.200q", resp.Status, body))
	}
	e.Status, e.TraceID = resp.StatusCode, traceID(resp.Header.Get(TraceparentHeader))
	return e
}

// json makes a request with in as its JSON body, if not nil, and decodes the
// answer into out, if not nil.
func (c *Client) json(ctx context.Context, method, path string, query url.Values, in, out any, key string) error {
	r := call{method: method, path: path, query: query, accept: "application/json", key: key}
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		r.body, r.typ = bytes.NewReader(b), "application/json"
	}
	resp, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	return readJSON(resp, out)
}

func readJSON(resp *http.Response, out any) error {
	defer resp.Body.Close()
	if out == nil {
		_, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
		return err
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return unexpected(resp.StatusCode, err.Error())
	}
	// A connection is only reused after its answer was read to the end.
	_, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 4<<10))
	return err
}

// NewIdempotencyKey returns a random key. A create that is repeated with the
// same key returns the session of the first one.
func NewIdempotencyKey() string { return rand.Text() }

// Health returns whether the server accepts work. It needs no key.
func (c *Client) Health(ctx context.Context) (Health, error) {
	var h Health
	return h, c.json(ctx, "GET", "/v1/health", nil, nil, &h, "")
}

// Version returns the server's version.
func (c *Client) Version(ctx context.Context) (Version, error) {
	var v Version
	return v, c.json(ctx, "GET", "/v1/version", nil, nil, &v, "")
}

// Node returns what the server found on its machine.
func (c *Client) Node(ctx context.Context) (Node, error) {
	var n Node
	return n, c.json(ctx, "GET", "/v1/node", nil, nil, &n, "")
}

// CreateKey creates an API key. Its secret cannot be asked for again.
func (c *Client) CreateKey(ctx context.Context, k CreateKey) (CreatedKey, error) {
	var out CreatedKey
	return out, c.json(ctx, "POST", "/v1/keys", nil, k, &out, "")
}

// Keys returns all API keys, revoked ones included.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	var p Page[Key]
	return p.Items, c.json(ctx, "GET", "/v1/keys", nil, nil, &p, "")
}

// RevokeKey revokes a key. Requests with it fail from then on.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.json(ctx, "DELETE", "/v1/keys/"+url.PathEscape(id), nil, nil, nil, "")
}

// Templates returns all templates of the server.
func (c *Client) Templates(ctx context.Context) ([]Template, error) {
	var p Page[Template]
	return p.Items, c.json(ctx, "GET", "/v1/templates", nil, nil, &p, "")
}

// Template returns a template by name or digest.
func (c *Client) Template(ctx context.Context, name string) (Template, error) {
	var t Template
	return t, c.json(ctx, "GET", "/v1/templates/"+escapePath(name), nil, nil, &t, "")
}

// DeleteTemplate removes the name of a template or, given a digest, the
// template. It fails with CodeConflict while sessions use the template.
func (c *Client) DeleteTemplate(ctx context.Context, name string) error {
	return c.json(ctx, "DELETE", "/v1/templates/"+escapePath(name), nil, nil, nil, "")
}

// escapePath escapes the parts of a name between slashes.
func escapePath(s string) string {
	parts := strings.Split(s, "/")
	for i, p := range parts {
		parts[i] = url.PathEscape(p)
	}
	return strings.Join(parts, "/")
}

// BuildTemplate builds a template. progress may be nil; it is called from the
// calling goroutine.
func (c *Client) BuildTemplate(ctx context.Context, b BuildTemplate, progress func(Progress)) (Template, error) {
	body, err := json.Marshal(b)
	if err != nil {
		return Template{}, err
	}
	resp, err := c.send(ctx, call{method: "POST", path: "/v1/templates", body: bytes.NewReader(body), typ: "application/json", accept: NDJSONType})
	if err != nil {
		return Template{}, err
	}
	var out *Template
	err = lines(resp, func(u BuildUpdate) error {
		if u.Error != nil {
			return u.Error
		}
		if u.Progress != nil && progress != nil {
			progress(*u.Progress)
		}
		out = u.Template
		return nil
	})
	if err != nil {
		return Template{}, err
	}
	if out == nil {
		return Template{}, fmt.Errorf("build a template: the answer ended early: %w", io.ErrUnexpectedEOF)
	}
	return *out, nil
}

// errStop makes lines stop.
var errStop = errors.New("stop")

// lines decodes an answer of JSON lines, calls fn for each, and closes it.
func lines[T any](resp *http.Response, fn func(T) error) error {
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	for {
		var v T
		err := dec.Decode(&v)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := fn(v); err != nil {
			return traced(err, resp)
		}
	}
}
