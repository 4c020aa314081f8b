// Package auth says who is calling: it keeps API keys and authenticates those
// who send one. What a caller may do is decided in package access.
package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"bivy/internal/access"
	"bivy/internal/durable"
	"bivy/internal/kind"
	"bivy/internal/secret"
	"bivy/internal/session"
)

// TokenPrefix begins every API key. The shape, e2b_ and 40 hex digits, is the
// one that existing clients check before they send a request.
const TokenPrefix = "e2b_"

const tokenBytes = 20

// MaxLabel bounds what a key is called, in bytes.
const MaxLabel = 128

// AdminKeyFile is the name of the file that holds the first admin key.
const AdminKeyFile = "admin.key"

// Key is an API key as it is stored: without the key itself.
type Key struct {
	ID        string   // first 8 hex digits of Hash; names the key everywhere
	Hash      [32]byte // SHA-256 of the token
	Role      access.Role
	Label     string // what its owner calls it
	CreatedAt time.Time
	CreatedBy string    // subject of whoever created it
	RevokedAt time.Time // zero while it is good
}

// Subject is the Principal.Subject of whoever calls with the key.
func (k Key) Subject() string { return "key:" + k.ID }

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
}

// Keyring authenticates callers and manages their keys. Lookups read memory
// only. There is one Keyring per Store: a key that another process writes into
// the Store is not seen.
type Keyring struct {
	store  Store
	now    func() time.Time
	byHash atomic.Pointer[map[[32]byte]Key]
	mu     sync.Mutex // serialises changes, so that byHash never goes back
}

// Open returns a Keyring over the keys in store. now may be nil.
func Open(ctx context.Context, store Store, now func() time.Time) (*Keyring, error) {
	if now == nil {
		now = time.Now
	}
	r := &Keyring{store: store, now: now}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.reloadLocked(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Keyring) reloadLocked(ctx context.Context) error {
	keys, err := r.store.Keys(ctx)
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

// Authenticate returns whose key token is; Unauthentic when it is nobody's or
// was revoked. A revoked key stops working when Revoke returns.
func (r *Keyring) Authenticate(_ context.Context, token string) (access.Caller, error) {
	unknown := func(format string, args ...any) (access.Caller, error) {
		return access.Caller{}, kind.Errorf(kind.Unauthentic, format, args...).
			WithHint("send the API key in X-API-Key or as Authorization: Bearer; the first one is in the %s file of the data directory", AdminKeyFile)
	}
	if token == "" {
		return unknown("no API key was sent")
	}
	if !wellFormed(token) {
		return unknown("what was sent is not an API key: want %s and %d hex digits", TokenPrefix, 2*tokenBytes)
	}
	// The time of a map lookup depends on the hash alone, from which nothing
	// about a working key can be learnt.
	hash := sha256.Sum256([]byte(token))
	k, ok := (*r.byHash.Load())[hash]
	if !ok || subtle.ConstantTimeCompare(k.Hash[:], hash[:]) != 1 {
		return unknown("the API key is not known here")
	}
	if !k.RevokedAt.IsZero() {
		return unknown("the API key %s was revoked at %s", k.ID, k.RevokedAt.UTC().Format(time.RFC3339))
	}
	return access.Caller{Principal: session.Principal{Subject: k.Subject()}, Role: k.Role}, nil
}

// Create makes a key. The token is returned this once and stored nowhere.
func (r *Keyring) Create(ctx context.Context, by session.Principal, role access.Role, label string) (secret.Value, Key, error) {
	if _, err := access.ParseRole(string(role)); err != nil {
		return secret.Value{}, Key{}, err
	}
	if len(label) > MaxLabel || !utf8.ValidString(label) || strings.ContainsFunc(label, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return secret.Value{}, Key{}, kind.Errorf(kind.Invalid, "%.64q: want text without control characters, at most %d bytes", label, MaxLabel).WithField("label")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// IDs are short, so that people can say them; with very many keys a new
	// one may meet an old one's.
	for try := 0; ; try++ {
		token := newToken()
		k, err := r.putLocked(ctx, token, by.Subject, role, label)
		if kind.Is(err, kind.Conflict) && try < 8 {
			continue
		}
		if err != nil {
			return secret.Value{}, Key{}, err
		}
		return token, k, nil
	}
}

func (r *Keyring) putLocked(ctx context.Context, token secret.Value, by string, role access.Role, label string) (Key, error) {
	hash := sha256.Sum256([]byte(token.Reveal()))
	k := Key{
		ID:        hex.EncodeToString(hash[:4]),
		Hash:      hash,
		Role:      role,
		Label:     label,
		CreatedAt: r.now().UTC().Truncate(time.Microsecond),
		CreatedBy: by,
	}
	if err := r.store.PutKey(ctx, k); err != nil {
		return Key{}, fmt.Errorf("store API key %s: %w", k.ID, err)
	}
	return k, r.reloadLocked(ctx)
}

// List returns every key, revoked ones too, oldest first.
func (r *Keyring) List(ctx context.Context) ([]Key, error) { return r.store.Keys(ctx) }

// Revoke ends a key at once; doing it again changes nothing. It fails with
// NotFound for an unknown id and with Conflict for the last good admin key,
// without which nobody could make another.
func (r *Keyring) Revoke(ctx context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var last *Key
	others := 0
	for _, k := range *r.byHash.Load() {
		good := k.Role == access.Admin && k.RevokedAt.IsZero()
		switch {
		case k.ID == id && good:
			last = &k
		case good:
			others++
		}
	}
	if last != nil && others == 0 {
		return kind.Errorf(kind.Conflict, "key %s is the last admin key", id).WithHint("create another admin key first")
	}
	if err := r.store.RevokeKey(ctx, id, r.now().UTC().Truncate(time.Microsecond)); err != nil {
		return err
	}
	return r.reloadLocked(ctx)
}

// EnsureAdmin makes the first admin key when there is no key at all, writes
// its token to AdminKeyFile in dir, mode 0600, and reports the file's path. It
// returns "" when there are keys already.
//
// The file is durable before the key is stored: a crash between the two leaves
// a token that does not work and is replaced at the next start, never a key
// that nobody knows.
func (r *Keyring) EnsureAdmin(ctx context.Context, dir string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(*r.byHash.Load()) > 0 {
		return "", nil
	}
	token := newToken()
	path := filepath.Join(dir, AdminKeyFile)
	if err := durable.WriteFile(path, []byte(token.Reveal()+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("first admin key: %w", err)
	}
	if _, err := r.putLocked(ctx, token, "local:first-run", access.Admin, "first admin key"); err != nil {
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
