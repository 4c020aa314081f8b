package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"bivy/client"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/driver/fake"
	"bivy/internal/kind"
	"bivy/internal/template"
)

// machine is where daemons of a test run one after the other.
type machine struct {
	cfg  config.Config
	host fake.Host
	root string // of the image base
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{root: t.TempDir()}
	m.cfg = config.Config{DataDir: t.TempDir(), RunDir: t.TempDir(), Driver: fake.Name}.WithDefaults()
	m.host.Dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(m.root, "hello"), []byte("hello\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *machine) options(t *testing.T) Options {
	return Options{Config: m.cfg, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Version: client.Version{Version: "1.2.3", Commit: "abc"}}
}

// open opens a daemon whose sandboxes have their agents in this process.
func (m *machine) open(t *testing.T) (*Daemon, error) {
	return assemble(t.Context(), m.options(t), func(d *Daemon) (*templates, error) {
		d.driver = &fake.Driver{Host: &m.host}
		if err := d.openImages(func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("agent")), nil }); err != nil {
			return nil, err
		}
		_, err := d.images.Build(t.Context(), m.spec("base"), nil)
		return &templates{Store: d.images, log: d.log}, err
	})
}

func (m *machine) spec(name string) template.Spec {
	return template.Spec{Version: 1, Name: name, From: template.From{Directory: &template.Directory{Path: m.root}}}
}

// running is a daemon that runs, with clients of it.
type running struct {
	*Daemon
	t     *testing.T
	url   string
	admin *client.Client
	stop  func()
}

func (m *machine) start(t *testing.T) *running {
	t.Helper()
	d, err := m.open(t)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() { over <- d.Run(ctx) }()
	select {
	case <-d.Ready():
	case err := <-over:
		t.Fatal(errors.Join(err, d.Close()))
	}
	srv := httptest.NewServer(d.Handler())
	r := &running{Daemon: d, t: t, url: srv.URL}
	r.admin = r.as(d.LocalKey().Reveal())
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		srv.Close()
		cancel()
		if err := errors.Join(<-over, d.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

func (r *running) as(key string) *client.Client {
	r.t.Helper()
	c, err := client.New(client.Options{URL: r.url, Key: key})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.Close)
	return c
}

// events are those of the record of the node, with their payloads.
func (m *machine) events(t *testing.T) []audit.Stored {
	t.Helper()
	d := &Daemon{cfg: m.cfg, log: slog.New(slog.DiscardHandler)}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := d.openStore(t.Context()); err != nil {
		t.Fatal(err)
	}
	segments, err := d.store.Segments(t.Context(), d.id)
	if err != nil {
		t.Fatal(err)
	}
	var all []audit.Stored
	for _, s := range segments {
		if err := d.store.SegmentEvents(t.Context(), d.id, s.Number, 0, 0, func(e audit.Stored) error {
			all = append(all, e)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// find returns the events of an action.
func find(all []audit.Stored, a audit.Action) []audit.Stored {
	return slices.DeleteFunc(slices.Clone(all), func(e audit.Stored) bool { return e.Event.Action != a })
}

// TestRecordOfTheNode: what a server does beside its sessions is in the record
// of its node.
func TestRecordOfTheNode(t *testing.T) {
	m := newMachine(t)
	r := m.start(t)
	ctx := t.Context()
	k, err := r.admin.CreateKey(ctx, client.CreateKey{Role: client.Developer, Label: "ci"})
	if err != nil {
		t.Fatal(err)
	}
	dev := r.as(k.Secret)
	for range 2 {
		if err := dev.DeleteTemplate(ctx, "base"); !errors.Is(err, &client.Error{Code: client.CodeDenied}) {
			t.Errorf("a developer removes a template: %v", err)
		}
	}
	if _, err := r.as("e2b_" + strings.Repeat("0", 40)).Version(ctx); err == nil {
		t.Error("an unknown key is good")
	}
	build := client.BuildTemplate{Version: 1, Name: "tool", From: client.TemplateSource{Directory: &client.PathSource{Path: m.root}}}
	if _, err := r.admin.BuildTemplate(ctx, build, nil); err != nil {
		t.Fatal(err)
	}
	if err := r.admin.DeleteTemplate(ctx, "tool"); err != nil {
		t.Fatal(err)
	}
	r.stop()

	all := m.events(t)
	var started struct {
		Versions map[string]string
		Config   struct {
			Settings json.RawMessage
			Digest   string
		}
	}
	first := find(all, audit.ServerStarted)
	if len(first) != 1 {
		t.Fatalf("%d starts", len(first))
	}
	if err := json.Unmarshal(first[0].Payload, &started); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bivy", "go", "driver", "schema", "commit"} {
		if started.Versions[name] == "" {
			t.Errorf("started without the version of %s: %v", name, started.Versions)
		}
	}
	if sum := sha256.Sum256(started.Config.Settings); started.Config.Digest != "sha256:"+hex.EncodeToString(sum[:]) ||
		!bytes.Contains(started.Config.Settings, []byte(m.cfg.DataDir)) {
		t.Errorf("configuration %s is not what has the digest %s", started.Config.Settings, started.Config.Digest)
	}
	if last := all[len(all)-1].Event.Action; last != audit.ServerStopped {
		t.Errorf("the last event is %s", last)
	}
	deniedByRules(t, all)
	for _, want := range []struct {
		action  audit.Action
		payload string
	}{
		{audit.KeyCreated, `"label":"ci"`},
		{audit.KeyUsed, `"role":"developer"`},
		{audit.AccessDenied, `"reason":"template.write"`},
		{audit.AccessDenied, `"who":"key:` + k.ID + `"`},
		{audit.AccessDenied, `"count":2`},
		{audit.LoginRefused, `"reason":"unknown key"`},
		{audit.TemplateBuildIntent, `"source":"directory"`},
		{audit.TemplateBuilt, `"name":"tool"`},
		{audit.TemplateRemoved, `"why":"requested"`},
	} {
		if !slices.ContainsFunc(find(all, want.action), func(e audit.Stored) bool { return bytes.Contains(e.Payload, []byte(want.payload)) }) {
			t.Errorf("no %s with %s", want.action, want.payload)
		}
	}
}

// deniedByRules checks that refusals are recorded with their decision.
func deniedByRules(t *testing.T, all []audit.Stored) {
	t.Helper()
	for _, e := range find(all, audit.AccessDenied) {
		if e.Event.Decision.Verdict != audit.Deny || e.Event.Decision.Policy == "" {
			t.Errorf("%s is recorded with the decision %+v", e.Payload, e.Event.Decision)
		}
	}
}

// TestLostSigningKey: where records are sealed, a server does not start without
// the key that sealed them, says what to do, and starts after that was done.
func TestLostSigningKey(t *testing.T) {
	m := newMachine(t)
	r := m.start(t)
	before := r.signing.Signer().Public()
	sess, err := r.admin.CreateSession(t.Context(), client.CreateSession{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sess.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.stop()
	key := filepath.Join(m.cfg.DataDir, audit.SigningKeyFile)
	if _, err := replaceLostKey(t.Context(), m.options(t)); !kind.Is(err, kind.Conflict) {
		t.Errorf("a key that is there is replaced as lost: %v", err)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if d, err := m.open(t); !kind.Is(err, kind.Conflict) || !strings.Contains(kind.Hint(err), "bivy audit key rotate --lost") {
		t.Errorf("started without the key: %v, %v", d, err)
	}
	if _, err := os.Stat(key); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a new key was made in silence: %v", err)
	}
	next, err := replaceLostKey(t.Context(), m.options(t))
	if err != nil || next.Fingerprint == before.Fingerprint() {
		t.Fatalf("%+v, %v", next, err)
	}
	r = m.start(t)
	if k, err := r.admin.AuditKey(t.Context()); err != nil || k.Fingerprint != next.Fingerprint || len(k.Rotations) != 1 {
		t.Errorf("%+v, %v", k, err)
	}
	export, err := r.admin.SystemRecord(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer export.Close()
	if _, err := audit.VerifySystem(export, []audit.PublicKey{before, r.signing.Signer().Public()}, audit.VerifyOptions{AllowOpen: true}); err != nil {
		t.Errorf("the record of the node does not verify: %v", err)
	}
	r.stop()
	all := m.events(t)
	if replaced := find(all, audit.SigningKeyReplaced); len(replaced) != 1 || !bytes.Contains(replaced[0].Payload, []byte(`"lost":true`)) {
		t.Errorf("replaced: %v", replaced)
	}
	if refused := find(all, audit.SigningKeyFailed); len(refused) != 1 {
		t.Errorf("%d refusals to replace a key that is there", len(refused))
	}
}

// TestDigestKey: the key of the digests stays, and is its owner's alone.
func TestDigestKey(t *testing.T) {
	d := &Daemon{cfg: config.Config{DataDir: t.TempDir()}}
	one, err := d.digestKey()
	if err != nil || len(one) != digestKeyBytes {
		t.Fatalf("%d bytes, %v", len(one), err)
	}
	if two, err := d.digestKey(); err != nil || !bytes.Equal(one, two) {
		t.Errorf("another key after a restart: %v", err)
	}
	path := d.data("digest.key")
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if err := os.Truncate(path, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := d.digestKey(); !kind.Is(err, kind.Conflict) || kind.Hint(err) == "" {
		t.Errorf("a key that was cut: %v", err)
	}
}

// TestRepeatedCreateAfterRestart: the digest of a create is the same in the
// next process.
func TestRepeatedCreateAfterRestart(t *testing.T) {
	m := newMachine(t)
	o := client.CreateOptions{IdempotencyKey: client.NewIdempotencyKey()}
	spec := client.CreateSession{Spec: client.Spec{Env: map[string]string{"PIN": "1234"}}}
	r := m.start(t)
	key, err := r.admin.CreateKey(t.Context(), client.CreateKey{Role: client.Developer})
	if err != nil {
		t.Fatal(err)
	}
	first, err := r.as(key.Secret).CreateSessionWith(t.Context(), spec, o)
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	r = m.start(t)
	again, err := r.as(key.Secret).CreateSessionWith(t.Context(), spec, o)
	if err != nil || again.ID != first.ID {
		t.Errorf("%+v, %v; want session %s", again, err, first.ID)
	}
	if _, err := r.admin.Session(first.ID).End(t.Context()); err != nil {
		t.Error(err)
	}
}
