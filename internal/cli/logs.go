package cli

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/audit"
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
		add("%s", formatSize(*p.Size))
	}
	switch {
	case p.Signal != 0:
		add("signal %d", p.Signal)
	case p.Exit != nil:
		add("exit %d", *p.Exit)
	}
	if p.Millis != nil {
		add("in %s", formatDuration(time.Duration(*p.Millis*float64(time.Millisecond))))
	}
	for _, s := range []string{p.Reason, p.Result, p.Detail, p.Error} {
		if s != "" {
			add("%s", s)
		}
	}
	return strings.Join(out, "  ")
}
