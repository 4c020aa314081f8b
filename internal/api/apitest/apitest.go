// Package apitest is a complete backend for package api without any
// isolation: sessions are directories of this host and commands are its
// processes. Tests of the interface, of its client and of the command line
// stand on it; nothing else may.
package apitest

import (
	"bivy/internal/access"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"bivy/client"
	"bivy/internal/api"
	"bivy/internal/audit"
	"bivy/internal/auth"
	"bivy/internal/driver"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/template"
)

// Secrets of the keys that every Backend has, one of each role.
const (
	AdminSecret     = "e2b_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	DeveloperSecret = "e2b_dddddddddddddddddddddddddddddddddddddddd"
	AuditorSecret   = "e2b_cccccccccccccccccccccccccccccccccccccccc"
)

// Backend implements every port of package api.
type Backend struct {
	root   string
	signer *audit.Signer
	node   session.NodeID

	mu        sync.Mutex
	sessions  map[session.ID]*state
	order     []session.ID // as created
	creates   map[session.IdempotencyKey]session.ID
	keys      keyStore
	keyring   *auth.Keyring
	templates []template.Listed
}

type state struct {
	s       session.Session
	dir     string
	events  []audit.Stored
	head    audit.Head
	seal    *audit.Seal
	changed chan struct{} // closed and replaced with each event
	procs   map[string]*process
}

// New makes a Backend that keeps the files of its sessions below root.
func New(root string) *Backend {
	b := &Backend{
		root: root, signer: audit.GenerateSigner(), node: "test",
		sessions: map[session.ID]*state{}, creates: map[session.IdempotencyKey]session.ID{},
	}
	for token, role := range map[string]access.Role{AdminSecret: access.Admin, DeveloperSecret: access.Developer, AuditorSecret: access.Auditor} {
		b.keys.keys = append(b.keys.keys, auth.Key{ID: string(role), Hash: sha256.Sum256([]byte(token)), Role: role, Label: string(role),
			CreatedAt: time.Now().UTC(), CreatedBy: "test"})
	}
	b.templates = []template.Listed{{
		Template: template.Template{
			Digest: template.Digest("sha256:" + strings.Repeat("ab", 32)), ImageDigest: template.Digest("sha256:" + strings.Repeat("cd", 32)),
			ImageBytes: 1 << 20, Source: "this host", Created: time.Now().UTC(), Config: template.Config{User: "user"},
		},
		Names: []template.Ref{{Name: "base", Tag: template.DefaultTag}},
	}}
	return b
}

// Options returns what api.New makes a handler of, standing on b.
func (b *Backend) Options() api.Options {
	pub := b.signer.Public()
	return api.Options{
		Sessions: b, Commands: b, Files: b, Records: b, Templates: templates{b}, Keys: b.keyring,
		AuditKey: client.AuditKey{Algorithm: "ed25519", PublicKey: string(pub.Export()), Fingerprint: pub.Fingerprint()},
		Version:  client.Version{Version: "test", Go: "go", API: "v1"},
		Node: func(context.Context) (client.Node, error) {
			return client.Node{ID: string(b.node), Driver: "none", OK: true, Facts: []client.Fact{
				{Name: "kernel", Status: client.FactOK, Found: "6.18", Means: "sandboxes can run"},
				{Name: "kvm", Status: client.FactWarn, Found: "no /dev/kvm", Means: "the systrap platform is used", Hint: "nested virtualisation makes system calls cheaper"},
			}}, nil
		},
	}
}

// Handler serves the interface on b.
func (b *Backend) Handler() (http.Handler, error) {
	var err error
	if b.keyring, err = auth.Open(context.Background(), &b.keys, nil); err != nil {
		return nil, err
	}
	return api.New(b.Options())
}

// PublicKey is the key that records are signed with.
func (b *Backend) PublicKey() audit.PublicKey { return b.signer.Public() }

func (b *Backend) appendLocked(st *state, entries ...audit.Entry) error {
	for _, e := range entries {
		ev, err := audit.Next(st.head, e, audit.Moment{Now: time.Now(), Boot: "00000000-0000-4000-8000-000000000000", Uptime: time.Since(st.s.CreatedAt)})
		if err != nil {
			return err
		}
		st.events = append(st.events, ev)
		st.head = ev.Head()
	}
	close(st.changed)
	st.changed = make(chan struct{})
	return nil
}

// record appends to a session's record.
func (b *Backend) record(id session.ID, entries ...audit.Entry) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.findLocked(id)
	if err == nil && st.s.State == session.Ended {
		err = kind.Errorf(kind.Conflict, "the record of session %s is sealed", id)
	}
	if err != nil {
		return err
	}
	return b.appendLocked(st, entries...)
}

func (b *Backend) findLocked(id session.ID) (*state, error) {
	st := b.sessions[id]
	if st == nil {
		return nil, kind.Errorf(kind.NotFound, "session %s does not exist", id)
	}
	return st, nil
}

func (b *Backend) liveLocked(id session.ID) (*state, error) {
	st, err := b.findLocked(id)
	if err == nil && st.s.State != session.Running {
		return nil, kind.Errorf(kind.Conflict, "session %s is %s", id, st.s.State).WithHint("make another one")
	}
	return st, err
}

// Create implements api.Sessions. Templates are named for what happens:
// "missing", "broken", "panic", "slow" and "slow-broken" with news, "begun" with a
// session that tells why it ended, and "stuck" until the caller goes.
func (b *Backend) Create(ctx context.Context, req lifecycle.CreateRequest) (session.Session, lifecycle.Timing, error) {
	spec := req.Spec.WithDefaults()
	if err := spec.Validate(); err != nil {
		return session.Session{}, nil, err
	}
	if spec.Template == "missing" {
		return session.Session{}, nil, kind.Errorf(kind.NotFound, "template missing does not exist").
			WithField("template").WithHint("templates: base")
	}
	if spec.Template == "broken" {
		return session.Session{}, nil, errors.New("secret detail of a fault")
	}
	if spec.Template == "panic" {
		panic("secret detail of a panic")
	}
	if spec.Template == "stuck" {
		<-ctx.Done()
		return session.Session{}, nil, ctx.Err()
	}
	if spec.Template == "slow" && req.Progress != nil {
		for i := range int64(3) {
			req.Progress(i+1, 3, "building slow")
		}
	}
	if spec.Template == "slow-broken" && req.Progress != nil {
		req.Progress(1, 2, "building slow-broken")
		return session.Session{}, nil, kind.Errorf(kind.Exhausted, "no space left").WithField("template")
	}
	if spec.Template == "begun" {
		return session.Session{ID: session.NewID(), State: session.Ended, Reason: session.CreateFailed}, nil,
			kind.Errorf(kind.Exhausted, "no space left").WithField("template").WithHint("remove something")
	}
	digest, err := spec.Digest()
	if err != nil {
		return session.Session{}, nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if req.Key.Key != "" {
		for k, id := range b.creates {
			if k.Scope != req.Key.Scope || k.Key != req.Key.Key {
				continue
			}
			if k.Digest != req.Key.Digest {
				return session.Session{}, nil, kind.Errorf(kind.Conflict, "the idempotency key was used for another request")
			}
			return b.sessions[id].s, nil, nil
		}
	}
	now := time.Now().UTC()
	id := session.NewID()
	st := &state{dir: filepath.Join(b.root, string(id)), changed: make(chan struct{}), procs: map[string]*process{}, head: audit.Start(id)}
	st.s = session.Session{ID: id, Version: 2, State: session.Running, Spec: spec, SpecDigest: digest, Owner: req.Owner, Node: b.node,
		Generation: 1, Template: string(b.templates[0].Digest), CreatedAt: now, StartedAt: now, Deadline: now.Add(spec.Timeout.Duration())}
	if err := os.MkdirAll(st.dir, 0o755); err != nil {
		return session.Session{}, nil, err
	}
	b.sessions[id] = st
	b.order = append(b.order, id)
	if req.Key.Key != "" {
		b.creates[req.Key] = id
	}
	err = b.appendLocked(st,
		audit.Entry{Action: audit.SessionCreated, Outcome: audit.OK, Actor: req.Owner, Payload: map[string]any{"spec_digest": digest}},
		audit.Entry{Action: audit.SessionRunning, Outcome: audit.OK, Actor: req.Owner, Sandbox: id.Sandbox(1)})
	return st.s, lifecycle.Timing{{Name: "admit", Took: time.Millisecond}, {Name: "boot", Took: 2 * time.Millisecond}}, err
}

// Get implements api.Sessions.
func (b *Backend) Get(_ context.Context, id session.ID) (session.Session, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.findLocked(id)
	if err != nil {
		return session.Session{}, err
	}
	return st.s, nil
}

// List implements api.Sessions; its cursor is the last id given.
func (b *Backend) List(_ context.Context, f session.Filter, cursor string, limit int) ([]session.Session, string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var page []session.Session
	skipping := cursor != ""
	for _, id := range slices.Backward(b.order) {
		s := b.sessions[id].s
		if skipping {
			skipping = string(id) != cursor
			continue
		}
		match := (f.Owner == "" || f.Owner == s.Owner.Subject) && (len(f.States) == 0 || slices.Contains(f.States, s.State))
		for k, v := range f.Labels {
			match = match && s.Spec.Labels[k] == v
		}
		if !match {
			continue
		}
		if len(page) == limit {
			return page, string(page[limit-1].ID), nil
		}
		page = append(page, s)
	}
	if skipping {
		return nil, "", kind.Errorf(kind.Invalid, "%.40q is not a cursor", cursor).WithField("cursor")
	}
	return page, "", nil
}

// End implements api.Sessions.
func (b *Backend) End(ctx context.Context, req lifecycle.EndRequest) (session.Session, error) {
	b.mu.Lock()
	st, err := b.findLocked(req.ID)
	if err != nil {
		b.mu.Unlock()
		return session.Session{}, err
	}
	if st.s.State == session.Ended {
		defer b.mu.Unlock()
		return st.s, nil
	}
	st.s.State, st.s.Reason = session.Ending, req.Reason
	procs := st.procs
	st.procs = map[string]*process{}
	b.mu.Unlock()
	for _, p := range procs {
		p.stop()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if st.s.State == session.Ended { // by another caller
		return st.s, nil
	}
	err = b.appendLocked(st,
		audit.Entry{Action: audit.SessionEnding, Outcome: audit.OK, Actor: req.Actor, Payload: map[string]any{"reason": req.Reason}},
		audit.Entry{Action: audit.SessionEnded, Outcome: audit.OK, Actor: req.Actor})
	if err != nil {
		return session.Session{}, err
	}
	seal, err := b.signer.Seal(st.head, audit.Closeout{Session: st.s.ID, Owner: st.s.Owner, Reason: req.Reason,
		CreatedAt: st.s.CreatedAt, StartedAt: st.s.StartedAt, EndedAt: time.Now(), SealedAt: time.Now()})
	if err != nil {
		return session.Session{}, err
	}
	st.seal = &seal
	st.s.State, st.s.EndedAt = session.Ended, time.Now().UTC()
	st.s.Version += 2
	close(st.changed)
	st.changed = make(chan struct{})
	return st.s, os.RemoveAll(st.dir)
}

// SetTimeout implements api.Sessions.
func (b *Backend) SetTimeout(_ context.Context, id session.ID, _ session.Principal, seconds session.Seconds) (session.Session, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.liveLocked(id)
	if err != nil {
		return session.Session{}, err
	}
	st.s.Deadline = time.Now().UTC().Add(seconds.Duration())
	st.s.Version++
	return st.s, nil
}

// Stats implements api.Sessions.
func (b *Backend) Stats(_ context.Context, id session.ID) (driver.Stats, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	st, err := b.liveLocked(id)
	if err != nil {
		return driver.Stats{}, err
	}
	return driver.Stats{CPU: time.Second, MemoryBytes: 1 << 20, MemoryPeakBytes: 2 << 20, PIDs: int64(1 + len(st.procs))}, nil
}

// Events implements api.Records.
func (b *Backend) Events(_ context.Context, id session.ID, after uint64, limit int, fn func(audit.Stored) error) error {
	b.mu.Lock()
	st, err := b.findLocked(id)
	if err != nil {
		b.mu.Unlock()
		return err
	}
	events := st.events[min(after, uint64(len(st.events))):]
	b.mu.Unlock()
	for i, ev := range events {
		if limit > 0 && i == limit {
			return nil
		}
		if err := fn(ev); err != nil {
			return err
		}
	}
	return nil
}

// Watch implements api.Records.
func (b *Backend) Watch(ctx context.Context, id session.ID, after uint64, fn func(audit.Stored) error) error {
	for {
		b.mu.Lock()
		st, err := b.findLocked(id)
		if err != nil {
			b.mu.Unlock()
			return err
		}
		events := st.events[min(after, uint64(len(st.events))):]
		changed, over := st.changed, st.s.State == session.Ended
		b.mu.Unlock()
		for _, ev := range events {
			if err := fn(ev); err != nil {
				return err
			}
			after = ev.Event.Seq
		}
		if over {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Export implements api.Records.
func (b *Backend) Export(_ context.Context, id session.ID, w io.Writer) error {
	b.mu.Lock()
	st, err := b.findLocked(id)
	if err != nil {
		b.mu.Unlock()
		return err
	}
	events, seal := st.events, st.seal
	b.mu.Unlock()
	return audit.Export(w, id, func(yield func(audit.Stored) error) error {
		for _, ev := range events {
			if err := yield(ev); err != nil {
				return err
			}
		}
		return nil
	}, seal)
}

// templates implements api.Templates.
type templates struct{ b *Backend }

func (t templates) List() ([]template.Listed, error) {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return slices.Clone(t.b.templates), nil
}

func (t templates) Get(name string) (template.Template, error) {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	i, err := t.findLocked(name)
	if err != nil {
		return template.Template{}, err
	}
	return t.b.templates[i].Template, nil
}

func (t templates) findLocked(name string) (int, error) {
	ref, _ := template.ParseRef(name)
	for i, l := range t.b.templates {
		if string(l.Digest) == name || slices.Contains(l.Names, ref) {
			return i, nil
		}
	}
	return 0, kind.Errorf(kind.NotFound, "template %.200s does not exist", name).WithHint("bivy template ls shows those that do")
}

func (t templates) Build(_ context.Context, spec template.Spec, progress template.Progress) (template.Template, error) {
	if progress == nil {
		progress = func(template.Event) {}
	}
	progress(template.Event{Phase: "read", Done: 1, Total: 2})
	if spec.From.Image != nil {
		return template.Template{}, kind.Errorf(kind.Unavailable, "registry of %s: connection refused", spec.From.Image.Ref).WithField("from.image.ref")
	}
	var sum [32]byte
	rand.Read(sum[:])
	d := template.Digest(fmt.Sprintf("sha256:%x", sum))
	l := template.Listed{Template: template.Template{Digest: d, ImageDigest: d, ImageBytes: 4096, Source: spec.From.Kind(), Created: time.Now().UTC(),
		Config: template.Config{Env: spec.Env, User: spec.User, Workdir: spec.Workdir, Cmd: spec.Cmd}, Notes: []string{"2 device nodes left out"}}}
	if spec.Name != "" {
		ref, err := template.ParseRef(spec.Name)
		if err != nil {
			return template.Template{}, err
		}
		l.Names = []template.Ref{ref}
	}
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	t.b.templates = append(t.b.templates, l)
	return l.Template, nil
}

func (t templates) Remove(name string) error {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	i, err := t.findLocked(name)
	if err != nil {
		return err
	}
	t.b.templates = slices.Delete(t.b.templates, i, i+1)
	return nil
}

// keyStore implements auth.Store.
type keyStore struct {
	mu   sync.Mutex
	keys []auth.Key
}

func (k *keyStore) PutKey(_ context.Context, key auth.Key) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.keys = append(k.keys, key)
	return nil
}

func (k *keyStore) Keys(context.Context) ([]auth.Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.keys), nil
}

func (k *keyStore) RevokeKey(_ context.Context, id string, at time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.keys {
		if k.keys[i].ID == id {
			k.keys[i].RevokedAt = at
			return nil
		}
	}
	return kind.Errorf(kind.NotFound, "key %.64s does not exist", id)
}
