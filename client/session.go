package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/url"
	"strconv"
	"time"
)

// Session is a session of a server. Its methods are safe for concurrent use.
type Session struct {
	ID     string      // of the session
	Info   SessionInfo // as it was when this value was made; see Get
	Timing []Phase     // how long the parts of its creation took
	c      *Client
}

// Session returns the session with that id. It makes no request: a session that
// does not exist is reported by the methods of the result.
func (c *Client) Session(id string) *Session {
	return &Session{ID: id, Info: SessionInfo{ID: id}, c: c}
}

// CreateOptions are the options of CreateSessionWith.
type CreateOptions struct {
	IdempotencyKey string         // a repeated create with the same key returns the same session; empty: a new key
	UndoOnCancel   bool           // send no key, so that the server undoes a create whose ctx is done first
	Progress       func(Progress) // may be nil; called from the calling goroutine
}

// CreateSession creates a session and returns once it is running.
func (c *Client) CreateSession(ctx context.Context, s CreateSession) (*Session, error) {
	return c.CreateSessionWith(ctx, s, CreateOptions{})
}

// CreateSessionWith is CreateSession with options.
func (c *Client) CreateSessionWith(ctx context.Context, s CreateSession, o CreateOptions) (*Session, error) {
	body, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	if o.IdempotencyKey == "" && !o.UndoOnCancel {
		o.IdempotencyKey = NewIdempotencyKey()
	}
	r := call{method: "POST", path: "/v1/sessions", body: bytes.NewReader(body), typ: "application/json",
		accept: "application/json", key: o.IdempotencyKey}
	if o.Progress != nil {
		r.accept = NDJSONType
	}
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	var out *CreatedSession
	if o.Progress == nil {
		out = &CreatedSession{}
		err = readJSON(resp, out)
	} else {
		err = lines(resp, func(u CreateUpdate) error {
			if u.Error != nil {
				return u.Error
			}
			if u.Progress != nil {
				o.Progress(*u.Progress)
			}
			out = u.Session
			return nil
		})
	}
	if err != nil {
		return nil, err
	}
	if out == nil {
		return nil, fmt.Errorf("create a session: the answer ended early: %w", io.ErrUnexpectedEOF)
	}
	return &Session{ID: out.ID, Info: out.SessionInfo, Timing: out.Timing, c: c}, nil
}

// ListOptions select sessions. A zero field selects all.
type ListOptions struct {
	States []State           // in one of these states
	Labels map[string]string // with all of these labels
	Owner  string            // of the owner with this subject
	Limit  int               // sessions in one page; 0: the server's default
}

func (o ListOptions) query() url.Values {
	q := url.Values{}
	for _, s := range o.States {
		q.Add("state", string(s))
	}
	for k, v := range o.Labels {
		q.Add("label", k+"="+v)
	}
	if o.Owner != "" {
		q.Set("owner", o.Owner)
	}
	if o.Limit > 0 {
		q.Set("limit", strconv.Itoa(o.Limit))
	}
	return q
}

// Sessions lists sessions, newest first. It asks for one page after the other,
// and stops after an error.
func (c *Client) Sessions(ctx context.Context, o ListOptions) iter.Seq2[SessionInfo, error] {
	return pages[SessionInfo](ctx, c, "/v1/sessions", o.query(), "cursor")
}

// pages returns the items of a list, page by page.
func pages[T any](ctx context.Context, c *Client, path string, q url.Values, cursor string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		q := maps.Clone(q)
		for {
			var p Page[T]
			var zero T
			if err := c.json(ctx, "GET", path, q, nil, &p, ""); err != nil {
				yield(zero, err)
				return
			}
			for _, item := range p.Items {
				if !yield(item, nil) {
					return
				}
			}
			if p.Complete {
				return
			}
			if p.NextCursor == "" || p.NextCursor == q.Get(cursor) {
				yield(zero, unexpected(200, "a list that is not complete and has no next page"))
				return
			}
			q.Set(cursor, p.NextCursor)
		}
	}
}

// GetSession returns the session with that id, as the server knows it.
func (c *Client) GetSession(ctx context.Context, id string) (*Session, error) {
	s := c.Session(id)
	info, err := s.Get(ctx)
	if err != nil {
		return nil, err
	}
	s.Info = info
	return s, nil
}

func (s *Session) path(rest string) string { return "/v1/sessions/" + url.PathEscape(s.ID) + rest }

// Get returns the present state of the session.
func (s *Session) Get(ctx context.Context) (SessionInfo, error) {
	var info SessionInfo
	return info, s.c.json(ctx, "GET", s.path(""), nil, nil, &info, "")
}

// End ends the session and returns once its sandbox is gone. Ending a session
// that has ended changes nothing. The end continues when ctx is cancelled.
func (s *Session) End(ctx context.Context) (SessionInfo, error) {
	var info SessionInfo
	return info, s.c.json(ctx, "DELETE", s.path(""), nil, nil, &info, "")
}

// SetTimeout sets the session's deadline to d from now, rounded up to seconds.
func (s *Session) SetTimeout(ctx context.Context, d time.Duration) (SessionInfo, error) {
	var info SessionInfo
	in := SetTimeout{TimeoutSeconds: int64((d + time.Second - 1) / time.Second)}
	return info, s.c.json(ctx, "POST", s.path("/timeout"), nil, in, &info, "")
}

// Stats measures the session's sandbox.
func (s *Session) Stats(ctx context.Context) (Stats, error) {
	var st Stats
	return st, s.c.json(ctx, "GET", s.path("/stats"), nil, nil, &st, "")
}

// Events lists the events of the session's record with sequence numbers greater
// than after.
func (s *Session) Events(ctx context.Context, after uint64) iter.Seq2[Event, error] {
	q := url.Values{"after": {strconv.FormatUint(after, 10)}}
	return pages[Event](ctx, s.c, s.path("/events"), q, "after")
}

// Follow is Events that continues with new events as they are written, until the
// session has ended.
func (s *Session) Follow(ctx context.Context, after uint64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		q := url.Values{"after": {strconv.FormatUint(after, 10)}, "follow": {"true"}}
		resp, err := s.c.send(ctx, call{method: "GET", path: s.path("/events"), query: q, accept: NDJSONType})
		if err != nil {
			yield(Event{}, err)
			return
		}
		err = lines(resp, func(u EventUpdate) error {
			if u.Error != nil {
				return u.Error
			}
			if u.Event != nil && !yield(*u.Event, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop { //nolint:errorlint // errStop is never wrapped
			yield(Event{}, err)
		}
	}
}

// Record returns the session's record in the form that is verified offline. The
// caller closes it.
func (s *Session) Record(ctx context.Context) (io.ReadCloser, error) {
	resp, err := s.c.send(ctx, call{method: "GET", path: s.path("/record")})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
