package guest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"bivy/internal/guest/files"
	"bivy/internal/guest/proc"
	"bivy/internal/guest/wire"
)

// exposed lists the response headers that scripts in a browser may read (CORS).
const exposed = "Content-Encoding, Content-Disposition, Connect-Content-Encoding, Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, " +
	wire.HeaderReason + ", " + wire.HeaderVersion

// ServeHTTP implements http.Handler.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", exposed)
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
		h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
		// A wildcard does not cover Authorization.
		if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
			h.Set("Access-Control-Allow-Headers", asked)
		}
		h.Set("Access-Control-Max-Age", "7200")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	control := http.NewResponseController(w)
	w = &deadlineWriter{w, control}
	r.Body = &deadlineBody{r.Body, control}
	if err := a.route(w, r); err != nil {
		a.writeError(w, r, err)
	}
}

// writeError sends err as a response. The text of an error that is not an
// HTTPError is logged and not sent: the client gets "internal error".
func (a *Agent) writeError(w http.ResponseWriter, r *http.Request, err error) {
	var httpErr *files.HTTPError
	if !errors.As(err, &httpErr) {
		a.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "err", err)
		httpErr = &files.HTTPError{Status: http.StatusInternalServerError, Text: "internal error"}
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Del("Content-Encoding")
	h.Del("Content-Disposition")
	if httpErr.Why != "" {
		h.Set(wire.HeaderReason, string(httpErr.Why))
	}
	w.WriteHeader(httpErr.Status)
	// An error here means that the client has disconnected.
	_ = json.NewEncoder(w).Encode(wire.ErrorBody{Code: httpErr.Status, Message: httpErr.Text})
}

func httpError(status int, text string) error { return &files.HTTPError{Status: status, Text: text} }

// route authorises a request and handles it.
func (a *Agent) route(w http.ResponseWriter, r *http.Request) error {
	path := r.URL.Path
	if path == "/health" {
		if err := method(r, http.MethodGet, http.MethodHead); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	local, _ := r.Context().Value(localKey{}).(bool)
	if path == "/init" || path == "/reclaim" {
		if local {
			return httpError(http.StatusForbidden, "only the host may use "+path)
		}
	}
	if path == "/init" {
		return a.serveInit(w, r)
	}
	token, ready := a.accessToken()
	if !ready {
		return httpError(http.StatusServiceUnavailable, "the sandbox is not initialised")
	}
	if token == "" && local {
		return httpError(http.StatusUnauthorized, "programs inside the sandbox need an access token, and none is set")
	}
	if path == "/files" {
		return a.serveFiles(w, r, token)
	}
	if token != "" && !equalSecrets(r.Header.Get(wire.HeaderToken), token) {
		return httpError(http.StatusUnauthorized, "the access token is missing or wrong: send it as "+wire.HeaderToken)
	}
	switch {
	case strings.HasPrefix(path, "/process.Process/"):
		a.processes.ServeHTTP(w, r)
		return nil
	case strings.HasPrefix(path, "/filesystem.Filesystem/"):
		a.filesystem.ServeHTTP(w, r)
		return nil
	case path == "/files/compose":
		if err := method(r, http.MethodPost); err != nil {
			return err
		}
		written, err := a.files.Compose(r)
		return writeJSON(w, written, err)
	case path == "/metrics":
		if err := method(r, http.MethodGet); err != nil {
			return err
		}
		return writeJSON(w, a.metrics(), nil)
	case path == "/envs":
		if err := method(r, http.MethodGet); err != nil {
			return err
		}
		env := a.resolver.Settings().Env
		if env == nil {
			env = map[string]string{}
		}
		return writeJSON(w, env, nil)
	case path == "/reclaim":
		if err := method(r, http.MethodPost); err != nil {
			return err
		}
		reclaim()
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return httpError(http.StatusNotFound, "no such endpoint: "+strconv.Quote(path))
}

func method(r *http.Request, allowed ...string) error {
	for _, m := range allowed {
		if r.Method == m {
			return nil
		}
	}
	return httpError(http.StatusMethodNotAllowed, "method "+strconv.Quote(r.Method)+" is not allowed here, only "+strings.Join(allowed, " and "))
}

func writeJSON(w http.ResponseWriter, body any, err error) error {
	if err != nil {
		return err
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	if _, err := w.Write(text); err != nil {
		return nil //nolint:nilerr // the client has disconnected
	}
	return nil
}

// serveFiles handles /files, which accepts a signature instead of the token.
func (a *Agent) serveFiles(w http.ResponseWriter, r *http.Request, token string) error {
	operation := wire.SignRead
	if r.Method == http.MethodPost {
		operation = wire.SignWrite
	} else if err := method(r, http.MethodGet, http.MethodHead, http.MethodPost); err != nil {
		return err
	}
	if token != "" {
		if err := a.authoriseFile(r, operation, token); err != nil {
			return err
		}
	}
	user := r.URL.Query().Get("username")
	if user == "" {
		name, err := proc.Username(r.Header)
		if err != nil {
			return httpError(http.StatusUnauthorized, "the Authorization header is malformed")
		}
		user = name
	}
	if operation == wire.SignRead {
		return a.files.Read(w, r, user)
	}
	written, err := a.files.Write(r, user)
	return writeJSON(w, written, err)
}

// authoriseFile checks the token if the request has one, otherwise the signature.
func (a *Agent) authoriseFile(r *http.Request, operation, token string) error {
	if given := r.Header.Get(wire.HeaderToken); given != "" {
		if !equalSecrets(given, token) {
			return httpError(http.StatusUnauthorized, "the access token is wrong")
		}
		return nil
	}
	q := r.URL.Query()
	return checkSignature(fileSignature{
		path: q.Get("path"), operation: operation, user: q.Get("username"),
		signature: q.Get("signature"), expiration: q.Get("signature_expiration"),
	}, token, a.now())
}

// fileSignature is a signature and the values that it signs, as given in a query.
type fileSignature struct{ path, operation, user, signature, expiration string }

// checkSignature checks the signature before the expiry, because the expiry can
// only be trusted when the signature covers it.
func checkSignature(s fileSignature, token string, now time.Time) error {
	if s.signature == "" {
		return httpError(http.StatusUnauthorized, "missing signature query parameter")
	}
	var expiry time.Time
	if s.expiration != "" {
		seconds, err := strconv.ParseInt(s.expiration, 10, 64)
		if err != nil || strconv.FormatInt(seconds, 10) != s.expiration {
			return httpError(http.StatusUnauthorized, "invalid signature")
		}
		expiry = time.Unix(seconds, 0)
	}
	if !equalSecrets(s.signature, wire.Sign(s.path, s.operation, s.user, token, expiry)) {
		return httpError(http.StatusUnauthorized, "invalid signature")
	}
	if s.expiration != "" && now.After(expiry) {
		return httpError(http.StatusUnauthorized, "signature is already expired")
	}
	return nil
}

// equalSecrets compares two secrets in constant time, which depends neither on
// where they differ nor on their lengths.
func equalSecrets(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

func (a *Agent) accessToken() (token string, ready bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.token, a.ready
}
