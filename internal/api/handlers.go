package api

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	_ "embed" // for the interface's description
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"

	"bivy/client"
	"bivy/internal/access"
	"bivy/internal/audit"
	"bivy/internal/kind"
	"bivy/internal/lifecycle"
	"bivy/internal/session"
	"bivy/internal/template"
)

//go:embed openapi.yaml
var openAPIDocument []byte

func openAPI(c *call) error {
	c.w.Header().Set("Content-Type", "application/yaml")
	_, err := c.w.Write(openAPIDocument)
	return err
}

func health(c *call) error {
	if ready := c.h.o.Ready; ready != nil {
		select {
		case <-ready:
		default:
			c.w.Header().Set("Retry-After", "1")
			return c.reply(http.StatusServiceUnavailable, client.Health{Status: "starting"})
		}
	}
	return c.reply(http.StatusOK, client.Health{Status: "ok"})
}

func version(c *call) error {
	v, err := c.h.o.Node.Version(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, v)
}

func node(c *call) error {
	n, err := c.h.o.Node.Node(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, n)
}

func createSession(c *call) error {
	typ, err := c.accepts("application/json", client.NDJSONType)
	if err != nil {
		return err
	}
	var in client.CreateSession
	if err := c.decode(&in); err != nil {
		return err
	}
	req := lifecycle.CreateRequest{Caller: c.caller, OnBehalfOf: in.OnBehalfOf, Trigger: in.Trigger, Spec: specIn(in.Spec)}
	for field, v := range map[string]string{"on_behalf_of": in.OnBehalfOf, "trigger": in.Trigger} {
		if len(v) > 256 {
			return kind.Errorf(kind.Invalid, "%d bytes, at most 256", len(v)).WithField(field)
		}
	}
	if key := c.req.Header.Get(idempotencyHeader); key != "" {
		digest, err := c.h.digestOf(in)
		if err != nil {
			return err
		}
		req.Key = session.IdempotencyKey{Scope: c.caller.Principal.Subject, Key: key, Digest: digest}
	}
	var up *updates
	if typ == client.NDJSONType {
		up = newUpdates(c, http.StatusCreated)
		req.Progress = func(done, total int64, what string) {
			up.progress(client.CreateUpdate{Progress: &client.Progress{What: what, Done: done, Total: total}})
		}
	}
	s, timing, err := c.h.o.Sessions.Create(c.ctx(), req)
	if err != nil && s.ID != "" {
		err = withRecord(err, s.ID)
	}
	out := client.CreatedSession{SessionInfo: sessionOut(s), Timing: timingOut(timing)}
	if up != nil {
		return up.last(err, client.CreateUpdate{Session: &out},
			func(e *client.Error) any { return client.CreateUpdate{Error: e} })
	}
	if err != nil {
		return err
	}
	status := http.StatusCreated
	if len(timing) == 0 { // the key had made it already
		status = http.StatusOK
	}
	return c.reply(status, out)
}

// withRecord says where a create that failed is explained: what was begun has
// a record, and with it an id.
func withRecord(err error, id session.ID) error {
	hint := kind.Hint(err)
	if hint != "" {
		hint += "; "
	}
	return kind.Errorf(kind.Of(err), "%w", err).
		WithHint("%sthe record of session %s says what was tried: bivy logs %s", hint, id, id)
}

// digestOf names a request by its content, so that an idempotency key is not
// used for another one. It is keyed, because it is stored and the request may
// hold secrets that are short enough to be guessed.
func (h *Handler) digestOf(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	mac := hmac.New(sha256.New, h.o.DigestKey)
	mac.Write(b)
	return "hmac-sha256:" + hex.EncodeToString(mac.Sum(nil)), nil
}

const (
	defaultLimit = 100
	maxLimit     = 1000
)

func listSessions(c *call) error {
	limit, err := c.number("limit", defaultLimit, 1, maxLimit)
	if err != nil {
		return err
	}
	q := c.req.URL.Query()
	f := session.Filter{Owner: q.Get("owner")}
	scope, err := access.Roles{}.Scope(c.ctx(), c.caller, access.SessionRead)
	if err != nil {
		return err
	}
	if scope != "" {
		if f.Owner != "" && f.Owner != scope {
			return page[client.SessionInfo](c, nil)
		}
		f.Owner = scope
	}
	for _, s := range q["state"] {
		if !slices.Contains(session.States(), session.State(s)) {
			return kind.Errorf(kind.Invalid, "%.40q is not a state", s).WithField("state").WithHint("states: %v", session.States())
		}
		f.States = append(f.States, session.State(s))
	}
	for _, l := range q["label"] {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return kind.Errorf(kind.Invalid, "%.100q; want KEY=VALUE", l).WithField("label")
		}
		if f.Labels == nil {
			f.Labels = map[string]string{}
		}
		f.Labels[k] = v
	}
	items, next, err := c.h.o.Sessions.List(c.ctx(), c.caller, f, q.Get("cursor"), int(limit))
	if err != nil {
		return err
	}
	p := client.Page[client.SessionInfo]{Items: []client.SessionInfo{}, NextCursor: next, Complete: next == ""}
	for _, s := range items {
		p.Items = append(p.Items, sessionOut(s))
	}
	return c.reply(http.StatusOK, p)
}

func getSession(c *call) error {
	s, err := c.h.o.Sessions.Get(c.ctx(), c.caller, c.session)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, sessionOut(s))
}

func endSession(c *call) error {
	if err := c.noBody(); err != nil {
		return err
	}
	s, err := c.h.o.Sessions.End(c.ctx(), lifecycle.EndRequest{Caller: c.caller, ID: c.session, Reason: session.Requested})
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, sessionOut(s))
}

func setTimeout(c *call) error {
	var in client.SetTimeout
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.TimeoutSeconds < 1 || in.TimeoutSeconds > int64(session.MaxTimeout) {
		return kind.Errorf(kind.Invalid, "%d seconds is outside 1 to %d", in.TimeoutSeconds, session.MaxTimeout).WithField("timeout_seconds")
	}
	s, err := c.h.o.Sessions.SetTimeout(c.ctx(), c.caller, c.session, session.Seconds(in.TimeoutSeconds))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, sessionOut(s))
}

func stats(c *call) error {
	st, err := c.h.o.Workload.Stats(c.ctx(), c.caller, c.session)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, statsOut(st))
}

func events(c *call) error {
	after, err := c.number("after", 0, 0, math.MaxInt64)
	if err != nil {
		return err
	}
	limit, err := c.number("limit", defaultLimit, 1, maxLimit)
	if err != nil {
		return err
	}
	follow, err := c.boolean("follow")
	if err != nil {
		return err
	}
	if follow {
		return followEvents(c, uint64(after))
	}
	p := client.Page[client.Event]{Items: []client.Event{}, Complete: true}
	// One more than asked for shows whether there is a next page.
	err = c.h.o.Sessions.Events(c.ctx(), c.caller, c.session, uint64(after), int(limit)+1, func(s audit.Stored) error {
		if len(p.Items) == int(limit) {
			p.Complete = false
			p.NextCursor = uintText(p.Items[limit-1].Seq)
			return nil
		}
		p.Items = append(p.Items, eventOut(s))
		return nil
	})
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, p)
}

func followEvents(c *call, after uint64) error {
	// A first look fails like any other request where the caller may not
	// follow; after it the answer begins, although there may be no event yet.
	if err := c.h.o.Sessions.Events(c.ctx(), c.caller, c.session, after, 1, func(audit.Stored) error { return nil }); err != nil {
		return err
	}
	up := newUpdates(c, http.StatusOK)
	up.open()
	err := c.h.o.Sessions.Follow(c.ctx(), c.caller, c.session, after, func(s audit.Stored) error {
		ev := eventOut(s)
		return up.send(client.EventUpdate{Event: &ev})
	})
	if err != nil {
		return up.last(err, nil, func(e *client.Error) any { return client.EventUpdate{Error: e} })
	}
	return nil
}

func record(c *call) error {
	c.download(string(c.session))
	return c.h.o.Sessions.Export(c.ctx(), c.caller, c.session, c.w)
}

func listTemplates(c *call) error {
	list, err := c.h.o.Templates.List(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	var items []client.Template
	for _, l := range list {
		items = append(items, templateOut(l))
	}
	return page(c, items)
}

func getTemplate(c *call) error {
	l, err := c.h.o.Templates.Get(c.ctx(), c.caller, c.req.PathValue("name"))
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, templateOut(l))
}

func removeTemplate(c *call) error {
	if err := c.noBody(); err != nil {
		return err
	}
	if err := c.h.o.Templates.Remove(c.ctx(), c.caller, c.req.PathValue("name")); err != nil {
		return err
	}
	return c.nothing()
}

func buildTemplate(c *call) error {
	typ, err := c.accepts(client.NDJSONType, "application/json")
	if err != nil {
		return err
	}
	var in client.BuildTemplate
	if err := c.decode(&in); err != nil {
		return err
	}
	var up *updates
	var progress template.Progress
	if typ == client.NDJSONType {
		up = newUpdates(c, http.StatusCreated)
		progress = func(e template.Event) {
			up.progress(client.BuildUpdate{Progress: &client.Progress{What: e.Phase, Done: e.Done, Total: e.Total}})
		}
	}
	l, err := c.h.o.Templates.Build(c.ctx(), c.caller, templateIn(in), progress)
	out := templateOut(l)
	if up != nil {
		return up.last(err, client.BuildUpdate{Template: &out},
			func(e *client.Error) any { return client.BuildUpdate{Error: e} })
	}
	if err != nil {
		return err
	}
	return c.reply(http.StatusCreated, out)
}

func listKeys(c *call) error {
	keys, err := c.h.o.Keys.List(c.ctx(), c.caller)
	if err != nil {
		return err
	}
	var items []client.Key
	for _, k := range keys {
		items = append(items, keyOut(k))
	}
	return page(c, items)
}

func createKey(c *call) error {
	var in client.CreateKey
	if err := c.decode(&in); err != nil {
		return err
	}
	token, k, err := c.h.o.Keys.Create(c.ctx(), c.caller, access.Role(in.Role), in.Label)
	if err != nil {
		return err
	}
	return c.reply(http.StatusCreated, client.CreatedKey{Key: keyOut(k), Secret: token.Reveal()})
}

func revokeKey(c *call) error {
	if err := c.noBody(); err != nil {
		return err
	}
	if err := c.h.o.Keys.Revoke(c.ctx(), c.caller, c.req.PathValue("key")); err != nil {
		return err
	}
	return c.nothing()
}

// gone reports whether err only says that the caller has left.
func gone(ctx context.Context, err error) bool {
	return ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, ctx.Err()))
}
