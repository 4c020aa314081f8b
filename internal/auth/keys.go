// Package auth says who is calling: it keeps API keys and authenticates
// callers who send one. What a caller may do is decided by package access.
package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/secret"
	"bivy/internal/session"
)

// TokenPrefix begins every API key. The form, e2b_ and 40 hex digits, is the
// one that E2B clients check before they send a request.
const TokenPrefix = "e2b_"

const tokenBytes = 20

// MaxLabel bounds the label of a key, in bytes.
const MaxLabel = 128

// AdminKeyFile is the name of the file that holds the first admin key.
const AdminKeyFile = "admin.key"

// firstRun is who creates the first admin key.
var firstRun = session.Principal{Subject: "local:first-run"}

// Key is an API key as it is stored: without its token.
type Key struct {
	ID          string      // first 8 hex digits of Hash; names the key everywhere
	Hash        [32]byte    // SHA-256 of the token
	Role        access.Role // what its holder may do
	Label       string      // free text of its owner
	CreatedAt   time.Time   // UTC, microseconds
	CreatedBy   string      // Principal.Subject of its creator
	RevokedAt   time.Time   // zero while it is valid
	FirstUsedAt time.Time   // zero until its first use is in the record of the node
}

// Subject is the Principal.Subject of a caller who sends the key.
func (k Key) Subject() string { return "key:" + k.ID }

// object is the key in events.
func (k Key) object() string { return "key/" + k.ID }

// Store keeps API keys. Its methods are safe for concurrent use, and what
// they wrote is durable when they return.
type Store interface {
	// PutKey adds a key; Conflict when its ID or Hash is taken.
	PutKey(ctx context.Context, k Key) error
	// Keys returns every key, revoked ones too, oldest first.
	Keys(ctx context.Context) ([]Key, error)
	// RevokeKey sets RevokedAt unless it is set already; NotFound for an
	// unknown ID.
	RevokeKey(ctx context.Context, id string, at time.Time) error
	// MarkKeyUsed sets FirstUsedAt unless it is set already, and reports
	// whether it was not; NotFound for an unknown ID.
	MarkKeyUsed(ctx context.Context, id string, at time.Time) (first bool, err error)
}

// Record is the record of the node. journal.SystemRecord is one.
type Record interface {
	// Begin makes an intent durable and returns how to conclude it. When it
	// fails the effect must not happen.
	Begin(ctx context.Context, intent audit.Entry) (conclude func(outcome audit.Entry) error, err error)
	// Record makes a fact durable.
	Record(ctx context.Context, e audit.Entry) error
	// CountRefused counts a request that was refused. Counts are recorded
	// together now and then.
	CountRefused(a audit.Action, reason, who string, d audit.Decision)
}

// Options are what a Keyring is made of. Store, Record and Access are
// required.
type Options struct {
	Store  Store
	Record Record
	Access access.Decider
	Now    func() time.Time // wall clock; nil: time.Now
	Log    *slog.Logger     // nil: discard
}

// Keyring authenticates callers and manages their keys. Lookups read memory
// only. There is one Keyring per Store: it does not see a key that another
// process writes into the Store. Its methods may be called from any goroutine.
type Keyring struct {
	o      Options
	byHash atomic.Pointer[map[[32]byte]Key]
	uses   uses
	mu     sync.Mutex // serialises changes, so that byHash never goes back
}

// Open returns a Keyring over the keys in a store. First uses of keys are
// recorded while Run runs.
func Open(ctx context.Context, o Options) (*Keyring, error) {
	if o.Store == nil || o.Record == nil || o.Access == nil {
		return nil, errors.New("auth: store, record and access are required")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &Keyring{o: o, uses: newUses()}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.reloadLocked(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Keyring) reloadLocked(ctx context.Context) error {
	keys, err := r.o.Store.Keys(ctx)
	if err != nil {
		return fmt.Errorf("load API keys: %w", err)
	}
	m := make(map[[32]byte]Key, len(keys))
	for _, k := range keys {
		m[k.Hash] = k
	}
	r.byHash.Store(&m)
	return nil
}

// Reasons of refused logins, as the record of the node has them.
const (
	reasonMissing   = "missing"
	reasonMalformed = "malformed"
	reasonUnknown   = "unknown key"
	reasonRevoked   = "revoked key"
)

// Authenticate returns whose key token is; Unauthentic when it is not a valid
// key. A revoked key stops working when Revoke returns. from is the host that
// the request came from; refused requests are counted by it, or by the id of
// the key when that is known.
func (r *Keyring) Authenticate(ctx context.Context, token, from string) (access.Caller, error) {
	refuse := func(reason, who, format string, args ...any) (access.Caller, error) {
		r.o.Record.CountRefused(audit.LoginRefused, reason, who, audit.Decision{})
		return access.Caller{}, kind.Errorf(kind.Unauthentic, format, args...).
			WithHint("send an API key in X-API-Key or as Authorization: Bearer; the first one is in the file %s of the data directory", AdminKeyFile)
	}
	if token == "" {
		return refuse(reasonMissing, from, "no API key was sent")
	}
	if !wellFormed(token) {
		return refuse(reasonMalformed, from, "malformed API key: want %s and %d hex digits", TokenPrefix, 2*tokenBytes)
	}
	// The time of a map lookup depends on the hash alone, which tells nothing
	// about a valid key.
	hash := sha256.Sum256([]byte(token))
	k, ok := (*r.byHash.Load())[hash]
	if !ok || subtle.ConstantTimeCompare(k.Hash[:], hash[:]) != 1 {
		return refuse(reasonUnknown, from, "unknown API key")
	}
	if !k.RevokedAt.IsZero() {
		return refuse(reasonRevoked, k.Subject(), "API key %s was revoked at %s", k.ID, k.RevokedAt.UTC().Format(time.RFC3339))
	}
	if k.FirstUsedAt.IsZero() {
		r.uses.add(ctx, k, from, r.o.Now())
	}
	return access.Caller{Principal: session.Principal{Subject: k.Subject()}, Role: k.Role}, nil
}

// decide asks whether who may manage keys.
func (r *Keyring) decide(ctx context.Context, who access.Caller) (audit.Decision, error) {
	return r.o.Access.Decide(ctx, access.Request{Caller: who, Action: access.KeyManage})
}

// Create makes a key. The token is returned this once and stored nowhere.
func (r *Keyring) Create(ctx context.Context, who access.Caller, role access.Role, label string) (secret.Value, Key, error) {
	decision, err := r.decide(ctx, who)
	if err != nil {
		return secret.Value{}, Key{}, err
	}
	if _, err := access.ParseRole(string(role)); err != nil {
		return secret.Value{}, Key{}, err
	}
	if len(label) > MaxLabel || !utf8.ValidString(label) || strings.ContainsFunc(label, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return secret.Value{}, Key{}, kind.Errorf(kind.Invalid, "%.64q: want text without control characters, at most %d bytes", label, MaxLabel).WithField("label")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	token, k := r.newKeyLocked(who.Principal.Subject, role, label)
	if err := r.putLocked(ctx, k, who.Principal, decision); err != nil {
		return secret.Value{}, Key{}, err
	}
	return token, k, nil
}

// newKeyLocked returns a token and its key. IDs are short, so that people can
// say them; among very many keys a new one may have an ID that is taken.
func (r *Keyring) newKeyLocked(by string, role access.Role, label string) (secret.Value, Key) {
	for {
		token := newToken()
		hash := sha256.Sum256([]byte(token.Reveal()))
		id := hex.EncodeToString(hash[:4])
		if _, taken := r.findLocked(id); !taken {
			return token, Key{
				ID: id, Hash: hash, Role: role, Label: label,
				CreatedAt: r.o.Now().UTC().Truncate(time.Microsecond), CreatedBy: by,
			}
		}
	}
}

func (r *Keyring) findLocked(id string) (Key, bool) {
	for _, k := range *r.byHash.Load() {
		if k.ID == id {
			return k, true
		}
	}
	return Key{}, false
}

// keyPayload describes a key in events.
type keyPayload struct {
	Role  access.Role `json:"role"`
	Label string      `json:"label,omitempty"`
}

// putLocked stores a key between its intent and its outcome.
func (r *Keyring) putLocked(ctx context.Context, k Key, by session.Principal, decision audit.Decision) error {
	about := keyPayload{Role: k.Role, Label: k.Label}
	return r.recordedLocked(ctx, audit.Entry{
		Action: audit.KeyCreateIntent, Actor: by, Object: k.object(), Ref: k.ID, Decision: decision, Payload: about,
	}, audit.Entry{Action: audit.KeyCreated, Outcome: audit.OK, Payload: about}, func() error {
		if err := r.o.Store.PutKey(ctx, k); err != nil {
			return fmt.Errorf("store API key %s: %w", k.ID, err)
		}
		return nil
	})
}

// recordedLocked does change between an intent and its outcome, then loads the
// keys. The outcome says that it failed when change returns an error.
func (r *Keyring) recordedLocked(ctx context.Context, intent, done audit.Entry, change func() error) error {
	conclude, err := r.o.Record.Begin(ctx, intent)
	if err != nil {
		return err
	}
	if err := change(); err != nil {
		return errors.Join(err, conclude(audit.Entry{
			Action: audit.KeyFailed, Outcome: audit.Failed, Payload: map[string]any{"error": err.Error()},
		}))
	}
	return errors.Join(r.reloadLocked(context.WithoutCancel(ctx)), conclude(done))
}

// List returns every key, revoked ones too, oldest first.
func (r *Keyring) List(ctx context.Context, who access.Caller) ([]Key, error) {
	if _, err := r.decide(ctx, who); err != nil {
		return nil, err
	}
	return r.o.Store.Keys(ctx)
}

// Revoke makes a key invalid at once; repeating it changes nothing. It fails
// with NotFound for an unknown id and with Conflict for the last valid admin
// key, without which no other key could be made.
func (r *Keyring) Revoke(ctx context.Context, who access.Caller, id string) error {
	decision, err := r.decide(ctx, who)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.findLocked(id)
	if !ok {
		return kind.Errorf(kind.NotFound, "API key %.64q does not exist", id).WithField("key")
	}
	if !k.RevokedAt.IsZero() {
		return nil
	}
	if k.Role == access.Admin && !r.otherAdminLocked(id) {
		return kind.Errorf(kind.Conflict, "key %s is the last admin key", id).WithHint("create another admin key first")
	}
	return r.recordedLocked(ctx, audit.Entry{
		Action: audit.KeyRevokeIntent, Actor: who.Principal, Object: k.object(), Ref: k.ID, Decision: decision,
	}, audit.Entry{Action: audit.KeyRevoked, Outcome: audit.OK, Payload: keyPayload{Role: k.Role, Label: k.Label}}, func() error {
		return r.o.Store.RevokeKey(ctx, id, r.o.Now().UTC().Truncate(time.Microsecond))
	})
}

// otherAdminLocked reports whether a key other than id is a valid admin key.
func (r *Keyring) otherAdminLocked(id string) bool {
	for _, k := range *r.byHash.Load() {
		if k.ID != id && k.Role == access.Admin && k.RevokedAt.IsZero() {
			return true
		}
	}
	return false
}

// EnsureAdmin makes the first admin key when there is no key at all, writes
// its token to AdminKeyFile in dir, mode 0600, and returns the file's path. It
// returns "" when there are keys already.
//
// The file is durable before the key is stored: a crash between the two leaves
// a token that does not work and is replaced at the next start, never a key
// whose token is lost.
func (r *Keyring) EnsureAdmin(ctx context.Context, dir string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(*r.byHash.Load()) > 0 {
		return "", nil
	}
	token, k := r.newKeyLocked(firstRun.Subject, access.Admin, "first admin key")
	path := filepath.Join(dir, AdminKeyFile)
	if err := durable.WriteFile(path, []byte(token.Reveal()+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("first admin key: %w", err)
	}
	if err := r.putLocked(ctx, k, firstRun, audit.Decision{}); err != nil {
		return "", err
	}
	return path, nil
}

func newToken() secret.Value {
	var b [tokenBytes]byte
	rand.Read(b[:])
	return secret.New(TokenPrefix + hex.EncodeToString(b[:]))
}

func wellFormed(token string) bool {
	tail, ok := strings.CutPrefix(token, TokenPrefix)
	return ok && len(tail) == 2*tokenBytes && strings.Trim(tail, "0123456789abcdef") == ""
}
