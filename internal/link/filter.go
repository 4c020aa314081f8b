package link

import (
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/nested"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// filter sits between the wire and the stack and sees every packet the guest
// sends. Only TCP reaches the stack, which knows the connections that the
// host opened, and hands new ones to the handler or resets them; everything
// else is refused here.
type filter struct {
	nested.Endpoint
	dark    bool // the stack resets every connection that the guest opens
	refused atomic.Uint64
}

func newFilter(child stack.LinkEndpoint, dark bool) *filter {
	f := &filter{dark: dark}
	f.Init(child, f)
	return f
}

// DeliverNetworkPacket implements stack.NetworkDispatcher. Its input is the
// guest's: any bytes at all.
func (f *filter) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	size := pkt.Data().Size()
	head, ok := pkt.Data().PullUp(min(size, headBytes))
	if !ok {
		f.refused.Add(1)
		return
	}
	switch verdict(head, size) {
	case pass:
		f.Endpoint.DeliverNetworkPacket(protocol, pkt)
	case connect:
		if f.dark {
			f.refused.Add(1)
		}
		f.Endpoint.DeliverNetworkPacket(protocol, pkt)
	case reject:
		f.refused.Add(1)
		f.reject(head)
	case drop:
		f.refused.Add(1)
	}
}

type decision uint8

const (
	drop    decision = iota // gets no answer
	pass                    // may belong to a connection
	connect                 // opens a connection
	reject                  // answered with "unreachable"
)

// headBytes is how much of a packet a verdict and an answer need: the
// longest IPv4 header and the start of what it carries.
const headBytes = header.IPv4MaximumHeaderSize + header.TCPMinimumSize

// verdict reads the head of a packet of size bytes as the guest sent it.
func verdict(head []byte, size int) decision {
	ip := header.IPv4(head)
	if header.IPVersion(head) != header.IPv4Version || !ip.IsValid(size) || int(ip.HeaderLength()) > len(head) {
		return drop // IPv6, and what is no packet
	}
	rest := head[ip.HeaderLength():]
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber:
		seg := header.TCP(rest)
		if ip.FragmentOffset() != 0 || ip.More() || len(seg) < header.TCPMinimumSize {
			return drop // nothing on this wire needs fragments
		}
		if f := seg.Flags(); f.Contains(header.TCPFlagSyn) && !f.Contains(header.TCPFlagAck) {
			return connect
		}
		return pass
	case header.ICMPv4ProtocolNumber:
		// Only a request is answered: an answer to an error would be a loop.
		if p := header.ICMPv4(rest); len(p) < header.ICMPv4MinimumSize || p.Type() != header.ICMPv4Echo {
			return drop
		}
		return reject
	default:
		if header.IsV4MulticastAddress(ip.DestinationAddress()) || ip.DestinationAddress() == header.IPv4Broadcast {
			return drop
		}
		return reject
	}
}

// reject answers with ICMP "port unreachable" (RFC 792), which a guest's
// socket reports as "connection refused" at once.
func (f *filter) reject(head []byte) {
	src := header.IPv4(head)
	quoted := head[:min(len(head), int(src.HeaderLength())+header.ICMPv4MinimumErrorPayloadSize)]
	total := header.IPv4MinimumSize + header.ICMPv4MinimumSize + len(quoted)
	b := make([]byte, total)
	ip := header.IPv4(b)
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(total),
		TTL:         64,
		Protocol:    uint8(header.ICMPv4ProtocolNumber),
		SrcAddr:     src.DestinationAddress(),
		DstAddr:     src.SourceAddress(),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	icmp := header.ICMPv4(ip.Payload())
	copy(icmp[header.ICMPv4MinimumSize:], quoted)
	icmp.SetType(header.ICMPv4DstUnreachable)
	icmp.SetCode(header.ICMPv4PortUnreachable)
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))

	answer := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	defer answer.DecRef()
	answer.NetworkProtocolNumber = header.IPv4ProtocolNumber
	var list stack.PacketBufferList
	list.PushBack(answer)
	// A full wire drops the answer; the guest then waits for its own
	// timeout.
	_, _ = f.WritePackets(list)
}
