package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"bivy/client"
	"bivy/internal/kind"
)

// want checks the arguments that a command must have, and says which of them
// is missing. Only with more may others follow.
func want(more bool, names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return kind.Errorf(kind.Invalid, "%s is missing", names[len(args)])
		case len(args) > len(names) && !more:
			return kind.Errorf(kind.Invalid, "%.100q is too much", args[len(names)])
		}
		return nil
	}
}

// group makes cmd one that only holds others: it shows its help, and takes no
// name that none of them has.
func group(cmd *cobra.Command) *cobra.Command {
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
	return kind.Errorf(kind.Invalid, "unknown command %.100q of %s", name, parent.CommandPath()).
		WithHint("there are %s", strings.Join(names, ", "))
}

// helpCommand is cobra's, but that what does not exist is a failure.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Tell of a command",
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

// whereIDs says how to find what has an id that is not known.
func whereIDs(e *client.Error) string {
	if e.Code != client.CodeNotFound && e.Code != client.CodeInvalid {
		return ""
	}
	switch e.Field {
	case "session":
		return "bivy ls -a lists sessions"
	case "key":
		return "bivy key ls lists keys"
	case "template":
		return "bivy template ls lists templates"
	}
	return ""
}

// wrongFlag reports whether err is about a flag's value.
func wrongFlag(err error) bool {
	return kind.Is(err, kind.Invalid) && strings.HasPrefix(kind.Field(err), "--")
}

// asTyped says what a server refused in the words of the command line.
func asTyped(err error, argv []string) error {
	e, ok := err.(*client.Error) //nolint:errorlint // what wraps it has its own words
	if !ok {
		return err
	}
	told := *e
	switch {
	case e.ExitCode == exitNotFound && len(argv) > 0 && !strings.Contains(argv[0], "/"):
		told.Field, told.Message = "", "command not found: "+argv[0]
	case e.Field == "cwd":
		told.Field = "workdir"
		if dir, ok := between(e.Message, "cwd '", "' does not exist"); ok {
			told.Message = dir + " does not exist in the session"
		}
	case e.Field == "user":
		if name, ok := between(e.Message, "invalid username: '", "'"); ok {
			told.Message = name + " is no user of the template"
		}
	}
	return &told
}

func between(s, before, after string) (string, bool) {
	_, s, ok1 := strings.Cut(s, before)
	s, _, ok2 := strings.Cut(s, after)
	return s, ok1 && ok2
}
