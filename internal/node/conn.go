package node

import (
	"context"
	"errors"
	"net"

	"bivy/internal/guest/guestclient"
	"bivy/internal/kind"
	"bivy/internal/session"
)

// Guest returns the client of the agent inside.
func (n *Node) Guest(_ context.Context, id session.SandboxID) (*guestclient.Client, error) {
	e, err := n.entry(id)
	if err != nil {
		return nil, err
	}
	return n.guest(e)
}

func (n *Node) guest(e *entry) (*guestclient.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.openLocked(); err != nil {
		return nil, err
	}
	if e.client == nil {
		e.client = guestclient.New(guestclient.Config{
			Dial:  func(ctx context.Context) (net.Conn, error) { return n.dial(ctx, e, n.o.AgentPort) },
			Token: n.token(e.id),
		})
	}
	return e.client, nil
}

func (e *entry) openLocked() error {
	switch {
	case e.shut, e.destroying:
		return kind.Errorf(kind.Conflict, "sandbox %s is shut", e.id)
	case !e.up:
		return kind.Errorf(kind.Unavailable, "sandbox %s does not run", e.id)
	}
	return nil
}

// dial connects to a TCP port inside.
func (n *Node) dial(ctx context.Context, e *entry, port uint16) (net.Conn, error) {
	e.mu.Lock()
	err := e.openLocked()
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	raw, err := n.o.Driver.Dial(ctx, e.id, port)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, e: e}
	e.mu.Lock()
	defer e.mu.Unlock()
	// It may have been shut while the driver was dialling.
	if err := e.openLocked(); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	e.conns[c] = struct{}{}
	return c, nil
}

// conn is an open connection into a sandbox.
type conn struct {
	net.Conn
	e *entry
}

// Close closes the connection and takes it off the entry's list.
func (c *conn) Close() error {
	c.e.mu.Lock()
	delete(c.e.conns, c)
	c.e.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite ends the sending half where the driver's connection can.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return kind.Errorf(kind.Invalid, "this connection has no half to close")
}

// cut closes every connection into the sandbox; with shut no new one is made.
func (e *entry) cut(shut bool) {
	e.mu.Lock()
	e.shut = e.shut || shut
	client := e.client
	e.client = nil
	open := make([]net.Conn, 0, len(e.conns))
	for c := range e.conns {
		open = append(open, c.Conn)
	}
	clear(e.conns)
	e.mu.Unlock()
	for _, c := range open {
		// Closing is what matters; an error means that the other end did.
		_ = c.Close()
	}
	if client != nil {
		_ = client.Close() // always nil
	}
}

// Shut refuses new connections into the sandbox and closes those that are open.
func (n *Node) Shut(_ context.Context, id session.SandboxID) error {
	e, err := n.entry(id)
	if err != nil {
		return err
	}
	e.cut(true)
	return nil
}
