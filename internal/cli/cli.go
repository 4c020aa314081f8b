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

// Exit codes. run, exec and shell return the exit code of the command that ran.
const (
	exitFailed   = 1   // bivy failed
	exitUsage    = 2   // the command line is wrong
	exitNotRun   = 125 // run, exec, shell: bivy failed, or the session ended first
	exitNotFound = 127 // run, exec: the command does not exist; 126, not executable, comes from the server
	exitSignal   = 128 // plus the number of the signal that ended the command
)

// Engine holds what the command line needs and the REST interface does not
// offer. A command whose function is nil fails: the build does not have it.
type Engine struct {
	Version client.Version // of this build

	// Serve runs a server until ctx ends. It calls ready once, when the
	// server listens and takes work.
	Serve func(ctx context.Context, cfg config.Config, log *slog.Logger, ready func(Listening)) error

	// Local starts the same server without an address, for this process only.
	Local func(ctx context.Context, cfg config.Config, log *slog.Logger) (*Local, error)

	// ReplaceLostKey makes a new signing key in the data directory of a server that
	// does not run because its key is missing, and returns it.
	ReplaceLostKey func(ctx context.Context, cfg config.Config) (client.AuditKey, error)

	// Doctor checks this machine.
	Doctor func(ctx context.Context, cfg config.Config) (client.Node, error)

	// Bench measures this machine; docs/performance.md describes its output.
	Bench func(ctx context.Context, cfg config.Config, b Bench) error
}

// Listening says where a server can be reached.
type Listening struct {
	URL     string // e.g. http://127.0.0.1:7171
	KeyFile string // file with the first admin key; may be empty
}

// Local is a server in this process.
type Local struct {
	Handler http.Handler // of the REST interface
	Key     string       // API key of role admin
	// Close ends running work and releases the directories.
	Close func(ctx context.Context) error
}

// Bench is the options of a measurement.
type Bench struct {
	Suite  string // empty: all
	OutDir string // directory for the results; empty: none are kept
	JSON   bool   // write JSON to Stdout instead of a table
	Stdout io.Writer
	Stderr io.Writer // progress
}

// Streams are the standard streams of the process.
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
	if parent, ok := config.Variable("TRACEPARENT"); ok {
		ctx = client.WithTraceparent(ctx, parent)
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

	path   string       // of the command, e.g. "bivy key create"
	parsed bool         // the command line is right
	failed int          // exit code of failures; 0: exitFailed
	code   int          // exit code when nothing failed
	quiet  bool         // the failure was printed already
	close  func() error // stops the server in this process; nil: there is none
}

func (a *app) json() bool { return a.output == "json" }

// exit prints the error, if any, and returns the exit code.
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
		a.printError(err)
	}
	return code
}

// printError prints an error and its hint.
func (a *app) printError(err error) {
	fmt.Fprintf(a.Err, "bivy: %s\n", printable(err.Error()))
	hint := kind.Hint(err)
	var e *client.Error
	if errors.As(err, &e) {
		if hint = e.Hint; hint == "" {
			hint = lookupHint(e)
		}
	}
	var dial *net.OpError
	if hint == "" && errors.As(err, &dial) && dial.Op == "dial" {
		hint = "is the server running? use --server or BIVY_SERVER for another one"
	}
	if hint == "" && (!a.parsed || wrongFlag(err)) {
		hint = "see " + a.path + " --help"
	}
	if hint != "" {
		fmt.Fprintf(a.Err, "hint: %s\n", printable(hint))
	}
}

// note prints a message that is neither output nor an error.
func (a *app) note(format string, args ...any) {
	fmt.Fprintln(a.Err, "bivy: "+printable(fmt.Sprintf(format, args...)))
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "bivy",
		Short:         "Run AI agents in isolated sessions, each with a signed record",
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if a.output != "text" && a.output != "json" {
				return kind.Errorf(kind.Invalid, "invalid value %q: must be text or json", a.output).WithField("--output")
			}
			a.parsed = true
			return nil
		},
	}
	root.Version = a.version()
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetHelpCommand(helpCommand())
	f := root.PersistentFlags()
	f.StringVar(&a.server, "server", "", "`URL` of the server, e.g. http://127.0.0.1:7171 (default $BIVY_SERVER, else the server of this machine)")
	f.StringVar(&a.keyFile, "key-file", "", "`FILE` that contains the API key (default the key in $BIVY_API_KEY)")
	f.StringVar(&a.configFile, "config", "", "configuration `FILE` (default $BIVY_CONFIG, else "+config.File+")")
	f.StringVar(&a.dataDir, "data", "", "data `DIR` of this machine's server (default "+config.DefaultDataDir+")")
	f.StringVarP(&a.output, "output", "o", "text", "output `FORMAT`: text or json")
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
		Use: "version", Short: "Show the version of bivy", Args: atMost(0),
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

// loadConfig reads the server's configuration. Flags override it.
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
