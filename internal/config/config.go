// Package config reads the settings of the server and of the command line: a YAML
// file each, parsed strictly, and a few environment variables. No other package
// reads the environment. The zero value of every field is valid.
package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"bivy/internal/kind"
)

// File is the default path of the server's configuration.
const File = "/etc/bivy/config.yaml"

// Defaults of Config.
const (
	DefaultListen  = "127.0.0.1:7171"
	DefaultDataDir = "/var/lib/bivy"
	DefaultRunDir  = "/run/bivy"
	DefaultDriver  = "gvisor"
)

// Config is the configuration of a server.
type Config struct {
	Listen            string   `yaml:"listen"`             // HOST:PORT
	Hosts             []string `yaml:"hosts"`              // host names that requests may use, besides loopback names
	TLSCert           string   `yaml:"tls_cert"`           // file; if set, the server uses TLS
	TLSKey            string   `yaml:"tls_key"`            // file
	AllowPlaintext    bool     `yaml:"allow_plaintext"`    // listen beyond loopback without TLS
	DataDir           string   `yaml:"data_dir"`           // for files that must survive a reboot
	RunDir            string   `yaml:"run_dir"`            // for files that need not
	Driver            string   `yaml:"driver"`             // how sandboxes are isolated
	LogLevel          string   `yaml:"log_level"`          // debug, info, warn, error
	LogFormat         string   `yaml:"log_format"`         // text, json
	CreateConcurrency int      `yaml:"create_concurrency"` // sessions created at the same time; 0: one per CPU
}

// WithDefaults sets the fields that are empty to their defaults.
func (c Config) WithDefaults() Config {
	set := func(p *string, v string) {
		if *p == "" {
			*p = v
		}
	}
	set(&c.Listen, DefaultListen)
	set(&c.DataDir, DefaultDataDir)
	set(&c.RunDir, DefaultRunDir)
	set(&c.Driver, DefaultDriver)
	set(&c.LogLevel, "info")
	set(&c.LogFormat, "text")
	return c
}

// Validate returns an error for the first invalid field. c must have its defaults.
func (c Config) Validate() error {
	bad := func(field, format string, args ...any) error {
		return kind.Errorf(kind.Invalid, format, args...).WithField(field)
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return bad("listen", "invalid address %q: want HOST:PORT, e.g. %s", c.Listen, DefaultListen)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return bad("tls_cert", "tls_cert and tls_key must be set together")
	}
	for _, d := range []struct{ field, dir string }{{"data_dir", c.DataDir}, {"run_dir", c.RunDir}} {
		if !filepath.IsAbs(d.dir) {
			return bad(d.field, "%q is not an absolute path", d.dir)
		}
	}
	if _, err := c.level(); err != nil {
		return err
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return bad("log_format", "invalid format %q: want text or json", c.LogFormat)
	}
	if c.CreateConcurrency < 0 || c.CreateConcurrency > 1024 {
		return bad("create_concurrency", "%d is out of range: want 0 to 1024", c.CreateConcurrency)
	}
	return nil
}

// Load reads a configuration file. If path is empty it reads File, which need not
// exist.
func Load(path string) (Config, error) {
	var c Config
	must := path != ""
	if !must {
		path = File
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !must {
		return c, nil
	}
	if err != nil {
		return c, kind.Errorf(kind.Invalid, "configuration: %w", err)
	}
	if err := Decode(data, &c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// TLS loads the certificate. It returns nil if none is configured.
func (c Config) TLS() (*tls.Config, error) {
	if c.TLSCert == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, kind.Errorf(kind.Invalid, "%w", err).WithField("tls_cert")
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, nil
}

func (c Config) level() (slog.Level, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return l, kind.Errorf(kind.Invalid, "invalid level %q: want debug, info, warn or error", c.LogLevel).WithField("log_level")
	}
	return l, nil
}

// Logger returns a logger that writes to w.
func (c Config) Logger(w io.Writer) (*slog.Logger, error) {
	l, err := c.level()
	if err != nil {
		return nil, err
	}
	o := &slog.HandlerOptions{Level: l}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return slog.New(slog.NewTextHandler(w, o)), nil
}

// SignerDir is the directory of the key that signs records.
func (c Config) SignerDir() string { return c.DataDir }

// Client is the configuration of the command line.
type Client struct {
	Server  string `yaml:"server"`   // URL
	KeyFile string `yaml:"key_file"` // file that holds the API key
}

// ClientDir is the directory of the command line's configuration. It is empty if the
// user has no home directory.
func ClientDir() string {
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "bivy")
}

// LoadClient reads client.yaml in ClientDir, which need not exist.
func LoadClient() (Client, error) {
	var c Client
	dir := ClientDir()
	if dir == "" {
		return c, nil
	}
	path := filepath.Join(dir, "client.yaml")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, kind.Errorf(kind.Invalid, "configuration: %w", err)
	}
	if err := Decode(data, &c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Env holds the environment variables that the command line uses.
type Env struct {
	Server     string // BIVY_SERVER
	Key        string // BIVY_API_KEY
	ConfigFile string // BIVY_CONFIG
	Term       string // TERM
}

// Environment reads Env.
func Environment() Env {
	return Env{
		Server:     os.Getenv("BIVY_SERVER"),
		Key:        os.Getenv("BIVY_API_KEY"),
		ConfigFile: os.Getenv("BIVY_CONFIG"),
		Term:       os.Getenv("TERM"),
	}
}

// Variable looks up an environment variable whose name the user has given.
func Variable(name string) (string, bool) { return os.LookupEnv(name) }

// ReadKey reads an API key from a file.
func ReadKey(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	key := strings.TrimSpace(string(data))
	if key == "" || strings.ContainsAny(key, " \r\n\t") {
		return "", kind.Errorf(kind.Invalid, "%s must contain exactly one API key", path)
	}
	return key, nil
}
