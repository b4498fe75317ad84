package adaptationtest

import (
	"sync/atomic"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	validator "github.com/containerd/nri/plugins/default-validator"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
)

// The names that NRI's package has for messages.
type (
	// ContainerUpdate is NRI's own.
	ContainerUpdate = nri.ContainerUpdate
	// LinuxIOPriority is NRI's own.
	LinuxIOPriority = nri.LinuxIOPriority
)

const (
	// DefaultPluginRegistrationTimeout is what the suite expects plugins to be told.
	DefaultPluginRegistrationTimeout = 5 * time.Second
	// DefaultPluginRequestTimeout is the time limit of one call.
	DefaultPluginRequestTimeout = 2 * time.Second
)

// The time limits are global in NRI's package, so the suite sets them in this way. They
// are read when a hub starts.
var (
	registrationTimeout atomic.Int64
	requestTimeout      atomic.Int64
)

// SetPluginRegistrationTimeout is for hubs that are started afterwards.
func SetPluginRegistrationTimeout(d time.Duration) { registrationTimeout.Store(int64(d)) }

// SetPluginRequestTimeout is for hubs that are started afterwards.
func SetPluginRequestTimeout(d time.Duration) { requestTimeout.Store(int64(d)) }

func timeout(set *atomic.Int64, otherwise time.Duration) config.Duration {
	if d := set.Load(); d != 0 {
		return config.Duration(d)
	}
	return config.Duration(otherwise)
}

// Option changes how the hub is set up.
type Option func(*Adaptation) error

// WithPluginPath sets the folder of pre-installed plugins.
func WithPluginPath(path string) Option {
	return func(a *Adaptation) error {
		a.cfg.Launch.Folder = path
		return nil
	}
}

// WithPluginConfigPath sets the folder of their configuration.
func WithPluginConfigPath(path string) Option {
	return func(a *Adaptation) error {
		a.cfg.Launch.ConfigFolder = path
		return nil
	}
}

// WithSocketPath sets the plugins' way in.
func WithSocketPath(path string) Option {
	return func(a *Adaptation) error {
		a.cfg.NRI.Socket.Path = path
		return nil
	}
}

// WithDisabledExternalConnections closes the plugins' way in.
func WithDisabledExternalConnections() Option {
	return func(a *Adaptation) error {
		a.cfg.NRI.Enable = false
		return nil
	}
}

// WithDefaultValidator configures NRI's own validator.
func WithDefaultValidator(cfg *validator.DefaultValidatorConfig) Option {
	return func(a *Adaptation) error {
		a.cfg.Validator = *cfg
		return nil
	}
}

// WithTestNRIVersion sets the NRI version that plugins are told.
func WithTestNRIVersion(version string) Option {
	return func(a *Adaptation) error {
		a.options = append(a.options, app.WithNRIVersion(version))
		return nil
	}
}
