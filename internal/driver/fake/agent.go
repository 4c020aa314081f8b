package fake

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"bivy/internal/guest/wire"
	"bivy/internal/guest/wire/gen/filesystem/filesystemconnect"
	"bivy/internal/guest/wire/gen/process/processconnect"
	"bivy/internal/kind"
)

// agent is the in-process stand-in for bivy-guest: the part of its protocol
// that running commands and moving files needs. Paths are below the sandbox's
// directory; processes are of this machine and start there.
type agent struct {
	s   *sandbox
	lis *pipes
	srv *http.Server

	processconnect.UnimplementedProcessHandler
	filesystemconnect.UnimplementedFilesystemHandler

	// over ends what the agent does when the sandbox stops.
	over context.Context
	end  context.CancelFunc

	mu         sync.Mutex
	token      string
	generation uint64
	env        map[string]string
	procs      map[uint32]*proc // running, and ended ones still remembered
	ran        bool             // processes were started
	work       sync.WaitGroup
}

func newAgent(s *sandbox) *agent {
	a := &agent{s: s, lis: newPipes(), procs: map[uint32]*proc{}}
	a.over, a.end = context.WithCancel(context.Background())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("POST /init", a.serveInit)
	mux.HandleFunc("GET /files", a.serveRead)
	mux.HandleFunc("POST /files", a.serveWrite)
	mux.Handle(processconnect.NewProcessHandler(a))
	mux.Handle(filesystemconnect.NewFilesystemHandler(a))
	a.srv = &http.Server{
		Handler:     a.guard(mux),
		BaseContext: func(net.Listener) context.Context { return a.over },
	}
	a.work.Go(func() { _ = a.srv.Serve(a.lis) }) // returns when stop closes the listener
	return a
}

// stop ends the agent, its connections and its processes; wait waits for that.
func (a *agent) stop() {
	a.end()
	_ = a.lis.Close()
	_ = a.srv.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.procs {
		select {
		case <-p.over: // its number may have passed to another process
		default:
			p.kill()
		}
	}
}

func (a *agent) wait() { a.work.Wait() }

func (a *agent) hasRun() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ran
}

func (a *agent) dial(ctx context.Context) (net.Conn, error) {
	c, err := a.lis.dial(ctx)
	if errors.Is(err, net.ErrClosed) {
		return nil, kind.Errorf(kind.Unavailable, "sandbox %s has stopped", a.s.ID)
	}
	return c, err
}

// guard makes requests wait while the sandbox is paused and checks the token.
func (a *agent) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.s.mu.Lock()
		paused := a.s.paused
		a.s.mu.Unlock()
		if paused != nil {
			select {
			case <-paused:
			case <-r.Context().Done():
				return
			}
		}
		a.mu.Lock()
		token := a.token
		a.mu.Unlock()
		if token != "" && r.URL.Path != "/health" && r.Header.Get(wire.HeaderToken) != token {
			refuse(w, http.StatusUnauthorized, "", "the access token is missing or wrong")
			return
		}
		next.ServeHTTP(w, r)
	})
}

func refuse(w http.ResponseWriter, status int, why wire.Reason, text string) {
	w.Header().Set("Content-Type", "application/json")
	if why != "" {
		w.Header().Set(wire.HeaderReason, string(why))
	}
	w.WriteHeader(status)
	// A client that is gone does not need the answer.
	_ = json.NewEncoder(w).Encode(wire.ErrorBody{Code: status, Message: text})
}

func (a *agent) serveInit(w http.ResponseWriter, r *http.Request) {
	var in wire.InitRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, wire.MaxMessage)).Decode(&in); err != nil {
		refuse(w, http.StatusBadRequest, "", err.Error())
		return
	}
	a.mu.Lock()
	a.token, a.env = in.AccessToken, maps.Clone(in.EnvVars)
	a.generation++
	generation := a.generation
	a.mu.Unlock()
	h := w.Header()
	h.Set(wire.HeaderVersion, wire.Version)
	h.Set(wire.HeaderGeneration, strconv.FormatUint(generation, 10))
	h.Set(wire.HeaderClockOffset, strconv.FormatInt(time.Until(in.Timestamp).Milliseconds(), 10))
	h.Set(wire.HeaderClockSet, "false")
	w.WriteHeader(http.StatusNoContent)
}

// path returns where on this machine a path in the sandbox is. Nothing leads
// out of the root by "..", but symbolic links may: there is no isolation.
func (a *agent) path(p string) string { return filepath.Join(a.s.root(), filepath.Join("/", p)) }

// inside is the reverse.
func (a *agent) inside(p string) string {
	rest := strings.TrimPrefix(p, a.s.root())
	if rest == "" {
		return "/"
	}
	return rest
}

// pipes is a listener whose connections never leave the process.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (l *pipes) dial(ctx context.Context) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.conns <- far:
		return near, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *pipes) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr implements net.Listener.
func (l *pipes) Addr() net.Addr { return pipeAddr{} }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "agent" }
