package link

import (
	"context"
	"encoding/binary"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
		{"TCP connect", packet(6, public, tcpFlags(syn)), passCounted},
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
	l, err := Open(host)
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
	l, err := Open(host)
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
		l, err := Open(host)
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
