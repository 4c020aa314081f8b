package guest

import (
	"net"
	"net/netip"
	"sync/atomic"
)

// localKey marks, in a request's context, whether its peer is inside.
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

// listener tells connections from inside from the host's and bounds them.
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
			_ = c.Close() // the peer sees it closed, which is the answer
			continue
		}
		return &localConn{Conn: c, count: &l.local}, nil
	}
}

// fromInside reports that the peer has an address of this machine. Over a Unix
// socket, whose file mode says who may connect, it is the host.
func fromInside(c net.Conn) bool {
	remote, ok := address(c.RemoteAddr())
	if !ok {
		return false
	}
	local, _ := address(c.LocalAddr())
	if remote.IsLoopback() || remote.IsUnspecified() || remote == local {
		return true
	}
	// A program can bind any of the machine's addresses, whichever it calls.
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false // then only the two above can be known
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
