package broker

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"time"

	"github.com/crisp-cri/crisp/services/internal/config"
)

// Config is the section "broker" of the configuration file.
type Config struct {
	URL           string `toml:"url" comment:"Use the NATS cluster at this address (nats:// or tls://, several separated by commas)\ninstead of running a server. Empty: run one."`
	NkeySeedFile  string `toml:"nkey_seed_file" comment:"With url: the nkey seed with which the stream is managed there."`
	CAFile        string `toml:"ca_file" comment:"With url: the authority that signed the certificate of the cluster."`
	Listen        string `toml:"listen" comment:"Address of the server. Off loopback it wants a certificate, see tls."`
	AllowInsecure bool   `toml:"allow_insecure" comment:"Allow an address off loopback without TLS. Only for private networks."`
	StoreDir      string `toml:"store_dir" comment:"Folder of the JetStream store."`

	MaxStore     config.ByteSize `toml:"max_store" comment:"Most that the store may take on disk."`
	MaxPayload   config.ByteSize `toml:"max_payload" comment:"Largest message."`
	SyncAlways   bool            `toml:"sync_always" comment:"Write each event to the disk before it is acknowledged. Without it an acknowledged event\nsurvives the death of the process, but not that of the machine within sync_interval."`
	SyncInterval config.Duration `toml:"sync_interval" comment:"How often the store is written to the disk if sync_always is off."`
	Domain       string          `toml:"domain" comment:"JetStream domain; wanted with leaf remotes, a different one on each node."`

	TLS         TLSConfig    `toml:"tls"`
	LeafRemotes []LeafRemote `toml:"leaf_remotes" comment:"Clusters that this server joins as a leaf node, each with url, nkey_seed_file and ca_file."`
}

// TLSConfig names the certificate of the server.
type TLSConfig struct {
	CertFile string `toml:"cert_file" comment:"Certificate of the server; empty: no TLS."`
	KeyFile  string `toml:"key_file" comment:"Key of the certificate."`
	CAFile   string `toml:"ca_file" comment:"Authority whose client certificates are asked for, on top of the nkeys; empty: none are."`
}

// LeafRemote is a cluster that the server joins.
type LeafRemote struct {
	URL          string `toml:"url"`
	NkeySeedFile string `toml:"nkey_seed_file"`
	CAFile       string `toml:"ca_file"`
}

// DefaultConfig returns a server on loopback that stores below /var/lib/crisp.
func DefaultConfig() Config {
	return Config{
		Listen:       "127.0.0.1:4222",
		StoreDir:     "/var/lib/crisp/eventbus/jetstream",
		MaxStore:     config.GiB,
		MaxPayload:   config.MiB,
		SyncInterval: config.Duration(10 * time.Second),
		LeafRemotes:  []LeafRemote{},
	}
}

// External says that no server is run.
func (c Config) External() bool { return c.URL != "" }

// Validate implements config.Validator.
func (c Config) Validate() error {
	if c.External() {
		return c.validateExternal()
	}
	errs := []error{c.validateListen()}
	if !filepath.IsAbs(c.StoreDir) {
		errs = append(errs, fmt.Errorf("store_dir: %q is not absolute, write for example %q", c.StoreDir, DefaultConfig().StoreDir))
	}
	if c.MaxStore < config.MiB {
		errs = append(errs, fmt.Errorf("max_store: %v is too little, write at least 1MiB", c.MaxStore))
	}
	if c.MaxPayload < config.KiB || c.MaxPayload > 64*config.MiB {
		errs = append(errs, fmt.Errorf("max_payload: %v is out of range, write a size from 1KiB to 64MiB", c.MaxPayload))
	}
	if c.SyncInterval.Std() < 100*time.Millisecond {
		errs = append(errs, fmt.Errorf("sync_interval: %v is too short, write at least 100ms or set sync_always", c.SyncInterval))
	}
	if len(c.LeafRemotes) > 0 && c.Domain == "" {
		errs = append(errs, errors.New("domain: leaf remotes want a domain, write for example the name of the node"))
	}
	for i, r := range c.LeafRemotes {
		if u, err := url.Parse(r.URL); err != nil || u.Host == "" {
			errs = append(errs, fmt.Errorf("leaf_remotes[%d].url: %q is no address, write for example \"tls://hub:7422\"", i, r.URL))
		}
	}
	return errors.Join(errs...)
}

func (c Config) validateExternal() error {
	var errs []error
	if u, err := url.Parse(c.URL); err != nil || u.Host == "" {
		errs = append(errs, fmt.Errorf("url: %q is no address, write for example \"tls://nats:4222\"", c.URL))
	}
	if len(c.LeafRemotes) > 0 {
		errs = append(errs, errors.New("leaf_remotes: only a server of our own can be a leaf node, leave url or these out"))
	}
	return errors.Join(errs...)
}

func (c Config) validateListen() error {
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("listen: %q is no address, write for example \"127.0.0.1:4222\"", c.Listen)
	}
	if (c.TLS.CertFile == "") != (c.TLS.KeyFile == "") {
		return errors.New("tls.cert_file: a certificate wants both cert_file and key_file")
	}
	if c.TLS.CAFile != "" && c.TLS.CertFile == "" {
		return errors.New("tls.ca_file: asking for client certificates wants cert_file and key_file")
	}
	if c.TLS.CertFile == "" && !loopback(host) && !c.AllowInsecure {
		return fmt.Errorf("listen: %q is not on loopback, set tls.cert_file and tls.key_file"+
			" (or allow_insecure on a private network)", c.Listen)
	}
	return nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
