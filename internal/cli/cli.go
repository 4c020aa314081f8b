// Package cli is the bivy command. It is a client of the REST interface like
// any other: where no server runs, the engine that its caller injects is
// started in this process, and spoken to in the same way.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
)

// Exit codes. A command that ran to its end passes its own code through.
const (
	exitFailed        = 1   // bivy could not do it
	exitUsage         = 2   // the command line is wrong
	exitNotRun        = 125 // run, exec, shell: bivy could not do it
	exitNotExecutable = 126 // run, exec: the command cannot be executed
	exitNotFound      = 127 // run, exec: the command does not exist
	exitSignal        = 128 // plus the signal that ended the command
)

// Engine is what the command line needs that is not behind the REST
// interface. Nil functions are commands that this build does not have.
type Engine struct {
	Version client.Version

	// Serve runs a server until ctx ends. It calls ready once, when the
	// server listens and takes work.
	Serve func(ctx context.Context, cfg config.Config, log *slog.Logger, ready func(Listening)) error

	// Local starts the same server without an address, for this process alone.
	Local func(ctx context.Context, cfg config.Config, log *slog.Logger) (*Local, error)

	// Doctor looks at this machine.
	Doctor func(ctx context.Context, cfg config.Config) (client.Node, error)

	// Bench measures; what it finds is written as it says in docs/performance.md.
	Bench func(ctx context.Context, cfg config.Config, b Bench) error
}

// Listening is where a server can be reached.
type Listening struct {
	URL     string
	KeyFile string // that holds the first admin key; may be empty
}

// Local is a server in this process.
type Local struct {
	Handler http.Handler
	Key     string // an admin's
	// Close ends what the server still does, and lets go of what it holds.
	Close func(ctx context.Context) error
}

// Bench is what to measure.
type Bench struct {
	Suite  string // empty: all
	OutDir string // for the figures
	JSON   bool   // figures to Stdout, instead of a table
	Stdout io.Writer
	Stderr io.Writer
}

// Streams are the process's own.
type Streams struct {
	In, Out, Err *os.File
}

// Main runs the command line and returns the exit code.
func Main(ctx context.Context, e Engine, args []string, s Streams) int {
	a := &app{engine: e, Streams: s, env: config.Environment()}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.InitDefaultCompletionCmd(args...)
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			group(cmd)
		}
	}
	cmd, err := root.ExecuteContextC(ctx)
	a.path = cmd.CommandPath()
	if a.close != nil {
		err = errors.Join(err, a.close())
	}
	return a.exit(err)
}

// app is one invocation.
type app struct {
	Streams
	engine Engine
	env    config.Env

	server, keyFile, configFile, dataDir, output string

	path   string // of the command, e.g. "bivy key create"
	parsed bool   // the command line was understood
	failed int    // exit code of failures; 0: exitFailed
	code   int    // exit code when nothing failed
	quiet  bool   // the failure has been told
	close  func() error
}

func (a *app) json() bool { return a.output == "json" }

// exit tells of a failure and picks the exit code.
func (a *app) exit(err error) int {
	if err == nil {
		return a.code
	}
	var e *client.Error
	isClient := errors.As(err, &e)
	code := exitFailed
	switch {
	case !a.parsed || wrongFlag(err):
		code = exitUsage
	case isClient && e.ExitCode != 0 && a.failed != 0:
		code = e.ExitCode
	case a.failed != 0:
		code = a.failed
	}
	if !a.quiet {
		a.complain(err)
	}
	return code
}

func (a *app) complain(err error) {
	fmt.Fprintf(a.Err, "bivy: %s\n", printable(err.Error()))
	hint := kind.Hint(err)
	var e *client.Error
	if errors.As(err, &e) {
		if hint = e.Hint; hint == "" {
			hint = whereIDs(e)
		}
	}
	var dial *net.OpError
	if hint == "" && errors.As(err, &dial) && dial.Op == "dial" {
		hint = "is the server running? --server and BIVY_SERVER name another one"
	}
	if hint == "" && (!a.parsed || wrongFlag(err)) {
		hint = "see " + a.path + " --help"
	}
	if hint != "" {
		fmt.Fprintf(a.Err, "hint: %s\n", printable(hint))
	}
}

// note says something that is neither output nor a failure.
func (a *app) note(format string, args ...any) {
	fmt.Fprintln(a.Err, "bivy: "+printable(fmt.Sprintf(format, args...)))
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "bivy",
		Short:         "Isolated sessions for agents: created in a moment, ended with a record",
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if a.output != "text" && a.output != "json" {
				return kind.Errorf(kind.Invalid, "%q; want text or json", a.output).WithField("--output")
			}
			a.parsed = true
			return nil
		},
	}
	root.Version = a.version()
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetHelpCommand(helpCommand())
	f := root.PersistentFlags()
	f.StringVar(&a.server, "server", "", "server to use, e.g. http://127.0.0.1:7171 (BIVY_SERVER)")
	f.StringVar(&a.keyFile, "key-file", "", "file that holds the API key (BIVY_API_KEY holds the key itself)")
	f.StringVar(&a.configFile, "config", "", "configuration file (BIVY_CONFIG; default "+config.File+")")
	f.StringVar(&a.dataDir, "data", "", "data directory of this machine's server (default "+config.DefaultDataDir+")")
	f.StringVarP(&a.output, "output", "o", "text", "text or json")
	root.AddGroup(&cobra.Group{ID: "use", Title: "Sessions:"}, &cobra.Group{ID: "see", Title: "Records and templates:"}, &cobra.Group{ID: "host", Title: "Server:"})
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("use", a.runCommand(), a.createCommand(), a.execCommand(), a.shellCommand(), a.cpCommand(), a.lsCommand(), a.showCommand(), a.timeoutCommand(), a.endCommand())
	add("see", a.logsCommand(), a.auditCommand(), a.templateCommand())
	add("host", a.serveCommand(), a.doctorCommand(), a.benchCommand(), a.keyCommand(), a.versionCommand())
	return root
}

func (a *app) version() string {
	return strings.TrimSpace("bivy " + a.engine.Version.Version + " " + a.engine.Version.Commit)
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Say what this bivy is", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := a.engine.Version
			if v.Go == "" {
				v.Go = runtime.Version()
			}
			if a.json() {
				return a.printJSON(v)
			}
			fmt.Fprintln(a.Out, a.version())
			return nil
		},
	}
}

// loadConfig reads the server's configuration with what the command line
// changes of it.
func (a *app) loadConfig() (config.Config, error) {
	path := a.configFile
	if path == "" {
		path = a.env.ConfigFile
	}
	cfg, err := config.Load(path)
	if err != nil {
		return cfg, err
	}
	if a.dataDir != "" {
		cfg.DataDir = a.dataDir
	}
	cfg = cfg.WithDefaults()
	return cfg, cfg.Validate()
}
