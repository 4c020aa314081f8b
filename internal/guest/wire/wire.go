// Package wire is what the agent inside a sandbox and the host say to each
// other: the generated process and filesystem services (below gen), the JSON
// bodies of the plain HTTP endpoints, the limits both sides know, and the
// stable reasons by which the host tells one refusal from another.
//
// It holds no behaviour of either side, so both may import it.
package wire

//go:generate ./generate.sh

import (
	"time"
)

// Port is where the agent listens unless told otherwise.
const Port = 49983

// Version is the protocol level the agent reports in [HeaderVersion]. E2B's
// clients switch features on by it.
const Version = "0.6.13"

// Header names of the plain HTTP endpoints.
const (
	HeaderToken       = "X-Access-Token"
	HeaderVersion     = "X-Envd-Version"
	HeaderReason      = "Bivy-Reason"          // why a request was refused, one of the Reason values
	HeaderGeneration  = "Bivy-Generation"      // on /init: how often the agent was initialised
	HeaderClockOffset = "Bivy-Clock-Offset-Ms" // on /init: host clock minus guest clock before the call
	HeaderClockSet    = "Bivy-Clock-Set"       // on /init: whether the guest kernel took the host's clock
	HeaderKeepalive   = "Keepalive-Ping-Interval"
	HeaderMetadata    = "X-Metadata-" // prefix; the rest is the key
)

// Limits that both sides enforce or rely on.
const (
	// MaxMessage bounds one request message of either service, decoded.
	MaxMessage = 16 << 20
	// OutputChunk and PTYChunk bound the data of one event.
	OutputChunk = 32 << 10
	PTYChunk    = 16 << 10
	// Retention is how long the end of a process can still be asked for.
	Retention = 30 * time.Second
)

// InitRequest is the body of POST /init.
type InitRequest struct {
	// AccessToken is the token every later request needs. Empty leaves the
	// agent open to the host (and to nobody inside).
	AccessToken string `json:"accessToken,omitempty"`
	// EnvVars replaces the environment that every process gets.
	EnvVars map[string]string `json:"envVars,omitempty"`
	// Timestamp is the host's clock.
	Timestamp time.Time `json:"timestamp,omitzero"`
	// Hostname, when set, becomes the guest's, in /etc/hosts too.
	Hostname string `json:"hostname,omitempty"`
	// DefaultUser is who a request without a user acts as; empty leaves it.
	DefaultUser string `json:"defaultUser,omitempty"`
	// DefaultWorkdir is where a process without a cwd starts; empty means the
	// user's home.
	DefaultWorkdir string `json:"defaultWorkdir,omitempty"`
	// LifecycleID names the incarnation, for logs.
	LifecycleID string `json:"lifecycleID,omitempty"`
}

// ErrorBody is the body of every refusal of the plain HTTP endpoints.
type ErrorBody struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// WrittenFile is one element of the answer to POST /files. Size and SHA256
// describe the bytes as stored and are bivy's own.
type WrittenFile struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Size     int64             `json:"size"`
	SHA256   string            `json:"sha256"`
}

// ComposeRequest is the body of POST /files/compose.
type ComposeRequest struct {
	SourcePaths []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username,omitempty"`
}

// Metrics is the answer to GET /metrics.
type Metrics struct {
	Timestamp  int64   `json:"ts"`
	CPUCount   int     `json:"cpu_count"`
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   uint64  `json:"mem_total"`
	MemUsed    uint64  `json:"mem_used"`
	MemCache   uint64  `json:"mem_cache"`
	MemTotalMB uint64  `json:"mem_total_mib"`
	MemUsedMB  uint64  `json:"mem_used_mib"`
	DiskUsed   uint64  `json:"disk_used"`
	DiskTotal  uint64  `json:"disk_total"`
}
