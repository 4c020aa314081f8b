// Package apitest starts the whole of bivy behind package api for tests: the
// real lifecycle, workload, record, node and store, with driver/fake in place
// of isolation, so that commands are processes of this host. Tests of the
// interface, of its client and of the command line stand on it; it is for
// tests only.
package apitest

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/api"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/catalog"
	"bivy/internal/driver/fake"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/node"
	"bivy/internal/nodeinfo"
	"bivy/internal/sandbox"
	"bivy/internal/session"
	"bivy/internal/store/sqlite"
	"bivy/internal/template"
	"bivy/internal/workgroup"
)

// Tokens of the keys that every Backend has, one of each role. The id of each
// key is the name of its role.
const (
	AdminSecret     = "e2b_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	DeveloperSecret = "e2b_dddddddddddddddddddddddddddddddddddddddd"
	AuditorSecret   = "e2b_cccccccccccccccccccccccccccccccccccccccc"
)

// NodeID is the node of every Backend.
const NodeID session.NodeID = "node-test"

// A Resolver stands before the real templates when a session is created.
// handled is false for names that it leaves to them.
type Resolver func(ctx context.Context, name string, progress func(done, total int64, what string)) (handled bool, err error)

// Options of Start.
type Options struct {
	Resolve Resolver     // nil: the real templates only
	Log     *slog.Logger // nil: discard
}

// Backend is a running bivy without a listener.
type Backend struct {
	Manager   *lifecycle.Manager
	Store     *sqlite.Store
	System    *journal.SystemRecord
	Signing   *journal.Signing
	Keys      *auth.Keyring
	Templates *template.Store
	Host      *fake.Host
	Driver    *fake.Driver // its Script makes calls go wrong

	api     api.Options
	resolve Resolver
	cancel  context.CancelFunc
	flush   func() // stops the record of the node, which then writes what it has counted
	running sync.WaitGroup
	mu      sync.Mutex
	failed  error // of what runs
	closers []func() error
}

// Start starts a Backend with its files below dir and waits until it is ready.
// It has the template base.
func Start(ctx context.Context, dir string, o Options) (_ *Backend, err error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	b := &Backend{resolve: o.Resolve, Host: &fake.Host{Dir: filepath.Join(dir, "host")}}
	b.Driver = &fake.Driver{Host: b.Host}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	for _, d := range []string{dir, b.Host.Dir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if b.Store, err = sqlite.Open(ctx, filepath.Join(dir, "store"), sqlite.Options{Log: o.Log}); err != nil {
		return nil, err
	}
	b.closers = append(b.closers, b.Store.Close)
	signer, err := audit.LoadSigner(dir, false)
	if err != nil {
		return nil, err
	}
	b.Signing = journal.NewSigning(dir, signer)
	b.System = journal.NewSystemRecord(journal.SystemOptions{Store: b.Store, Node: NodeID, Signing: b.Signing, Access: access.Roles{}, Log: o.Log})
	for token, role := range map[string]access.Role{AdminSecret: access.Admin, DeveloperSecret: access.Developer, AuditorSecret: access.Auditor} {
		k := auth.Key{ID: string(role), Hash: sha256.Sum256([]byte(token)), Role: role, Label: string(role), CreatedAt: time.Now(), CreatedBy: "test"}
		if err := b.Store.PutKey(ctx, k); err != nil && !kind.Is(err, kind.Conflict) { // of an earlier Backend
			return nil, err
		}
	}
	if b.Keys, err = auth.Open(ctx, auth.Options{Store: b.Store, Record: b.System, Access: access.Roles{}, Log: o.Log}); err != nil {
		return nil, err
	}
	if b.Templates, err = template.Open(filepath.Join(dir, "templates"), template.Options{Log: o.Log}); err != nil {
		return nil, err
	}
	b.closers = append(b.closers, b.Templates.Close)
	if err := b.buildBase(ctx, filepath.Join(dir, "base")); err != nil {
		return nil, err
	}
	return b, b.start(ctx, dir, o.Log)
}

// buildBase makes a small image by the name base. Nothing runs from it: the
// fake driver's sandboxes have directories of this host.
func (b *Backend) buildBase(ctx context.Context, root string) error {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "hello"), []byte("hello\n"), 0o600); err != nil {
		return err
	}
	_, err := b.Templates.Build(ctx, template.Spec{Version: 1, Name: "base", From: template.From{Directory: &template.Directory{Path: root}}}, nil)
	return err
}

// start assembles the parts on the stores and runs them.
func (b *Backend) start(ctx context.Context, dir string, log *slog.Logger) error {
	work := workgroup.New()
	records := journal.New(journal.Options{Store: b.Store, Work: work, Log: log, Poll: 20 * time.Millisecond})
	n, err := node.New(node.Options{
		Dir: filepath.Join(dir, "node"), Driver: b.Driver, Tick: 5 * time.Millisecond, Log: log,
		Recorder: journal.NewRecorder(records, b.System, NodeID),
	})
	if err != nil {
		return err
	}
	b.Manager, err = lifecycle.New(lifecycle.Options{
		Store: b.Store, Journal: records, Work: work, Node: n, Templates: leases{b}, System: b.System, Signer: b.Signing,
		Access: access.Roles{}, NodeID: NodeID, Log: log,
	})
	if err != nil {
		return err
	}
	b.api = api.Options{
		Sessions: b.Manager, Workload: b.Manager.Workload(), System: b.System, Keys: b.Keys,
		Templates: catalog.New(b.Templates, b.System, access.Roles{}),
		Node: nodeinfo.New(nodeinfo.Options{
			Access: access.Roles{}, Version: client.Version{Version: "test", Go: "go", API: "v1"}, Signer: b.Signing.Signer, Examine: examine,
		}),
		DigestKey: []byte("the digest key of every test, 32 bytes or more"), Ready: b.Manager.Ready(), Log: log,
	}
	live, cancel := context.WithCancel(context.WithoutCancel(ctx))
	b.cancel = cancel
	b.run(func() error { return n.Run(live) })
	b.run(func() error { return b.Manager.Run(live) })
	b.run(func() error { b.Keys.Run(live); return nil })
	counting, flush := context.WithCancel(live)
	flushed := make(chan struct{})
	b.flush = func() { flush(); <-flushed }
	b.run(func() error {
		defer close(flushed)
		b.System.Run(counting)
		return nil
	})
	select {
	case <-b.Manager.Ready():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run runs f until Close, which waits for it.
func (b *Backend) run(f func() error) {
	b.running.Go(func() {
		err := f()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.failed = errors.Join(b.failed, err)
	})
}

func examine(context.Context) (client.Node, error) {
	return client.Node{ID: string(NodeID), Driver: fake.Name, OK: true, Facts: []client.Fact{
		{Name: "kernel", Status: client.FactOK, Found: "6.18", Means: "sandboxes can run"},
		{Name: "kvm", Status: client.FactWarn, Found: "no /dev/kvm", Means: "the systrap platform is used", Hint: "nested virtualisation makes system calls cheaper"},
	}}, nil
}

// Options returns what api.New makes a handler of, standing on b.
func (b *Backend) Options() api.Options { return b.api }

// Handler serves the interface on b.
func (b *Backend) Handler() (*api.Handler, error) { return api.New(b.api) }

// PublicKey is the key that records are signed with.
func (b *Backend) PublicKey() audit.PublicKey { return b.Signing.Signer().Public() }

// Flush makes the record of the node write what it has counted, as it does
// when the process stops. After it nothing more is counted into the record.
func (b *Backend) Flush() error {
	b.flush()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed
}

// Close stops what Start started and returns what went wrong in it. Sandboxes
// of sessions that have not ended are destroyed.
func (b *Backend) Close() error {
	if b.cancel != nil {
		b.cancel()
	}
	b.running.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := []error{b.failed, b.destroyAll()}
	b.failed = nil
	for i := len(b.closers) - 1; i >= 0; i-- {
		errs = append(errs, b.closers[i]())
	}
	b.closers = nil
	return errors.Join(errs...)
}

// Left returns how many sandboxes there are.
func (b *Backend) Left() (int, error) {
	found, err := b.Driver.List(context.Background())
	return len(found), err
}

func (b *Backend) destroyAll() error {
	found, err := b.Driver.List(context.Background())
	for _, f := range found {
		err = errors.Join(err, b.Driver.Destroy(context.Background(), f.ID))
	}
	return err
}

// leases implements lifecycle.Templates on the templates of a Backend.
type leases struct{ b *Backend }

// Resolve implements lifecycle.Templates.
func (l leases) Resolve(ctx context.Context, name string, progress func(done, total int64, what string)) (sandbox.Template, error) {
	if l.b.resolve != nil {
		if handled, err := l.b.resolve(ctx, name, progress); err != nil {
			return sandbox.Template{}, err
		} else if handled {
			name = "base"
		}
	}
	t, err := l.b.Templates.Get(name)
	if err != nil {
		return sandbox.Template{}, kind.Errorf(kind.Of(err), "%w", err).WithField("template")
	}
	return sandbox.Template{Digest: string(t.Digest), ImageDigest: string(t.ImageDigest), Image: t.Image, Agent: []string{"/agent"}}, nil
}

// Lease implements lifecycle.Templates.
func (l leases) Lease(_ context.Context, digest, holder string) error {
	return l.b.Templates.Lease(template.Digest(digest), holder)
}

// Release implements lifecycle.Templates.
func (l leases) Release(_ context.Context, holder string) error {
	all, err := l.b.Templates.List()
	for _, t := range all {
		err = errors.Join(err, l.b.Templates.Release(t.Digest, holder))
	}
	return err
}
