package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/auth"
	"bivy/internal/bench"
	"bivy/internal/cli"
	"bivy/internal/config"
	"bivy/internal/doctor"
)

// Engine is what the command line is given to work with.
func Engine(v client.Version) cli.Engine {
	return cli.Engine{
		Version: v,
		Serve: func(ctx context.Context, cfg config.Config, log *slog.Logger, ready func(cli.Listening)) error {
			return serve(ctx, Options{Config: cfg, Log: log, Version: v}, ready)
		},
		Local: func(ctx context.Context, cfg config.Config, log *slog.Logger) (*cli.Local, error) {
			return local(ctx, Options{Config: cfg, Log: log, Version: v})
		},
		ReplaceLostKey: func(ctx context.Context, cfg config.Config) (client.AuditKey, error) {
			return replaceLostKey(ctx, Options{Config: cfg, Log: slog.New(slog.DiscardHandler), Version: v})
		},
		Doctor: doctor.Examine,
		Bench: func(ctx context.Context, _ config.Config, b cli.Bench) error {
			return bench.Run(ctx, bench.Options{Suite: b.Suite, OutDir: b.OutDir, JSON: b.JSON, Stdout: b.Stdout, Stderr: b.Stderr, Version: v})
		},
	}
}

// serve opens a daemon and serves it on the configured address until ctx ends.
func serve(ctx context.Context, o Options, ready func(cli.Listening)) (err error) {
	listener, url, err := listen(ctx, o.Config)
	if err != nil {
		if errors.Is(err, unix.EADDRINUSE) && config.Held(o.Config.RunDir) {
			return config.HeldError(o.Config.RunDir) // that process has the address
		}
		return err
	}
	defer listener.Close()
	d, err := New(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	go func() { // ends when the daemon is ready or ctx ends
		select {
		case <-d.Ready():
			ready(cli.Listening{URL: url, KeyFile: d.keyFile()})
			// Unpacking the carried binaries takes some thirty megabytes that are
			// not needed again.
			debug.FreeOSMemory()
		case <-ctx.Done():
		}
	}()
	return d.Serve(ctx, listener)
}

// keyFile is where the first admin key was written, if it is still there.
func (d *Daemon) keyFile() string {
	path := d.data(auth.AdminKeyFile)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

func listen(ctx context.Context, cfg config.Config) (net.Listener, string, error) {
	cert, err := cfg.TLS()
	if err != nil {
		return nil, "", err
	}
	listener, err := api.Listen(ctx, cfg.Listen, cert, cfg.AllowPlaintext)
	if err != nil {
		return nil, "", err
	}
	scheme := "http"
	if cert != nil {
		scheme = "https"
	}
	return listener, scheme + "://" + listener.Addr().String(), nil
}

// local opens a daemon for this process alone.
func local(ctx context.Context, o Options) (*cli.Local, error) {
	o.Local = true
	d, err := New(ctx, o)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }() // ends with Close below
	shut := func(context.Context) error {
		cancel()
		return errors.Join(<-ended, d.Close())
	}
	select {
	case <-d.Ready():
		return &cli.Local{Handler: d.Handler(), Key: d.LocalKey().Reveal(), Close: shut}, nil
	case err := <-ended:
		cancel()
		return nil, errors.Join(fmt.Errorf("start: %w", err), d.Close())
	}
}
