package link

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// packet builds an IPv4 packet with no options from the guest.
func packet(proto byte, dst [4]byte, payload []byte) []byte {
	b := make([]byte, 20+len(payload))
	b[0] = 0x45
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[8], b[9] = 64, proto
	copy(b[12:], Guest.AsSlice())
	copy(b[16:], dst[:])
	copy(b[20:], payload)
	return b
}

func tcpFlags(flags byte) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b[0:], 4000)
	binary.BigEndian.PutUint16(b[2:], 443)
	b[12], b[13] = 5<<4, flags
	return b
}

func TestVerdict(t *testing.T) {
	const syn, ack = 2, 16
	public := [4]byte{192, 0, 2, 7} // documentation range; never sent anywhere
	for _, tc := range []struct {
		name string
		in   []byte
		want decision
	}{
		{"empty", nil, drop},
		{"one byte", []byte{0x45}, drop},
		{"IPv6", append([]byte{0x60}, make([]byte, 60)...), drop},
		{"TCP connect", packet(6, public, tcpFlags(syn)), connect},
		{"TCP answer to the host", packet(6, public, tcpFlags(syn|ack)), pass},
		{"TCP data", packet(6, public, tcpFlags(ack)), pass},
		{"TCP short", packet(6, public, make([]byte, 8)), drop},
		{"UDP", packet(17, public, make([]byte, 30)), reject},
		{"UDP multicast", packet(17, [4]byte{224, 0, 0, 251}, make([]byte, 30)), drop},
		{"UDP broadcast", packet(17, [4]byte{255, 255, 255, 255}, make([]byte, 30)), drop},
		{"ping", packet(1, public, []byte{8, 0, 0, 0, 0, 0, 0, 0}), reject},
		{"ICMP error", packet(1, public, []byte{3, 3, 0, 0, 0, 0, 0, 0}), drop},
		{"GRE", packet(47, public, make([]byte, 8)), reject},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := verdict(tc.in[:min(len(tc.in), headBytes)], len(tc.in)); got != tc.want {
				t.Errorf("verdict = %d, want %d", got, tc.want)
			}
		})
	}
}

// TestRefusal plays the guest on a raw wire: a connection to anywhere is reset
// and a datagram answered at once, and both are counted.
func TestRefusal(t *testing.T) {
	guest, host, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	l, err := Open(host, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw := int(guest.Fd())
	if err := unix.SetNonblock(raw, false); err != nil {
		t.Fatal(err)
	}
	limit := unix.NsecToTimeval(int64(5 * time.Second))
	if err := unix.SetsockoptTimeval(raw, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		t.Fatal(err)
	}
	exchange := func(p []byte) []byte {
		t.Helper()
		if _, err := unix.Write(raw, p); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, MTU)
		n, err := unix.Read(raw, b)
		if err != nil {
			t.Fatalf("no answer: %v", err)
		}
		return b[:n]
	}
	public := [4]byte{192, 0, 2, 7}
	if got := exchange(packet(6, public, tcpFlags(2))); got[9] != 6 || got[33]&4 == 0 || [4]byte(got[12:16]) != public {
		t.Errorf("answer to a connect is not a reset from the far address: % x", got)
	}
	if got := exchange(packet(17, public, make([]byte, 12))); got[9] != 1 || got[20] != 3 || got[21] != 3 {
		t.Errorf("answer to a datagram is not port unreachable: % x", got)
	}
	if got := l.Refused(); got != 2 {
		t.Errorf("refused = %d, want 2", got)
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	guest, host, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	l, err := Open(host, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := l.Dial(ctx, 80); err == nil {
		t.Error("dial to a silent guest succeeded")
	}
	l.Close()
	l.Close()
	if _, err := l.Dial(t.Context(), 80); err == nil {
		t.Error("dial on a closed link succeeded")
	}
}

func FuzzVerdict(f *testing.F) {
	f.Add(packet(6, [4]byte{1, 2, 3, 4}, tcpFlags(2)))
	f.Add([]byte{0x4f, 0, 0, 20})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		verdict(b[:min(len(b), headBytes)], len(b))
	})
}

// TestNothingStaysOpen: a wire takes its descriptors with it.
func TestNothingStaysOpen(t *testing.T) {
	count := func() int {
		t.Helper()
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	life := func() {
		t.Helper()
		guest, host, err := Pair()
		if err != nil {
			t.Fatal(err)
		}
		defer guest.Close()
		l, err := Open(host, Options{})
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	life() // the poller is made with the first
	before := count()
	for range 10 {
		life()
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors before ten wires, %d after", before, after)
	}
}

// guestStack opens two links back to back: one plays the guest, by a stack that has
// the guest's address, and the other is the host's end under test.
func guestStack(t *testing.T, o Options) (host *Link, dial func(ctx context.Context, to netip.AddrPort) (net.Conn, error)) {
	t.Helper()
	file, fd, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	guestFD, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	if host, err = Open(fd, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	// A promiscuous stack that spoofs can be the guest as well: connections
	// leave from the guest's address.
	guest, err := Open(guestFD, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(guest.Close)
	return host, func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
		local := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(Guest.As4())}
		remote := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(to.Addr().As4()), Port: to.Port()}
		return gonet.DialTCPWithBind(ctx, guest.stack, local, remote, header.IPv4ProtocolNumber)
	}
}

// TestOutbound: a connection that the guest opens reaches the handler with its
// destination, bytes pass both ways, and it is closed when the handler returns.
func TestOutbound(t *testing.T) {
	to := netip.MustParseAddrPort("192.0.2.7:443")
	got := make(chan netip.AddrPort, 1)
	host, dial := guestStack(t, Options{Outbound: func(_ context.Context, f *Flow) {
		got <- f.Destination()
		c, err := f.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := f.Accept(); err == nil {
			t.Error("a flow was accepted twice")
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Error(err)
		}
		if _, err := c.Write(append([]byte("echo:"), b...)); err != nil {
			t.Error(err)
		}
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := dial(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "echo:hello" {
		t.Errorf("answer %q, %v", b, err)
	}
	if d := <-got; d != to {
		t.Errorf("destination %s, want %s", d, to)
	}
	if n := host.Refused(); n != 0 {
		t.Errorf("%d refused", n)
	}
}

// TestOutboundRefusal: what a handler does not accept is reset and counted, as
// is everything beyond the bound and what a handler panics at; none of it
// stops the link.
func TestOutboundRefusal(t *testing.T) {
	waiting := make(chan struct{}, MaxFlows)
	release := make(chan struct{})
	host, dial := guestStack(t, Options{Outbound: func(_ context.Context, f *Flow) {
		switch f.Destination().Port() {
		case 1:
			return
		case 2:
			panic("as tested")
		case 3:
			waiting <- struct{}{}
			<-release
		default:
			if _, err := f.Accept(); err != nil {
				t.Error(err)
			}
		}
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	addr := netip.MustParseAddr("192.0.2.7")
	for i, port := range []uint16{1, 2} {
		if _, err := dial(ctx, netip.AddrPortFrom(addr, port)); err == nil || ctx.Err() != nil {
			t.Errorf("port %d: %v; want it refused at once", port, err)
		}
		if n := host.Refused(); n != uint64(i+1) {
			t.Errorf("%d refused, want %d", n, i+1)
		}
	}
	var dials sync.WaitGroup
	for range MaxFlows {
		dials.Go(func() {
			if c, err := dial(ctx, netip.AddrPortFrom(addr, 3)); err == nil {
				c.Close()
				t.Error("a flow that was never accepted is open")
			}
		})
	}
	for range MaxFlows {
		select {
		case <-waiting:
		case <-ctx.Done():
			t.Fatal("flows do not reach the handler")
		}
	}
	if _, err := dial(ctx, netip.AddrPortFrom(addr, 4)); err == nil || ctx.Err() != nil {
		t.Errorf("a flow beyond the bound: %v; want it refused at once", err)
	}
	close(release)
	dials.Wait()
	c, err := dial(ctx, netip.AddrPortFrom(addr, 4))
	if err != nil {
		t.Fatalf("after the others have ended: %v", err)
	}
	defer c.Close()
	if _, err := io.ReadAll(c); err != nil {
		t.Errorf("a flow whose handler has returned: %v", err)
	}
}

// TestCloseEndsFlows: closing a link cuts accepted connections and ends the
// contexts of their handlers.
func TestCloseEndsFlows(t *testing.T) {
	accepted, ended := make(chan struct{}), make(chan error, 1)
	host, dial := guestStack(t, Options{Outbound: func(ctx context.Context, f *Flow) {
		c, err := f.Accept()
		if err != nil {
			ended <- nil
			return
		}
		close(accepted)
		_, err = c.Read(make([]byte, 1))
		<-ctx.Done()
		ended <- err
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := dial(ctx, netip.MustParseAddrPort("192.0.2.7:443"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	select {
	case <-accepted:
	case <-ctx.Done():
		t.Fatal("the flow is not accepted")
	}
	host.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a read on a closed link succeeded")
		}
	case <-ctx.Done():
		t.Error("the context of the handler did not end")
	}
}
