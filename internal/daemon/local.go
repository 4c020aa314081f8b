package daemon

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"bivy/internal/access"
	"bivy/internal/auth"
	"bivy/internal/config"
	"bivy/internal/kind"
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
	path := config.LockPath(d.cfg.RunDir)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return kind.Errorf(kind.Unavailable, "%w", err).WithHint("run bivy as root, or choose other directories with data_dir and run_dir")
	}
	ctx, cancel := context.WithTimeout(ctx, config.LockPatience)
	defer cancel()
	tick := time.NewTicker(config.LockInterval)
	defer tick.Stop()
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		// A server that serves goes on. One whose announcement cannot be read
		// is waited for like any other process.
		if _, serving, _ := config.Find(d.cfg.RunDir); serving || ctx.Err() != nil {
			return errors.Join(config.HeldError(d.cfg.RunDir), f.Close())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	d.closers = append(d.closers, f.Close)
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	}
	return err
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
