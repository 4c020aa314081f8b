// Command bivy is the command line, the server and the node daemon of bivy.
package main

import (
	"context"
	"os"
	"runtime"

	"bivy/client"
	"bivy/internal/cli"
	"bivy/internal/daemon"
)

// Set by the linker (see the Makefile).
var version, commit = "dev", ""

func main() {
	v := client.Version{Version: version, Commit: commit, Go: runtime.Version(), API: "v1"}
	os.Exit(cli.Main(context.Background(), daemon.Engine(v), os.Args[1:], cli.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}))
}
