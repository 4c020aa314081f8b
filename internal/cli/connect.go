package cli

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
)

// where says which server a command may use.
type where uint8

const (
	anywhere where = iota // any, or a new one in this process
	onServer              // one that runs already: the result must outlive this process
)

// connect finds the server: the one of --server or BIVY_SERVER, of the user's
// settings, the one that runs on this machine, and last this process itself.
func (a *app) connect(ctx context.Context, w where) (*client.Client, error) {
	own, err := config.LoadClient()
	if err != nil {
		return nil, err
	}
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	at, keyFile := a.server, a.keyFile
	if at == "" {
		at = a.env.Server
	}
	if at == "" {
		at = own.Server
	}
	if keyFile == "" {
		keyFile = own.KeyFile
	}
	grace := time.Duration(0)
	if at == "" && w == onServer {
		grace = startTimeout
	}
	running, alive, err := a.find(ctx, cfg.RunDir, at == "", grace)
	if err != nil {
		return nil, err
	}
	if at, err = serverURL(at); err != nil {
		return nil, err
	}
	if alive && (at == "" || sameServer(at, running.URL)) {
		// The URL may be another name of the server of this machine: use the one
		// that it announced, whose key file is known.
		at = running.URL
		if a.dataDir != "" && running.DataDir != "" && filepath.Clean(a.dataDir) != filepath.Clean(running.DataDir) {
			return nil, kind.Errorf(kind.Conflict, "the server on this machine uses %s, not %s", running.DataDir, a.dataDir).
				WithHint("omit --data, or set another run_dir")
		}
	}
	if at == "" {
		if w == onServer {
			return nil, kind.Errorf(kind.Unavailable, "no server is running on this machine and none was specified").
				WithHint("start one with: bivy serve")
		}
		return a.local(ctx, cfg)
	}
	key := ""
	switch {
	case a.keyFile != "":
		key, err = config.ReadKey(a.keyFile)
	case a.env.Key != "":
		key = a.env.Key
	case keyFile != "":
		key, err = config.ReadKey(keyFile)
	case alive && at == running.URL && running.KeyFile != "":
		key, err = config.ReadKey(running.KeyFile)
	default:
		if dir := config.ClientDir(); dir != "" {
			if key, err = config.ReadKey(filepath.Join(dir, "key")); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err != nil {
		return nil, kind.Errorf(kind.Unauthentic, "API key: %w", err).WithHint("set BIVY_API_KEY, or use --key-file FILE")
	}
	return client.New(client.Options{URL: at, Key: key, UserAgent: "bivy/" + a.engine.Version.Version})
}

// startTimeout is how long a command that needs a server waits for one that may
// just have been started.
const startTimeout = 500 * time.Millisecond

// find returns the server of this machine. A process that has locked the run
// directory and announced no address may be a server that is starting: with wait,
// find waits for it. It also waits for grace, for a server that has not locked
// the directory yet.
func (a *app) find(ctx context.Context, runDir string, wait bool, grace time.Duration) (config.Running, bool, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, config.LockPatience)
	defer cancel()
	tick := time.NewTicker(config.LockInterval)
	defer tick.Stop()
	for {
		running, alive, err := config.Find(runDir)
		if err != nil || alive || !wait || !config.Held(runDir) && time.Since(began) >= grace {
			return running, alive, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if !config.Held(runDir) {
				return running, false, nil
			}
			return running, false, config.HeldError(runDir)
		}
	}
}

// serverURL checks a URL. HOST:PORT means http.
func serverURL(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", kind.Errorf(kind.Invalid, "invalid value %.200q: must be a URL such as http://127.0.0.1:7171", s).WithField("--server")
	}
	return s, nil
}

// sameServer reports whether two URLs are the same server of this machine, where
// localhost is any loopback address.
func sameServer(asked, served string) bool {
	a, err1 := url.Parse(asked)
	s, err2 := url.Parse(served)
	if err1 != nil || err2 != nil || a.Scheme != s.Scheme || a.Port() != s.Port() || strings.Trim(a.Path, "/") != "" {
		return false
	}
	ip := net.ParseIP(s.Hostname())
	return a.Hostname() == s.Hostname() || strings.EqualFold(a.Hostname(), "localhost") && ip != nil && ip.IsLoopback()
}

// How long this process waits for the server in it: for requests in progress, and
// then for sessions to end. The two are separate, so that a request that hangs
// leaves time for the second.
const (
	requestTimeout = 30 * time.Second
	closeTimeout   = 2 * time.Minute
)

// local starts a server in this process and returns a client that connects to it
// through socket pairs, which no other process can open.
func (a *app) local(ctx context.Context, cfg config.Config) (*client.Client, error) {
	if a.engine.Local == nil {
		return nil, kind.Errorf(kind.Unavailable, "no server is running on this machine and none was specified").WithHint("start one with: bivy serve")
	}
	// The server must outlive a cancelled ctx, to end the sessions it has created.
	life := context.WithoutCancel(ctx)
	cfg.LogLevel = "error"
	log, err := cfg.Logger(a.Err)
	if err != nil {
		return nil, err
	}
	l, err := a.engine.Local(life, cfg, log)
	if err != nil {
		return nil, err
	}
	pairs := newPairs()
	srv := &http.Server{Handler: l.Handler, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(pairs) }() // ends with Shutdown below
	a.close = func() error {
		quiet, cancel := context.WithTimeout(life, requestTimeout)
		defer cancel()
		err := srv.Shutdown(quiet)
		if err != nil {
			err = errors.Join(err, srv.Close()) // close what has not finished
		}
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
		end, cancel := context.WithTimeout(life, closeTimeout)
		defer cancel()
		return errors.Join(err, l.Close(end))
	}
	return client.New(client.Options{URL: "http://localhost", Key: l.Key, UserAgent: "bivy/" + a.engine.Version.Version,
		HTTPClient: &http.Client{Transport: &http.Transport{
			DialContext:        pairs.dial,
			DisableCompression: true,
			ReadBufferSize:     64 << 10,
			WriteBufferSize:    64 << 10,
		}}})
}

// pairs is a listener for connections from this process.
type pairs struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPairs() *pairs { return &pairs{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pairs) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	near, err1 := fileConn(fds[0])
	far, err2 := fileConn(fds[1])
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	select {
	case p.conns <- far:
		return near, nil
	case <-p.done:
		err = net.ErrClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	return nil, errors.Join(err, near.Close(), far.Close())
}

func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socketpair")
	defer f.Close() // FileConn duplicates the descriptor
	return net.FileConn(f)
}

// Accept implements net.Listener.
func (p *pairs) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p *pairs) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

// Addr implements net.Listener.
func (p *pairs) Addr() net.Addr { return &net.UnixAddr{Name: "inside", Net: "unix"} }
