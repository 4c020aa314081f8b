package guest

import (
	"net"
	"strconv"
	"testing"
	"time"

	"bivy/internal/guest/wire"
)

func FuzzSignature(f *testing.F) {
	f.Add("hello.txt", "user", "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", "")
	f.Add("a", "", "v1_", "1700000000")
	f.Add("a:read:u", "", "", "-1")
	f.Add("", "", "x", "99999999999999999999")
	now := time.Unix(1_700_000_000, 0)
	const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
	f.Fuzz(func(t *testing.T, path, user, signature, expiration string) {
		err := checkSignature(fileSignature{path, wire.SignRead, user, signature, expiration}, token, now)
		if err == nil {
			// Only the holder of the token can have made it.
			var expiry time.Time
			if expiration != "" {
				seconds, err := strconv.ParseInt(expiration, 10, 64)
				if err != nil || seconds < now.Unix() {
					t.Fatalf("expiration %q is believed", expiration)
				}
				expiry = time.Unix(seconds, 0)
			}
			if signature != wire.Sign(path, wire.SignRead, user, token, expiry) {
				t.Fatalf("signature %q is believed", signature)
			}
		}
	})
}

func TestFromInside(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	conn := func(remote, local string) net.Conn {
		return addressed{remote: tcp(t, remote), local: tcp(t, local)}
	}
	for name, tt := range map[string]struct {
		conn net.Conn
		want bool
	}{
		"the host":            {conn("203.0.113.1:5", "203.0.113.2:49983"), false},
		"loopback":            {conn("127.0.0.1:5", "127.0.0.1:49983"), true},
		"all of loopback":     {conn("127.9.9.9:5", "203.0.113.2:49983"), true},
		"loopback, version 6": {conn("[::1]:5", "[::1]:49983"), true},
		"mapped":              {conn("[::ffff:127.0.0.1]:5", "[::ffff:127.0.0.1]:49983"), true},
		"own address":         {conn("203.0.113.2:5", "203.0.113.2:49983"), true},
		"unspecified":         {conn("0.0.0.0:5", "203.0.113.2:49983"), true},
		"unix":                {addressed{remote: &net.UnixAddr{}, local: &net.UnixAddr{}}, false},
	} {
		if got := fromInside(tt.conn); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok && !fromInside(addressed{remote: &net.TCPAddr{IP: n.IP}, local: tcp(t, "203.0.113.2:1")}) {
			t.Errorf("the machine's own %v is not recognised as the machine's own", n)
		}
	}
}

func tcp(t *testing.T, s string) net.Addr {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

type addressed struct {
	net.Conn
	remote, local net.Addr
}

func (a addressed) RemoteAddr() net.Addr { return a.remote }
func (a addressed) LocalAddr() net.Addr  { return a.local }
