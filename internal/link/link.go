// Package link is the only network connection of a sandbox, the wire: one end
// of a socket pair is the guest's eth0, the other ends here, in a small
// user-space network stack. The host has no interface, route or firewall rule
// for it, so nothing leaves a sandbox without passing this code, and all that
// there is to clean up is a file descriptor.
//
//	guest: eth0 10.88.0.2 ◀── packets ──▶ filter ── TCP only ──▶ stack ──▶ Dial, Outbound
//
// Inward, Dial reaches any TCP port of the guest. Outward, TCP connections go
// to the Outbound handler. Everything else that the guest sends is refused at
// once and counted; without a handler connections are too, and the link is
// called dark.
package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// Addresses on every wire. They mean nothing outside it: no two wires meet,
// so that all sandboxes have the same.
var (
	Guest   = netip.MustParseAddr("10.88.0.2")
	Gateway = netip.MustParseAddr("10.88.0.1")
)

// PrefixBits is the length of the network prefix of both addresses.
const PrefixBits = 30

// MTU of the wire. A packet is one datagram between two processes, so larger
// is only fewer system calls.
const MTU = 65000

const nicID = 1

// Link is the host's end of one wire.
type Link struct {
	stack   *stack.Stack
	wire    *os.File
	child   *fdbased.InjectableEndpoint
	filter  *filter
	over    chan struct{} // closed when nothing is read from the wire any more
	buffers sync.Pool     // of *[]byte of MTU: an idle wire holds none
	closing atomic.Bool
	ctx     context.Context // of flows; ends with Close
	cancel  context.CancelFunc
}

// Options of Open.
type Options struct {
	// Outbound handles a TCP connection that the guest opens, in a goroutine
	// of its own: it is reset unless accepted, and closed when Outbound
	// returns. ctx ends when the link is closed. A panic ends the one flow.
	// nil: the link is dark.
	Outbound func(ctx context.Context, f *Flow)
	Log      *slog.Logger // nil: discard
}

// Widen gives one end of a wire the send buffer it needs. The kernel's default
// holds three packets, and a full wire drops: TCP would crawl at the pace of
// its retransmissions. Without CAP_NET_ADMIN the host's maximum has to do.
func Widen(fd int) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wireBuffer); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wireBuffer)
	}
}

// wireBuffer is what may be in flight in one direction, in bytes of kernel
// memory; none of it is held while the wire is idle.
const wireBuffer = 4 << 20

// Open takes the host's end of a wire, which the Link owns from here on, also
// when Open fails.
func Open(hostFD int, o Options) (*Link, error) {
	// Injectable: gVisor's own readers never close the event descriptor that
	// stops them, and hold a thread and their buffers while nothing comes.
	child, err := fdbased.NewInjectable(hostFD, MTU, stack.CapabilityRXChecksumOffload|stack.CapabilityTXChecksumOffload)
	if err != nil {
		unix.Close(hostFD)
		return nil, fmt.Errorf("link endpoint: %w", err)
	}
	l := &Link{
		// It is non-blocking by now, so that reading it holds no thread.
		wire: os.NewFile(uintptr(hostFD), "link host end"), child: child, over: make(chan struct{}),
		buffers: sync.Pool{New: func() any { b := make([]byte, MTU); return &b }},
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
			DefaultIPTables:    nil,
		}),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.filter = newFilter(child, o.Outbound == nil)
	raw, err := l.wire.SyscallConn()
	if err == nil {
		err = l.configure()
	}
	if o.Outbound != nil {
		l.forward(o)
	}
	if err != nil {
		close(l.over)
		l.Close()
		return nil, err
	}
	go l.receive(raw) // ends when the wire is closed, which Close waits for
	return l, nil
}

// receive takes packets from the wire until it ends.
func (l *Link) receive(raw syscall.RawConn) {
	defer close(l.over)
	for {
		var packet *buffer.View
		err := raw.Read(func(fd uintptr) bool {
			b := l.buffers.Get().(*[]byte)
			defer l.buffers.Put(b)
			n, err := unix.Read(int(fd), *b)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Read(int(fd), *b)
			}
			if errors.Is(err, unix.EAGAIN) {
				return false
			}
			if err == nil && n > 0 {
				packet = buffer.NewViewWithData((*b)[:n])
			}
			return true
		})
		if err != nil || packet == nil {
			return // closed here or there
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(packet)})
		l.child.InjectInbound(header.IPv4ProtocolNumber, pkt)
		pkt.DecRef()
	}
}

func (l *Link) configure() error {
	if err := l.stack.CreateNIC(nicID, l.filter); err != nil {
		return fmt.Errorf("link interface: %s", err)
	}
	addr := tcpip.ProtocolAddress{Protocol: header.IPv4ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(Gateway.As4()), PrefixLen: PrefixBits}}
	if err := l.stack.AddProtocolAddress(nicID, addr, stack.AddressProperties{}); err != nil {
		return fmt.Errorf("link address: %s", err)
	}
	// The stack answers for every address, so that a connection to anywhere
	// is reset at once instead of hanging until the guest gives up.
	if err := l.stack.SetPromiscuousMode(nicID, true); err != nil {
		return fmt.Errorf("link promiscuous mode: %s", err)
	}
	if err := l.stack.SetSpoofing(nicID, true); err != nil {
		return fmt.Errorf("link spoofing: %s", err)
	}
	l.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nicID}})
	sack := tcpip.TCPSACKEnabled(true)
	if err := l.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return fmt.Errorf("link SACK: %s", err)
	}
	return nil
}

// Dial connects to a TCP port of the guest.
func (l *Link) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	to := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(Guest.As4()), Port: port}
	conn, err := gonet.DialContextTCP(ctx, l.stack, to, header.IPv4ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("dial port %d: %w", port, err)
	}
	return conn, nil
}

// Refused is how many packets and connections of the guest were refused.
func (l *Link) Refused() uint64 { return l.filter.refused.Load() }

// Close cuts every connection and closes the wire; it may be repeated. It does
// not wait for Outbound handlers.
func (l *Link) Close() {
	if l.closing.Swap(true) {
		return
	}
	l.cancel()
	l.stack.Close()
	// The descriptor stays open until nothing can write to it any more: its
	// number may be another wire's a moment later. No error is possible on what can
	// be polled, as Open's SyscallConn has shown.
	_ = l.wire.SetReadDeadline(time.Unix(1, 0))
	<-l.over
	l.stack.Wait()
	_ = l.wire.Close() // nothing is buffered that could be lost
}
