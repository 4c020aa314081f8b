package node

import (
	"context"
	"net"

	"bivy/internal/session"
)

func (n *Node) has(id session.SandboxID) bool {
	_, err := n.entry(id)
	return err == nil
}

func (n *Node) guestDial(id session.SandboxID) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		e, err := n.entry(id)
		if err != nil {
			return nil, err
		}
		return n.dial(ctx, e, n.o.AgentPort)
	}
}
