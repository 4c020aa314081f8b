package api

import (
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
	"bivy/internal/access"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/trace"
)

// Options are what the interface stands on. All fields but Ready, Hosts and Log
// are required.
type Options struct {
	Sessions  Sessions
	Workload  Workload
	System    System
	Templates Templates
	Keys      Keys
	Node      Node

	// DigestKey is the secret key, at least 32 bytes, of the digests by which a
	// repeated create is recognised. They are stored, and a plain hash of the
	// request would let its environment values be guessed.
	DigestKey []byte

	// Ready is closed when sessions can be made; nil: always.
	Ready <-chan struct{}
	// Hosts are the names, beside loopback ones, that a request's Host header
	// may have. Any other is refused: a web page could have made the browser
	// resolve its own name to this address.
	Hosts []string
	Log   *slog.Logger // nil: discard
}

// Handler serves the interface.
type Handler struct {
	o   Options
	log *slog.Logger
	mux *http.ServeMux
}

const minDigestKey = 32 // bytes

// New makes a Handler.
func New(o Options) (*Handler, error) {
	if o.Sessions == nil || o.Workload == nil || o.System == nil || o.Templates == nil || o.Keys == nil || o.Node == nil {
		return nil, errors.New("api: every part of Options is required")
	}
	if len(o.DigestKey) < minDigestKey {
		return nil, fmt.Errorf("api: the digest key has %d bytes, want %d", len(o.DigestKey), minDigestKey)
	}
	h := &Handler{o: o, log: o.Log, mux: http.NewServeMux()}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	for _, r := range table() {
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

// Listen opens the address that the interface is served on. An address beyond
// loopback needs a certificate, unless plain says that a proxy in front of it
// encrypts.
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

// hostAllowed guards against DNS rebinding: a web page whose own name resolves
// to this address.
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
	request string   // id of the request
	trace   trace.ID // that the request belongs to
	status  int      // that was sent; 0: none yet
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
	w := &response{ResponseWriter: rw, request: newRequestID(), trace: traceOf(req)}
	req = req.WithContext(trace.NewContext(req.Context(), w.trace))
	w.Header().Set("Bivy-Request-Id", w.request)
	w.Header().Set(client.TraceparentHeader, w.trace.Traceparent())
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	log := h.logOf(w).With("method", req.Method, "path", req.URL.Path)
	defer func() {
		p := recover()
		if p == http.ErrAbortHandler { //nolint:errorlint // the documented comparison
			log.Debug("request cut", "status", w.status, "took", time.Since(start))
			panic(p)
		}
		if p != nil {
			log.Error("panic in a request", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if w.status != 0 {
				// The caller must not take what was sent for the whole answer.
				panic(http.ErrAbortHandler)
			}
			h.fail(w, req, errors.New("panic"))
		}
		log.Debug("request", "status", w.status, "took", time.Since(start))
	}()
	if !h.hostAllowed(req.Host) {
		h.fail(w, req, kind.Errorf(kind.Denied, "this server is not called %.100q", req.Host).
			WithHint("use its loopback address, or add the name to hosts in its configuration"))
		return
	}
	h.mux.ServeHTTP(w, req)
}

// traceOf returns the trace that the caller names, or a new one when it names
// none or names it in a way that the recommendation tells to ignore.
func traceOf(req *http.Request) trace.ID {
	if values := req.Header.Values(client.TraceparentHeader); len(values) == 1 {
		if id, ok := trace.Parse(values[0]); ok {
			return id
		}
	}
	return trace.New()
}

// logOf returns the log for lines about one request.
func (h *Handler) logOf(w *response) *slog.Logger {
	return h.log.With("request", w.request, "trace", w.trace)
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

// run authenticates a request, checks its form and calls its handler.
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
		if err := c.authenticate(); err != nil {
			return err
		}
		if err := c.checkQuery(); err != nil {
			return err
		}
		if strings.Contains(r.pattern, "{session}") {
			var err error
			if c.session, err = session.ParseID(req.PathValue("session")); err != nil {
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
	h       *Handler
	w       *response
	req     *http.Request
	ctl     *http.ResponseController
	route   route
	caller  access.Caller // zero on public routes
	session session.ID    // in the path of routes below a session
}

func (c *call) ctx() context.Context { return c.req.Context() }

// authenticate finds out who calls.
func (c *call) authenticate() error {
	if c.route.public != "" {
		return nil
	}
	token := c.req.Header.Get("X-API-Key")
	if scheme, bearer, ok := strings.Cut(c.req.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		token = bearer
	}
	caller, err := c.h.o.Keys.Authenticate(c.ctx(), token, remoteHost(c.req.RemoteAddr))
	if err != nil {
		c.w.Header().Set("WWW-Authenticate", `Bearer realm="bivy"`)
		return err
	}
	c.caller = caller
	return nil
}

// remoteHost is the host of an address, or the address where it has none.
func remoteHost(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

func (c *call) checkQuery() error {
	if c.req.URL.RawQuery == "" {
		return c.checkIdempotency()
	}
	// ParseQuery, unlike Query, fails for what it cannot read.
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
