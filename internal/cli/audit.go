package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/kind"
)

func (a *app) auditCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "audit", Short: "Show, export and verify records"})
	cmd.AddCommand(a.auditShow(), a.auditExport(), a.auditVerify(), a.auditHead(), a.auditKey())
	return cmd
}

func (a *app) auditShow() *cobra.Command {
	return &cobra.Command{
		Use: "show SESSION", Short: "Show every event of a record with its hash", Args: want(false, "SESSION"), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			items := []client.Event{}
			rows := [][]string{{"SEQ", "TIME", "ACTION", "OUTCOME", "ACTOR", "HASH", ""}}
			for ev, err := range c.Session(args[0]).Events(cmd.Context(), 0) {
				if err != nil {
					return err
				}
				items = append(items, ev)
				rows = append(rows, []string{fmt.Sprint(ev.Seq), ev.Time.UTC().Format(time.RFC3339Nano), ev.Action, ev.Outcome,
					ev.Actor.Subject, ev.Hash[:min(12, len(ev.Hash))], eventText(ev)})
			}
			if a.json() {
				return a.printJSON(items)
			}
			return table(a.Out, rows...)
		},
	}
}

func (a *app) auditExport() *cobra.Command {
	var file string
	var system bool
	cmd := &cobra.Command{
		Use: "export [flags] SESSION", Short: "Write a record in the form that is verified offline", ValidArgsFunction: a.completeSession,
		Long: `Write a record in the form that is verified offline: that of a session or, with
--system, that of the server's node.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if system {
				return atMost(0)(cmd, args)
			}
			return want(false, "SESSION")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			var r io.ReadCloser
			if system {
				r, err = c.SystemRecord(cmd.Context())
			} else {
				r, err = c.Session(args[0]).Record(cmd.Context())
			}
			if err != nil {
				return err
			}
			defer r.Close()
			if file == "" || file == "-" {
				_, err = io.Copy(a.Out, r)
				return err
			}
			return writeNew(file, r)
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "`FILE` to create (default standard output)")
	cmd.Flags().BoolVar(&system, "system", false, "export the system record of the node")
	return cmd
}

// writeNew writes what r returns to a file that must not exist: a record is
// evidence and is never overwritten.
func writeNew(file string, r io.Reader) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return kind.Errorf(kind.Conflict, "%s exists", file).WithField("--file")
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	return nil
}

func (a *app) auditHead() *cobra.Command {
	return &cobra.Command{
		Use: "head", Short: "Print a signed statement of all records of the node", Args: atMost(0),
		Long: `Print a signed statement of how many records the server's node has, and of the
hash of the last event of each. Keep it on another machine. With

  bivy audit verify --system --head FILE

it shows later whether a record was deleted, cut or replaced since, for example
because an older copy of the database was restored.`,
		Example: "  bivy audit head > head.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			head, err := c.AuditHead(cmd.Context())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.Out, "%s\n", head)
			return err
		},
	}
}

func (a *app) auditKey() *cobra.Command {
	cmd := &cobra.Command{
		Use: "key", Short: "Show the keys that records are signed with", Args: atMost(0),
		Long: `Show the public key that the server's node signs records with, and the keys that
it replaced. The output is a file of keys for bivy audit verify --key.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			k, err := c.AuditKey(cmd.Context())
			if err != nil {
				return err
			}
			return a.printAuditKey(k)
		},
	}
	var lost bool
	rotate := &cobra.Command{
		Use: "rotate [flags]", Short: "Replace the signing key", Args: atMost(0),
		Long: `Replace the key that the server's node signs records with. The old key signs the
new one, so that new records verify wherever the old key is trusted.

With --lost the old key does not exist any more and signs nothing: the new key
has to be pinned wherever records are verified. It is used when the server does
not start because the key is missing, and needs no server.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			k, err := a.rotateKey(cmd, lost)
			if err != nil {
				return err
			}
			return a.printAuditKey(k)
		},
	}
	rotate.Flags().BoolVar(&lost, "lost", false, "the private key is lost; make a new one without its signature")
	cmd.AddCommand(rotate)
	return cmd
}

// rotateKey replaces the signing key through the server. The server does not
// start without its key: then a lost one is replaced by this process.
func (a *app) rotateKey(cmd *cobra.Command, lost bool) (client.AuditKey, error) {
	ctx := cmd.Context()
	if lost && a.server == "" && a.env.Server == "" {
		cfg, err := a.loadConfig()
		if err != nil {
			return client.AuditKey{}, err
		}
		_, alive, err := a.find(ctx, cfg.RunDir, true, 0)
		if err != nil {
			return client.AuditKey{}, err
		}
		if !alive {
			if a.engine.ReplaceLostKey == nil {
				return client.AuditKey{}, a.missing("way to replace a lost key")
			}
			return a.engine.ReplaceLostKey(ctx, cfg)
		}
	}
	c, err := a.connect(ctx, anywhere)
	if err != nil {
		return client.AuditKey{}, err
	}
	return c.RotateAuditKey(ctx, client.RotateAuditKey{Lost: lost})
}

// printAuditKey prints keys as a file of keys, with comments.
func (a *app) printAuditKey(k client.AuditKey) error {
	if a.json() {
		return a.printJSON(k)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# current key %s\n%s", k.Fingerprint, k.PublicKey)
	for _, f := range k.Former {
		text := "former key " + f.Fingerprint
		if !f.ReplacedAt.IsZero() {
			text += ", replaced " + formatTime(f.ReplacedAt)
		}
		if f.Lost {
			text += ", lost: it did not sign its successor"
		}
		fmt.Fprintf(&b, "# %s\n%s", text, f.PublicKey)
	}
	_, err := io.WriteString(a.Out, printable(b.String()))
	return err
}
