package session

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"bivy/internal/argv"
	"bivy/internal/kind"
)

// SpecVersion is the version of Spec this build reads and writes.
const SpecVersion = 1

// Spec is what a session asks for, as code. The zero value of every field is
// valid and is filled by WithDefaults.
type Spec struct {
	Version   int               `json:"version" yaml:"version"`                 // SpecVersion
	Template  string            `json:"template" yaml:"template"`               // name[:tag] or sha256:…
	Resources Resources         `json:"resources" yaml:"resources"`             // hard limits
	Timeout   Seconds           `json:"timeout_seconds" yaml:"timeout_seconds"` // life of the session
	Env       map[string]string `json:"env,omitempty" yaml:"env"`               // of every process
	User      string            `json:"user,omitempty" yaml:"user"`             // default user; empty: the template's
	Workdir   string            `json:"workdir,omitempty" yaml:"workdir"`       // default directory; empty: the user's home
	Hostname  string            `json:"hostname,omitempty" yaml:"hostname"`     // empty: "bivy"
	Labels    map[string]string `json:"labels,omitempty" yaml:"labels"`         // the owner's own notes
}

// Resources are hard limits of one sandbox, enforced on the host.
type Resources struct {
	CPUMillis int64 `json:"cpu_millis" yaml:"cpu_millis"` // thousandths of a core
	MemoryMiB int64 `json:"memory_mib" yaml:"memory_mib"` // everything the sandbox holds
	DiskMiB   int64 `json:"disk_mib" yaml:"disk_mib"`     // the writable layer
	PIDs      int64 `json:"pids" yaml:"pids"`             // host threads of the sandbox
}

// Seconds is a whole number of seconds.
type Seconds int64

// Duration converts s.
func (s Seconds) Duration() time.Duration { return time.Duration(s) * time.Second }

// Bounds of a Spec.
const (
	MinMemoryMiB   = 64
	MaxMemoryMiB   = 1 << 20
	MinCPUMillis   = 50
	MaxCPUMillis   = 1024_000
	MinDiskMiB     = 8
	MaxDiskMiB     = 1 << 20
	MinPIDs        = 64
	MaxPIDs        = 1 << 20
	MaxTimeout     = Seconds(30 * 24 * 3600)
	MaxLabels      = 64
	MaxLabelLength = 256
	MaxNameLength  = 255
	MaxPathLength  = argv.MaxPath
)

// WithDefaults fills what the spec leaves open.
func (s Spec) WithDefaults() Spec {
	set := func(p *int64, v int64) {
		if *p == 0 {
			*p = v
		}
	}
	if s.Version == 0 {
		s.Version = SpecVersion
	}
	if s.Template == "" {
		s.Template = "base"
	}
	set(&s.Resources.CPUMillis, 2000)
	set(&s.Resources.MemoryMiB, 1024)
	set(&s.Resources.DiskMiB, 1024)
	set(&s.Resources.PIDs, 4096)
	if s.Timeout == 0 {
		s.Timeout = 300
	}
	if s.Hostname == "" {
		s.Hostname = "bivy"
	}
	s.Env = maps.Clone(s.Env)
	s.Labels = maps.Clone(s.Labels)
	return s
}

// Validate reports the first field of a defaulted spec that is wrong.
func (s Spec) Validate() error {
	bad := func(field, format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField(field)
	}
	between := func(field string, v, lo, hi int64, unit string) error {
		if v < lo || v > hi {
			return bad(field, "%d %s is outside %d to %d", v, unit, lo, hi)
		}
		return nil
	}
	if s.Version != SpecVersion {
		return kind.Errorf(kind.Invalid, "version %d is not known to this bivy, which reads version %d", s.Version, SpecVersion).
			WithField("version").WithHint("set version: %d, or use a newer bivy", SpecVersion)
	}
	if !cleanName(s.Template, MaxNameLength) {
		return bad("template", "%.64q is not a template name or digest", s.Template)
	}
	r := s.Resources
	for _, err := range []error{
		between("resources.cpu_millis", r.CPUMillis, MinCPUMillis, MaxCPUMillis, "thousandths of a core"),
		between("resources.memory_mib", r.MemoryMiB, MinMemoryMiB, MaxMemoryMiB, "MiB"),
		between("resources.disk_mib", r.DiskMiB, MinDiskMiB, MaxDiskMiB, "MiB"),
		between("resources.pids", r.PIDs, MinPIDs, MaxPIDs, "host threads"),
		between("timeout_seconds", int64(s.Timeout), 1, int64(MaxTimeout), "seconds"),
	} {
		if err != nil {
			return err
		}
	}
	if err := ValidateEnv("env", s.Env); err != nil {
		return err
	}
	if s.User != "" && !cleanName(s.User, 64) {
		return bad("user", "%.64q is not a user name", s.User)
	}
	if s.Workdir != "" && (!strings.HasPrefix(s.Workdir, "/") || len(s.Workdir) > MaxPathLength || strings.ContainsRune(s.Workdir, 0)) {
		return bad("workdir", "%.64q is not an absolute path", s.Workdir)
	}
	if !cleanHostname(s.Hostname) {
		return bad("hostname", "%.64q is not a host name: want 1 to 63 of a-z, 0-9 and inner hyphens", s.Hostname)
	}
	if len(s.Labels) > MaxLabels {
		return bad("labels", "%d labels, at most %d", len(s.Labels), MaxLabels)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		v := s.Labels[k]
		if k == "" || len(k) > MaxLabelLength || len(v) > MaxLabelLength || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return bad("labels", "label %.64q: keys and values are UTF-8 of at most %d bytes, keys not empty", k, MaxLabelLength)
		}
	}
	return nil
}

// ValidateEnv checks an environment that is kept as JSON: by [argv.CheckEnv],
// and that it is UTF-8.
func ValidateEnv(field string, env map[string]string) error {
	if err := argv.CheckEnv(field, env); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		if !utf8.ValidString(k) || !utf8.ValidString(env[k]) {
			return kind.Errorf(kind.Invalid, "variable %.64q: name and value must be UTF-8", k).WithField(field)
		}
	}
	return nil
}

// WithoutEnvValues returns the spec as it may be shown and recorded: with the
// names of its variables, whose values may be anything, a secret too.
func (s Spec) WithoutEnvValues() Spec {
	names := make(map[string]string, len(s.Env))
	for name := range s.Env {
		names[name] = ""
	}
	s.Env = names
	return s
}

// Digest names what the spec asks for: "sha256:" and the hex SHA-256 of the
// canonical JSON (Go's encoding: fields in order, map keys sorted) of the spec
// without the values of its environment. Records show that spec and its digest;
// a digest over the values would let a reader test guesses of them.
func (s Spec) Digest() (string, error) {
	b, err := json.Marshal(s.WithoutEnvValues())
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

func cleanName(s string, limit int) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for _, c := range s {
		if c <= ' ' || c == 0x7f || c > 0x7e {
			return false
		}
	}
	return true
}

func cleanHostname(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
