// Package tls replaces crypto/tls when bivy-guest is built (see
// cmd/bivy-guest/build.sh). The agent serves over a link inside one machine and
// never uses TLS, but net/http would link all of crypto/tls: a sixth of the
// binary, which every sandbox maps and every template contains.
//
// It declares what net/http refers to; every function fails. When a Go release
// refers to more, that build fails and the declaration has to be added here.
package tls

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
)

var errLeftOut = errors.New("tls: not supported by this program")

// Certificate replaces the key pair of crypto/tls.
type Certificate struct{}

// CertificateVerificationError replaces the error for a peer's certificate.
type CertificateVerificationError struct {
	UnverifiedCertificates []*x509.Certificate
	Err                    error
}

// Error returns the text of Err.
func (e *CertificateVerificationError) Error() string { return e.Err.Error() }

// ClientHelloInfo replaces the first message of a client.
type ClientHelloInfo struct{ Conn net.Conn }

// Config replaces the configuration.
type Config struct {
	Certificates       []Certificate
	GetCertificate     func(*ClientHelloInfo) (*Certificate, error)
	GetConfigForClient func(*ClientHelloInfo) (*Config, error)
	NextProtos         []string
	ServerName         string
}

// Clone returns a copy.
func (c *Config) Clone() *Config { d := *c; return &d }

// ConnectionState replaces the state of a connection; it is always zero.
type ConnectionState struct {
	NegotiatedProtocol         string
	NegotiatedProtocolIsMutual bool
	HandshakeComplete          bool
	PeerCertificates           []*x509.Certificate
}

// Conn replaces a TLS connection. Its handshake always fails.
type Conn struct{ net.Conn }

// ConnectionState returns the zero state.
func (c *Conn) ConnectionState() ConnectionState { return ConnectionState{} }

// HandshakeContext always fails.
func (c *Conn) HandshakeContext(context.Context) error { return errLeftOut }

// Handshake always fails.
func (c *Conn) Handshake() error { return errLeftOut }

// VerifyHostname always fails.
func (c *Conn) VerifyHostname(string) error { return errLeftOut }

// Client returns a connection whose handshake fails.
func Client(conn net.Conn, _ *Config) *Conn { return &Conn{conn} }

// NewListener returns a listener whose Accept always fails.
func NewListener(inner net.Listener, _ *Config) net.Listener { return refusing{inner} }

type refusing struct{ net.Listener }

func (refusing) Accept() (net.Conn, error) { return nil, errLeftOut }

// LoadX509KeyPair always fails.
func LoadX509KeyPair(string, string) (Certificate, error) { return Certificate{}, errLeftOut }

// RecordHeaderError replaces the error for a peer that does not use TLS.
type RecordHeaderError struct {
	Msg          string
	RecordHeader [5]byte
	Conn         net.Conn
}

// Error returns Msg.
func (e RecordHeaderError) Error() string { return e.Msg }
