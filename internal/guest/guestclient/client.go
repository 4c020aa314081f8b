// Package guestclient is the host's client of the agent inside one sandbox: for
// processes, files and initialisation.
//
//	c := guestclient.New(guestclient.Config{Dial: dial})
//	_, err := c.Init(ctx, wire.InitRequest{AccessToken: token})
//	p, err := c.Exec(ctx, guestclient.Command{Argv: []string{"ls"}})
//	for e, err := p.Next(); err == nil; e, err = p.Next() { … }
//
// A [Client] needs only a function that dials the agent, so it works over any
// link. Responses come from inside a sandbox and are not trusted: every message is
// limited in size. Errors have a kind (package kind) and, where the agent sent one,
// a reason (wire.ReasonOf).
package guestclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bivy/internal/guest/wire"
	"bivy/internal/guest/wire/gen/filesystem/filesystemconnect"
	"bivy/internal/guest/wire/gen/process/processconnect"
	"bivy/internal/kind"
)

// base is a placeholder: requests go where Dial connects to.
const base = "http://guest"

// Limits of one message from the guest in bytes, which is decoded as a whole: of
// the process service, whose output comes in small chunks; of the filesystem
// service, which lists a directory in one message; and of a plain response.
const (
	maxProcessMessage = 1 << 20
	maxFilesMessage   = 8 << 20
	maxResponse       = 1 << 20
)

// callTimeout is the deadline of a short call whose context has none.
const callTimeout = 30 * time.Second

// Config says how to reach an agent.
type Config struct {
	// Dial opens a connection to the agent's port. It is called for every new
	// connection; a stream occupies one.
	Dial func(ctx context.Context) (net.Conn, error)
	// Token is the agent's current access token; empty before the first Init.
	Token string
}

// Client talks to one agent. It is safe for concurrent use.
type Client struct {
	transport *http.Transport
	http      *http.Client
	process   processconnect.ProcessClient
	files     filesystemconnect.FilesystemClient

	// closed ends every stream when the client is closed.
	closed context.Context
	close  context.CancelFunc

	mu    sync.Mutex
	token string
}

// New returns a client. It connects when it is first used.
func New(cfg Config) *Client {
	c := &Client{token: cfg.Token}
	c.closed, c.close = context.WithCancel(context.Background())
	c.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return cfg.Dial(ctx)
		},
		DisableCompression:  true,
		MaxIdleConns:        8,
		MaxIdleConnsPerHost: 8,
		IdleConnTimeout:     60 * time.Second,
	}
	c.http = &http.Client{
		Transport:     roundTripper(c.roundTrip),
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	opts := []connect.ClientOption{
		// The link is in memory, so compression only costs processor time.
		connect.WithAcceptCompression("gzip", nil, nil),
	}
	c.process = processconnect.NewProcessClient(c.http, base, append(opts, connect.WithReadMaxBytes(maxProcessMessage))...)
	c.files = filesystemconnect.NewFilesystemClient(c.http, base, append(opts, connect.WithReadMaxBytes(maxFilesMessage))...)
	return c
}

// Close ends all streams and connections. Processes in the guest continue.
func (c *Client) Close() error {
	c.close()
	c.transport.CloseIdleConnections()
	return nil
}

// Token returns the token in use.
func (c *Client) Token() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.token
}

// setToken makes later requests use token.
func (c *Client) setToken(token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.token = token
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// limitKey is the context key of a process's timeout, which is sent in a header. A
// deadline of the context would end the stream instead of the process.
type limitKey struct{}

func (c *Client) roundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if token := c.Token(); token != "" && r.Header.Get(wire.HeaderToken) == "" {
		r.Header.Set(wire.HeaderToken, token)
	}
	if limit, ok := r.Context().Value(limitKey{}).(time.Duration); ok && limit > 0 {
		ms := max(limit.Milliseconds(), 1)
		r.Header.Set("Connect-Timeout-Ms", strconv.FormatInt(ms, 10))
	}
	return c.transport.RoundTrip(r)
}

// streamContext returns a context that ends with ctx or with the client.
func (c *Client) streamContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.closed, cancel)
	return ctx, func() { stop(); cancel() }
}

// callContext returns a context for a short call, with a deadline.
func (c *Client) callContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, end := c.streamContext(ctx)
	if _, ok := ctx.Deadline(); ok {
		return ctx, end
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	return ctx, func() { cancel(); end() }
}

// agentError is an error the agent sent.
type agentError struct {
	what   string
	text   string
	reason wire.Reason
	cause  error
}

func (r *agentError) Error() string       { return r.what + ": " + r.text }
func (r *agentError) Reason() wire.Reason { return r.reason }
func (r *agentError) Unwrap() error       { return r.cause }

// mapError gives an error of package connect a kind and prefixes what was done.
func mapError(what string, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if own := (*kind.Error)(nil); errors.As(err, &own) || !errors.As(err, &ce) {
		return transportError(what, err)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return transportError(what, err) // the stream was cut, which connect reports as malformed
	}
	r := &agentError{what: what, text: ce.Message(), reason: wire.ReasonOf(err), cause: err}
	return kind.Wrap(kindOfCode(ce.Code()), r)
}

// transportError returns an error of the connection to the agent. An error of Dial
// keeps its kind; others are Unavailable.
func transportError(what string, err error) error {
	k := kind.Unavailable
	if own := (*kind.Error)(nil); errors.As(err, &own) {
		k = own.Kind
	}
	return kind.Wrap(k, fmt.Errorf("%s: %w", what, err))
}

func kindOfCode(code connect.Code) kind.Kind {
	switch code {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return kind.Invalid
	case connect.CodeNotFound:
		return kind.NotFound
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted:
		return kind.Conflict
	case connect.CodePermissionDenied:
		return kind.Denied
	case connect.CodeUnauthenticated:
		return kind.Unauthentic
	case connect.CodeResourceExhausted:
		return kind.Exhausted
	case connect.CodeUnavailable, connect.CodeCanceled, connect.CodeDeadlineExceeded:
		return kind.Unavailable
	case connect.CodeUnknown, connect.CodeUnimplemented, connect.CodeInternal, connect.CodeDataLoss:
		return kind.Internal
	}
	return kind.Internal
}

func kindOfStatus(status int) kind.Kind {
	switch status {
	case http.StatusBadRequest, http.StatusRequestedRangeNotSatisfiable, http.StatusNotAcceptable:
		return kind.Invalid
	case http.StatusUnauthorized:
		return kind.Unauthentic
	case http.StatusForbidden:
		return kind.Denied
	case http.StatusNotFound:
		return kind.NotFound
	case http.StatusConflict:
		return kind.Conflict
	case http.StatusTooManyRequests, http.StatusInsufficientStorage, http.StatusRequestEntityTooLarge:
		return kind.Exhausted
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return kind.Unavailable
	}
	return kind.Internal
}
