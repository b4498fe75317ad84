package adaptationtest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// SyncCB hands the pods and containers of the node to a plugin.
type SyncCB func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*ContainerUpdate, error)

// SyncFn calls the function it gets once, with all pods and containers.
type SyncFn func(context.Context, SyncCB) error

// UpdateFn updates containers and returns the updates that failed.
type UpdateFn func(context.Context, []*ContainerUpdate) ([]*ContainerUpdate, error)

// Adaptation is a hub in this process and the gateway that is connected to it. Use New.
type Adaptation struct {
	name, version string
	syncFn        SyncFn
	updateFn      UpdateFn
	cfg           config.Config
	options       []app.Option

	folder  string
	conn    *grpc.ClientConn
	client  nriv1.HubServiceClient
	gateway *gateway
	cancel  context.CancelFunc
	stopped chan error
}

// New prepares a hub for a runtime of that name and version.
func New(name, version string, syncFn SyncFn, updateFn UpdateFn, opts ...Option) (*Adaptation, error) {
	if syncFn == nil || updateFn == nil {
		return nil, errors.New("a function to synchronise with and one for updates are needed")
	}
	a := &Adaptation{name: name, version: version, syncFn: syncFn, updateFn: updateFn, cfg: config.Default()}
	for _, o := range opts {
		if err := o(a); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// Start starts the hub and connects the gateway.
func (a *Adaptation) Start() (err error) {
	if a.folder, err = os.MkdirTemp("", "hub"); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			a.Stop()
		}
	}()
	a.configure()
	tel, err := a.telemetry()
	if err != nil {
		return err
	}
	if err := a.run(tel); err != nil {
		return err
	}
	return a.dial()
}

func (a *Adaptation) telemetry() (*telemetry.Telemetry, error) {
	return telemetry.New(context.Background(), telemetry.Config{
		Service: "nri-hub", Log: telemetry.LogConfig{Level: "error", Format: "text"}, Trace: a.cfg.Tracing,
	}, os.Stderr)
}

// dial connects the gateway to a hub that runs, or is about to.
func (a *Adaptation) dial() error {
	tel, err := a.telemetry()
	if err != nil {
		return err
	}
	if a.conn, err = rpc.Dial(rpc.DefaultClientConfig(a.cfg.Server.Socket.Path), tel); err != nil {
		return err
	}
	a.client = nriv1.NewHubServiceClient(rpc.Lane(a.conn))
	a.gateway, err = connect(a)
	return err
}

func (a *Adaptation) configure() {
	a.cfg.RunFolder = a.folder
	a.cfg.Admin.Listen = ""
	a.cfg.Events.URL = ""
	// What NRI's own library does with a plugin that has no policy of its own.
	a.cfg.Plugins = []config.Plugin{{Name: "*", OnTimeout: config.Disconnect}}
	a.cfg.Server.Socket.Path = filepath.Join(a.folder, "api.sock")
	a.cfg.Timeouts.Announced = timeout(&registrationTimeout, DefaultPluginRegistrationTimeout)
	a.cfg.Timeouts.Request = timeout(&requestTimeout, DefaultPluginRequestTimeout)
	a.cfg.Events.URL = ""
	a.cfg.Launch.WasmCache = ""
	// The suite describes a runtime that drops a plugin at a timeout, or waits for it again
	// and again. This hub does so where it is told to.
	a.cfg.Plugins = []config.Plugin{{Name: "*", OnTimeout: config.Disconnect}}
	a.cfg.Degraded.After = math.MaxInt32
	a.cfg.Required.Annotations = false // the suite gives them to the validator
}

// run starts the hub and returns when all of it is up.
func (a *Adaptation) run(tel *telemetry.Telemetry) error {
	if err := a.cfg.Validate(); err != nil {
		return err
	}
	hub, err := app.New(a.cfg, tel, a.options...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel, a.stopped = cancel, make(chan error, 1)
	up := make(chan struct{})
	parts := append(hub.Parts(), lifecycle.Part{Name: "up", Run: func(ctx context.Context, ready func()) error {
		ready()
		close(up)
		<-ctx.Done()
		return nil
	}})
	go func() { a.stopped <- lifecycle.Run(ctx, tel.Log, parts...) }()
	select {
	case <-up:
		return nil
	case err := <-a.stopped:
		a.stopped <- err
		return fmt.Errorf("hub did not start: %w", err)
	}
}

// Stop disconnects the gateway and stops the hub.
func (a *Adaptation) Stop() {
	if a.gateway != nil {
		a.gateway.disconnect()
		a.gateway = nil
	}
	if a.conn != nil {
		_ = a.conn.Close()
		a.conn = nil
	}
	if a.cancel != nil {
		a.cancel()
		<-a.stopped
		a.cancel = nil
	}
	_ = os.RemoveAll(a.folder)
}

// PluginSyncBlock is what the suite releases after a request.
type PluginSyncBlock struct{}

// Unblock does nothing: the hub needs no such lock.
func (*PluginSyncBlock) Unblock() {}

// settleTime bounds the wait for plugins that are being synchronised.
const settleTime = 5 * time.Second

// BlockPluginSync returns when no plugin is being synchronised. NRI's package holds back
// synchronisations instead; this hub puts events aside for a plugin that joins. The suite
// calls it to be sure that a plugin which was synchronised takes part in requests.
func (a *Adaptation) BlockPluginSync() *PluginSyncBlock {
	for end := time.Now().Add(settleTime); time.Now().Before(end); time.Sleep(time.Millisecond) {
		joining := false
		for _, p := range a.plugins() {
			joining = joining || !p.GetActive()
		}
		if !joining {
			break
		}
	}
	return &PluginSyncBlock{}
}

// PluginClosed returns a function that says whether the plugin of that name is gone.
func (a *Adaptation) PluginClosed(name string) func() bool {
	return func() bool {
		for _, p := range a.plugins() {
			if p.GetIndex()+"-"+p.GetName() == name {
				return false
			}
		}
		return true
	}
}

func (a *Adaptation) plugins() []*nriv1.PluginStatus {
	status, err := a.client.GetStatus(context.Background(), &nriv1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	return status.GetPlugins()
}
