// Package testbed prepares what tests with real gVisor need: bivy-sentry and
// bivy-guest, built from this tree, and a template. It is for tests only.
package testbed

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"bivy/internal/template"
)

// Bed holds the binaries and the template. It is built once per test binary.
type Bed struct {
	Dir      string // removed by Close
	Sentry   string // path of bivy-sentry
	Guest    string // path of bivy-guest
	Build    string // the sentry's version string
	Template template.Template
	Store    *template.Store
}

// AgentPath is the path of the agent in images.
const AgentPath = "/usr/bin/bivy-guest"

// Path is the agent's PATH, which commands inherit.
const Path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// New builds a bed. If this machine cannot run gVisor it returns the reason in
// skip.
func New(ctx context.Context) (bed *Bed, skip string, err error) {
	if os.Geteuid() != 0 {
		return nil, "gVisor sandboxes need root", nil
	}
	dir, err := os.MkdirTemp("", "bivy-testbed-")
	if err != nil {
		return nil, "", err
	}
	b := &Bed{Dir: dir, Sentry: filepath.Join(dir, "bivy-sentry"), Guest: filepath.Join(dir, "bivy-guest"), Build: "bivy-testbed"}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	// The sentry executes itself again as an unprivileged user.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, "", err
	}
	if err := b.compile(ctx); err != nil {
		return nil, "", err
	}
	if b.Store, err = template.Open(filepath.Join(dir, "templates"), template.Options{Extra: []template.Extra{b.agent()}}); err != nil {
		return nil, "", err
	}
	if b.Template, err = b.Store.Build(ctx, template.Base(), nil); err != nil {
		return nil, "", fmt.Errorf("base template: %w", err)
	}
	return b, "", nil
}

func (b *Bed) agent() template.Extra {
	return template.Extra{Path: AgentPath, Mode: 0o555, Open: func() (io.ReadCloser, error) { return os.Open(b.Guest) }}
}

func (b *Bed) compile(ctx context.Context) error {
	for _, argv := range [][]string{
		{"go", "build", "-trimpath", "-ldflags", "-s -w -X gvisor.dev/gvisor/runsc/version.version=" + b.Build, "-o", b.Sentry, "./cmd/bivy-sentry"},
		{"cmd/bivy-guest/build.sh", b.Guest},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Dir = moduleRoot()
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%q: %w\n%s", argv, err, out)
		}
	}
	return nil
}

func moduleRoot() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// Close removes the bed's directory. b may be nil.
func (b *Bed) Close() {
	if b == nil {
		return
	}
	if b.Store != nil {
		_ = b.Store.Close()
	}
	_ = os.RemoveAll(b.Dir)
}

// Main builds a bed, passes it to use, and runs a package's tests. Where gVisor
// cannot run, bed is nil and skip is the reason, with which tests skip themselves.
func Main(m *testing.M, use func(bed *Bed, skip string)) int {
	bed, skip, err := New(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbed:", err)
		return 1
	}
	defer bed.Close()
	use(bed, skip)
	return m.Run()
}
