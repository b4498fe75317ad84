// Package config is the configuration of nri-hub: its keys, defaults and checks. It
// starts nothing and reads no files.
package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	validator "github.com/containerd/nri/plugins/default-validator"

	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

// Config is the content of nri-hub.toml.
type Config struct {
	Version     int    `toml:"version" comment:"Version of this file's form."`
	RunFolder   string `toml:"run_folder" comment:"Folder of the file that remembers the active plugins over a restart."`
	StateFolder string `toml:"state_folder" comment:"Folder of the file that remembers what plugins were told. On a disk it survives a reboot, too;\nempty: run_folder."`
	// RequiredPlugins are names with or without index.
	RequiredPlugins []string `toml:"required_plugins" comment:"Plugins (\"name\" or \"NN-name\") without which no pod and no container is created."`

	Log     telemetry.LogConfig   `toml:"log"`
	Admin   admin.Config          `toml:"admin"`
	Tracing telemetry.TraceConfig `toml:"tracing"`
	Server  rpc.ServerConfig      `toml:"server" comment:"The gateway's way in."`

	Events events.ClientConfig `toml:"events" comment:"The bus that takes the audit trail of what plugins change, under nri.audit. An empty url\nkeeps it in the log alone."`
	Audit  Audit               `toml:"audit" comment:"The audit trail of what plugins change."`

	NRI       NRI                              `toml:"nri" comment:"The plugins' way in."`
	Launch    Launch                           `toml:"launch" comment:"Pre-installed plugins, which the hub starts."`
	Timeouts  Timeouts                         `toml:"timeouts"`
	Degraded  Degraded                         `toml:"degraded" comment:"Plugins that have not answered in time."`
	Required  Required                         `toml:"required" comment:"Plugins without which pods and containers are not created."`
	Plugins   []Plugin                         `toml:"plugins,omitempty" comment:"How single plugins are treated; the first entry whose name matches counts."`
	Runtime   Runtime                          `toml:"runtime" comment:"What plugins are told of the runtime until a gateway says it."`
	Validator validator.DefaultValidatorConfig `toml:"default_validator" comment:"NRI's own validator of adjustments."`
}

// NRI is the socket for plugins that connect by themselves.
type NRI struct {
	Enable bool `toml:"enable" comment:"Whether plugins may connect by themselves."`
	// ListedOnly refuses strangers.
	ListedOnly bool            `toml:"listed_only" comment:"Refuse plugins for which there is no entry under plugins."`
	Socket     unixsock.Config `toml:"socket"`
}

// Audit says where the audit trail goes and what is in it.
type Audit struct {
	Log    bool `toml:"log" comment:"Write it to the log."`
	Values bool `toml:"values" comment:"Write old and new values. They may be secrets, such as in environment variables, so it is off."`
}

// Launch says where pre-installed plugins are.
type Launch struct {
	Enable       bool            `toml:"enable" comment:"Whether the hub starts the plugins in the folder."`
	Folder       string          `toml:"folder" comment:"Executables NN-name."`
	ConfigFolder string          `toml:"config_folder" comment:"Their configuration: NN-name.conf or name.conf."`
	MinBackoff   config.Duration `toml:"min_backoff" comment:"Pause before a plugin that ended is started again; it doubles each time."`
	MaxBackoff   config.Duration `toml:"max_backoff" comment:"Longest pause. A plugin that ran longer than this begins with the shortest again."`
	StopTimeout  config.Duration `toml:"stop_timeout" comment:"How long a plugin has to end before it is killed."`
	WasmCache    string          `toml:"wasm_cache" comment:"Folder in which compiled wasm plugins are kept; empty: they are compiled at each start."`
}

// Timeouts are the limits of everything that plugins do.
type Timeouts struct {
	Registration config.Duration `toml:"registration" comment:"For the registration of a plugin that has connected."`
	Announced    config.Duration `toml:"announced_registration" comment:"What plugins are told about the time they have for registering again. A generous value lets them survive a restart of the hub."`
	Request      config.Duration `toml:"request" comment:"For one call of one plugin."`
	Synchronize  config.Duration `toml:"synchronize" comment:"For handing over the pods and containers of the node, for each 3 MiB of them."`
	JoinWait     config.Duration `toml:"join_wait" comment:"How long the creation of a pod or container waits for a plugin that is being synchronised."`
	Settle       config.Duration `toml:"settle" comment:"How long after a start the gateway is asked to wait for plugins that were there before or are required."`
	Orphan       config.Duration `toml:"orphan" comment:"After a gateway has come back: how long it may take until plugins are told that what the gateway before has not finished is gone."`
	Update       config.Duration `toml:"update" comment:"For the updates of containers that a plugin asks for."`
}

// Runtime is a name and a version.
type Runtime struct {
	Name    string `toml:"name" comment:"Name of the runtime."`
	Version string `toml:"version" comment:"Empty: the version of the hub."`
}

// Ledger is the folder of what plugins were told.
func (c Config) Ledger() string {
	if c.StateFolder == "" {
		return c.RunFolder
	}
	return c.StateFolder
}

// Default is the configuration without a file.
func Default() Config {
	bus := events.DefaultClientConfig()
	bus.NkeySeedFile = "/var/lib/crisp/eventbus/keys/hub.nk" // written by eventbus
	return Config{
		Version:         1,
		RunFolder:       "/run/crisp/nri-hub",
		RequiredPlugins: []string{},
		Log:             telemetry.DefaultLogConfig(),
		Admin:           admin.Config{Listen: "127.0.0.1:9672"},
		Tracing:         telemetry.DefaultTraceConfig(),
		Server:          rpc.DefaultServerConfig("/run/crisp/nri-hub.sock"),
		Events:          bus,
		Audit:           Audit{Log: true},
		NRI: NRI{
			Enable: true,
			Socket: unixsock.Config{Path: "/var/run/nri/nri.sock", Mode: 0o600},
		},
		Launch: Launch{
			Enable:       true,
			Folder:       "/opt/nri/plugins",
			ConfigFolder: "/etc/nri/conf.d",
			MinBackoff:   config.Duration(time.Second),
			MaxBackoff:   config.Duration(time.Minute),
			StopTimeout:  config.Duration(3 * time.Second),
			WasmCache:    "/run/crisp/nri-hub/wasm",
		},
		Timeouts: Timeouts{
			Registration: config.Duration(5 * time.Second),
			Announced:    config.Duration(30 * time.Second),
			Request:      config.Duration(2 * time.Second),
			Synchronize:  config.Duration(10 * time.Second),
			JoinWait:     config.Duration(time.Second),
			Settle:       config.Duration(5 * time.Second),
			Orphan:       config.Duration(30 * time.Second),
			Update:       config.Duration(30 * time.Second),
		},
		Degraded: Degraded{
			After:    1,
			MinPause: config.Duration(500 * time.Millisecond),
			MaxPause: config.Duration(30 * time.Second),
		},
		Required:  Required{Wait: config.Duration(5 * time.Second), Annotations: true},
		Runtime:   Runtime{Name: "crisp"},
		Validator: validator.DefaultValidatorConfig{RequiredPlugins: []string{}},
	}
}

// Validate reports every mistake.
func (c Config) Validate() error {
	var errs []error
	for i, p := range c.Plugins {
		errs = append(errs, config.Section(fmt.Sprintf("plugins[%d]", i), p))
	}
	return errors.Join(append(errs,
		config.CheckVersion(c.Version),
		absolute("run_folder", c.RunFolder),
		absolute("state_folder", c.Ledger()),
		config.Section("log", c.Log),
		config.Section("admin", c.Admin),
		config.Section("tracing", c.Tracing),
		config.Section("server", c.Server),
		config.Section("nri.socket", c.NRI.Socket),
		config.Section("launch", c.Launch),
		config.Section("timeouts", c.Timeouts),
		config.Section("degraded", c.Degraded),
		config.Section("required", c.Required),
		config.Section("events", c.Events),
		named("runtime.name", c.Runtime.Name),
	)...)
}

// Validate implements config.Validator.
func (l Launch) Validate() error {
	if !l.Enable {
		return nil
	}
	return errors.Join(
		absolute("folder", l.Folder),
		absolute("config_folder", l.ConfigFolder),
		cacheFolder(l.WasmCache),
		positive("min_backoff", l.MinBackoff),
		positive("max_backoff", l.MaxBackoff),
		positive("stop_timeout", l.StopTimeout),
	)
}

// Validate implements config.Validator.
func (t Timeouts) Validate() error {
	return errors.Join(
		positive("registration", t.Registration),
		positive("announced_registration", t.Announced),
		positive("request", t.Request),
		positive("synchronize", t.Synchronize),
		positive("settle", t.Settle),
		positive("orphan", t.Orphan),
		positive("update", t.Update),
	)
}

func cacheFolder(path string) error {
	if path == "" {
		return nil
	}
	return absolute("wasm_cache", path)
}

func absolute(key, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s: %q is not absolute, write for example \"/run/crisp\"", key, path)
	}
	return nil
}

func positive(key string, d config.Duration) error {
	if d <= 0 {
		return fmt.Errorf("%s: is %v, write a duration such as \"5s\"", key, d)
	}
	return nil
}

func named(key, value string) error {
	if value == "" {
		return fmt.Errorf("%s: is empty, write for example \"crisp\"", key)
	}
	return nil
}
