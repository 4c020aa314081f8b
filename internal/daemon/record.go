package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/config"
	"bivy/internal/journal"
	"bivy/internal/kind"
	"bivy/internal/nodeinfo"
	"bivy/internal/session"
)

// openRecord loads the key that signs records and opens the record of the
// node. Where records were sealed with a key that is gone it fails, so that no
// new key takes its place unnoticed.
func (d *Daemon) openRecord(ctx context.Context) error {
	haveSeals, err := d.store.HasSeals(ctx)
	if err != nil {
		return err
	}
	signer, err := audit.LoadSigner(d.cfg.SignerDir(), haveSeals)
	if err != nil {
		return err
	}
	d.signing = journal.NewSigning(d.cfg.SignerDir(), signer)
	rules := &access.Counted{Decider: access.Roles{}}
	d.access = rules
	d.system = journal.NewSystemRecord(journal.SystemOptions{
		Store: d.store, Node: d.id, Signing: d.signing, Access: d.access,
		Versions: map[string]string{"bivy": d.version.Version, "go": runtime.Version()}, Log: d.log,
	})
	rules.Count = d.system.CountRefused
	return nil
}

// versions are what this process is made of.
func (d *Daemon) versions() map[string]string {
	v := map[string]string{"bivy": d.version.Version, "go": runtime.Version(), "driver": d.driver.Name(), "schema": strconv.Itoa(d.store.Schema())}
	if d.version.Commit != "" {
		v["commit"] = d.version.Commit
	}
	if d.isolator != "" {
		v[d.driver.Name()] = d.isolator
	}
	return v
}

// startedPayload is the payload of audit.ServerStarted.
type startedPayload struct {
	Versions map[string]string `json:"versions"`
	Config   configPayload     `json:"config"`
}

// configPayload is the configuration in effect. It has no secrets: those are
// in files that it names.
type configPayload struct {
	Settings settings `json:"settings"`
	Digest   string   `json:"digest"` // of the JSON of Settings
}

// settings are the fields of a configuration under the names that they have in
// its file.
type settings struct {
	Listen            string   `json:"listen"`
	Hosts             []string `json:"hosts"`
	TLSCert           string   `json:"tls_cert"`
	TLSKey            string   `json:"tls_key"` // the file's name
	AllowPlaintext    bool     `json:"allow_plaintext"`
	DataDir           string   `json:"data_dir"`
	RunDir            string   `json:"run_dir"`
	Driver            string   `json:"driver"`
	LogLevel          string   `json:"log_level"`
	LogFormat         string   `json:"log_format"`
	CreateConcurrency int      `json:"create_concurrency"`
}

func configOf(c config.Config) (configPayload, error) {
	s := settings(c)
	b, err := json.Marshal(s)
	if err != nil {
		return configPayload{}, err
	}
	sum := sha256.Sum256(b)
	return configPayload{Settings: s, Digest: "sha256:" + hex.EncodeToString(sum[:])}, nil
}

// stopRecordTime bounds the writing of the last event.
const stopRecordTime = 5 * time.Second

// recordStart records that a server has started, and has Close record that it
// has stopped.
func (d *Daemon) recordStart(ctx context.Context) error {
	cfg, err := configOf(d.cfg)
	if err != nil {
		return err
	}
	if err := d.system.Record(ctx, audit.Entry{
		Action: audit.ServerStarted, Outcome: audit.OK, Payload: startedPayload{Versions: d.versions(), Config: cfg},
	}); err != nil {
		return err
	}
	d.closers = append(d.closers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stopRecordTime)
		defer cancel()
		return d.system.Record(ctx, audit.Entry{Action: audit.ServerStopped, Outcome: audit.OK, Payload: struct{}{}})
	})
	return nil
}

// replaceLostKey makes a new signing key in place of one that is lost. No
// server runs on the directories meanwhile.
func replaceLostKey(ctx context.Context, o Options) (_ client.AuditKey, err error) {
	d := &Daemon{cfg: o.Config, log: o.Log, version: o.Version}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.openStore(ctx); err != nil {
		return client.AuditKey{}, err
	}
	system := journal.NewSystemRecord(journal.SystemOptions{Store: d.store, Node: d.id, Access: access.Roles{}, Log: d.log})
	conclude, err := system.Begin(ctx, audit.Entry{
		Action: audit.SigningKeyIntent, Actor: localUser(), Ref: "signing-key", Object: "signing-key", Payload: map[string]any{"lost": true},
	})
	if err != nil {
		return client.AuditKey{}, err
	}
	signer, err := audit.RotateLost(d.cfg.SignerDir())
	if err != nil {
		return client.AuditKey{}, errors.Join(err, conclude(audit.Entry{
			Action: audit.SigningKeyFailed, Outcome: audit.Failed, Payload: map[string]any{"error": err.Error()},
		}))
	}
	next := signer.Public().Fingerprint()
	if err := conclude(audit.Entry{
		Action: audit.SigningKeyReplaced, Outcome: audit.OK, Object: "signing-key/" + next, Payload: map[string]any{"new": next, "lost": true},
	}); err != nil {
		return client.AuditKey{}, kind.Errorf(kind.Of(err), "the key was replaced by %s, but that is not recorded: %w", next, err)
	}
	return nodeinfo.AuditKeyOf(signer)
}

// localUser is who works on the directories without a key.
func localUser() session.Principal {
	return session.Principal{Subject: fmt.Sprintf("local:%d", os.Getuid())}
}
