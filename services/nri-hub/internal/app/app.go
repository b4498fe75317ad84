// Package app puts nri-hub together: it builds the parts from the configuration and says
// in which order they run. It holds no rules of its own.
package app

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/containerd/errdefs"
	nrilog "github.com/containerd/nri/pkg/log"
	nriversion "github.com/containerd/nri/pkg/version"
	validator "github.com/containerd/nri/plugins/default-validator"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/ttrpcx"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/api"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/audit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/call"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/launch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/memory"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/plugin"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/sync"
)

// minNRIVersion is announced if the build does not say which version it has.
const minNRIVersion = "v0.12.5"

// App is the built process. Use New.
type App struct {
	cfg     config.Config
	tel     *telemetry.Telemetry
	hub     *hub.Hub
	plugins *plugin.Server
	modules *plugin.Modules
	service *api.Service
	server  *rpc.Server
	ledger  *memory.Ledger
	trail   *audit.Trail
	bus     *events.Publisher // nil without a bus
}

// Run is the body of "nri-hub run".
func Run(ctx context.Context, cfg config.Config, stderr io.Writer, again reload.Source[config.Config]) error {
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "nri-hub", Log: cfg.Log, Trace: cfg.Tracing}, stderr)
	if err != nil {
		return err
	}
	// NRI's validator logs through a variable of its package.
	nrilog.Set(logAdapter{tel.Log})
	a, err := New(cfg, tel)
	if err != nil {
		return err
	}
	return lifecycle.Run(ctx, tel.Log, append(a.Parts(), reload.Part(cfg, again, reload.Target[config.Config]{
		Live: []string{
			"log.level", "required_plugins", "required.rules", "required.exempt", "required.annotations",
			"plugins", "nri.listed_only", "default_validator",
		},
		Apply: a.apply,
	}, tel))...)
}

// apply brings a new configuration into force as far as that is possible while it runs.
func (a *App) apply(_ context.Context, cfg config.Config) error {
	rules, err := pluginRules(cfg)
	if err != nil {
		return err
	}
	a.hub.SetPolicy(policy(cfg, rules))
	return a.tel.SetLevel(cfg.Log.Level)
}

// Option changes what New builds.
type Option func(*plugin.Config)

// WithNRIVersion sets the NRI version that plugins are told, which is else the one of the
// build. It is for tests.
func WithNRIVersion(version string) Option {
	return func(c *plugin.Config) { c.NRIVersion = version }
}

// New builds everything and starts nothing.
func New(cfg config.Config, tel *telemetry.Telemetry, opts ...Option) (*App, error) {
	metrics, err := plugin.NewMetrics(tel.Registry)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	remembered, expected, err := memory.Open(cfg.RunFolder)
	if err != nil {
		return nil, err
	}
	ledger, past, err := memory.OpenLedger(cfg.Ledger(), tel.Log)
	if err != nil {
		return nil, err
	}
	generation, err := newGeneration()
	if err != nil {
		return nil, err
	}
	rules, err := pluginRules(cfg)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	a := &App{cfg: cfg, tel: tel, ledger: ledger}
	var bus audit.Publisher
	if cfg.Events.URL != "" {
		if a.bus, err = events.NewPublisher(cfg.Events, tel); err != nil {
			return nil, err
		}
		bus = a.bus
	}
	if a.trail, err = audit.New(audit.Config{Log: cfg.Audit.Log, Values: cfg.Audit.Values}, tel, bus); err != nil {
		return nil, err
	}
	a.hub = hub.New(a.hubConfig(generation, expected, past, rules), hub.Parts{
		Log:      tel.Log,
		Sync:     sync.New(tel.Log, cfg.Timeouts.Synchronize.Std()),
		Memory:   remembered,
		Ledger:   ledger,
		Active:   metrics.SetActive,
		TimedOut: metrics.TimedOut,
		Audit:    a.trail.Record,
	})
	a.modules = plugin.NewModules(cfg.Launch.WasmCache, tel.Log)
	connections := plugin.Config{
		RegistrationTimeout: cfg.Timeouts.Registration.Std(),
		AnnouncedTimeout:    cfg.Timeouts.Announced.Std(),
		RequestTimeout:      cfg.Timeouts.Request.Std(),
		NRIVersion:          nriVersion(),
	}
	for _, o := range opts {
		o(&connections)
	}
	a.plugins = plugin.NewServer(connections, plugin.Parts{
		Log:           tel.Log,
		Tracer:        tracer(tel),
		Metrics:       metrics,
		Host:          a.hub,
		Modules:       a.modules,
		Peer:          peer,
		ClientOptions: ttrpcx.ClientOptions(tel),
		ServerOptions: ttrpcx.ServerOptions(tel),
	})
	a.service = api.New(a.hub, tel.Log)
	a.server, err = rpc.NewServer(cfg.Server, tel, rpc.Service(&nriv1.HubService_ServiceDesc, a.service), rpc.WithLanes())
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Parts are the long-running parts in the order of their start. The gateway's way in
// comes first, because plugins are synchronised through it, and it goes last, so that
// plugins can be told of the end.
func (a *App) Parts() []lifecycle.Part {
	api := a.server.Part("api")
	serve := api.Run
	api.Run = func(ctx context.Context, ready func()) error {
		defer a.service.Wait()
		return serve(ctx, ready)
	}
	return []lifecycle.Part{
		a.tel.Part(),
		admin.Part(a.cfg.Admin, a.tel, admin.Check{Name: "plugins", Ready: a.settled}),
		a.ledgerPart(),
		a.auditPart(),
		api,
		a.pluginsPart(),
	}
}

// ledgerPart brings the ledger to the disk, and closes what plugins have used when none of them is there any more.
func (a *App) ledgerPart() lifecycle.Part {
	return lifecycle.Part{Name: "ledger", Run: func(ctx context.Context, ready func()) error {
		ready()
		a.ledger.Run(ctx)
		return errors.Join(a.ledger.Close(), a.modules.Close(context.WithoutCancel(ctx)))
	}}
}

// auditPart writes the audit trail to the log and hands it to the bus.
func (a *App) auditPart() lifecycle.Part {
	return lifecycle.Part{Name: "audit", Run: func(ctx context.Context, ready func()) error {
		ready()
		a.trail.Run(ctx)
		if a.bus != nil {
			a.bus.Close()
		}
		return nil
	}}
}

// settled is the readiness check: all expected plugins are there or given up.
func (a *App) settled(context.Context) error {
	if state, _ := a.hub.State(); !state.Ready {
		return errors.New("plugins that were there before, or are required, are missing")
	}
	return nil
}

func (a *App) hubConfig(generation uint64, expected []plug.ID, past object.Past, rules rule.Plugins) hub.Config {
	t := a.cfg.Timeouts
	runtime := outward.Runtime{Name: a.cfg.Runtime.Name, Version: a.cfg.Runtime.Version}
	if runtime.Version == "" {
		runtime.Version = buildinfo.Read().Version
	}
	return hub.Config{
		Generation: generation,
		Call: call.Config{
			RequestTimeout: t.Request.Std(),
			DegradeAfter:   a.cfg.Degraded.After,
			MinPause:       a.cfg.Degraded.MinPause.Std(),
			MaxPause:       a.cfg.Degraded.MaxPause.Std(),
		},
		Dispatch:      dispatch.Config{JoinWait: t.JoinWait.Std(), RequiredWait: a.cfg.Required.Wait.Std()},
		SettleTimeout: t.Settle.Std(),
		OrphanGrace:   t.Orphan.Std(),
		UpdateTimeout: t.Update.Std(),
		Policy:        policy(a.cfg, rules),
		Runtime:       runtime,
		Expected:      expected,
		Past:          past,
	}
}

// policy are the rules that may change while the hub runs.
func policy(cfg config.Config, rules rule.Plugins) roster.Policy {
	return roster.Policy{
		Plugins: rules, ListedOnly: cfg.NRI.ListedOnly, Required: requiredRules(cfg), Validator: newValidator(cfg.Validator),
	}
}

// newGeneration is a random number other than zero, which a gateway has before it knows
// any generation.
func newGeneration() (uint64, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("generation: %w", err)
	}
	return binary.BigEndian.Uint64(b[:]) | 1, nil
}

func newValidator(cfg validator.DefaultValidatorConfig) roster.Validator {
	if !cfg.Enable {
		return nil
	}
	return validator.NewDefaultValidator(&cfg)
}

// tracer makes spans only where they go anywhere; the caller's trace goes on all the same.
func tracer(tel *telemetry.Telemetry) trace.Tracer {
	if tel.Recording() {
		return tel.Tracer
	}
	return noop.NewTracerProvider().Tracer("")
}

func nriVersion() string {
	switch v := nriversion.GetFromBuildInfo(); v {
	case "", nriversion.UnknownVersion, nriversion.DevelVersion:
		return minNRIVersion
	default:
		return v
	}
}

// launched connects the launcher with the server of plugin connections.
type launched struct{ plugins *plugin.Server }

var _ launch.Server = launched{}

// ServeWasm implements launch.Server.
func (l launched) ServeWasm(ctx context.Context, p launch.Plugin) error {
	return l.plugins.ServeWasm(ctx, p.Path, plugin.Launched{ID: plug.ID{Index: p.Index, Name: p.Name}, Config: p.Config})
}

// ServeLaunched implements launch.Server.
func (l launched) ServeLaunched(ctx context.Context, c net.Conn, p launch.Plugin) error {
	return l.plugins.ServeLaunched(ctx, c, plugin.Launched{
		ID: plug.ID{Index: p.Index, Name: p.Name}, PID: p.PID, Executable: p.Path, Config: p.Config,
		UID: uint32(os.Getuid()), GID: uint32(os.Getgid()),
	})
}
