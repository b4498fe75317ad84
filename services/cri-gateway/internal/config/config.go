// Package config is the configuration of the gateway: its keys, their defaults and what
// is wrong with values. It reads no files and starts nothing.
package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	// minMessage is what clients may send and receive by the protocol's habit.
	minMessage = 16 * config.MiB
	// maxMessage lets the output of a command through: 16 MiB of each stream.
	maxMessage = 40 * config.MiB
	// avoided is the end of a socket path at which kubelet takes the runtime for another.
	avoided = "run/crio/crio.sock"
)

// What happens while the hub is away.
const (
	Ignore = "ignore"
	Fail   = "fail"
)

// Config is the gateway's configuration file.
type Config struct {
	Version    int                   `toml:"version" comment:"Version of this file's form."`
	CRI        rpc.ServerConfig      `toml:"cri" comment:"The CRI service for kubelet."`
	Sandboxd   Sandboxd              `toml:"sandboxd" comment:"The service that owns sandboxes, containers and images."`
	NRI        NRI                   `toml:"nri" comment:"The hub of the NRI plugins."`
	Streaming  Streaming             `toml:"streaming" comment:"The server for exec, attach and port forwarding."`
	Operations Operations            `toml:"operations" comment:"Calls that change something; they outlive their callers."`
	Events     events.ClientConfig   `toml:"events" comment:"The bus from which the gateway hears of containers that end by themselves.\nAn empty url does without."`
	Log        telemetry.LogConfig   `toml:"log" comment:"Log lines on standard error."`
	Admin      admin.Config          `toml:"admin" comment:"Metrics and health."`
	Tracing    telemetry.TraceConfig `toml:"tracing" comment:"Traces."`
}

// Sandboxd says how to reach sandboxd.
type Sandboxd struct {
	Socket     string          `toml:"socket" comment:"Path of sandboxd's socket."`
	MaxMessage config.ByteSize `toml:"max_message" comment:"Largest message in either direction."`
	// Hold is how long calls wait for a sandboxd that is away.
	Hold config.Duration `toml:"hold" comment:"How long calls wait for a sandboxd that is away, for example because it restarts."`
}

// NRI says how to live with nri-hub.
type NRI struct {
	Enabled bool   `toml:"enabled" comment:"Tell and ask the plugins at all."`
	Socket  string `toml:"socket" comment:"Path of nri-hub's socket."`
	// MoreSockets are those of further hubs.
	MoreSockets []string        `toml:"more_sockets,omitempty" comment:"Paths of the sockets of further hubs, over which plugins are spread. All plugins have one order,\nwhichever hub they connect to."`
	MaxMessage  config.ByteSize `toml:"max_message" comment:"Largest message in either direction."`
	// Hold is how long calls are held back for a hub that is away.
	Hold config.Duration `toml:"hold" comment:"How long calls are held back when the hub went away or waits for its plugins."`
	// Unavailable is what happens after that: Ignore or Fail.
	Unavailable string `toml:"unavailable" comment:"What happens to calls after that: \"ignore\" goes on without plugins, \"fail\" refuses\nnew sandboxes, new containers and changes. Stopping and removing always works."`
}

// Streaming says where and how sessions are served.
type Streaming struct {
	Listen          string          `toml:"listen" comment:"Address; kubelet connects to it. Port 0 takes a free one."`
	TLSCertFile     string          `toml:"tls_cert_file" comment:"Certificate for HTTPS; empty serves plain HTTP."`
	TLSKeyFile      string          `toml:"tls_key_file" comment:"Key of the certificate."`
	TLSClientCAFile string          `toml:"tls_client_ca_file" comment:"Authorities of which each client must have a certificate; empty: clients need none.\nkubelet has none and could not connect."`
	TLSMinVersion   string          `toml:"tls_min_version" comment:"Least version of TLS: \"1.2\" or \"1.3\"."`
	TLSCipherSuites []string        `toml:"tls_cipher_suites" comment:"Cipher suites of TLS 1.2 by their names, such as \"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\"; none: the usual ones."`
	IdleTimeout     config.Duration `toml:"idle_timeout" comment:"Sessions end when nothing was sent for so long."`
	CreationTimeout config.Duration `toml:"creation_timeout" comment:"How long a client may take to open its streams."`
}

// Operations bounds calls that change something.
type Operations struct {
	Limit     config.Duration `toml:"limit" comment:"The most that an operation may take, on top of a container's own stop timeout."`
	UndoLimit config.Duration `toml:"undo_limit" comment:"The most that the undoing of a failed operation may take."`
	Drain     config.Duration `toml:"drain" comment:"How long operations in flight may go on when the process is told to stop."`
}

// Default returns the configuration with every default set.
func Default() Config {
	cri := rpc.DefaultServerConfig("/run/crisp/cri.sock")
	cri.Socket.Mode = 0o660
	cri.MaxMessage = maxMessage
	bus := events.DefaultClientConfig()
	bus.NkeySeedFile = "/var/lib/crisp/eventbus/keys/gateway.nk" // written by eventbus
	return Config{
		Version: 1,
		CRI:     cri,
		Sandboxd: Sandboxd{
			Socket:     "/run/crisp/sandboxd.sock",
			MaxMessage: maxMessage,
			Hold:       config.Duration(10 * time.Second),
		},
		NRI: NRI{
			Enabled:     true,
			Socket:      "/run/crisp/nri-hub.sock",
			MaxMessage:  maxMessage,
			Hold:        config.Duration(10 * time.Second),
			Unavailable: Ignore,
		},
		Streaming: Streaming{
			Listen:          "127.0.0.1:0",
			TLSMinVersion:   "1.2",
			TLSCipherSuites: []string{},
			IdleTimeout:     config.Duration(4 * time.Hour),
			CreationTimeout: config.Duration(30 * time.Second),
		},
		Operations: Operations{
			Limit:     config.Duration(10 * time.Minute),
			UndoLimit: config.Duration(2 * time.Minute),
			Drain:     config.Duration(30 * time.Second),
		},
		Events:  bus,
		Log:     telemetry.DefaultLogConfig(),
		Admin:   admin.Config{Listen: "127.0.0.1:9670"},
		Tracing: telemetry.DefaultTraceConfig(),
	}
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	var errs []error
	if strings.HasSuffix(c.CRI.Socket.Path, avoided) {
		errs = append(errs, fmt.Errorf(
			"cri.socket.path: a path that ends in %s makes kubelet change its source of statistics, write for example \"/run/crisp/cri.sock\"", avoided))
	}
	if c.CRI.MaxMessage != 0 && c.CRI.MaxMessage < minMessage {
		errs = append(errs, fmt.Errorf("cri.max_message: %v is too small, write at least %v", c.CRI.MaxMessage, minMessage))
	}
	return errors.Join(append(errs,
		config.CheckVersion(c.Version),
		config.Section("cri", c.CRI),
		config.Section("sandboxd", c.Sandboxd),
		config.Section("nri", c.NRI),
		config.Section("streaming", c.Streaming),
		config.Section("operations", c.Operations),
		config.Section("events", c.Events),
		config.Section("log", c.Log),
		config.Section("admin", c.Admin),
		config.Section("tracing", c.Tracing),
	)...)
}

// Client returns the configuration of the connection. The limits of calls are not
// configured: each method has its own.
func (c Sandboxd) Client() rpc.ClientConfig {
	return rpc.ClientConfig{Socket: c.Socket, MaxMessage: c.MaxMessage}
}

// Clients are the clients of all hubs.
func (c NRI) Clients() []rpc.ClientConfig {
	clients := []rpc.ClientConfig{{Socket: c.Socket, MaxMessage: c.MaxMessage}}
	for _, socket := range c.MoreSockets {
		clients = append(clients, rpc.ClientConfig{Socket: socket, MaxMessage: c.MaxMessage})
	}
	return clients
}

// Validate implements config.Validator.
func (c Sandboxd) Validate() error {
	return c.Client().Validate()
}

// Validate implements config.Validator.
func (c NRI) Validate() error {
	errs := []error{}
	seen := map[string]bool{}
	for _, client := range c.Clients() {
		errs = append(errs, client.Validate())
		if seen[client.Socket] {
			errs = append(errs, fmt.Errorf("more_sockets: %q is named twice", client.Socket))
		}
		seen[client.Socket] = true
	}
	if c.Unavailable != Ignore && c.Unavailable != Fail {
		errs = append(errs, fmt.Errorf("unavailable: %q is not known, write %q or %q", c.Unavailable, Ignore, Fail))
	}
	return errors.Join(errs...)
}

// MinVersion is the least version of TLS.
func (c Streaming) MinVersion() (uint16, error) {
	switch c.TLSMinVersion {
	case "1.2":
		return tls.VersionTLS12, nil
	case "1.3":
		return tls.VersionTLS13, nil
	default:
		return 0, fmt.Errorf("tls_min_version: %q is not known, write \"1.2\" or \"1.3\"", c.TLSMinVersion)
	}
}

// CipherSuites are the ids of the cipher suites; nil if none is named.
func (c Streaming) CipherSuites() ([]uint16, error) {
	var ids []uint16
	for _, name := range c.TLSCipherSuites {
		i := slices.IndexFunc(tls.CipherSuites(), func(s *tls.CipherSuite) bool {
			return s.Name == name && slices.Contains(s.SupportedVersions, tls.VersionTLS12)
		})
		if i < 0 {
			return nil, fmt.Errorf("tls_cipher_suites: %q is no safe suite of TLS 1.2, write for example \"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\"", name)
		}
		ids = append(ids, tls.CipherSuites()[i].ID)
	}
	return ids, nil
}

// Validate implements config.Validator.
func (c Streaming) Validate() error {
	var errs []error
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		errs = append(errs, fmt.Errorf("listen: %q is no address, write for example \"127.0.0.1:0\"", c.Listen))
	}
	if (c.TLSCertFile == "") != (c.TLSKeyFile == "") {
		errs = append(errs, errors.New("tls_cert_file: HTTPS wants both tls_cert_file and tls_key_file"))
	}
	if c.TLSClientCAFile != "" && c.TLSCertFile == "" {
		errs = append(errs, errors.New("tls_client_ca_file: client certificates want HTTPS, set tls_cert_file and tls_key_file"))
	}
	_, versionErr := c.MinVersion()
	_, suitesErr := c.CipherSuites()
	errs = append(errs, versionErr, suitesErr)
	return errors.Join(append(errs,
		positive("idle_timeout", c.IdleTimeout), positive("creation_timeout", c.CreationTimeout))...)
}

// Validate implements config.Validator.
func (c Operations) Validate() error {
	return errors.Join(positive("limit", c.Limit), positive("undo_limit", c.UndoLimit))
}

func positive(key string, d config.Duration) error {
	if d <= 0 {
		return fmt.Errorf("%s: %v is too short, write a duration above zero such as \"30s\"", key, d)
	}
	return nil
}
