// Package tls stands in for crypto/tls when bivy-guest is built (see
// cmd/bivy-guest/build.sh). The agent is spoken to over a link inside one
// machine and never uses TLS, yet net/http's server would link all of it: a
// sixth of the binary, which every sandbox maps and every template carries.
//
// It has what net/http names, and none of it works. A Go release that names
// more makes that build fail, and then this file has to follow.
package tls

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
)

var errLeftOut = errors.New("tls: left out of this program")

// Certificate stands for a key pair.
type Certificate struct{}

// CertificateVerificationError stands for a refused peer.
type CertificateVerificationError struct {
	UnverifiedCertificates []*x509.Certificate
	Err                    error
}

// Error returns the text of Err.
func (e *CertificateVerificationError) Error() string { return e.Err.Error() }

// ClientHelloInfo stands for the first message of a client.
type ClientHelloInfo struct{ Conn net.Conn }

// Config stands for a configuration.
type Config struct {
	Certificates       []Certificate
	GetCertificate     func(*ClientHelloInfo) (*Certificate, error)
	GetConfigForClient func(*ClientHelloInfo) (*Config, error)
	NextProtos         []string
	ServerName         string
}

// Clone returns a copy.
func (c *Config) Clone() *Config { d := *c; return &d }

// ConnectionState stands for what was agreed; nothing ever is.
type ConnectionState struct {
	NegotiatedProtocol         string
	NegotiatedProtocolIsMutual bool
	HandshakeComplete          bool
	PeerCertificates           []*x509.Certificate
}

// Conn stands for a connection. There are none.
type Conn struct{ net.Conn }

// ConnectionState returns nothing.
func (c *Conn) ConnectionState() ConnectionState { return ConnectionState{} }

// HandshakeContext refuses.
func (c *Conn) HandshakeContext(context.Context) error { return errLeftOut }

// Handshake refuses.
func (c *Conn) Handshake() error { return errLeftOut }

// VerifyHostname refuses.
func (c *Conn) VerifyHostname(string) error { return errLeftOut }

// Client returns a connection whose handshake fails.
func Client(conn net.Conn, _ *Config) *Conn { return &Conn{conn} }

// NewListener returns a listener that accepts nothing.
func NewListener(inner net.Listener, _ *Config) net.Listener { return refusing{inner} }

type refusing struct{ net.Listener }

func (refusing) Accept() (net.Conn, error) { return nil, errLeftOut }

// LoadX509KeyPair refuses.
func LoadX509KeyPair(string, string) (Certificate, error) { return Certificate{}, errLeftOut }

// RecordHeaderError stands for a peer that does not speak TLS.
type RecordHeaderError struct {
	Msg          string
	RecordHeader [5]byte
	Conn         net.Conn
}

// Error returns Msg.
func (e RecordHeaderError) Error() string { return e.Msg }
