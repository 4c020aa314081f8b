package guest

import (
	"net"
	"net/netip"
	"sync/atomic"
)

// localKey is the context key of a bool: whether the request comes from a
// program inside the sandbox.
type localKey struct{}

// localConn is a connection from a program inside the sandbox.
type localConn struct {
	net.Conn
	count  *atomic.Int32
	closed atomic.Bool
}

func (c *localConn) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.count.Add(-1)
	}
	return c.Conn.Close()
}

// listener wraps connections from inside the sandbox in localConn and limits
// their number.
type listener struct {
	net.Listener
	local atomic.Int32
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || !fromInside(c) {
			return c, err
		}
		if l.local.Add(1) > maxLocal {
			l.local.Add(-1)
			_ = c.Close() // the peer sees a closed connection
			continue
		}
		return &localConn{Conn: c, count: &l.local}, nil
	}
}

// fromInside reports whether the peer has an address of this machine. The peer of
// a Unix socket is the host: the socket's file mode decides who may connect.
func fromInside(c net.Conn) bool {
	remote, ok := address(c.RemoteAddr())
	if !ok {
		return false
	}
	local, _ := address(c.LocalAddr())
	if remote.IsLoopback() || remote.IsUnspecified() || remote == local {
		return true
	}
	// A program can connect from any address of the machine, not only from the
	// one that it connects to.
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false // only the addresses above can be checked
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == remote {
				return true
			}
		}
	}
	return false
}

func address(a net.Addr) (netip.Addr, bool) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	return tcp.AddrPort().Addr().Unmap().WithZone(""), true
}
