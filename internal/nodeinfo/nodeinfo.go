// Package nodeinfo tells callers about the node itself: which build it runs,
// what was found on its machine, and which keys sign its records. Each answer
// is decided on like every other action.
package nodeinfo

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"slices"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/audit"
)

// Options are what a Service is made of. Access and Signer are required.
type Options struct {
	Access  access.Decider
	Version client.Version
	// Signer returns the signer in use, which can be replaced meanwhile.
	Signer func() *audit.Signer
	// Examine looks at the machine; nil: there is nothing to tell.
	Examine func(ctx context.Context) (client.Node, error)
}

// Service answers. Its methods may be called from any goroutine.
type Service struct{ o Options }

// New returns a Service.
func New(o Options) *Service { return &Service{o: o} }

func (s *Service) decide(ctx context.Context, who access.Caller, a access.Action) error {
	_, err := s.o.Access.Decide(ctx, access.Request{Caller: who, Action: a})
	return err
}

// Version returns which build of bivy the node runs. Every caller with a role
// may ask.
func (s *Service) Version(ctx context.Context, who access.Caller) (client.Version, error) {
	return s.o.Version, s.decide(ctx, who, access.SessionRead)
}

// Node returns what was found on the machine.
func (s *Service) Node(ctx context.Context, who access.Caller) (client.Node, error) {
	if err := s.decide(ctx, who, access.NodeRead); err != nil {
		return client.Node{}, err
	}
	n := client.Node{OK: true}
	if s.o.Examine != nil {
		var err error
		if n, err = s.o.Examine(ctx); err != nil {
			return client.Node{}, err
		}
	}
	if n.Facts == nil {
		n.Facts = []client.Fact{}
	}
	return n, nil
}

// AuditKey returns the key that signs records and the keys that did so before.
func (s *Service) AuditKey(ctx context.Context, who access.Caller) (client.AuditKey, error) {
	if err := s.decide(ctx, who, access.AuditRead); err != nil {
		return client.AuditKey{}, err
	}
	return AuditKeyOf(s.o.Signer())
}

// algorithm of every signing key.
const algorithm = "ed25519"

// AuditKeyOf describes the key of a signer and its predecessors.
func AuditKeyOf(signer *audit.Signer) (client.AuditKey, error) {
	public := signer.Public()
	out := client.AuditKey{Algorithm: algorithm, PublicKey: string(public.Export()), Fingerprint: public.Fingerprint()}
	for _, statement := range signer.Rotations() {
		r, err := statement.Rotation()
		if err != nil {
			return client.AuditKey{}, err
		}
		envelope, err := json.Marshal(statement)
		if err != nil {
			return client.AuditKey{}, err
		}
		out.Rotations = append(out.Rotations, envelope)
		if r.Old == "" {
			continue // the key before was not known any more
		}
		key, err := encodeKey(r.OldKey)
		if err != nil {
			return client.AuditKey{}, fmt.Errorf("former key %s: %w", r.Old, err)
		}
		out.Former = append(out.Former, client.FormerKey{
			Algorithm: algorithm, PublicKey: key, Fingerprint: r.Old, ReplacedAt: r.Time, Lost: r.Lost,
		})
	}
	slices.Reverse(out.Former) // newest first
	return out, nil
}

// encodeKey returns the 32 bytes of a public key in the form of
// audit.PublicKey.Export.
func encodeKey(key []byte) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(ed25519.PublicKey(key))
	if err != nil {
		return "", err
	}
	keys, err := audit.ParsePublicKeys(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	if err != nil {
		return "", err
	}
	return string(keys[0].Export()), nil
}
