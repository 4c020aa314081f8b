package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/kind"
)

// want checks that the named arguments are there and, unless more is set, that no
// others are.
func want(more bool, names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return kind.Errorf(kind.Invalid, "missing argument %s", names[len(args)])
		case len(args) > len(names) && !more:
			return kind.Errorf(kind.Invalid, "unexpected argument %.100q", args[len(names)])
		}
		return nil
	}
}

// atMost checks that there are no more than n arguments.
func atMost(n int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return kind.Errorf(kind.Invalid, "unexpected argument %.100q", args[n])
		}
		return nil
	}
}

// onlyGroup annotates commands that do nothing but hold subcommands.
const onlyGroup = "group"

// group makes cmd a command that only has subcommands: alone it shows its help.
func group(cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = map[string]string{onlyGroup: "true"}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return unknownCommand(cmd, args[0])
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	return cmd
}

func unknownCommand(parent *cobra.Command, name string) error {
	var names []string
	for _, c := range parent.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return kind.Errorf(kind.Invalid, "unknown command %.100q for %.100q", name, parent.CommandPath()).
		WithHint("commands: %s", strings.Join(names, ", "))
}

// helpCommand is the help command of cobra, except that an unknown command is an
// error.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Show help for a command",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			if c, _, err := cmd.Root().Find(args); err == nil {
				for _, sub := range c.Commands() {
					if sub.IsAvailableCommand() {
						names = append(names, sub.Name()+"\t"+sub.Short)
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		Args: func(cmd *cobra.Command, args []string) error {
			if c, rest, err := cmd.Root().Find(args); err != nil || len(rest) > 0 {
				if c == nil || len(rest) == 0 {
					c, rest = cmd.Root(), args
				}
				return unknownCommand(c, rest[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, _, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

// lookupHint returns a hint for an id that the server does not know.
func lookupHint(e *client.Error) string {
	if e.Code != client.CodeNotFound && e.Code != client.CodeInvalid {
		return ""
	}
	switch e.Field {
	case "session":
		return "list sessions with: bivy ls -a"
	case "key":
		return "list keys with: bivy key ls"
	case "template":
		return "list templates with: bivy template ls"
	}
	return ""
}

// wrongFlag reports whether err is about the value of a flag.
func wrongFlag(err error) bool {
	return kind.Is(err, kind.Invalid) && strings.HasPrefix(kind.Field(err), "--")
}

// commandError turns an error of the server about a command into the words of the
// command line.
func commandError(err error, argv []string) error {
	e, ok := err.(*client.Error) //nolint:errorlint // an error that wraps it has its own words
	if !ok {
		return err
	}
	out := *e
	switch {
	case e.ExitCode == exitNotFound && len(argv) > 0 && !strings.Contains(argv[0], "/"):
		out.Field, out.Message = "", "command not found: "+argv[0]
	case e.Field == "cwd":
		out.Field = "workdir"
		if dir, ok := between(e.Message, "cwd '", "' does not exist"); ok {
			out.Message = dir + " does not exist in the session"
		}
	case e.Field == "user":
		if name, ok := between(e.Message, "invalid username: '", "'"); ok {
			out.Message = "user " + name + " does not exist in the session"
		}
	}
	return &out
}

// between returns the text between before and after.
func between(s, before, after string) (string, bool) {
	_, s, ok1 := strings.Cut(s, before)
	s, _, ok2 := strings.Cut(s, after)
	return s, ok1 && ok2
}
