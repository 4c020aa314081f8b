package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"bivy/client"
	"bivy/internal/config"
	"bivy/internal/kind"
)

// missing is the error of a command that this build does not have.
func (a *app) missing(what string) error {
	return kind.Errorf(kind.Invalid, "this build of bivy has no %s", what)
}

func (a *app) serveCommand() *cobra.Command {
	var listen, driver, runDir string
	cmd := &cobra.Command{
		Use: "serve [flags]", Short: "Run the server of this machine", Args: atMost(0),
		Long: `Run the server of this machine until SIGINT or SIGTERM. Sessions continue to run
without it, and the next server takes them over.

The first start writes an API key of role admin to a file that only its owner
can read. On the same machine the command line finds server and key by itself.

Flags override the configuration file.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.engine.Serve == nil {
				return a.missing("server")
			}
			cfg, err := a.loadConfig()
			if err != nil {
				return err
			}
			for _, f := range []struct {
				from string
				to   *string
			}{{listen, &cfg.Listen}, {driver, &cfg.Driver}, {runDir, &cfg.RunDir}} {
				if f.from != "" {
					*f.to = f.from
				}
			}
			if err := cfg.Validate(); err != nil {
				return err
			}
			return a.serve(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "", "`HOST:PORT` to listen on (default "+config.DefaultListen+")")
	f.StringVar(&runDir, "run", "", "`DIR` for files that need not survive a reboot (default "+config.DefaultRunDir+")")
	f.StringVar(&driver, "driver", "", "`NAME` of the driver that isolates sandboxes (default "+config.DefaultDriver+")")
	return cmd
}

func (a *app) serve(ctx context.Context, cfg config.Config) (err error) {
	log, err := cfg.Logger(a.Err)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
	defer stop()
	var an announcement
	err = a.engine.Serve(ctx, cfg, log, func(l Listening) {
		if err := an.make(cfg.RunDir, config.Running{URL: l.URL, KeyFile: l.KeyFile, DataDir: cfg.DataDir}); err != nil {
			stop()
			return
		}
		log.Info("serving", "url", l.URL, "data", cfg.DataDir, "driver", cfg.Driver, "key_file", l.KeyFile)
	})
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = nil
	}
	return errors.Join(err, an.end())
}

// announcement is the file that says where the server is. It is written when the
// server is ready, from any goroutine, and removed when the server has stopped.
type announcement struct {
	mu       sync.Mutex
	over     bool         // the server has stopped
	withdraw func() error // removes the file; nil: there is none
	err      error
}

func (n *announcement) make(runDir string, r config.Running) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		return nil
	}
	n.withdraw, n.err = config.Announce(runDir, r)
	return n.err
}

func (n *announcement) end() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.over = true
	if n.withdraw == nil {
		return n.err
	}
	return n.withdraw()
}

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Check what this machine has and what that enables or forbids", Args: atMost(0),
		Long: `Check what this machine has and what that enables or forbids. With --server,
show what that server found on its machine.

Exit codes: 0 no check failed; 1 otherwise.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var n client.Node
			if a.server != "" {
				c, err := a.connect(cmd.Context(), onServer)
				if err != nil {
					return err
				}
				if n, err = c.Node(cmd.Context()); err != nil {
					return err
				}
			} else {
				if a.engine.Doctor == nil {
					return a.missing("doctor")
				}
				cfg, err := a.loadConfig()
				if err != nil {
					return err
				}
				if n, err = a.engine.Doctor(cmd.Context(), cfg); err != nil {
					return err
				}
			}
			return a.printNode(n)
		},
	}
}

func (a *app) printNode(n client.Node) error {
	for _, f := range n.Facts {
		if f.Status == client.FactFail {
			a.code = exitFailed
		}
	}
	if a.json() {
		return a.printJSON(n)
	}
	var rows [][]string
	for _, f := range n.Facts {
		rows = append(rows, []string{strings.ToUpper(string(f.Status)), f.Name, f.Found, f.Means})
	}
	if err := table(a.Out, rows...); err != nil {
		return err
	}
	for _, f := range n.Facts {
		if f.Hint != "" && f.Status != client.FactOK {
			fmt.Fprintf(a.Out, "hint: %s: %s\n", f.Name, oneLine(f.Hint))
		}
	}
	return nil
}

func (a *app) benchCommand() *cobra.Command {
	b := Bench{}
	cmd := &cobra.Command{
		Use: "bench [SUITE]", Short: "Measure this machine", Args: atMost(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.engine.Bench == nil {
				return a.missing("bench")
			}
			cfg, err := a.loadConfig()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				b.Suite = args[0]
			}
			b.JSON, b.Stdout, b.Stderr = a.json(), a.Out, a.Err
			return a.engine.Bench(cmd.Context(), cfg, b)
		},
	}
	cmd.Flags().StringVar(&b.OutDir, "out", "", "`DIR` to write the results to (default none)")
	return cmd
}

func (a *app) keyCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "key", Short: "Create, list and revoke API keys"})
	var k client.CreateKey
	var role string
	create := &cobra.Command{
		Use: "create", Short: "Create a key and print its secret, which is not shown again", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch k.Role = client.Role(role); k.Role {
			case client.Admin, client.Developer, client.Auditor:
			default:
				return kind.Errorf(kind.Invalid, "invalid value %.100q: must be admin, developer or auditor", role).WithField("--role")
			}
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			out, err := c.CreateKey(cmd.Context(), k)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(out)
			}
			fmt.Fprintln(a.Out, out.Secret)
			return nil
		},
	}
	create.Flags().StringVar(&role, "role", string(client.Developer), "`ROLE` of the key: admin, developer or auditor")
	create.Flags().StringVar(&k.Label, "label", "", "`TEXT` to recognise the key by")
	ls := &cobra.Command{
		Use: "ls", Short: "List keys", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			keys, err := c.Keys(cmd.Context())
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(keys)
			}
			rows := [][]string{{"KEY", "ROLE", "CREATED", "BY", "REVOKED", "LABEL"}}
			for _, k := range keys {
				rows = append(rows, []string{k.ID, string(k.Role), formatTime(k.CreatedAt), k.CreatedBy, formatTime(k.RevokedAt), k.Label})
			}
			return table(a.Out, rows...)
		},
	}
	revoke := &cobra.Command{
		Use: "revoke KEY", Short: "Revoke a key; requests with it fail from then on", Args: want(false, "KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			return c.RevokeKey(cmd.Context(), args[0])
		},
	}
	cmd.AddCommand(create, ls, revoke)
	return cmd
}
