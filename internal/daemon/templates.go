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
	"bivy/internal/sandbox"
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
	hostCPUs  int             // as the node's
	log       *slog.Logger

	// provide is Build for a template that the node needs by itself, recorded.
	provide func(ctx context.Context, spec template.Spec, progress template.Progress) (template.Template, error)

	// agent is the digest of the agent that this build puts into images, and
	// stamp the file that says which one base was built with.
	agent, stamp string
}

func newTemplates(store *template.Store, builder interface {
	driver.Driver
	driver.Checkpointer
}, build string, hostCPUs int, log *slog.Logger) *templates {
	return &templates{Store: store, log: log, hostCPUs: hostCPUs, snapshots: snapshot.New(snapshot.Options{
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
	_, err = t.resolved(ctx, image)
	return image, err
}

// Resolve implements lifecycle.Templates.
func (t *templates) Resolve(ctx context.Context, name string, progress func(done, total int64, what string)) (sandbox.Template, error) {
	image, err := t.Store.Get(name)
	if isBase(name) && (kind.Is(err, kind.NotFound) || err == nil && t.outdated()) {
		image, err = t.provide(ctx, template.Base(), func(e template.Event) {
			if progress != nil {
				progress(e.Done, e.Total, "template base: "+e.Phase)
			}
		})
		if err == nil {
			err = t.built()
		}
	}
	if kind.Is(err, kind.NotFound) {
		return sandbox.Template{}, kind.Errorf(kind.NotFound, "%w", err).WithField("template")
	}
	if err != nil {
		return sandbox.Template{}, err
	}
	return t.resolved(ctx, image)
}

// resolved describes an image with its snapshot, which it makes when there is
// none. The snapshot is of a sandbox with the default resources of a session;
// sessions of other shapes are booted (sandbox.Restorable).
func (t *templates) resolved(ctx context.Context, image template.Template) (sandbox.Template, error) {
	// An image may name a group after the user; the account's own is used.
	user, _, _ := strings.Cut(image.Config.User, ":")
	out := sandbox.Template{
		Digest: string(image.Digest), ImageDigest: string(image.ImageDigest), Image: image.Image,
		Env: image.Config.Env, User: user, Workdir: image.Config.Workdir, Agent: []string{agentPath},
	}
	if t.snapshots == nil {
		return out, nil
	}
	start := sandbox.Spec{
		ID: session.NewID().Sandbox(1), Owner: driver.Owner{Kind: driver.OwnedByTemplate, ID: out.Digest},
		Session: session.Spec{}.WithDefaults(), Template: out,
	}.StartRequest(t.hostCPUs)
	dir, err := t.snapshots.Ensure(ctx, snapshot.Request{Dir: image.SnapshotDir(), Start: start})
	if err != nil {
		return sandbox.Template{}, err
	}
	out.Snapshot, out.SnapshotShape = dir, start.Shape
	return out, nil
}

// outdated reports whether base has the agent of another build: an upgrade
// makes it anew on first use. Other templates are rebuilt by their owners.
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

// Lease implements lifecycle.Templates.
func (t *templates) Lease(_ context.Context, digest, holder string) error {
	return t.Store.Lease(template.Digest(digest), holder)
}

// Release implements lifecycle.Templates. Which image a holder has is not kept
// in a second place: every image is asked.
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
