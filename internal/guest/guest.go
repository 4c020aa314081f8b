package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"bivy/internal/guest/accounts"
	"bivy/internal/guest/files"
	"bivy/internal/guest/proc"
	"bivy/internal/guest/wire"
	"bivy/internal/guest/wire/gen/filesystem/filesystemconnect"
	"bivy/internal/guest/wire/gen/process/processconnect"
)

const (
	// idleTimeout is longer than load balancers keep connections, so that it is
	// never the agent that closes first.
	idleTimeout = 640 * time.Second
	// headerTimeout bounds the time from the first byte of a request to the
	// end of its headers, maxHeader their size.
	headerTimeout = 30 * time.Second
	maxHeader     = 64 << 10
	// StallTimeout is how long one read from or write to a connection may wait
	// for the peer before the connection is closed. A slow reader slows a
	// process down; one that does not read at all blocks it for at most this
	// time.
	StallTimeout = 10 * time.Minute
	// maxLocal is how many connections programs inside may hold, so that they
	// cannot use up the descriptors that the host's connections need.
	maxLocal = 256
	// maxInit bounds the body of an initialisation.
	maxInit = 8 << 20
)

// Config is how the agent runs. The zero value is not usable: see Default.
type Config struct {
	Listen   string // host:port, or unix:path for a host that shares a file system
	Etc      string // where passwd, group and hosts are
	Run      string // where the files that identify the sandbox to E2B's tools are written, in e2b/
	User     string // the default user until an initialisation names one
	Path     string // what processes get as PATH
	SetClock bool   // whether to set the kernel's clock
	SetName  bool   // whether to set the kernel's host name
	Log      *slog.Logger
}

// Default returns the configuration inside a sandbox.
func Default() Config {
	return Config{
		Listen: fmt.Sprintf("0.0.0.0:%d", wire.Port), Etc: "/etc", Run: "/run", User: "user",
		SetClock: true, SetName: true, Log: slog.New(slog.DiscardHandler),
	}
}

// Agent is a running agent.
type Agent struct {
	cfg      Config
	log      *slog.Logger
	resolver *accounts.Resolver
	reaper   *proc.Reaper
	process  *proc.Service
	files    *files.Service
	usage    usage

	processes, filesystem http.Handler // the two services

	initLock sync.Mutex // one initialisation at a time; before mu

	mu         sync.Mutex
	ready      bool // initialised once
	token      string
	generation uint64
	offset     time.Duration // host clock minus guest clock
}

// New returns an agent that owns the processes of this program.
func New(cfg Config) (*Agent, error) {
	reaper, err := proc.NewReaper(cfg.Log)
	if err != nil {
		return nil, err
	}
	db := accounts.Open(filepath.Join(cfg.Etc, "passwd"), filepath.Join(cfg.Etc, "group"))
	resolver := accounts.NewResolver(db, cfg.Path, accounts.Settings{User: cfg.User})
	a := &Agent{
		cfg: cfg, log: cfg.Log, resolver: resolver, reaper: reaper,
		process: proc.NewService(resolver, reaper, cfg.Log),
		files:   files.NewService(resolver, cfg.Log),
	}
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(wire.MaxMessage),
		// The peer is on the same machine, so compression only costs processor time.
		connect.WithCompressMinBytes(1 << 30),
	}
	_, a.processes = processconnect.NewProcessHandler(a.process, opts...)
	_, a.filesystem = filesystemconnect.NewFilesystemHandler(a.files, opts...)
	return a, nil
}

// Listen opens the configured listener.
func (a *Agent) Listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	network, address := "tcp", a.cfg.Listen
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
	}
	l, err := lc.Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", a.cfg.Listen, err)
	}
	if network == "unix" {
		if err := os.Chmod(address, 0o600); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// Run serves on l until ctx is done, then kills every process: all processes of
// the sandbox when the agent is process 1, otherwise those that it started.
func (a *Agent) Run(ctx context.Context, l net.Listener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var own sync.WaitGroup
	own.Go(func() { a.reaper.Run(ctx) })
	server := &http.Server{
		Handler:           a,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			_, local := c.(*localConn)
			return context.WithValue(ctx, localKey{}, local)
		},
	}
	own.Go(func() {
		<-ctx.Done()
		_ = server.Close() // Serve's error is the one that counts
	})
	err := server.Serve(&listener{Listener: l})
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	if os.Getpid() == 1 {
		// Every process except this one.
		err = errors.Join(err, ignore(unix.Kill(-1, unix.SIGKILL), unix.ESRCH))
	} else {
		a.process.KillAll()
	}
	stop()
	own.Wait()
	return err
}

func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// now returns the host's time, as last set by an initialisation.
func (a *Agent) now() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return time.Now().Add(a.offset)
}

// reclaim returns the memory that earlier requests needed to the kernel.
func reclaim() {
	runtime.GC() // objects in a sync.Pool survive one collection; FreeOSMemory does the second
	debug.FreeOSMemory()
}

// deadlineWriter sets a new write deadline before every write, so that only a
// peer that has stopped reading is disconnected.
type deadlineWriter struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (p *deadlineWriter) Write(b []byte) (int, error) {
	if err := p.control.SetWriteDeadline(time.Now().Add(StallTimeout)); err != nil {
		return 0, err
	}
	return p.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, which streams need.
func (p *deadlineWriter) Flush() {
	_ = p.control.Flush() // the next write reports a broken connection
}

// Unwrap lets an http.ResponseController find the connection.
func (p *deadlineWriter) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// deadlineBody does the same for reads of the request's body. It clears the
// deadline after each read, because the server keeps reading in the background
// to notice when the client disconnects.
type deadlineBody struct {
	io.ReadCloser
	control *http.ResponseController
}

func (p *deadlineBody) Read(b []byte) (int, error) {
	if err := p.control.SetReadDeadline(time.Now().Add(StallTimeout)); err != nil {
		return 0, err
	}
	n, err := p.ReadCloser.Read(b)
	if clear := p.control.SetReadDeadline(time.Time{}); err == nil {
		err = clear
	}
	return n, err
}
