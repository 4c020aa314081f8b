// Package catalog decides who may see and change templates, and records every
// change in the record of the node: intent before, outcome after.
//
//	api ──▶ Service ──▶ decision ──▶ intent ──▶ Store ──▶ outcome
//
// What the node changes by itself, such as the base template that it builds on
// first use and templates that nothing uses any more, is recorded without a
// decision, with the node as its actor.
package catalog

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"strings"

	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/session"
	"bivy/internal/template"
)

// Store keeps templates, as template.Store does.
type Store interface {
	// List returns every template, oldest first.
	List() ([]template.Listed, error)
	// Get returns a template by name or digest; NotFound when there is none.
	Get(nameOrDigest string) (template.Template, error)
	// Build makes the template that spec describes and names it; progress may
	// be nil.
	Build(ctx context.Context, spec template.Spec, progress template.Progress) (template.Template, error)
	// Remove takes a name away, or with a digest removes the template and all
	// its names; Conflict for a template in use.
	Remove(nameOrDigest string) error
	// GC removes every template that has neither a name nor a lease.
	GC(ctx context.Context) (template.Collected, error)
}

// Record is the record of the node. journal.SystemRecord is one.
type Record interface {
	// Begin makes an intent durable and returns how to conclude it. When it
	// fails the effect must not happen.
	Begin(ctx context.Context, intent audit.Entry) (conclude func(outcome audit.Entry) error, err error)
}

// Service is the way to the templates of a node. Its methods may be called
// from any goroutine.
type Service struct {
	store  Store
	record Record
	access access.Decider
}

// New returns a Service.
func New(s Store, r Record, a access.Decider) *Service {
	return &Service{store: s, record: r, access: a}
}

func (s *Service) decide(ctx context.Context, who access.Caller, a access.Action) (audit.Decision, error) {
	return s.access.Decide(ctx, access.Request{Caller: who, Action: a})
}

// List returns every template, oldest first.
func (s *Service) List(ctx context.Context, who access.Caller) ([]template.Listed, error) {
	if _, err := s.decide(ctx, who, access.TemplateRead); err != nil {
		return nil, err
	}
	return s.store.List()
}

// Get returns a template by name or digest, with its names and leases.
func (s *Service) Get(ctx context.Context, who access.Caller, nameOrDigest string) (template.Listed, error) {
	if _, err := s.decide(ctx, who, access.TemplateRead); err != nil {
		return template.Listed{}, err
	}
	t, err := s.store.Get(nameOrDigest)
	if err != nil {
		return template.Listed{}, err
	}
	return s.listed(t)
}

// listed finds the names and leases of a template.
func (s *Service) listed(t template.Template) (template.Listed, error) {
	list, err := s.store.List()
	if err != nil {
		return template.Listed{}, err
	}
	for _, l := range list {
		if l.Digest == t.Digest {
			return l, nil
		}
	}
	return template.Listed{Template: t}, nil // it was removed a moment ago
}

// Payloads of events about templates.
type (
	buildPayload struct {
		Name   string `json:"name,omitempty"`
		Source string `json:"source"`
	}
	builtPayload struct {
		Name     string          `json:"name,omitempty"`
		Digest   template.Digest `json:"digest"`
		Image    template.Digest `json:"image"`
		Replaced template.Digest `json:"replaced,omitempty"` // that had the name before
	}
	removePayload struct {
		Name string `json:"name,omitempty"`
	}
	removedPayload struct {
		Name   string          `json:"name,omitempty"`
		Digest template.Digest `json:"digest"`
		Why    string          `json:"why"`
	}
	failedPayload struct {
		Error string `json:"error"`
	}
)

// Build makes the template that spec describes and names it; progress may be
// nil.
func (s *Service) Build(ctx context.Context, who access.Caller, spec template.Spec, progress template.Progress) (template.Listed, error) {
	decision, err := s.decide(ctx, who, access.TemplateWrite)
	if err != nil {
		return template.Listed{}, err
	}
	if err := spec.Validate(); err != nil {
		return template.Listed{}, err
	}
	t, err := s.build(ctx, who.Principal, decision, spec, progress)
	if err != nil {
		return template.Listed{}, err
	}
	return s.listed(t)
}

// Provide builds a template that the node needs by itself.
func (s *Service) Provide(ctx context.Context, spec template.Spec, progress template.Progress) (template.Template, error) {
	return s.build(ctx, session.Principal{}, audit.Decision{}, spec, progress)
}

func (s *Service) build(ctx context.Context, by session.Principal, decision audit.Decision, spec template.Spec, progress template.Progress) (template.Template, error) {
	before, err := s.named(spec.Name)
	if err != nil {
		return template.Template{}, err
	}
	conclude, err := s.record.Begin(ctx, audit.Entry{
		Action: audit.TemplateBuildIntent, Actor: by, Decision: decision, Ref: newRef(), Object: object(spec.Name),
		Payload: buildPayload{Name: spec.Name, Source: spec.From.Kind()},
	})
	if err != nil {
		return template.Template{}, err
	}
	t, err := s.store.Build(ctx, spec, progress)
	if err != nil {
		return t, errors.Join(err, conclude(failed(err)))
	}
	done := builtPayload{Name: spec.Name, Digest: t.Digest, Image: t.ImageDigest}
	if before != t.Digest {
		done.Replaced = before
	}
	return t, conclude(audit.Entry{Action: audit.TemplateBuilt, Outcome: audit.OK, Object: object(string(t.Digest)), Payload: done})
}

// named returns the template that has a name, or "" when none has.
func (s *Service) named(name string) (template.Digest, error) {
	if name == "" {
		return "", nil
	}
	t, err := s.store.Get(name)
	if kind.Is(err, kind.NotFound) {
		return "", nil
	}
	return t.Digest, err
}

// Remove takes a name away, or with a digest removes the template and all its
// names. It fails with Conflict for a template in use.
func (s *Service) Remove(ctx context.Context, who access.Caller, nameOrDigest string) error {
	decision, err := s.decide(ctx, who, access.TemplateWrite)
	if err != nil {
		return err
	}
	t, err := s.store.Get(nameOrDigest)
	if err != nil {
		return err
	}
	conclude, err := s.record.Begin(ctx, audit.Entry{
		Action: audit.TemplateRemoveIntent, Actor: who.Principal, Decision: decision, Ref: newRef(), Object: object(string(t.Digest)),
		Payload: removePayload{Name: nameOrDigest},
	})
	if err != nil {
		return err
	}
	if err := s.store.Remove(nameOrDigest); err != nil {
		return errors.Join(err, conclude(failed(err)))
	}
	return conclude(audit.Entry{
		Action: audit.TemplateRemoved, Outcome: audit.OK,
		Payload: removedPayload{Name: nameOrDigest, Digest: t.Digest, Why: "requested"},
	})
}

// maxCollected bounds the digests in one event of Collect.
const maxCollected = 256

// Collect removes the templates that have neither a name nor a lease and have
// not been used for a while. It writes nothing while there is none without
// both.
func (s *Service) Collect(ctx context.Context) (template.Collected, error) {
	list, err := s.store.List()
	if err != nil {
		return template.Collected{}, err
	}
	unused := false
	for _, l := range list {
		unused = unused || len(l.Names) == 0 && len(l.Leases) == 0
	}
	if !unused {
		return template.Collected{}, nil
	}
	conclude, err := s.record.Begin(ctx, audit.Entry{
		Action: audit.TemplateRemoveIntent, Ref: newRef(), Object: "templates/unused", Payload: map[string]any{"why": whyUnused},
	})
	if err != nil {
		return template.Collected{}, err
	}
	gone, err := s.store.GC(ctx)
	removed := gone.Digests[:min(len(gone.Digests), maxCollected)]
	out := audit.Entry{Action: audit.TemplateRemoved, Outcome: audit.OK, Payload: map[string]any{
		"why": whyUnused, "digests": removed, "count": len(gone.Digests), "bytes": gone.Bytes,
	}}
	if err != nil {
		out.Action, out.Outcome = audit.TemplateFailed, audit.Failed
		out.Payload = map[string]any{"why": whyUnused, "digests": removed, "count": len(gone.Digests), "error": err.Error()}
	}
	return gone, errors.Join(err, conclude(out))
}

// whyUnused is why Collect removes templates.
const whyUnused = "it has neither a name nor a session that uses it"

func failed(err error) audit.Entry {
	return audit.Entry{Action: audit.TemplateFailed, Outcome: audit.Failed, Payload: failedPayload{Error: err.Error()}}
}

// object is a template in events, by its name or digest: what is not printable
// ASCII, or is too long, is in the payload only.
func object(nameOrDigest string) string {
	o := "template/" + nameOrDigest
	if nameOrDigest == "" || len(o) > audit.MaxObject || strings.ContainsFunc(o, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return ""
	}
	return o
}

// newRef names one piece of work in the events about it.
func newRef() string {
	var b [8]byte
	rand.Read(b[:])
	return "template-" + hex.EncodeToString(b[:])
}
