package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/kind"
)

func (a *app) createCommand() *cobra.Command {
	var spec specFlags
	var key string
	cmd := &cobra.Command{
		Use: "create [flags]", Short: "Create a session and print its id", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := spec.request()
			if err != nil {
				return err
			}
			c, err := a.connect(cmd.Context(), onServer)
			if err != nil {
				return err
			}
			m := a.newMeter()
			s, err := c.CreateSessionWith(cmd.Context(), req, client.CreateOptions{IdempotencyKey: key, Progress: m.progress})
			m.end()
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(client.CreatedSession{SessionInfo: s.Info, Timing: s.Timing})
			}
			fmt.Fprintln(a.Out, s.ID)
			return nil
		},
	}
	spec.register(cmd)
	cmd.Flags().StringVar(&key, "idempotency-key", "", "`TEXT`; a repeated create with the same text returns the same session")
	return cmd
}

func (a *app) lsCommand() *cobra.Command {
	var all, quiet bool
	var labels, states []string
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list", "ps"}, Short: "List sessions", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o := client.ListOptions{}
			var err error
			if o.Labels, err = parsePairs("--label", labels, nil); err != nil {
				return err
			}
			if o.States, err = parseStates(states); err != nil {
				return err
			}
			if len(states) == 0 && !all {
				o.States = slices.DeleteFunc(slices.Clone(allStates[:]), func(s client.State) bool { return s == client.Ended })
			}
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			items := []client.SessionInfo{}
			for s, err := range c.Sessions(cmd.Context(), o) {
				if err != nil {
					return err
				}
				items = append(items, s)
			}
			switch {
			case a.json():
				return a.printJSON(items)
			case quiet:
				for _, s := range items {
					fmt.Fprintln(a.Out, s.ID)
				}
				return nil
			}
			rows := [][]string{{"SESSION", "STATE", "TEMPLATE", "CREATED", "ENDS", "OWNER", "LABELS"}}
			for _, s := range items {
				state, ends := string(s.State), "in "+formatDuration(time.Until(s.Deadline))
				if s.Reason != "" {
					state += " (" + s.Reason + ")"
				}
				if !s.EndedAt.IsZero() {
					ends = formatDuration(time.Since(s.EndedAt)) + " ago"
				}
				rows = append(rows, []string{s.ID, state, s.Spec.Template, formatDuration(time.Since(s.CreatedAt)) + " ago", ends, s.Owner.Subject, pairsText(s.Spec.Labels)})
			}
			return table(a.Out, rows...)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&all, "all", "a", false, "include sessions that have ended")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	f.StringArrayVar(&labels, "label", nil, "only sessions with label `KEY=VALUE`; may be repeated")
	f.StringArrayVar(&states, "state", nil, "only sessions in `STATE`; several with commas; may be repeated (default all but ended)")
	return cmd
}

// allStates are the states of a session, in the order of its life.
var allStates = [...]client.State{client.Creating, client.Running, client.Pausing, client.Standby, client.Resuming, client.Quarantined, client.Ending, client.Ended}

func parseStates(texts []string) ([]client.State, error) {
	var out []client.State
	for _, text := range texts {
		for s := range strings.SplitSeq(text, ",") {
			if !slices.Contains(allStates[:], client.State(s)) {
				var names []string
				for _, known := range allStates {
					names = append(names, string(known))
				}
				return nil, kind.Errorf(kind.Invalid, "invalid value %.100q: must be a state", s).WithField("--state").WithHint("states: %s", strings.Join(names, ", "))
			}
			out = append(out, client.State(s))
		}
	}
	return out, nil
}

// pairsText formats a map as KEY=VALUE,KEY=VALUE.
func pairsText(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, ",")
}

func (a *app) showCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show SESSION", Short: "Show a session", Args: want(false, "SESSION"), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			s, err := c.GetSession(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(s.Info)
			}
			rows := sessionRows(s.Info)
			if s.Info.State == client.Running {
				more, err := a.liveRows(cmd.Context(), s)
				if err != nil {
					return err
				}
				rows = append(rows, more...)
			}
			return table(a.Out, rows...)
		},
	}
}

func sessionRows(s client.SessionInfo) [][]string {
	rows := [][]string{
		{"session", s.ID},
		{"state", string(s.State)},
		{"reason", strings.TrimSuffix(s.Reason+": "+s.Detail, ": ")},
		{"sandbox", s.Sandbox},
		{"template", s.Spec.Template + " " + s.Template},
		{"cpu", fmt.Sprintf("%g cores", float64(s.Spec.Resources.CPUMillis)/1000)},
		{"memory", formatSize(s.Spec.Resources.MemoryMiB << 20)},
		{"disk", formatSize(s.Spec.Resources.DiskMiB << 20)},
		{"owner", s.Owner.Subject},
		{"on behalf of", s.Owner.OnBehalfOf},
		{"trigger", s.Owner.Trigger},
		{"labels", pairsText(s.Spec.Labels)},
		{"created", formatTime(s.CreatedAt)},
		{"started", formatTime(s.StartedAt)},
		{"ends by itself", formatTime(s.Deadline)},
		{"ended", formatTime(s.EndedAt)},
		{"spec", s.SpecDigest},
	}
	for _, r := range s.Residuals {
		rows = append(rows, []string{"residual", r})
	}
	return slices.DeleteFunc(rows, func(r []string) bool { return r[1] == "" || r[1] == "-" })
}

// liveRows returns the resource usage and the commands of a running session, as
// far as the key permits.
func (a *app) liveRows(ctx context.Context, s *client.Session) ([][]string, error) {
	var rows [][]string
	st, err := s.Stats(ctx)
	if err != nil && !errors.Is(err, &client.Error{Code: client.CodeConflict}) && !errors.Is(err, &client.Error{Code: client.CodeUnavailable}) {
		return nil, err
	}
	if err == nil {
		rows = append(rows, []string{"used", fmt.Sprintf("%s of CPU, %s of memory (peak %s), %d threads",
			formatDuration(time.Duration(st.CPUMicroseconds)*time.Microsecond), formatSize(st.MemoryBytes), formatSize(st.MemoryPeakBytes), st.PIDs)})
	}
	list, err := s.Commands(ctx)
	if errors.Is(err, &client.Error{Code: client.CodeConflict}) || errors.Is(err, &client.Error{Code: client.CodeDenied}) {
		return rows, nil
	}
	for _, c := range list {
		state := "running for " + formatDuration(time.Since(c.StartedAt))
		if c.Exit != nil {
			state = fmt.Sprintf("ended, status %d", c.Exit.Status())
		}
		rows = append(rows, []string{"command", c.ID + "  " + state + "  " + quoteArgv(c.Argv)})
	}
	return rows, err
}

// quoteArgv formats a command as shell input, cut after 200 characters.
func quoteArgv(argv []string) string {
	var out []string
	for _, s := range argv {
		if s == "" || strings.ContainsFunc(s, func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("@%_-+=:,./", r))
		}) {
			s = "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
		}
		out = append(out, s)
	}
	const most = 200
	text := []rune(strings.Join(out, " "))
	if len(text) > most {
		return string(text[:most]) + "…"
	}
	return string(text)
}

func (a *app) timeoutCommand() *cobra.Command {
	return &cobra.Command{
		Use: "timeout SESSION DURATION", Short: "Set when a session ends by itself: DURATION from now", Args: want(false, "SESSION", "DURATION"),
		Example: "  bivy timeout h2k… 10m", ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := parseSeconds("DURATION", args[1])
			if err != nil {
				a.parsed = false
				return err
			}
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			info, err := c.Session(args[0]).SetTimeout(cmd.Context(), time.Duration(n)*time.Second)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(info)
			}
			fmt.Fprintf(a.Out, "%s ends by itself at %s\n", info.ID, formatTime(info.Deadline))
			return nil
		},
	}
}

func (a *app) endCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "end SESSION…", Aliases: []string{"rm", "stop"}, Short: "End sessions and wait until their sandboxes are gone", ValidArgsFunction: a.completeSession,
		Args: func(_ *cobra.Command, args []string) error {
			if (len(args) == 0) != all {
				return errors.New("specify one or more sessions, or --all")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context(), anywhere)
			if err != nil {
				return err
			}
			if all {
				for s, err := range c.Sessions(cmd.Context(), client.ListOptions{}) {
					if err != nil {
						return err
					}
					if s.State != client.Ended {
						args = append(args, s.ID)
					}
				}
			}
			// A failure does not keep the other sessions from being ended.
			var failed []error
			ended := []client.SessionInfo{}
			for _, id := range args {
				info, err := c.Session(id).End(cmd.Context())
				if err != nil {
					if !strings.Contains(err.Error(), id) {
						err = fmt.Errorf("session %s: %w", id, err)
					}
					failed = append(failed, err)
					continue
				}
				ended = append(ended, info)
				if !a.json() {
					line := info.ID + " ended: " + info.Reason
					if len(info.Residuals) > 0 {
						line += fmt.Sprintf(" (%d residuals)", len(info.Residuals))
					}
					fmt.Fprintln(a.Out, oneLine(line))
				}
			}
			if a.json() {
				failed = append(failed, a.printJSON(ended))
			}
			return errors.Join(failed...)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "end every session that the key may end")
	return cmd
}

// completionTimeout limits how long completion waits for the server.
const completionTimeout = 2 * time.Second

// completeSession completes ids of sessions that have not ended. Without a server
// there are none.
func (a *app) completeSession(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 && cmd.Name() != "end" {
		return nil, cobra.ShellCompDirectiveDefault
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	c, err := a.connect(ctx, onServer)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for s, err := range c.Sessions(ctx, client.ListOptions{}) {
		if err != nil {
			break
		}
		if s.State != client.Ended {
			out = append(out, s.ID+"\t"+string(s.State)+" "+s.Spec.Template)
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
