// Package app wires the gateway: it builds all parts from the configuration, and says in
// which order they start and stop. It holds no logic of its own.
package app

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/image"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/runtime"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/afterwards"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/config"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/containerevents"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/eventfeed"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/status"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// Name is the name of the program.
const Name = "cri-gateway"

// undoGrace is how long operations that are cut short may take to undo themselves.
const undoGrace = 10 * time.Second

// App is a gateway that has not been started.
type App struct {
	cfg      config.Config
	shown    atomic.Pointer[config.Config] // the configuration that was read last
	tel      *telemetry.Telemetry
	conns    []*grpc.ClientConn
	sandboxd *backend.Sandboxd
	session  *backend.Session
	hubs     *backend.Hubs // nil if NRI is off
	// afterwards is hubs as the sequences see it.
	afterwards *afterwards.Hub
	ops        *operation.Group
	sequences  *sequence.Sequences
	streams    *streaming.Server
	events     *containerevents.Feed // nil without a bus
	// busConnected tells whether the feed has a connection to the bus.
	busConnected atomic.Bool
	cri          *rpc.Server
}

// Run runs a gateway until ctx is done. Logs go to w.
func Run(ctx context.Context, cfg config.Config, w io.Writer, again reload.Source[config.Config]) error {
	tel, err := telemetry.New(ctx, telemetry.Config{Service: Name, Log: cfg.Log, Trace: cfg.Tracing}, w)
	if err != nil {
		return err
	}
	// The streaming libraries of Kubernetes log through a logger of the whole process.
	klog.SetSlogLogger(tel.Log)
	a, err := New(cfg, tel)
	if err != nil {
		return err
	}
	parts := append(a.Parts(), reload.Part(cfg, again, reload.Target[config.Config]{
		Live:  []string{"log.level", "nri.hold", "nri.unavailable"},
		Apply: a.apply,
	}, tel))
	return lifecycle.Run(ctx, tel.Log, parts...)
}

// apply brings a new configuration into force as far as that is possible while it runs.
func (a *App) apply(_ context.Context, cfg config.Config) error {
	if a.hubs != nil {
		a.hubs.SetPolicy(cfg.NRI.Hold.Std(), cfg.NRI.Unavailable == config.Fail)
	}
	a.shown.Store(&cfg)
	return a.tel.SetLevel(cfg.Log.Level)
}

// New builds a gateway. It connects to nothing and opens nothing.
func New(cfg config.Config, tel *telemetry.Telemetry) (*App, error) {
	a := &App{cfg: cfg, tel: tel}
	a.shown.Store(&cfg)
	observer := newMetrics(tel)
	version := status.RuntimeVersion(buildinfo.Read().Version)

	conn, err := a.dial(cfg.Sandboxd.Client())
	if err != nil {
		return nil, err
	}
	a.sandboxd = backend.NewSandboxd(conn, cfg.Sandboxd.Hold.Std())
	a.session = backend.NewSession(a.sandboxd.Node, cfg.Sandboxd.Hold.Std(), tel.Log)
	hub, err := a.newHub(version, observer)
	if err != nil {
		return nil, err
	}
	a.ops = operation.New(tel.Log, observer)
	a.sequences = sequence.New(sequence.Parts{
		Sandboxes:  a.sandboxd.Sandboxes,
		Containers: a.sandboxd.Containers,
		Node:       a.sandboxd.Node,
		Session:    a.session,
		Hub:        hub,
		Operations: a.ops,
		Limits:     sequence.Limits{Work: cfg.Operations.Limit.Std(), Undo: cfg.Operations.UndoLimit.Std()},
		Log:        tel.Log,
	})
	if a.streams, err = a.newStreams(); err != nil {
		return nil, err
	}
	a.cri, err = rpc.NewServer(cfg.CRI, tel,
		rpc.Service(&criv1.RuntimeService_ServiceDesc, runtime.New(runtime.Parts{
			Version:    version,
			Sequences:  a.sequences,
			Sandboxes:  a.sandboxd.Sandboxes,
			Containers: a.sandboxd.Containers,
			Node:       a.sandboxd.Node,
			Sandboxd:   a.sandboxd.Conn,
			Streams:    a.streams,
			Events:     a.newEvents(observer),
			Self:       self{a},
		})),
		rpc.Service(&criv1.ImageService_ServiceDesc, image.New(a.sandboxd.Images)),
		rpc.WithoutDeadlineFloor(),
	)
	return a, err
}

func (a *App) dial(cfg rpc.ClientConfig) (*grpc.ClientConn, error) {
	conn, err := rpc.Dial(cfg, a.tel)
	if err != nil {
		return nil, err
	}
	a.conns = append(a.conns, conn)
	return conn, nil
}

// newHub returns the hubs as the sequences see them, and keeps them if there are any.
func (a *App) newHub(version string, observer backend.HubObserver) (sequence.Hub, error) {
	cfg := a.cfg.NRI
	if !cfg.Enabled {
		return backend.NoHub{}, nil
	}
	hubs := make([]*backend.Hub, 0, 1+len(cfg.MoreSockets))
	for _, client := range cfg.Clients() {
		conn, err := a.dial(client)
		if err != nil {
			return nil, err
		}
		hubs = append(hubs, backend.NewHub(conn, backend.HubConfig{
			Hold:           cfg.Hold.Std(),
			Require:        cfg.Unavailable == config.Fail,
			RuntimeName:    status.RuntimeName,
			RuntimeVersion: version,
		}, observer, a.tel.Log))
	}
	a.hubs = backend.NewHubs(hubs...)
	a.afterwards = afterwards.New(a.hubs, a.tel.Log)
	return a.afterwards, nil
}

func (a *App) newStreams() (*streaming.Server, error) {
	cfg := streaming.Config{
		Listen:          a.cfg.Streaming.Listen,
		IdleTimeout:     a.cfg.Streaming.IdleTimeout.Std(),
		CreationTimeout: a.cfg.Streaming.CreationTimeout.Std(),
	}
	var err error
	if cfg.TLS, err = streamingTLS(a.cfg.Streaming, a.tel.Log); err != nil {
		return nil, err
	}
	return streaming.New(cfg, a.sandboxd.Containers, a.sandboxd.Sandboxes, a.tel.Log), nil
}

// streamingTLS is nil if plain HTTP is to be served.
func streamingTLS(cfg config.Streaming, log *slog.Logger) (*tls.Config, error) {
	if cfg.TLSCertFile == "" {
		return nil, nil //nolint:nilnil // plain HTTP
	}
	files := listen.TLSFiles{Cert: cfg.TLSCertFile, Key: cfg.TLSKeyFile, ClientCA: cfg.TLSClientCAFile}
	var err error
	if files.MinVersion, err = cfg.MinVersion(); err != nil {
		return nil, err
	}
	if files.CipherSuites, err = cfg.CipherSuites(); err != nil {
		return nil, err
	}
	return listen.NewTLS(files, log)
}

// newEvents returns the feed of container events as the handlers see it, and keeps it if
// there is a bus.
func (a *App) newEvents(observer containerevents.Observer) runtime.Events {
	if a.cfg.Events.URL == "" {
		return containerevents.None{}
	}
	a.events = containerevents.New(containerevents.Parts{
		Sandboxes:  a.sandboxd.Sandboxes,
		Containers: a.sandboxd.Containers,
		Source: func(ctx context.Context, sink containerevents.Sink) error {
			return eventfeed.RunChanges(ctx, a.cfg.Events, a.tel, sink, a.busConnected.Store)
		},
		Connected: a.busConnected.Load,
		Observer:  observer,
		Log:       a.tel.Log,
	})
	return a.events
}

// Parts returns what runs, in the order of starting. At the stop the CRI service ends
// first, then the sessions, then the operations in flight, and the connections last.
func (a *App) Parts() []lifecycle.Part {
	checks := []admin.Check{{Name: "sandboxd", Ready: a.session.Ready}}
	parts := []lifecycle.Part{a.tel.Part(), a.connections()}
	parts = append(parts, background("session", a.session.Run))
	if a.hubs != nil {
		checks = append(checks, admin.Check{Name: "nri-hub", Ready: a.hubNeeded})
		parts = append(parts, background("nri-hub", func(ctx context.Context) error {
			return a.hubs.Run(ctx, a.sandboxd.Node, a.sequences)
		}), background("afterwards", func(ctx context.Context) error {
			// It ends after the operations and before the hub.
			<-ctx.Done()
			a.afterwards.Wait()
			return nil
		}))
		if a.cfg.Events.URL != "" {
			parts = append(parts, background("events", func(ctx context.Context) error {
				return eventfeed.Run(ctx, a.cfg.Events, a.tel, a.sequences)
			}))
		}
	}
	if a.events != nil {
		parts = append(parts, background("container-events", a.events.Run))
	}
	return append(parts,
		a.operations(),
		lifecycle.Part{Name: "streaming", Run: a.streams.Run},
		admin.Part(a.cfg.Admin, a.tel, checks...),
		a.cri.Part("cri"),
	)
}

// hubNeeded is the readiness of the hub: a missing one makes the gateway unready only if calls
// would be refused.
func (a *App) hubNeeded(ctx context.Context) error {
	if !a.hubs.Required() {
		return nil
	}
	return a.hubs.Ready(ctx)
}

// background is a part on which nothing waits.
func background(name string, run func(context.Context) error) lifecycle.Part {
	return lifecycle.Part{Name: name, Run: func(ctx context.Context, ready func()) error {
		ready()
		return run(ctx)
	}}
}

// connections closes the connections when nothing uses them any more.
func (a *App) connections() lifecycle.Part {
	return lifecycle.Part{Name: "connections", Run: func(ctx context.Context, ready func()) error {
		ready()
		<-ctx.Done()
		var err error
		for _, c := range a.conns {
			if e := c.Close(); e != nil {
				err = e
			}
		}
		return err
	}}
}

// operations waits at the stop for what is in flight.
func (a *App) operations() lifecycle.Part {
	drain := a.cfg.Operations.Drain.Std()
	return lifecycle.Part{
		Name:        "operations",
		StopTimeout: drain + 2*undoGrace,
		Run: func(ctx context.Context, ready func()) error {
			ready()
			<-ctx.Done()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
			defer cancel()
			return a.ops.Close(ctx, undoGrace)
		},
	}
}
