// Command bivy is the command line, the server and the node daemon of bivy.
package main

import (
	"context"
	"os"

	"bivy/client"
	"bivy/internal/cli"
	"bivy/internal/daemon"
)

// Set by the build.
var version, commit = "dev", ""

func main() {
	// Taken here: the gVisor driver replaces the process's own.
	streams := cli.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}
	engine := daemon.Engine(client.Version{Version: version, Commit: commit, API: "v1"})
	os.Exit(cli.Main(context.Background(), engine, os.Args[1:], streams))
}
