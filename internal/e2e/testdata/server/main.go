// Command server is bivy's server with a switch that kills it at a named
// point of its work. It is for tests of what a crash leaves behind, and lives
// here so that the shipped server has no such switch.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/daemon"
)

func main() {
	// Kept, since the driver points the globals elsewhere.
	out, errs := os.Stdout, os.Stderr
	if err := run(out, errs); err != nil {
		fmt.Fprintln(errs, "server:", err)
		os.Exit(1)
	}
}

func run(out, errs *os.File) error {
	data := flag.String("data", "", "data directory")
	runDir := flag.String("run", "", "run directory")
	kill := flag.String("kill", "", "point at which to die")
	nth := flag.Int("nth", 1, "how often the point has to be reached for that")
	trace := flag.String("trace", "", "file to which points are appended")
	flag.Parse()

	cfg := config.Config{DataDir: *data, RunDir: *runDir, Listen: "127.0.0.1:0"}.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	points, err := newPoints(*kill, *nth, *trace)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(errs, nil))
	d, err := daemon.New(ctx, daemon.Options{Config: cfg, Log: log, Version: client.Version{Version: "e2e", API: "v1"}, FailPoint: points.reached})
	if err != nil {
		return err
	}
	defer d.Close()
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return err
	}
	go func() { // ends with the process
		<-d.Ready()
		r := config.Running{URL: "http://" + listener.Addr().String()}
		if _, err := config.Announce(cfg.RunDir, r); err != nil {
			fmt.Fprintln(errs, "announce:", err)
		}
	}()
	go tell(out)
	return d.Serve(ctx, listener)
}

// tell answers SIGUSR1 with the number of goroutines, as a line on out.
func tell(out *os.File) {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	for range asked {
		runtime.GC()
		fmt.Fprintln(out, runtime.NumGoroutine())
	}
}

type points struct {
	kill string
	left atomic.Int64 // until kill counts

	mu    sync.Mutex
	trace *os.File
}

func newPoints(kill string, nth int, trace string) (*points, error) {
	p := &points{kill: kill}
	p.left.Store(int64(nth))
	if trace == "" {
		return p, nil
	}
	var err error
	p.trace, err = os.OpenFile(trace, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return p, err
}

func (p *points) reached(name string) {
	if p.trace != nil {
		p.mu.Lock()
		fmt.Fprintln(p.trace, name)
		p.mu.Unlock()
	}
	if p.kill != "" && p.kill == name && p.left.Add(-1) == 0 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			panic(err)
		}
		select {} // nothing happens after the point
	}
}
