package link

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// MaxFlows is how many connections that it opened a guest may have at a time.
// More are refused. It bounds what a guest can make this process hold: with
// the buffers of both directions a flow takes at most a few megabytes.
const MaxFlows = 512

// Flow is one TCP connection that a guest is opening.
type Flow struct {
	link *Link
	src  netip.AddrPort
	dst  netip.AddrPort

	mu   sync.Mutex
	req  *tcp.ForwarderRequest // nil once the handshake is over or refused
	conn net.Conn              // nil unless accepted
}

// Source is the guest's end.
func (f *Flow) Source() netip.AddrPort { return f.src }

// Destination is where the guest wants to connect to.
func (f *Flow) Destination() netip.AddrPort { return f.dst }

// Accept completes the handshake with the guest and returns the host's end of
// the connection. It can be called once.
func (f *Flow) Accept() (net.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.req == nil {
		return nil, fmt.Errorf("flow to %s: accepted before, or over", f.dst)
	}
	if f.link.closing.Load() {
		return nil, fmt.Errorf("flow to %s: %w", f.dst, net.ErrClosed)
	}
	var queue waiter.Queue
	ep, err := f.req.CreateEndpoint(&queue)
	if err != nil {
		return nil, fmt.Errorf("flow to %s: %s", f.dst, err)
	}
	f.req.Complete(false)
	f.req = nil
	f.conn = gonet.NewTCPConn(&queue, ep)
	return f.conn, nil
}

// end closes what was accepted; what was not is counted and reset.
func (f *Flow) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.req == nil {
		_ = f.conn.Close() // always nil
		return
	}
	f.link.filter.refused.Add(1)
	f.req.Complete(true)
	f.req = nil
}

// forward gives the connections that the guest opens to o.Outbound.
func (l *Link) forward(o Options) {
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	slots := make(chan struct{}, MaxFlows)
	// The forwarder drops requests beyond its own bound without an answer, so
	// it has more room than slots.
	forwarder := tcp.NewForwarder(l.stack, 0, 2*MaxFlows, func(req *tcp.ForwarderRequest) {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		default:
			l.filter.refused.Add(1)
			req.Complete(true)
			return
		}
		id := req.ID()
		f := &Flow{link: l, req: req,
			src: addrPort(id.RemoteAddress.As4(), id.RemotePort), dst: addrPort(id.LocalAddress.As4(), id.LocalPort)}
		defer func() {
			if p := recover(); p != nil {
				log.Error("an outbound handler panicked", "destination", f.dst, "panic", p)
			}
			f.end()
		}()
		o.Outbound(l.ctx, f)
	})
	l.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, forwarder.HandlePacket)
}

func addrPort(addr [4]byte, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(addr), port)
}
