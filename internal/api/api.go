// Package api is bivy's REST interface, version 1: it decodes requests,
// checks who may make them, calls the lifecycle and maps what comes back.
// Nothing else is decided here.
//
// The wire types are those of package client. openapi.yaml describes the
// interface, and tests hold the two against each other.
package api

import (
	"bivy/internal/access"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"bivy/client"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Options are what the interface stands on. All fields but Hosts, Ready, Log
// and Node are required.
type Options struct {
	Sessions  Sessions
	Commands  Commands
	Files     Files
	Records   Records
	Templates Templates
	Keys      Keys

	AuditKey client.AuditKey
	Version  client.Version
	Node     func(ctx context.Context) (client.Node, error) // nil: no facts

	// Ready is closed when sessions can be made; nil: always.
	Ready <-chan struct{}
	// Hosts are the names, beside loopback ones, that a request's Host may
	// have. A page in a browser that was led to this address by its own name
	// is refused.
	Hosts []string
	Log   *slog.Logger // nil: discard
}

// Handler serves the interface.
type Handler struct {
	o      Options
	log    *slog.Logger
	mux    *http.ServeMux
	routes []route
}

// New makes a Handler.
func New(o Options) (*Handler, error) {
	if o.Sessions == nil || o.Commands == nil || o.Files == nil || o.Records == nil || o.Templates == nil || o.Keys == nil {
		return nil, errors.New("api: every port of Options is required")
	}
	h := &Handler{o: o, log: o.Log, mux: http.NewServeMux()}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	h.routes = h.table()
	for _, r := range h.routes {
		h.mux.HandleFunc(r.method+" "+r.pattern, func(w http.ResponseWriter, req *http.Request) {
			h.run(w.(*response), req, r)
		})
	}
	h.mux.HandleFunc("/", h.noRoute)
	return h, nil
}

// Limits of the HTTP server.
const (
	maxHeaderBytes    = 64 << 10
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	bodyTimeout       = 30 * time.Second // for a JSON body to arrive
	maxBody           = 1 << 20          // of JSON
	maxDrained        = 32 << 20         // of a body that is refused, so that the caller hears why
)

// NewServer returns an HTTP server for h with the limits of this interface.
// It sets no total timeout: streams live as long as their commands.
func NewServer(h http.Handler, log *slog.Logger) *http.Server {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
	}
	if log != nil {
		s.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	}
	return s
}

// Listen opens the address the interface is served on. An address that others
// can reach needs a certificate, unless plain says that something in front of
// it encrypts.
func Listen(ctx context.Context, address string, cert *tls.Config, plain bool) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, kind.Errorf(kind.Invalid, "%q is not an address to listen on: %w", address, err).
			WithField("listen").WithHint("want HOST:PORT, e.g. 127.0.0.1:7171")
	}
	if !isLoopback(host) && cert == nil && !plain {
		return nil, kind.Errorf(kind.Invalid, "%s can be reached by others, and there is no TLS certificate", address).
			WithField("listen").WithHint("set tls_cert and tls_key, or listen on 127.0.0.1; allow_plaintext: true if something in front of bivy encrypts")
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, kind.Errorf(kind.Unavailable, "listen on %s: %w", address, err).
			WithField("listen").WithHint("another process may have the port: choose one with --listen")
	}
	if cert != nil {
		cert = cert.Clone()
		cert.NextProtos = []string{"h2", "http/1.1"}
		l = tls.NewListener(l, cert)
	}
	return l, nil
}

func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}

// hostAllowed guards against pages that reach this address under a name of
// their own.
func (h *Handler) hostAllowed(hostport string) bool {
	host := hostport
	if name, _, err := net.SplitHostPort(hostport); err == nil {
		host = name
	}
	return isLoopback(host) || slices.ContainsFunc(h.o.Hosts, func(s string) bool { return strings.EqualFold(s, host) })
}

// response notes what was sent, for the log and for panics.
type response struct {
	http.ResponseWriter
	request string // its id
	status  int
}

func (w *response) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	start := time.Now()
	w := &response{ResponseWriter: rw, request: newRequestID()}
	w.Header().Set("Bivy-Request-Id", w.request)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	defer func() {
		p := recover()
		if p == http.ErrAbortHandler { //nolint:errorlint // the documented comparison
			panic(p)
		}
		if p != nil {
			h.log.Error("panic in a request", "request", w.request, "method", req.Method, "path", req.URL.Path,
				"panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if w.status != 0 {
				// What was sent cannot be taken back, but it can be seen to be cut.
				panic(http.ErrAbortHandler)
			}
			h.fail(w, req, errors.New("panic"))
		}
		h.log.Debug("request", "request", w.request, "method", req.Method, "path", req.URL.Path,
			"status", w.status, "took", time.Since(start))
	}()
	if !h.hostAllowed(req.Host) {
		h.fail(w, req, kind.Errorf(kind.Denied, "this server is not called %.100q", req.Host).
			WithHint("use its loopback address, or add the name to hosts in its configuration"))
		return
	}
	h.mux.ServeHTTP(w, req)
}

func newRequestID() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// noRoute answers for paths and methods that no route has.
func (h *Handler) noRoute(rw http.ResponseWriter, req *http.Request) {
	w := rw.(*response)
	var allow []string
	for _, method := range []string{"GET", "POST", "PUT", "DELETE"} {
		other := req.Clone(req.Context())
		other.Method = method
		if _, pattern := h.mux.Handler(other); pattern != "/" && pattern != "" {
			allow = append(allow, method)
		}
	}
	if len(allow) > 0 && !slices.Contains(allow, req.Method) {
		w.Header().Set("Allow", strings.Join(allow, ", "))
		h.failStatus(w, http.StatusMethodNotAllowed, client.Error{Code: client.CodeInvalid,
			Message: fmt.Sprintf("%s cannot be %s", req.URL.Path, req.Method), Hint: "allowed: " + strings.Join(allow, ", ")})
		return
	}
	h.fail(w, req, kind.Errorf(kind.NotFound, "there is nothing at %.200s", req.URL.Path).
		WithHint("GET /v1/openapi.yaml describes every path"))
}

// run checks a request against its route and calls its handler.
func (h *Handler) run(w *response, req *http.Request, r route) {
	c := &call{h: h, w: w, req: req, route: r, ctl: http.NewResponseController(w)}
	err := func() error {
		if req.Method != r.method {
			// The mux lets HEAD through to GET, which may be a stream.
			w.Header().Set("Allow", r.method)
			h.failStatus(w, http.StatusMethodNotAllowed, client.Error{Code: client.CodeInvalid,
				Message: fmt.Sprintf("%s cannot be %s", req.URL.Path, req.Method), Hint: "allowed: " + r.method})
			return nil
		}
		if err := c.authorise(); err != nil {
			return err
		}
		if err := c.checkQuery(); err != nil {
			return err
		}
		if strings.Contains(r.pattern, "{session}") {
			if err := c.loadSession(); err != nil {
				return err
			}
		}
		return r.handle(c)
	}()
	if err != nil {
		h.fail(w, req, err)
	}
}

// call is one request on its way through its route.
type call struct {
	h      *Handler
	w      *response
	req    *http.Request
	ctl    *http.ResponseController
	route  route
	caller access.Caller
	sess   session.Session // of routes below a session
}

func (c *call) ctx() context.Context { return c.req.Context() }

// actor is who does what this request asks for.
func (c *call) actor() session.Principal { return c.caller.Principal }

func (c *call) authorise() error {
	if c.route.public != "" {
		return nil
	}
	token := c.req.Header.Get("X-API-Key")
	if scheme, bearer, ok := strings.Cut(c.req.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		token = bearer
	}
	caller, err := c.h.o.Keys.Authenticate(c.ctx(), token)
	if err != nil {
		c.w.Header().Set("WWW-Authenticate", `Bearer realm="bivy"`)
		return err
	}
	c.caller = caller
	return c.decide(access.Resource{})
}

// decide asks whether the caller may do what the route is for.
func (c *call) decide(r access.Resource) error {
	_, err := access.Roles{}.Decide(c.ctx(), access.Request{Caller: c.caller, Action: c.route.need, Resource: r})
	return err
}

func (c *call) checkQuery() error {
	if c.req.URL.RawQuery == "" {
		return c.checkIdempotency()
	}
	// ParseQuery, unlike Query, tells of what it cannot read.
	q, err := parseQuery(c.req.URL.RawQuery)
	if err != nil {
		return err
	}
	for name, values := range q {
		p := slices.IndexFunc(c.route.query, func(p string) bool { return strings.TrimSuffix(p, "*") == name })
		if p < 0 {
			e := kind.Errorf(kind.Invalid, "unknown parameter").WithField(name)
			if len(c.route.query) > 0 {
				e = e.WithHint("known: %s", strings.ReplaceAll(strings.Join(c.route.query, ", "), "*", ""))
			}
			return e
		}
		if len(values) > 1 && !strings.HasSuffix(c.route.query[p], "*") {
			return kind.Errorf(kind.Invalid, "given twice").WithField(name)
		}
	}
	return c.checkIdempotency()
}

const idempotencyHeader = "Idempotency-Key"

func (c *call) checkIdempotency() error {
	values := c.req.Header.Values(idempotencyHeader)
	if len(values) == 0 {
		return nil
	}
	switch {
	case !c.route.repeatable:
		return kind.Errorf(kind.Invalid, "this request does not take the header").WithField(idempotencyHeader).
			WithHint("without it, repeat only what is safe to repeat")
	case len(values) > 1 || values[0] == "" || len(values[0]) > 255:
		return kind.Errorf(kind.Invalid, "want one text of 1 to 255 bytes").WithField(idempotencyHeader)
	}
	return nil
}

// loadSession finds the session of the path. To who may not see it, it does
// not exist.
func (c *call) loadSession() error {
	id, err := session.ParseID(c.req.PathValue("session"))
	if err != nil {
		return err
	}
	s, err := c.h.o.Sessions.Get(c.ctx(), id)
	if err != nil {
		return err
	}
	c.sess = s
	return c.decide(access.Of(s))
}
