package app

import (
	"errors"
	"fmt"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/eventbus/internal/broker"
	"github.com/crisp-cri/crisp/services/eventbus/internal/streams"
	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// Config is the configuration of the process.
type Config struct {
	Version int                   `toml:"version" comment:"Version of this file's form."`
	Log     telemetry.LogConfig   `toml:"log"`
	Admin   admin.Config          `toml:"admin"`
	Tracing telemetry.TraceConfig `toml:"tracing"`
	RPC     rpc.ServerConfig      `toml:"rpc" comment:"The health service (gRPC) of the process."`
	Broker  broker.Config         `toml:"broker"`
	Stream  streams.Config        `toml:"stream"`
	Access  access.Config         `toml:"access"`
}

// Default returns the configuration of a bus for one machine.
func Default() Config {
	return Config{
		Version: 1,
		Log:     telemetry.DefaultLogConfig(),
		Admin:   admin.Config{Listen: "127.0.0.1:9673"},
		Tracing: telemetry.DefaultTraceConfig(),
		RPC:     rpc.DefaultServerConfig("/run/crisp/eventbus.sock"),
		Broker:  broker.DefaultConfig(),
		Stream:  streams.DefaultConfig(),
		Access:  access.Config{KeysDir: "/var/lib/crisp/eventbus/keys"},
	}
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	errs := []error{
		config.CheckVersion(c.Version),
		config.Section("log", c.Log),
		config.Section("admin", c.Admin),
		config.Section("tracing", c.Tracing),
		config.Section("rpc", c.RPC),
		config.Section("broker", c.Broker),
		config.Section("stream", c.Stream),
		config.Section("access", c.Access),
	}
	if !c.Broker.External() && c.Stream.MaxBytes > c.Broker.MaxStore {
		errs = append(errs, fmt.Errorf("stream.max_bytes: %v do not fit into broker.max_store, %v",
			c.Stream.MaxBytes, c.Broker.MaxStore))
	}
	return errors.Join(errs...)
}
