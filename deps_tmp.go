//go:build never

package bivy

import (
	_ "connectrpc.com/connect"
	_ "connectrpc.com/connect/cmd/protoc-gen-connect-go"
	_ "github.com/creack/pty"
	_ "github.com/erofs/go-erofs"
	_ "github.com/fsnotify/fsnotify"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/google/go-containerregistry/pkg/registry"
	_ "github.com/google/go-containerregistry/pkg/v1/layout"
	_ "github.com/google/go-containerregistry/pkg/v1/remote"
	_ "github.com/google/go-containerregistry/pkg/v1/tarball"
	_ "github.com/klauspost/compress/zstd"
	_ "github.com/opencontainers/runtime-spec/specs-go"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/schollz/progressbar/v3"
	_ "github.com/spf13/cobra"
	_ "go.yaml.in/yaml/v3"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "golang.org/x/term"
	_ "google.golang.org/protobuf/cmd/protoc-gen-go"
	_ "gvisor.dev/gvisor/runsc/cli"
	_ "gvisor.dev/gvisor/runsc/cmd"
	_ "gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	_ "gvisor.dev/gvisor/runsc/container"
	_ "modernc.org/sqlite"
)
