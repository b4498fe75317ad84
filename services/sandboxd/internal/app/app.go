// Package app puts sandboxd together: it turns the configuration into the parts of the
// process and says in which order they start and stop. It holds no rule of its own.
package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/internal/admin"
	busevents "github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/ttrpcx"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/api"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/classes"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/containerio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/erofs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/layerusage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/outbox"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/podfiles"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/preflight"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/reserve"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/rootfs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/hints"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/stats"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// layerUsageLife is how long the size of a writable layer is taken for current. It is about
// how often kubelet asks.
const layerUsageLife = 10 * time.Second

// streamsStopTime bounds the writing of what was read when the process is told to end.
const streamsStopTime = 3 * time.Second

const bootIDFile = "/proc/sys/kernel/random/boot_id"

// Run runs the process until ctx ends or a part of it fails.
func Run(ctx context.Context, cfg config.Config, stderr io.Writer, again reload.Source[config.Config]) error {
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "sandboxd", Log: cfg.Log, Trace: cfg.Tracing}, stderr)
	if err != nil {
		return err
	}
	storage.AdoptLibraryLogs(ctx, tel.Log)
	a, err := New(ctx, cfg, tel)
	if err != nil {
		return err
	}
	err = lifecycle.Run(ctx, tel.Log, append(a.Parts(), reload.Part(cfg, again, a.reloading(), tel))...)
	return errors.Join(err, a.Close())
}

// App is the process, put together but not started.
type App struct {
	cfg          config.Config
	tel          *telemetry.Telemetry
	reserve      *reserve.Reserve
	store        *store.Store
	storage      *storage.Storage
	imageMetrics *progress.Metrics
	images       *image.Service
	shims        *shim.Manager
	streams      streams
	network      *network.CNI
	engine       *engine.Engine
	hints        *hints.Server
	publisher    *busevents.Publisher
	relay        *outbox.Relay
	passing      *outbox.Passing // events that need not arrive
	server       *rpc.Server
	cadvisor     *rpc.Server // nil unless configured
	work         *api.Work
	host         host.Facts
	cgroups      *stats.Reader
	rootfs       *rootfs.Rootfs
	// layerUsage remembers what writable layers take.
	layerUsage *layerusage.Cache
	classes    *classes.Classes
	specRules  atomic.Pointer[ocispec.Builder]
	handlers   atomic.Pointer[pod.Handlers]
	node       *api.Node
	features   map[string]*criv1.RuntimeHandlerFeatures // by handler
	metrics    *metrics
}

// New opens the stores and builds every part; nothing is started. Close what it returns.
func New(ctx context.Context, cfg config.Config, tel *telemetry.Telemetry) (_ *App, err error) {
	a := &App{cfg: cfg, tel: tel, work: api.NewWork(tel.Log), classes: new(classes.Classes), metrics: newMetrics(tel)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close())
		}
	}()
	err = os.MkdirAll(cfg.State, 0o711)
	if err != nil {
		return nil, err
	}
	a.reserve, err = reserve.New(ctx, cfg.Root, tel.Log)
	if err != nil {
		return nil, err
	}
	a.store, err = store.Open(filepath.Join(cfg.Root, "records.db"))
	if err != nil {
		return nil, err
	}
	a.store.OnFull(func() bool { return a.reserve.Release(ctx) })
	a.imageMetrics = progress.NewMetrics(tel.Registry)
	a.host, err = host.Probe()
	if err != nil {
		return nil, err
	}
	a.tellUserNamespace(ctx)
	a.storage, err = storage.Open(ctx, storage.Config{
		Root: filepath.Join(cfg.Root, "images"), Snapshotter: cfg.Image.Snapshotter, Wanted: handlerSnapshotters(cfg), Proxies: proxySnapshotters(cfg), Own: a.host.Own, Collected: a.imageMetrics.Collected,
	}, tel.Log)
	if err != nil {
		return nil, err
	}
	err = a.buildEngine(ctx)
	if err != nil {
		return nil, err
	}
	err = a.buildEvents()
	if err != nil {
		return nil, err
	}
	a.features = a.probeFeatures(ctx, cfg)
	err = a.buildServer()
	if err != nil {
		return nil, err
	}
	return a, a.buildCAdvisor()
}

// tellUserNamespace says what is different if the process runs in a user namespace.
func (a *App) tellUserNamespace(ctx context.Context) {
	own, groups := a.host.Own, a.host.Groups
	if !own.Nested() {
		return
	}
	a.tel.Log.InfoContext(ctx, "running in a user namespace",
		slog.String("uids", own.UIDs.String()), slog.String("gids", own.GIDs.String()), slog.String("cgroup_root", groups.Root))
	if groups.None {
		a.tel.Log.WarnContext(ctx, "containers run without control groups, that is without limits and figures of use", slog.String("reason", groups.Why))
	}
}

// Check looks for what is wrong with a configuration beyond its form.
func Check(cfg config.Config) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(cfg.Runtime.DefaultSysctls)) {
		if err := namespaces.CheckSysctl(name); err != nil {
			errs = append(errs, fmt.Errorf("runtime.default_sysctls: %w", err))
		}
	}
	for _, w := range workloads(cfg) {
		if err := w.Resources.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("runtime.workloads.%s.resources: %w", w.Name, err))
		}
	}
	if cfg.UsesErofs() {
		if err := erofs.Supported(); err != nil {
			errs = append(errs, fmt.Errorf("snapshotter erofs: %w", err))
		}
	}
	known := handlers(cfg).ByName
	for _, name := range slices.Sorted(maps.Keys(known)) {
		if _, err := command.Options(known[name]); err != nil {
			errs = append(errs, fmt.Errorf("runtime.handlers.%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (a *App) buildEngine(ctx context.Context) error {
	cfg, tel := a.cfg, a.tel
	boot, err := os.ReadFile(bootIDFile)
	if err != nil {
		return err
	}
	a.shims, err = shim.New(ctx, shimConfig(cfg, a.host, tel), tel.Log)
	if err != nil {
		return err
	}
	err = a.classes.Load(cfg.Runtime.RDTFile, cfg.Runtime.BlockIOFile)
	if err != nil {
		return err
	}
	a.network = network.New(ctx, NetworkConfig(cfg), tel.Log, tel.Tracer)
	a.setSpecRules(ctx, cfg)
	a.handlers.Store(new(handlers(cfg)))
	init, err := initBinary(cfg)
	if err != nil {
		return err
	}
	specs := specPort{
		rules:      &a.specRules,
		initBinary: init,
		systemd:    systemdCgroup(cfg),
		mapsIDs:    func() bool { return a.rootfs.MapsIDs("") },
	}
	a.cgroups = stats.New("/sys/fs/cgroup", a.host.CgroupV2)
	a.rootfs = rootfs.New(a.storage)
	a.layerUsage = layerusage.New(context.WithoutCancel(ctx), a.rootfs, layerUsageLife)
	tasks := controller.NewTasks(a.shims)
	files := podfiles.New(podfiles.Config{StateDir: cfg.Root, RunDir: cfg.State})
	a.streams = newStreams(a.shims, containerio.New(containerio.Config{
		Dir: filepath.Join(cfg.State, "io"), MaxLineSize: cfg.Logs.MaxLineSize.Int(),
		StdinClosed: func(ctx context.Context, id string) { a.engine.Exec.CloseStdin(ctx, id) },
	}, tel.Log), cfg.Logs.MaxLineSize.Int())
	images := imageConfig(cfg, a.imageChanged)
	images.Metrics = a.imageMetrics
	a.images = image.New(images, a.storage, tel.Log, tel.Tracer,
		func(ctx context.Context, id string) []string { return a.engine.Views.ImageUsers(ctx, id) })
	a.engine = engine.New(ctx, engine.Config{
		Handler: func(name string) (pod.Handler, error) { return a.handlers.Load().Find(name) },
		BootID:  strings.TrimSpace(string(boot)), SessionGrace: cfg.Runtime.SessionGrace.Std(),
		ContainerDir: filepath.Join(cfg.Root, "containers"), Ended: a.metrics.ended,
	}, engine.Ports{
		Store: a.store, Images: a.images, Rootfs: a.rootfs, ImageVolumes: rootfs.NewVolumes(a.storage, filepath.Join(cfg.Root, "volumes")), Network: meteredNetwork{a.network, a.metrics},
		Namespaces: pinPort{namespaces.New(filepath.Join(cfg.State, "ns"), namespaces.Defaults{
			UnprivilegedPorts: cfg.Runtime.UnprivPorts, UnprivilegedICMP: cfg.Runtime.UnprivICMP,
			Sysctls: cfg.Runtime.DefaultSysctls, LastGroup: lastGroup(a.host),
		})},
		Files: files, Controller: controller.New(a.shims, tasks), Tasks: tasks, IO: a.streams,
		Specs: specs, Programs: preflight.Programs{}, Cgroups: cgroupPort{a.cgroups},
	}, tel.Log, tel.Tracer)
	return nil
}

// imageChanged tells the bus of a changed image.
func (a *App) imageChanged(ctx context.Context, topic string, event any) {
	switch m := event.(type) {
	case *eventv1.ImageProgress:
		if a.passing != nil {
			a.passing.Tell(ctx, pod.Namespace, topic, "progress-"+rand.Text(), m)
		}
	case proto.Message:
		a.engine.Publish(ctx, topic, m)
	}
}

func (a *App) buildEvents() error {
	var err error
	a.hints, err = hints.New(a.tel.Log, func(ctx context.Context, _ string, event any) {
		if oom, ok := event.(*events.TaskOOM); ok {
			a.engine.Tasks.HintOOM(ctx, oom.GetContainerID())
		}
	}, append([]ttrpc.ServerOpt{}, ttrpcx.ServerOptions(a.tel)...)...)
	if err != nil || !a.cfg.Bus.Enabled {
		return err
	}
	a.publisher, err = busevents.NewPublisher(a.cfg.Bus.Client, a.tel)
	if err != nil {
		return err
	}
	publish := func(ctx context.Context, e *recordv1.Event) error {
		return a.publisher.Publish(ctx, busevents.Message{
			ID: e.GetMessageId(), Topic: e.GetTopic(), Envelope: e.GetEnvelope(), TraceContext: e.GetTraceContext(),
		})
	}
	a.passing = outbox.NewPassing(publish, a.tel.Log)
	a.relay = outbox.New(a.store, publish, a.cfg.Bus.OutboxLimit, a.tel.Log, a.tel.Registry)
	return nil
}

func (a *App) buildServer() error {
	usage := api.NewStats(a.engine, a.cgroups, layers{a.layerUsage, a.storage})
	a.node = api.NewNode(a.engine, a.network, nodeConfig(a.cfg, a.host, a.features))
	var err error
	a.server, err = rpc.NewServer(a.cfg.Server, a.tel,
		rpc.Service(&sandboxv1.SandboxService_ServiceDesc, api.NewSandbox(a.engine, usage, a.work)),
		rpc.Service(&containerv1.ContainerService_ServiceDesc, api.NewContainer(a.engine, usage, a.work)),
		rpc.Service(&imagev1.ImageService_ServiceDesc, api.NewImage(a.images, a.work)),
		rpc.Service(&nodev1.NodeService_ServiceDesc, a.node),
	)
	return err
}

// Parts are the parts of the process in the order of their start. The server comes near the
// end and stops early; it answers what it can while the state is still being recovered.
func (a *App) Parts() []lifecycle.Part {
	parts := []lifecycle.Part{
		a.tel.Part(),
		admin.Part(a.cfg.Admin, a.tel, admin.Check{Name: "recovery", Ready: a.recovered}),
		{Name: "reserve", Run: a.reserve.Run},
		{Name: "network", Run: a.network.Run},
		{Name: "shim-events", Run: a.serveHints},
		{Name: "engine", Run: a.runEngine},
		{Name: "network-garbage", Run: a.collectNetworks},
	}
	if a.relay != nil {
		parts = append(parts, lifecycle.Part{Name: "outbox", Run: func(ctx context.Context, ready func()) error {
			ready()
			return a.relay.Run(ctx)
		}}, lifecycle.Part{Name: "passing-events", Run: func(ctx context.Context, ready func()) error {
			ready()
			return a.passing.Run(ctx)
		}})
	}
	if a.cadvisor != nil {
		parts = append(parts, a.cadvisorParts()...)
	}
	return append(parts, a.server.Part("server"), lifecycle.Part{Name: "pulls", Run: a.stopPulls})
}

// collectNetworks lets plugins release what no pod holds, once all pods are known.
func (a *App) collectNetworks(ctx context.Context, ready func()) error {
	ready()
	select {
	case <-a.engine.RecoveredC():
		a.network.Collect(ctx, a.engine.Views.Networked)
	case <-ctx.Done():
	}
	<-ctx.Done() // may be configured away
	return nil
}

// stopPulls ends the pulls before the server ends its calls: what a pull has brought is kept
// if the process stops, and thrown away if its callers leave.
func (a *App) stopPulls(ctx context.Context, ready func()) error {
	ready()
	<-ctx.Done()
	a.images.Close()
	return nil
}

func (a *App) recovered(context.Context) error {
	if a.engine.Recovered() {
		return nil
	}
	return errors.New("state is being recovered")
}

func (a *App) serveHints(ctx context.Context, ready func()) error {
	lis, err := hints.Listen(ctx, eventsSocket(a.cfg))
	if err != nil {
		return err
	}
	ready()
	return a.hints.Serve(ctx, lis)
}

// runEngine recovers the state and then keeps the engine until the end.
func (a *App) runEngine(ctx context.Context, ready func()) error {
	ready()
	defer a.stopStreams(ctx)
	defer a.engine.Close()
	err := a.images.Load(ctx)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	err = a.engine.Recover(ctx, func(ctx context.Context) ([]string, error) {
		loaded, err := a.shims.Reload(ctx, a.engine.MadeWith)
		if err != nil {
			return nil, fmt.Errorf("shims: %w", err)
		}
		ids := make([]string, 0, len(loaded))
		for _, l := range loaded {
			ids = append(ids, l.SandboxID)
		}
		return ids, nil
	})
	if err != nil {
		return fmt.Errorf("recover state: %w", err)
	}
	<-ctx.Done()
	a.work.Wait()
	return nil
}

// stopStreams writes what was read of the containers' output before the process ends. What
// comes later waits in the FIFOs, or is written by shims that write logs themselves.
func (a *App) stopStreams(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), streamsStopTime)
	defer cancel()
	err := a.streams.stop(ctx)
	if err != nil {
		a.tel.Log.WarnContext(ctx, "streams of containers did not come to rest", slog.Any("error", err))
	}
}

// Close releases what New opened. Shims and containers live on.
func (a *App) Close() error {
	var errs []error
	if a.publisher != nil {
		a.publisher.Close()
	}
	if a.shims != nil {
		errs = append(errs, a.shims.Close())
	}
	if a.images != nil {
		a.images.Close()
	}
	if a.layerUsage != nil {
		a.layerUsage.Close()
	}
	if a.storage != nil {
		errs = append(errs, a.storage.Close())
	}
	if a.store != nil {
		errs = append(errs, a.store.Close())
	}
	return errors.Join(errs...)
}
