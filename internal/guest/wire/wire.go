package wire

//go:generate ./generate.sh

import (
	"time"
)

// Port is the default TCP port of the agent.
const Port = 49983

// Version is the protocol version that the agent reports in [HeaderVersion]. E2B's
// clients enable features by it.
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
	// OutputChunk and PTYChunk limit the data of one event, in bytes.
	OutputChunk = 32 << 10
	PTYChunk    = 16 << 10
	// Retention is how long after its end a process can be connected to.
	Retention = 30 * time.Second
)

// InitRequest is the body of POST /init.
type InitRequest struct {
	// AccessToken is required in every later request. When it is empty, the
	// host needs none, and requests from inside the sandbox are refused.
	AccessToken string `json:"accessToken,omitempty"`
	// EnvVars replaces the variables that every process gets.
	EnvVars map[string]string `json:"envVars,omitempty"`
	// Timestamp is the host's time; zero leaves the guest's clock as it is.
	Timestamp time.Time `json:"timestamp,omitzero"`
	// Hostname is set in the kernel and in /etc/hosts; empty changes nothing.
	Hostname string `json:"hostname,omitempty"`
	// DefaultUser is the user of requests that name none; empty changes nothing.
	DefaultUser string `json:"defaultUser,omitempty"`
	// DefaultWorkdir is the directory of processes without a cwd; empty means
	// the user's home.
	DefaultWorkdir string `json:"defaultWorkdir,omitempty"`
	// LifecycleID is the id of the sandbox, for logs.
	LifecycleID string `json:"lifecycleID,omitempty"`
}

// ErrorBody is the body of every error of the plain HTTP endpoints.
type ErrorBody struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// WrittenFile is one element of the response to POST /files. Size and SHA256 are of
// the stored content; E2B's protocol does not have them.
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

// Metrics is the response to GET /metrics. Sizes are in bytes unless the name says
// otherwise.
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
