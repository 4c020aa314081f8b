package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/kind"
	"bivy/internal/session"
)

func (a *app) logsCommand() *cobra.Command {
	var follow, all bool
	var after uint64
	cmd := &cobra.Command{
		Use: "logs [flags] SESSION", Short: "Show what happened in a session",
		Long: `Show what happened in a session, from its record: its states, the commands that
ran in it and how they ended, the files that were copied and changed. Output of
commands is not part of the record. With -o json each event is one line.`,
		Args: want(false, "SESSION"), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			s := c.Session(args[0])
			events := s.Events(cmd.Context(), after)
			if follow {
				events = s.Follow(cmd.Context(), after)
			}
			for ev, err := range events {
				if err != nil {
					return err
				}
				switch {
				case a.json():
					err = a.printJSONLine(ev)
				case all || !detail(ev.Action):
					_, err = fmt.Fprintln(a.Out, eventLine(ev))
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "continue with new events until the session has ended")
	f.BoolVar(&all, "all", false, "include steps and intents")
	f.Uint64Var(&after, "after", 0, "only events after number `N`")
	return cmd
}

// detail reports whether an event is only shown with --all.
func detail(action string) bool {
	return strings.HasPrefix(action, "step.") || strings.HasSuffix(action, ".intent") && action != string(audit.CommandIntent) ||
		action == string(audit.CommandStarted)
}

// eventLine formats an event as one line.
func eventLine(ev client.Event) string {
	line := fmt.Sprintf("%s %5d  %-16s %s", ev.Time.UTC().Format("2006-01-02 15:04:05.000"), ev.Seq, ev.Action, eventText(ev))
	if ev.Outcome != string(audit.OK) && ev.Outcome != string(audit.Pending) {
		line += "  [" + ev.Outcome + "]"
	}
	return strings.TrimRight(oneLine(line), " ")
}

// eventText formats the payload of an event. The fields differ by action; missing
// ones are omitted.
func eventText(ev client.Event) string {
	var p struct {
		Argv       []string `json:"argv"`
		Command    string   `json:"command"`
		Exit       *int     `json:"exit"`
		Signal     int      `json:"signal"`
		Millis     *float64 `json:"ms"`
		Path       string   `json:"path"`
		To         string   `json:"to"`
		Op         string   `json:"op"`
		Size       *int64   `json:"size"`
		Reason     string   `json:"reason"`
		Detail     string   `json:"detail"`
		Error      string   `json:"error"`
		Flow       string   `json:"flow"`
		Step       string   `json:"step"`
		Result     string   `json:"result"`
		Kind       string   `json:"kind"`
		SpecDigest string   `json:"spec_digest"`
	}
	if len(ev.Payload) == 0 {
		return ""
	}
	if json.Unmarshal(ev.Payload, &p) != nil {
		// A payload of another form is shown unchanged.
		return string(ev.Payload)
	}
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if len(p.Argv) > 0 {
		add("%s", quoteArgv(p.Argv))
	}
	for _, s := range []string{strings.TrimSpace(p.Flow + " " + p.Step), p.Op, p.Kind, p.Path} {
		if s != "" {
			add("%s", s)
		}
	}
	if p.To != "" {
		add("to %s", p.To)
	}
	if p.Size != nil {
		add("%s", size(*p.Size))
	}
	switch {
	case p.Signal != 0:
		add("signal %d", p.Signal)
	case p.Exit != nil:
		add("exit %d", *p.Exit)
	}
	if p.Millis != nil {
		add("in %s", span(time.Duration(*p.Millis*float64(time.Millisecond))))
	}
	for _, s := range []string{p.Reason, p.Result, p.Detail, p.Error} {
		if s != "" {
			add("%s", s)
		}
	}
	return strings.Join(out, "  ")
}

func (a *app) auditCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "audit", Short: "Show, export and verify records"})
	cmd.AddCommand(a.auditShow(), a.auditExport(), a.auditVerify())
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
	cmd := &cobra.Command{
		Use: "export SESSION", Short: "Write a record in the form that is verified offline", Args: want(false, "SESSION"), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			r, err := c.Session(args[0]).Record(cmd.Context())
			if err != nil {
				return err
			}
			defer r.Close()
			if file == "" || file == "-" {
				_, err = io.Copy(a.Out, r)
				return err
			}
			// Never over what is there: a record is evidence.
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
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "file to make; default standard output")
	return cmd
}

func (a *app) auditVerify() *cobra.Command {
	var pins []string
	var open bool
	cmd := &cobra.Command{
		Use: "verify FILE|-|SESSION", Short: "Verify an exported record",
		Long: `Verify an exported record: that nothing in it was changed, left out, reordered or
added, and that it was sealed with a key that is pinned. It needs no server;
with a session's id the record is fetched first.

Pinned are the keys that --key names, else those in the data directory of this
machine's server and in trusted-keys beside the person's own settings. --key
takes a file with public keys, or the fingerprint of one of those.

Exit codes: 0 verified; 1 not.`,
		Args: want(false, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := a.pinned(pins)
			if err != nil {
				return err
			}
			in, close, err := a.openRecord(cmd, args[0])
			if err != nil {
				return err
			}
			defer close()
			report, err := audit.Verify(in, keys, audit.VerifyOptions{AllowOpen: open})
			var fault *audit.Fault
			if errors.As(err, &fault) {
				at := fmt.Sprintf("line %d", fault.Line)
				if fault.Seq > 0 {
					at = fmt.Sprintf("event %d", fault.Seq)
				}
				a.quiet = true
				if a.json() {
					return errors.Join(err, a.printJSON(map[string]any{"verified": false, "event": fault.Seq, "line": fault.Line, "why": fault.Why}))
				}
				fmt.Fprintf(a.Err, "bad record: %s: %s\n", at, oneLine(fault.Why))
				return err
			}
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(map[string]any{"verified": true, "session": report.Session, "events": report.Events, "erased": report.Erased,
					"sealed": report.Sealed, "sealed_at": report.SealedAt, "key": report.Key, "closeout": report.Closeout})
			}
			fmt.Fprintln(a.Out, report.String())
			return nil
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&pins, "key", nil, "file with public keys, or a fingerprint; may be repeated")
	f.BoolVar(&open, "open", false, "accept the record of a session that has not ended: intact so far, sealed by nobody")
	return cmd
}

func (a *app) openRecord(cmd *cobra.Command, arg string) (io.Reader, func() error, error) {
	none := func() error { return nil }
	if arg == "-" {
		return a.In, none, nil
	}
	f, err := os.Open(arg)
	if err == nil {
		return f, f.Close, nil
	}
	if _, idErr := session.ParseID(arg); idErr != nil || !errors.Is(err, fs.ErrNotExist) {
		return nil, none, kind.Errorf(kind.Invalid, "%w", err)
	}
	c, err := a.connect(cmd.Context(), anywhere)
	if err != nil {
		return nil, none, err
	}
	r, err := c.Session(arg).Record(cmd.Context())
	if err != nil {
		return nil, none, err
	}
	return r, r.Close, nil
}

// pinned finds the keys whose seals are believed.
func (a *app) pinned(pins []string) ([]audit.PublicKey, error) {
	var own []audit.PublicKey
	var looked []string
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	places := []string{filepath.Join(cfg.SignerDir(), audit.PublicKeyFile)}
	if dir := config.ClientDir(); dir != "" {
		places = append(places, filepath.Join(dir, "trusted-keys"))
	}
	for _, p := range places {
		looked = append(looked, p)
		keys, err := readKeys(p)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		}
		if err != nil {
			return nil, err
		}
		own = append(own, keys...)
	}
	if len(pins) == 0 {
		if len(own) == 0 {
			return nil, kind.Errorf(kind.Invalid, "no key is pinned: looked in %s", strings.Join(looked, " and ")).
				WithHint("name the file with the public key: --key FILE")
		}
		return own, nil
	}
	var out []audit.PublicKey
	for _, pin := range pins {
		keys, err := readKeys(pin)
		if err == nil {
			out = append(out, keys...)
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		found := false
		for _, k := range own {
			if k.Fingerprint() == pin {
				out, found = append(out, k), true
			}
		}
		if !found {
			return nil, kind.Errorf(kind.Invalid, "%q is neither a file nor the fingerprint of a key in %s", pin, strings.Join(looked, " or ")).WithField("--key")
		}
	}
	return out, nil
}

func readKeys(path string) ([]audit.PublicKey, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	keys, err := audit.ParsePublicKeys(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return keys, nil
}
