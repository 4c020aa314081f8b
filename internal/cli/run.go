package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
)

// endTimeout limits how long run and shell wait for the end of their session.
const endTimeout = time.Minute

func (a *app) runCommand() *cobra.Command {
	var spec specFlags
	var r runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG…]",
		Short: "Create a session, run a command in it, and end it",
		Long: `Create a session, run a command in it, and end it.

Standard input, output and error are connected to the command, signals are
passed on to it, and its exit code is returned. Without a server this process
runs the session itself.

Exit codes: that of the command; 128 plus the number of the signal that ended
it; 127 when the command does not exist, 126 when it cannot be executed, 125 when
bivy fails or the session ends first, 2 when the command line is wrong.`,
		Example: "  bivy run -- python3 -c 'print(6*7)'\n  bivy run --upload script.py --memory 256M -- python3 script.py",
		Args:    want(true, "COMMAND"),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.failed = exitNotRun
			return a.run(cmd.Context(), &spec, &r, args)
		},
	}
	cmd.Flags().SetInterspersed(false)
	spec.register(cmd)
	f := cmd.Flags()
	f.BoolVarP(&r.tty, "tty", "t", false, "allocate a terminal for the command")
	f.BoolVarP(&r.noStdin, "no-stdin", "n", false, "do not connect standard input")
	f.StringArrayVar(&r.uploads, "upload", nil, "copy a file or directory `SRC[:DST]` into the session first; may be repeated")
	f.BoolVar(&r.timing, "timing", false, "print how long each phase took to stderr")
	f.BoolVar(&r.keep, "keep", false, "do not end the session afterwards; needs a server")
	return cmd
}

type runFlags struct {
	tty, noStdin, timing, keep bool
	uploads                    []string
}

func (a *app) run(ctx context.Context, spec *specFlags, r *runFlags, argv []string) error {
	req, err := spec.request()
	if err != nil {
		return err
	}
	place := anywhere
	if r.keep {
		place = onServer
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sig := notify(cancel)
	defer sig.stop()
	if r.tty && !term.IsTerminal(int(a.In.Fd())) {
		return noTerminal()
	}
	err = a.inSession(ctx, place, req, sig, r, func(s *client.Session) error {
		for _, u := range r.uploads {
			if err := a.uploadArg(ctx, s, u, req.Workdir); err != nil {
				return err
			}
		}
		return a.runAttached(ctx, s, client.Command{Argv: argv, Stdin: !r.noStdin}, r.tty, sig)
	})
	if n := sig.cancelledBy(); n != 0 {
		a.failed, a.code, a.quiet = exitSignal+n, exitSignal+n, errors.Is(err, context.Canceled)
	}
	return err
}

// inSession creates a session, calls do, and ends the session.
func (a *app) inSession(ctx context.Context, place where, req client.CreateSession, sig *signals, r *runFlags, do func(*client.Session) error) error {
	began := time.Now()
	c, err := a.connect(ctx, place)
	if err != nil {
		return err
	}
	connected := time.Now()
	m := a.newMeter()
	s, err := c.CreateSessionWith(ctx, req, client.CreateOptions{Progress: m.progress, UndoOnCancel: true})
	m.end()
	if err != nil {
		return err
	}
	created := time.Now()
	if r.keep {
		a.note("session %s", s.ID)
	}
	err = do(s)
	ran := time.Now()
	if !r.keep {
		life, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		sig.attach(nil, nil)
		if _, endErr := s.End(life); endErr != nil {
			err = errors.Join(err, fmt.Errorf("end session %s: %w", s.ID, endErr))
		}
	}
	if r.timing {
		rows := [][]string{{"PHASE", "TOOK"}, {"connect", formatDuration(connected.Sub(began))}}
		for _, p := range s.Timing {
			rows = append(rows, []string{"create: " + p.Name, formatDuration(p.Took())})
		}
		rows = append(rows, []string{"create", formatDuration(created.Sub(connected))}, []string{"command", formatDuration(ran.Sub(created))},
			[]string{"end", formatDuration(time.Since(ran))}, []string{"session", s.ID})
		err = errors.Join(err, table(a.Err, rows...))
	}
	return err
}

// runAttached runs one command with the streams of this process and sets the exit
// code.
func (a *app) runAttached(ctx context.Context, s *client.Session, cmd client.Command, tty bool, sig *signals) error {
	cmd.OnDisconnect = client.Kill
	if tty {
		if !term.IsTerminal(int(a.In.Fd())) {
			return noTerminal()
		}
		size, ok := a.terminalSize()
		if !ok {
			size = client.Size{Cols: 80, Rows: 24} // the terminal does not report its size
		}
		cmd.PTY = &size
		cmd.Stdin = true
		if _, ok := cmd.Env["TERM"]; !ok && a.env.Term != "" {
			env := map[string]string{"TERM": a.env.Term}
			for k, v := range cmd.Env {
				env[k] = v
			}
			cmd.Env = env
		}
	}
	p, err := s.Start(ctx, cmd)
	if err != nil {
		return commandError(err, cmd.Argv)
	}
	defer p.Close()
	restore := func() {} // restores the mode of the terminal
	defer func() { restore() }()
	var resize func(context.Context)
	if tty {
		old, err := term.MakeRaw(int(a.In.Fd()))
		if err != nil {
			return fmt.Errorf("terminal: %w", err)
		}
		restore = sync.OnceFunc(func() {
			if err := term.Restore(int(a.In.Fd()), old); err != nil {
				a.note("restore the terminal: %v; run: reset", err)
			}
		})
		resize = func(ctx context.Context) {
			if size, ok := a.terminalSize(); ok {
				// After an error the size is right again with the next change.
				_ = p.Resize(ctx, size)
			}
		}
	}
	sig.attach(p, resize)
	defer sig.attach(nil, nil)
	if cmd.Stdin {
		// A read of standard input cannot be cancelled; it ends with the process.
		go copyStdin(p, a.In)
	}
	exit, err := p.Wait(a.Out, a.Err)
	restore()
	if err != nil {
		if errors.Is(err, syscall.EPIPE) && !errors.Is(err, client.ErrDetached) {
			// The reader of the output has closed it, as head does.
			a.code = exitSignal + int(syscall.SIGPIPE)
			return nil
		}
		return err
	}
	a.code = exit.Status()
	if exit.Code < 0 && exit.Signal == 0 {
		// It was ended from outside and has no exit code of its own.
		a.code = exitNotRun
	}
	switch {
	case exit.OOM:
		a.note("the command was killed: the session reached its memory limit")
	case exit.Error != "":
		why := exit.Error
		if info, err := s.Get(ctx); err == nil && info.Reason != "" {
			why = "the session ended: " + strings.TrimSuffix(info.Reason+": "+info.Detail, ": ")
		}
		a.note("the command was ended: %s", why)
	}
	return nil
}

// noTerminal is the error of -t without a terminal.
func noTerminal() error {
	return kind.Errorf(kind.Invalid, "standard input is not a terminal").WithField("--tty").WithHint("omit -t")
}

// terminalSize returns the size of the terminal, or false when it is unknown.
func (a *app) terminalSize() (client.Size, bool) {
	cols, rows, err := term.GetSize(int(a.In.Fd()))
	if err != nil || cols < 1 || rows < 1 || cols > 0xffff || rows > 0xffff {
		return client.Size{}, false
	}
	return client.Size{Cols: uint16(cols), Rows: uint16(rows)}, true
}

// copyStdin sends in to the standard input of the command.
func copyStdin(p *client.Process, in io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			if _, err := p.Write(buf[:n]); err != nil {
				return // the command has ended, which Wait reports
			}
		}
		if err != nil {
			_ = p.CloseStdin() // as above
			return
		}
	}
}

func (a *app) execCommand() *cobra.Command {
	var c client.Command
	var env []string
	var timeout string
	var tty, noStdin, detach bool
	cmd := &cobra.Command{
		Use:   "exec [flags] SESSION -- COMMAND [ARG…]",
		Short: "Run a command in a session",
		Long: `Run a command in a session.

Standard input, output and error are connected to the command, signals are
passed on to it, and its exit code is returned. When this process disconnects,
the command is killed, unless it was started with --detach. Exit codes are those
of bivy run.`,
		Args:              want(true, "SESSION", "COMMAND"),
		ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			a.failed = exitNotRun
			argv := args[1:]
			if argv[0] == "--" {
				argv = argv[1:]
			}
			if len(argv) == 0 {
				a.parsed = false
				return kind.Errorf(kind.Invalid, "missing argument COMMAND")
			}
			var err error
			c.Argv = argv
			if c.Env, err = parsePairs("--env", env, config.Variable); err != nil {
				return err
			}
			if timeout != "" {
				n, err := parseSeconds("--timeout", timeout)
				if err != nil {
					return err
				}
				c.TimeoutSeconds = float64(n)
			}
			return a.exec(cmd.Context(), args[0], c, tty, noStdin, detach)
		},
	}
	cmd.Flags().SetInterspersed(false)
	f := cmd.Flags()
	f.BoolVarP(&tty, "tty", "t", false, "allocate a terminal for the command")
	f.BoolVarP(&noStdin, "no-stdin", "n", false, "do not connect standard input")
	f.BoolVarP(&detach, "detach", "d", false, "print the id of the command once it has started, and leave it running")
	f.StringArrayVarP(&env, "env", "e", nil, "environment variable `KEY=VALUE`, or KEY for the value it has here; may be repeated")
	f.StringVar(&c.User, "user", "", "`USER` to run as (default the session's)")
	f.StringVar(&c.Cwd, "workdir", "", "`DIR` to start in (default the session's)")
	f.StringVar(&timeout, "timeout", "", "kill the command after a `DURATION` such as 90s (default never)")
	f.StringVar(&c.Tag, "tag", "", "`TEXT` kept with the command")
	return cmd
}

func (a *app) exec(ctx context.Context, id string, c client.Command, tty, noStdin, detach bool) error {
	conn, err := a.connect(ctx, onServer)
	if err != nil {
		return err
	}
	s := conn.Session(id)
	if detach {
		info, err := s.StartDetached(ctx, c)
		if err != nil {
			return commandError(err, c.Argv)
		}
		if a.json() {
			return a.printJSON(info)
		}
		fmt.Fprintln(a.Out, info.ID)
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sig := notify(cancel)
	defer sig.stop()
	c.Stdin = !noStdin
	err = a.runAttached(ctx, s, c, tty, sig)
	if n := sig.cancelledBy(); n != 0 {
		a.failed, a.code, a.quiet = exitSignal+n, exitSignal+n, errors.Is(err, context.Canceled)
	}
	return err
}

// shellArgv starts bash, or else sh, as a login shell.
var shellArgv = []string{"/bin/sh", "-c", `if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi`}

func (a *app) shellCommand() *cobra.Command {
	var spec specFlags
	var r runFlags
	cmd := &cobra.Command{
		Use:   "shell [flags] [SESSION]",
		Short: "Open a shell in a session, or in a new session that ends with it",
		Args:  atMost(1), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			a.failed = exitNotRun
			if !term.IsTerminal(int(a.In.Fd())) {
				a.parsed = false
				return kind.Errorf(kind.Invalid, "standard input is not a terminal").WithHint("use bivy exec or bivy run")
			}
			if len(args) == 0 {
				r.tty = true
				return a.run(cmd.Context(), &spec, &r, shellArgv)
			}
			return a.exec(cmd.Context(), args[0], client.Command{Argv: shellArgv}, true, false, false)
		},
	}
	spec.register(cmd)
	cmd.Flags().BoolVar(&r.keep, "keep", false, "do not end the new session afterwards; needs a server")
	return cmd
}

// uploadArg copies one SRC[:DST] of --upload.
func (a *app) uploadArg(ctx context.Context, s *client.Session, arg, workdir string) error {
	src, dst := arg, ""
	if i := strings.LastIndexByte(arg, ':'); i > 0 {
		src, dst = arg[:i], arg[i+1:]
	}
	abs, err := filepath.Abs(src)
	if err != nil {
		return err
	}
	if _, err := os.Stat(abs); err != nil {
		return kind.Errorf(kind.Invalid, "%w", err).WithField("--upload")
	}
	if dst == "" {
		dst = path.Join(workdir, filepath.Base(abs))
	}
	return a.upload(ctx, s, src, dst)
}
