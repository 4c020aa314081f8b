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

func (a *app) missing(what string) error {
	return kind.Errorf(kind.Invalid, "this build of bivy has no %s", what)
}

func (a *app) serveCommand() *cobra.Command {
	var listen, driver, runDir string
	cmd := &cobra.Command{
		Use: "serve [flags]", Short: "Run the server of this machine", Args: cobra.NoArgs,
		Long: `Run the server of this machine, until SIGINT or SIGTERM. Sessions live on without
it and are taken back when it starts again.

The first start writes an admin's API key to a file that only its owner can
read. The command line finds server and key by itself on the same machine.`,
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
	f.StringVar(&listen, "listen", "", "HOST:PORT (default "+config.DefaultListen+")")
	f.StringVar(&runDir, "run", "", "directory for what need not survive a reboot (default "+config.DefaultRunDir+")")
	f.StringVar(&driver, "driver", "", "how sandboxes are isolated (default "+config.DefaultDriver+")")
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

// announcement is made by the server when it is ready, on a goroutine of its
// own choice, and taken back when it has stopped.
type announcement struct {
	mu       sync.Mutex
	over     bool
	withdraw func() error
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
		Use: "doctor", Short: "Say what this machine has and what that enables or forbids", Args: cobra.NoArgs,
		Long: `Say what this machine has and what that enables or forbids. With --server it
asks about that server's machine. Exit codes: 0 nothing has failed; 1 otherwise.`,
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
		Use: "bench [SUITE]", Short: "Measure this machine", Args: cobra.MaximumNArgs(1),
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
	cmd.Flags().StringVar(&b.OutDir, "out", "", "directory to write the figures to")
	return cmd
}

func (a *app) keyCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "key", Short: "Make, list and revoke API keys"})
	var k client.CreateKey
	var role string
	create := &cobra.Command{
		Use: "create", Short: "Make a key and print its secret, this once", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch k.Role = client.Role(role); k.Role {
			case client.Admin, client.Developer, client.Auditor:
			default:
				return kind.Errorf(kind.Invalid, "%.100q; want admin, developer or auditor", role).WithField("--role")
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
	create.Flags().StringVar(&role, "role", string(client.Developer), "admin, developer or auditor")
	create.Flags().StringVar(&k.Label, "label", "", "what to call it")
	ls := &cobra.Command{
		Use: "ls", Short: "List keys", Args: cobra.NoArgs,
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
				rows = append(rows, []string{k.ID, string(k.Role), when(k.CreatedAt), k.CreatedBy, when(k.RevokedAt), k.Label})
			}
			return table(a.Out, rows...)
		},
	}
	revoke := &cobra.Command{
		Use: "revoke KEY", Short: "Make a key worthless at once", Args: want(false, "KEY"),
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
