package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"bivy/internal/bundle"
	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/guest/guestclient"
	"bivy/internal/guest/wire"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/node"
	"bivy/internal/session"
	"bivy/internal/snapshot"
	"bivy/internal/template"
)

// agentPath is where every image carries the agent.
const agentPath = "/usr/bin/bivy-guest"

// templates is what the lifecycle and the interface see of images: those of
// the store, and a snapshot beside each.
type templates struct {
	*template.Store
	snapshots *snapshot.Maker // nil: the driver boots every sandbox
	log       *slog.Logger

	// agent is the digest of the agent that this build puts into images, and
	// stamp the file that says which one base was built with.
	agent, stamp string
}

func newTemplates(store *template.Store, builder interface {
	driver.Driver
	driver.Checkpointer
}, build string, log *slog.Logger) *templates {
	return &templates{Store: store, log: log, snapshots: snapshot.New(snapshot.Options{
		Driver: builder, Build: build, Log: log,
		Ready: func(ctx context.Context, d driver.Driver, id session.SandboxID) error {
			c := guestclient.New(guestclient.Config{Dial: func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, id, wire.Port) }})
			defer c.Close()
			return c.Health(ctx)
		},
	})}
}

// Build makes the image and its snapshot.
func (t *templates) Build(ctx context.Context, spec template.Spec, progress template.Progress) (template.Template, error) {
	image, err := t.Store.Build(ctx, spec, progress)
	if err != nil {
		return image, err
	}
	if progress != nil {
		progress(template.Event{Phase: "snapshot"})
	}
	_, err = t.snapshot(ctx, image)
	return image, err
}

// Resolve implements lifecycle.Templates.
func (t *templates) Resolve(ctx context.Context, name string, progress func(done, total int64, what string)) (lifecycle.Template, error) {
	image, err := t.Store.Get(name)
	if isBase(name) && (kind.Is(err, kind.NotFound) || err == nil && t.outdated()) {
		image, err = t.Build(ctx, template.Base(), func(e template.Event) {
			if progress != nil {
				progress(e.Done, e.Total, "template base: "+e.Phase)
			}
		})
		if err == nil {
			err = t.built()
		}
	}
	if err != nil {
		return lifecycle.Template{}, err
	}
	dir, err := t.snapshot(ctx, image)
	if err != nil {
		return lifecycle.Template{}, err
	}
	// The group that an image may name after the user is the account's own.
	user, _, _ := strings.Cut(image.Config.User, ":")
	return lifecycle.Template{
		Digest: string(image.Digest), ImageDigest: string(image.ImageDigest), Image: image.Image, Snapshot: dir, SnapshotDiskMiB: snapshotResources.DiskMiB,
		Env: image.Config.Env, User: user, Workdir: image.Config.Workdir, Agent: []string{agentPath},
	}, nil
}

// outdated reports whether base has the agent of another build: an upgrade
// makes it anew on first use. Other templates are their owners' to rebuild.
func (t *templates) outdated() bool {
	b, err := os.ReadFile(t.stamp)
	return t.agent != "" && (err != nil || string(b) != t.agent)
}

func (t *templates) built() error {
	if t.agent == "" {
		return nil
	}
	return os.WriteFile(t.stamp, []byte(t.agent), 0o644) //nolint:gosec // a digest, not a secret
}

func isBase(name string) bool {
	ref, err := template.ParseRef(name)
	base, baseErr := template.ParseRef("base")
	return err == nil && baseErr == nil && ref == base
}

// snapshotResources are a session's defaults: a sandbox is restored with the
// disk it was saved with, so that sessions that ask for another are booted.
var snapshotResources = session.Spec{}.WithDefaults().Resources

func (t *templates) snapshot(ctx context.Context, image template.Template) (string, error) {
	if t.snapshots == nil {
		return "", nil
	}
	r := snapshotResources
	return t.snapshots.Ensure(ctx, snapshot.Request{
		Dir: image.SnapshotDir(),
		Start: driver.StartRequest{
			Image: image.Image, Args: []string{agentPath}, Env: []string{"PATH=" + node.AgentSearchPath}, Hostname: "bivy",
			Limits: driver.Limits{CPUMillis: r.CPUMillis, MemoryBytes: r.MemoryMiB << 20, DiskBytes: r.DiskMiB << 20, PIDs: r.PIDs},
		},
	})
}

// Lease implements lifecycle.Templates.
func (t *templates) Lease(_ context.Context, digest, holder string) error {
	return t.Store.Lease(template.Digest(digest), holder)
}

// Release implements lifecycle.Templates. A holder may hold any image: which
// one it was is not worth a second place to keep it.
func (t *templates) Release(_ context.Context, holder string) error {
	all, err := t.Store.List()
	for _, l := range all {
		err = errors.Join(err, t.Store.Release(l.Digest, holder))
	}
	return err
}

// openFake runs agents as processes of this host, without any isolation.
func (d *Daemon) openFake() (*templates, error) {
	payload, err := bundle.Load()
	if err != nil {
		return nil, err
	}
	guest, err := payload.Unpack(d.data("bin"), bundle.Guest)
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", bundle.Guest, err)
	}
	host := &fake.Host{Dir: d.run("fake"), Program: func(_ driver.StartRequest, root, socket string) *exec.Cmd {
		cmd := exec.Command(guest, "-listen", "unix:"+socket, "-run", filepath.Join(root, "run"), "-set-clock=false", "-set-hostname=false")
		cmd.Dir = root
		return cmd
	}}
	d.driver = &fake.Driver{Host: host}
	d.closers = append(d.closers, d.driver.Close)
	if err := d.openImages(func() (io.ReadCloser, error) { return opened(payload.Open(bundle.Guest)) }); err != nil {
		return nil, err
	}
	return &templates{Store: d.images, log: d.log}, nil
}
