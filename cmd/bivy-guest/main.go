// Command bivy-guest is process 1 inside a bivy sandbox. See package guest.
//
// It reads no secret from its command line or environment: the host sends the
// access token over the agent's port.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"bivy/internal/guest"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bivy-guest:", err)
		os.Exit(1)
	}
}

func run() error {
	cfg := guest.Default()
	verbose := flag.Bool("v", false, "log every orphan reaped")
	flag.StringVar(&cfg.Listen, "listen", cfg.Listen, "address to serve on, host:port or unix:path")
	flag.StringVar(&cfg.Etc, "etc", cfg.Etc, "directory of passwd, group and hosts")
	flag.StringVar(&cfg.Run, "run", cfg.Run, "directory for the files that identify the sandbox to E2B's tools")
	flag.StringVar(&cfg.User, "user", cfg.User, "default user until the host sets one")
	flag.BoolVar(&cfg.SetClock, "set-clock", cfg.SetClock, "let the host set the kernel's clock")
	flag.BoolVar(&cfg.SetName, "set-hostname", cfg.SetName, "let the host set the kernel's host name")
	flag.Parse()
	cfg.Path = os.Getenv("PATH")
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))

	// The agent needs little memory, and every sandbox has one: collect garbage
	// early.
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(64 << 20)
	if err := guest.PrepareProcess(cfg.Log); err != nil {
		return err
	}
	if os.Getpid() == 1 {
		if err := guest.MakeRunDirs(cfg.Run); err != nil {
			cfg.Log.Warn("cannot create the image's directories in /run", "err", err)
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	// Process 1 must survive every signal that a program inside can send.
	// Signals are caught and not ignored, because children inherit ignored ones.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGABRT, unix.SIGTRAP, unix.SIGSYS,
		unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM, unix.SIGSTKFLT, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGVTALRM, unix.SIGPIPE, unix.SIGIO, unix.SIGPWR)
	go func() { // runs until the process ends
		for s := range signals {
			if s == unix.SIGTERM || (s == unix.SIGINT && os.Getpid() != 1) {
				stop()
			}
		}
	}()
	agent, err := guest.New(cfg)
	if err != nil {
		return err
	}
	l, err := agent.Listen(ctx)
	if err != nil {
		return err
	}
	return agent.Run(ctx, l)
}
