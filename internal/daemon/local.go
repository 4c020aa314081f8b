package daemon

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"io"

	"bivy/internal/access"
	"bivy/internal/auth"
	"bivy/internal/config"
	"bivy/internal/dirlock"
	"bivy/internal/kind"
	"bivy/internal/poll"
	"bivy/internal/secret"
)

// localKeys knows one key more than the keyring: that of the process itself.
type localKeys struct {
	*auth.Keyring
	local secret.Value
}

// Authenticate implements api.Keys.
func (k localKeys) Authenticate(ctx context.Context, token, from string) (access.Caller, error) {
	if k.local.Equal(secret.New(token)) {
		return access.Caller{Principal: localUser(), Role: access.Admin}, nil
	}
	return k.Keyring.Authenticate(ctx, token, from)
}

func newLocalKey() secret.Value {
	var b [32]byte
	rand.Read(b[:])
	return secret.New("local_" + hex.EncodeToString(b[:]))
}

// lockDir takes the run directory for this process. The store has a lock of
// its own on the data directory; two daemons with different data and the same
// run directory would take each other's sandboxes for orphans.
//
// Another command, or a server that stops, is given time to let go of it.
func lockDir(ctx context.Context, d *Daemon) error {
	ctx, cancel := context.WithTimeout(ctx, config.LockPatience)
	defer cancel()
	var lock *dirlock.Lock
	err := poll.Until(ctx, poll.Every(config.LockInterval), func() (done bool, err error) {
		lock, err = dirlock.Acquire(d.cfg.RunDir)
		if err == nil {
			return true, nil
		}
		if !kind.Is(err, kind.Conflict) {
			return true, kind.Errorf(kind.Unavailable, "%w", err).WithHint("run bivy as root, or choose other directories with data_dir and run_dir")
		}
		// A server that serves goes on. One whose announcement cannot be read
		// is waited for like any other process.
		_, serving, _ := config.Find(d.cfg.RunDir)
		return serving, err
	})
	if kind.Is(err, kind.Conflict) || ctx.Err() != nil && lock == nil {
		return config.HeldError(d.cfg.RunDir)
	}
	if err != nil {
		return err
	}
	d.closers = append(d.closers, lock.Close)
	return nil
}

func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:4])
}

func opened(data []byte, err error) (io.ReadCloser, error) {
	if err != nil {
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}
