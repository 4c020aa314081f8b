package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/api"
	"bivy/internal/auth"
	"bivy/internal/bundle"
	"bivy/internal/catalog"
	"bivy/internal/config"
	"bivy/internal/doctor"
	"bivy/internal/driver"
	"bivy/internal/driver/fake"
	"bivy/internal/driver/gvisor"
	"bivy/internal/durable"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/node"
	"bivy/internal/nodeinfo"
	"bivy/internal/secret"
	"bivy/internal/session"
	"bivy/internal/store/sqlite"
	"bivy/internal/template"
	"bivy/internal/workgroup"
)

// Options of New.
type Options struct {
	Config  config.Config // with defaults, valid
	Log     *slog.Logger
	Version client.Version
	// Local is for a command that has no server and works by itself: it is no
	// start of a server in the record of the node.
	Local bool
	// FailPoint is given to the lifecycle: tests stop the process in it. Nil in
	// production.
	FailPoint func(point string)
}

// Daemon is one machine's bivy: the interface, the lifecycle, the node and
// everything below.
type Daemon struct {
	cfg     config.Config
	log     *slog.Logger
	version client.Version
	id      session.NodeID

	store    *sqlite.Store
	signing  *journal.Signing
	system   *journal.SystemRecord
	access   access.Decider
	keys     *auth.Keyring
	images   *template.Store
	catalog  *catalog.Service
	driver   driver.Driver
	isolator string // build of what isolates, e.g. gVisor's; may be empty
	node     *node.Node
	manager  *lifecycle.Manager
	handler  http.Handler

	// AdminKeyFile holds the first admin key when this start made it.
	AdminKeyFile string
	local        secret.Value

	closers []func() error
}

// New opens the data directory and everything on it. It fails with Conflict
// while another daemon has it, and when the key that signs records is lost.
// What New opened, Close closes.
func New(ctx context.Context, o Options) (*Daemon, error) {
	return assemble(ctx, o, (*Daemon).openDriver)
}

// assemble is New with the driver and the templates that open makes.
func assemble(ctx context.Context, o Options, open func(*Daemon) (*templates, error)) (_ *Daemon, err error) {
	d := &Daemon{cfg: o.Config, log: o.Log, version: o.Version, local: newLocalKey()}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := d.openStore(ctx); err != nil {
		return nil, err
	}
	if err := d.openRecord(ctx); err != nil {
		return nil, err
	}
	templates, err := open(d)
	if err != nil {
		return nil, err
	}
	if !o.Local {
		if err := d.recordStart(ctx); err != nil {
			return nil, err
		}
	}
	d.background(d.system.Run) // after: Close stops it before it records the end
	if err := d.openKeys(ctx); err != nil {
		return nil, err
	}
	d.catalog = catalog.New(templates, d.system, d.access)
	templates.provide = d.catalog.Provide
	if err := d.openManager(templates, o.FailPoint); err != nil {
		return nil, err
	}
	return d, d.openHandler()
}

// openStore locks the directories and opens the database.
func (d *Daemon) openStore(ctx context.Context) (err error) {
	for dir, mode := range map[string]fs.FileMode{d.cfg.DataDir: 0o711, d.cfg.RunDir: 0o711} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return kind.Errorf(kind.Unavailable, "%w", err).WithHint("run bivy as root, or choose other directories with data_dir and run_dir")
		}
	}
	if err := lockDir(ctx, d); err != nil {
		return err
	}
	if d.store, err = sqlite.Open(ctx, d.data("store"), sqlite.Options{Log: d.log}); err != nil {
		return err
	}
	d.closers = append(d.closers, d.store.Close)
	d.id, err = d.nodeID()
	return err
}

// openKeys opens the API keys and makes the first one.
func (d *Daemon) openKeys(ctx context.Context) (err error) {
	if d.keys, err = auth.Open(ctx, auth.Options{Store: d.store, Record: d.system, Access: d.access, Log: d.log}); err != nil {
		return err
	}
	if d.AdminKeyFile, err = d.keys.EnsureAdmin(ctx, d.cfg.DataDir); err != nil {
		return err
	}
	d.background(d.keys.Run)
	return nil
}

// openManager makes the node and the lifecycle. Both write records: the node
// through a Recorder, over the journal that the lifecycle has.
func (d *Daemon) openManager(templates *templates, failPoint func(string)) (err error) {
	work := workgroup.New()
	records := journal.New(journal.Options{Store: d.store, Work: work, Log: d.log, FailPoint: failPoint})
	d.node, err = node.New(node.Options{
		Dir: d.data("node"), Driver: d.driver, Recorder: journal.NewRecorder(records, d.system, d.id), HostCPUs: templates.hostCPUs, Log: d.log,
	})
	if err != nil {
		return err
	}
	d.manager, err = lifecycle.New(lifecycle.Options{
		Store: d.store, Journal: records, Work: work, Node: d.node, Templates: templates, System: d.system, Signer: d.signing,
		Access: d.access, NodeID: d.id, Log: d.log, CreateLimit: d.cfg.CreateConcurrency, Versions: d.versions(), FailPoint: failPoint,
	})
	return err
}

func (d *Daemon) openHandler() error {
	digestKey, err := d.digestKey()
	if err != nil {
		return err
	}
	d.handler, err = api.New(api.Options{
		Sessions: d.manager, Workload: d.manager.Workload(), System: d.system, Templates: d.catalog, Keys: localKeys{d.keys, d.local},
		Node: nodeinfo.New(nodeinfo.Options{
			Access: d.access, Version: d.version, Signer: d.signing.Signer,
			Examine: func(ctx context.Context) (client.Node, error) { return doctor.Examine(ctx, d.cfg) },
		}),
		DigestKey: digestKey, Ready: d.manager.Ready(), Hosts: d.cfg.Hosts, Log: d.log,
	})
	return err
}

// background runs f until Close, which waits for it.
func (d *Daemon) background(f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { // ends with the closer below
		defer close(over)
		f(ctx)
	}()
	d.closers = append(d.closers, func() error {
		cancel()
		<-over
		return nil
	})
}

const digestKeyBytes = 32

// digestKey reads the secret key of the digests by which repeated creates are
// recognised, or makes one.
func (d *Daemon) digestKey() ([]byte, error) {
	path := d.data("digest.key")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		b = make([]byte, digestKeyBytes)
		rand.Read(b)
		return b, durable.WriteFile(path, b, 0o600)
	}
	if err == nil && len(b) != digestKeyBytes {
		err = kind.Errorf(kind.Conflict, "%s has %d bytes, want %d", path, len(b), digestKeyBytes).
			WithHint("remove it: creates of the last day are then not recognised when they are repeated")
	}
	return b, err
}

func (d *Daemon) data(name string) string { return filepath.Join(d.cfg.DataDir, name) }
func (d *Daemon) run(name string) string  { return filepath.Join(d.cfg.RunDir, name) }

// nodeID reads this machine's name, or gives it one.
func (d *Daemon) nodeID() (session.NodeID, error) {
	path := d.data("node-id")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		id := "node-" + string(session.NewID())[:8]
		return session.NodeID(id), durable.WriteFile(path, []byte(id+"\n"), 0o644)
	}
	if id := strings.TrimSpace(string(b)); err != nil || id != "" {
		return session.NodeID(id), err
	}
	return "", kind.Errorf(kind.Conflict, "%s is empty", path).WithHint("write the node's name into it: every record that it has written names it")
}

// openDriver makes the driver that the configuration names, and the templates
// that go with it.
func (d *Daemon) openDriver() (*templates, error) {
	switch d.cfg.Driver {
	case gvisor.Name:
		return d.openGVisor()
	case fake.Name:
		return d.openFake()
	}
	return nil, kind.Errorf(kind.Invalid, "no driver %q; there are %s and %s", d.cfg.Driver, gvisor.Name, fake.Name).WithField("driver")
}

func (d *Daemon) openImages(agent func() (io.ReadCloser, error)) error {
	var err error
	d.images, err = template.Open(d.data("templates"), template.Options{
		Extra: []template.Extra{{Path: agentPath, Mode: 0o555, Open: agent}}, Log: d.log, Getenv: getenv,
	})
	if err == nil {
		d.closers = append(d.closers, d.images.Close)
	}
	return err
}

// getenv gives registry credentials that a template names by variable.
func getenv(name string) string {
	value, _ := config.Variable(name)
	return value
}

// sweepPatience bounds the removal of sandboxes that an earlier process booted
// for snapshots.
const sweepPatience = 30 * time.Second

func (d *Daemon) openGVisor() (*templates, error) {
	payload, err := bundle.Load()
	if err != nil {
		return nil, err
	}
	// Below the data directory: /run often forbids execution.
	sentry, err := payload.Unpack(d.data("bin"), bundle.Sentry)
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", bundle.Sentry, err)
	}
	g, err := gvisor.New(gvisor.Options{Root: d.run("gvisor"), Sentry: sentry, Cgroup: d.cgroup(), Log: d.log})
	if err != nil {
		return nil, err
	}
	d.driver, d.isolator = g, payload.Build
	d.closers = append(d.closers, g.Close)
	if err := d.openImages(func() (io.ReadCloser, error) { return opened(payload.Open(bundle.Guest)) }); err != nil {
		return nil, err
	}
	// A driver of its own: its sandboxes belong to templates, and the node must
	// not see them.
	builder, err := gvisor.New(gvisor.Options{Root: d.run("snapshots"), Sentry: sentry, Cgroup: d.cgroup() + "-snapshots", Log: d.log})
	if err != nil {
		return nil, err
	}
	d.closers = append(d.closers, builder.Close)
	t := newTemplates(d.images, builder, payload.Build, runtime.NumCPU(), d.log)
	t.agent, t.stamp = payload.SHA256[bundle.Guest], d.data("base-agent")
	ctx, cancel := context.WithTimeout(context.Background(), sweepPatience)
	defer cancel()
	if err := t.snapshots.Recover(ctx); err != nil {
		return nil, fmt.Errorf("half-made snapshots of an earlier process: %w", err)
	}
	return t, nil
}

// cgroup names the parent of this daemon's groups: plain for the usual
// directories, so that people find it, else by directory, so that two daemons
// on one machine do not take each other's sandboxes for orphans.
func (d *Daemon) cgroup() string {
	if d.cfg.RunDir == config.DefaultRunDir {
		return "bivy"
	}
	return "bivy-" + shortHash(d.cfg.RunDir)
}

// Handler serves the REST interface.
func (d *Daemon) Handler() http.Handler { return d.handler }

// LocalKey is an admin's key that works in this process only.
func (d *Daemon) LocalKey() secret.Value { return d.local }

// Ready is closed when sessions can be made.
func (d *Daemon) Ready() <-chan struct{} { return d.manager.Ready() }

// Run keeps the node and the sessions until ctx ends. Sessions live on.
func (d *Daemon) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// The node after the manager, whose last work needs it.
	nodeCtx, stopNode := context.WithCancel(context.WithoutCancel(ctx))
	defer stopNode()
	group.Go(func() error { return d.node.Run(nodeCtx) })
	group.Go(func() error {
		defer stopNode()
		return d.manager.Run(ctx)
	})
	group.Go(func() error { return d.collect(ctx) })
	return group.Wait()
}

// collectEvery is how often images that nothing names or uses are removed.
const collectEvery = time.Hour

// collect removes unused images now and then until ctx ends.
func (d *Daemon) collect(ctx context.Context) error {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for {
		gone, err := d.catalog.Collect(ctx)
		if err != nil && ctx.Err() == nil {
			d.log.Error("removing unused templates", "error", err)
		}
		if len(gone.Digests) > 0 {
			d.log.Info("removed unused templates", "count", len(gone.Digests), "bytes", gone.Bytes)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Serve runs the daemon and its interface on listener until ctx ends.
func (d *Daemon) Serve(ctx context.Context, listener net.Listener) error {
	srv := api.NewServer(d.handler, d.log)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.Run(ctx) })
	group.Go(func() error {
		if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
		defer cancel()
		if err := srv.Shutdown(stop); err != nil {
			return srv.Close() // cut the streams that do not end by themselves
		}
		return nil
	})
	return group.Wait()
}

// stopPatience is how long open requests may take when the server stops.
const stopPatience = 3 * time.Second

// Close closes what New opened, last first. Sandboxes live on.
func (d *Daemon) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}
