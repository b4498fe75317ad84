// Package events is the bus as the services see it: a publisher that returns when the
// stream has the event, and a durable consumer.
//
// The bus carries news, never the truth, so nothing here depends on it being there. A
// publisher and a consumer can be made before the bus runs, survive its restarts, and
// find their way when its store was wiped. Delivery is at least once: the id of a
// message lets the stream drop a repetition within its window, and handlers must bear
// one. Events arrive in the order of the stream, except that an event whose handler
// failed comes again later. The package does not create the stream and does not decide
// who may connect: that is the bus's own work.
package events

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/crisp-cri/crisp/services/internal/config"
)

// Defaults that producer, consumer and bus have in common.
const (
	// DefaultStream is the name of the stream that holds the events of all nodes.
	DefaultStream = "CRISP_EVENTS"
	// DefaultURL is where the bus of the same machine listens.
	DefaultURL = "nats://127.0.0.1:4222"

	defaultConnectTimeout = 2 * time.Second
	defaultPublishTimeout = 5 * time.Second
)

// ClientConfig says how to reach the bus.
type ClientConfig struct {
	// URL is one or more addresses, separated by commas.
	URL string `toml:"url" comment:"Address of the bus; several of one cluster are separated by commas."`
	// NkeySeedFile names the file with the seed that identifies the process; empty
	// connects without identity. The file may appear later than the process.
	NkeySeedFile string `toml:"nkey_seed_file" comment:"File with the nkey seed of this process; empty connects without one."`
	// Node is the name of this node in subjects; empty means the host name.
	Node string `toml:"node" comment:"Name of this node in the subjects of events; empty: the host name."`
	// Stream is the name of the stream; empty means DefaultStream.
	Stream string `toml:"stream" comment:"Name of the JetStream stream."`
	// CAFile, CertFile and KeyFile are for buses that want TLS.
	CAFile   string `toml:"ca_file" comment:"Authority that signed the certificate of the bus, if the URL begins with tls://."`
	CertFile string `toml:"cert_file" comment:"Client certificate, if the bus asks for one."`
	KeyFile  string `toml:"key_file" comment:"Key of the client certificate."`
	// ConnectTimeout bounds one attempt to connect; zero means two seconds.
	ConnectTimeout config.Duration `toml:"connect_timeout" comment:"Limit of one attempt to connect."`
	// PublishTimeout bounds a publication whose context has no deadline; zero means 5 s.
	PublishTimeout config.Duration `toml:"publish_timeout" comment:"Limit of one publication, if the caller sets none."`
}

// DefaultClientConfig returns the configuration for the bus of the same machine,
// without identity.
func DefaultClientConfig() ClientConfig {
	return ClientConfig{
		URL:            DefaultURL,
		Stream:         DefaultStream,
		ConnectTimeout: config.Duration(defaultConnectTimeout),
		PublishTimeout: config.Duration(defaultPublishTimeout),
	}
}

// Validate implements config.Validator.
func (c ClientConfig) Validate() error {
	var errs []error
	for u := range strings.SplitSeq(c.URL, ",") {
		parsed, err := url.Parse(strings.TrimSpace(u))
		if c.URL != "" && (err != nil || parsed.Host == "") {
			errs = append(errs, fmt.Errorf("url: %q is no address, write for example %q", u, DefaultURL))
		}
	}
	if strings.ContainsAny(c.Stream, " .*>/\\") {
		errs = append(errs, fmt.Errorf("stream: %q holds a character that stream names must not have", c.Stream))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, errors.New("cert_file: a client certificate wants both cert_file and key_file"))
	}
	return errors.Join(errs...)
}

func (c ClientConfig) withDefaults() (ClientConfig, error) {
	def := DefaultClientConfig()
	if c.URL == "" {
		c.URL = def.URL
	}
	if c.Stream == "" {
		c.Stream = def.Stream
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = def.ConnectTimeout
	}
	if c.PublishTimeout == 0 {
		c.PublishTimeout = def.PublishTimeout
	}
	if c.Node == "" {
		host, err := os.Hostname()
		if err != nil {
			return c, fmt.Errorf("node: %w", err)
		}
		c.Node = host
	}
	return c, nil
}
