package app_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// TestMain is also the body of a launched plugin: the hub starts this very program.
func TestMain(m *testing.M) {
	if os.Getenv(nri.PluginSocketEnvVar) != "" {
		os.Exit(launchedPlugin())
	}
	testkit.Main(m)
}

// patience is how long tests wait for what must happen.
const patience = testkit.Patience

// hubProcess is a running hub with the paths that survive its restart.
type hubProcess struct {
	t    *testing.T
	cfg  hubconfig.Config
	tel  *telemetry.Telemetry
	span testkit.Spans
	stop func()
}

func testConfig(t *testing.T) hubconfig.Config {
	t.Helper()
	// Socket paths must be short.
	dir, err := os.MkdirTemp("", "hub")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg := hubconfig.Default()
	cfg.RunFolder = dir
	cfg.Admin.Listen = ""
	cfg.Server.Socket.Path = filepath.Join(dir, "api.sock")
	cfg.Server.DrainTimeout = config.Duration(time.Second)
	cfg.NRI.Socket.Path = filepath.Join(dir, "nri", "nri.sock")
	cfg.Launch.Folder = filepath.Join(dir, "plugins")
	cfg.Launch.ConfigFolder = filepath.Join(dir, "conf.d")
	cfg.Launch.MinBackoff = config.Duration(50 * time.Millisecond)
	cfg.Launch.StopTimeout = config.Duration(20 * time.Second)
	cfg.Launch.WasmCache = filepath.Join(dir, "wasm")
	cfg.Events.URL = ""
	cfg.Required.Wait = config.Duration(300 * time.Millisecond)
	cfg.Degraded.MinPause = config.Duration(50 * time.Millisecond)
	cfg.Timeouts.JoinWait = config.Duration(100 * time.Millisecond)
	// A plugin that is not meant to be slow is not: the limits of those that are belong to them, see hanging.
	cfg.Timeouts.Registration = config.Duration(patience)
	cfg.Timeouts.Synchronize = config.Duration(20 * time.Second)
	cfg.Timeouts.Request = config.Duration(20 * time.Second)
	return cfg
}

// hanging is the rule of a plugin that does not answer: it alone has this time limit.
func hanging(name string, limit time.Duration) hubconfig.Plugin {
	return hubconfig.Plugin{Name: name, Timeout: config.Duration(limit)}
}

func startHub(t *testing.T, cfg hubconfig.Config) *hubProcess {
	t.Helper()
	tel, spans := testkit.Telemetry(t)
	return startHubWith(t, cfg, tel, spans)
}

func startHubWith(t *testing.T, cfg hubconfig.Config, tel *telemetry.Telemetry, spans testkit.Spans) *hubProcess {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	a, err := app.New(cfg, tel)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	up, down := make(chan struct{}), make(chan error, 1)
	parts := append(a.Parts(), lifecycle.Part{Name: "test", Run: func(ctx context.Context, ready func()) error {
		ready()
		close(up)
		<-ctx.Done()
		return nil
	}})
	go func() { down <- lifecycle.Run(ctx, tel.Log, parts...) }()
	select {
	case <-up:
	case err := <-down:
		t.Fatal("hub did not start:", err)
	}
	var once sync.Once
	h := &hubProcess{t: t, cfg: cfg, tel: tel, span: spans, stop: func() {
		once.Do(func() {
			cancel()
			if err := <-down; err != nil {
				t.Error("hub stopped with an error:", err)
			}
		})
	}}
	t.Cleanup(h.stop)
	return h
}

// fakeGateway is the gateway's side of the contract.
type fakeGateway struct {
	nriv1.HubServiceClient

	generation atomic.Uint64
	cancel     context.CancelFunc
	done       chan struct{}

	mu          sync.Mutex
	states      []*nriv1.HubState
	pods        []*nri.PodSandbox
	containers  []*nri.Container
	ended       []string
	updates     []*nriv1.UpdateRequest
	inventories int
	onInventory func()
	fail        func(*nri.ContainerUpdate) bool
}

func (h *hubProcess) connect(prepare ...func(*fakeGateway)) *fakeGateway {
	h.t.Helper()
	conn, err := rpc.Dial(rpc.DefaultClientConfig(h.cfg.Server.Socket.Path), h.tel)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	g := &fakeGateway{HubServiceClient: nriv1.NewHubServiceClient(conn), cancel: cancel, done: make(chan struct{})}
	for _, p := range prepare {
		p(g)
	}
	stream, err := g.Connect(ctx)
	if err != nil {
		h.t.Fatal(err)
	}
	hello := &nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Hello{Hello: &nriv1.Hello{RuntimeName: "crisp-test", RuntimeVersion: "v9"}}}
	if err := stream.Send(hello); err != nil {
		h.t.Fatal(err)
	}
	first := make(chan struct{})
	go func() {
		defer close(g.done)
		g.serve(stream, first)
	}()
	<-first
	h.t.Cleanup(func() {
		g.disconnect()
		_ = conn.Close()
	})
	return g
}

func (g *fakeGateway) disconnect() {
	g.cancel()
	<-g.done
}

func (g *fakeGateway) serve(stream nriv1.HubService_ConnectClient, first chan struct{}) {
	var once sync.Once
	defer once.Do(func() { close(first) })
	for {
		msg, err := stream.Recv()
		if err != nil {
			return
		}
		switch m := msg.GetMessage().(type) {
		case *nriv1.ConnectResponse_State:
			g.generation.Store(m.State.GetGeneration())
			g.mu.Lock()
			g.states = append(g.states, m.State)
			g.mu.Unlock()
			once.Do(func() { close(first) })
		case *nriv1.ConnectResponse_InventoryRequest:
			g.answerInventory(stream, m.InventoryRequest.GetRequestId())
		case *nriv1.ConnectResponse_UpdateRequest:
			g.mu.Lock()
			g.updates = append(g.updates, m.UpdateRequest)
			var failed []*nri.ContainerUpdate
			for _, u := range m.UpdateRequest.GetUpdates() {
				if g.fail != nil && g.fail(u) {
					failed = append(failed, u)
				}
			}
			g.mu.Unlock()
			_ = stream.Send(&nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_UpdateResult{
				UpdateResult: &nriv1.UpdateResult{RequestId: m.UpdateRequest.GetRequestId(), Failed: failed},
			}})
		}
	}
}

// answerInventory sends the pods and each 1000 containers in a piece of their own.
func (g *fakeGateway) answerInventory(stream nriv1.HubService_ConnectClient, id uint64) {
	g.mu.Lock()
	g.inventories++
	pods, containers, hook := slices.Clone(g.pods), slices.Clone(g.containers), g.onInventory
	ended := slices.Clone(g.ended)
	g.mu.Unlock()
	if hook != nil {
		hook()
	}
	send := func(c *nriv1.InventoryChunk) {
		c.RequestId = id
		_ = stream.Send(&nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Inventory{Inventory: c}})
	}
	send(&nriv1.InventoryChunk{Pods: pods, EndedIds: ended, More: true})
	for part := range slices.Chunk(containers, 1000) {
		send(&nriv1.InventoryChunk{Containers: part, More: true})
	}
	send(&nriv1.InventoryChunk{})
}

func (g *fakeGateway) state() *nriv1.HubState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.states[len(g.states)-1]
}

func (g *fakeGateway) wanted() []*nriv1.UpdateRequest {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.updates)
}

func pod(id string) *nri.PodSandbox {
	return &nri.PodSandbox{Id: id, Name: "pod-" + id, Namespace: "default"}
}

func container(id string) *nri.Container {
	return &nri.Container{Id: id, PodSandboxId: "p1", Name: "ctr-" + id, State: nri.ContainerState_CONTAINER_RUNNING}
}

func (g *fakeGateway) run(ctx context.Context, id string) error {
	_, err := g.RunPodSandbox(ctx, &nriv1.RunPodSandboxRequest{
		Generation: g.generation.Load(), Request: &nri.RunPodSandboxRequest{Pod: pod(id)},
	})
	return err
}

func (g *fakeGateway) create(ctx context.Context, id string) (*nri.CreateContainerResponse, error) {
	resp, err := g.CreateContainer(ctx, &nriv1.CreateContainerRequest{
		Generation: g.generation.Load(),
		Request:    &nri.CreateContainerRequest{Pod: pod("p1"), Container: container(id)},
	})
	return resp.GetResponse(), err
}

func (g *fakeGateway) stopContainer(ctx context.Context, id string) (*nri.StopContainerResponse, error) {
	resp, err := g.StopContainer(ctx, &nriv1.StopContainerRequest{
		Generation: g.generation.Load(),
		Request:    &nri.StopContainerRequest{Pod: pod("p1"), Container: container(id)},
	})
	return resp.GetResponse(), err
}

func (g *fakeGateway) removeContainer(ctx context.Context, id string) error {
	_, err := g.RemoveContainer(ctx, &nriv1.RemoveContainerRequest{
		Generation: g.generation.Load(),
		Request:    &nri.RemoveContainerRequest{Pod: pod("p1"), Container: container(id)},
	})
	return err
}

// active returns the names of the active plugins in the order of calls.
func (g *fakeGateway) active(ctx context.Context) []string {
	resp, err := g.GetStatus(ctx, &nriv1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	var names []string
	for _, p := range resp.GetPlugins() {
		if p.GetActive() {
			names = append(names, p.GetIndex()+"-"+p.GetName())
		}
	}
	return names
}

// plugin returns what the hub tells of a plugin; false if it is not there.
func (g *fakeGateway) plugin(ctx context.Context, name string) (*nriv1.PluginStatus, bool) {
	resp, err := g.GetStatus(ctx, &nriv1.GetStatusRequest{})
	if err != nil {
		return nil, false
	}
	for _, p := range resp.GetPlugins() {
		if p.GetIndex()+"-"+p.GetName() == name {
			return p, true
		}
	}
	return nil, false
}

func (g *fakeGateway) await(t *testing.T, want ...string) {
	t.Helper()
	testkit.Eventually(t, patience, func() error {
		if got := g.active(t.Context()); !slices.Equal(got, want) {
			return fmt.Errorf("active plugins are %v, want %v", got, want)
		}
		return nil
	})
}

// recorder is a plugin that notes what it is told. Its hooks may be nil.
type recorder struct {
	stub stub.Stub

	onConfigure func(config, runtime, version string) (stub.EventMask, error)
	onSync      func(ctx context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error)
	onRun       func(ctx context.Context, p *nri.PodSandbox) error
	onCreate    func(ctx context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error)
	onUpdate    func(ctx context.Context, c *nri.Container, r *nri.LinuxResources) ([]*nri.ContainerUpdate, error)
	onStop      func(ctx context.Context, c *nri.Container) ([]*nri.ContainerUpdate, error)
	onShutdown  func()
	shutdown    atomic.Bool

	mu     sync.Mutex
	events []string
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf(format, args...))
}

func (r *recorder) seen() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events)
}

func (r *recorder) count(event string) int {
	n := 0
	for _, e := range r.seen() {
		if e == event {
			n++
		}
	}
	return n
}

func (r *recorder) Configure(_ context.Context, cfg, runtime, version string) (stub.EventMask, error) {
	if r.onConfigure != nil {
		return r.onConfigure(cfg, runtime, version)
	}
	return 0, nil
}

func (r *recorder) Synchronize(ctx context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error) {
	for _, p := range pods {
		r.note("sync pod %s", p.GetId())
	}
	for _, c := range containers {
		r.note("sync %s", c.GetId())
	}
	if r.onSync != nil {
		return r.onSync(ctx, pods, containers)
	}
	return nil, nil
}

func (r *recorder) Shutdown(context.Context) {
	r.shutdown.Store(true)
	if r.onShutdown != nil {
		r.onShutdown()
	}
}

func (r *recorder) RunPodSandbox(ctx context.Context, p *nri.PodSandbox) error {
	r.note("run %s", p.GetId())
	if r.onRun != nil {
		return r.onRun(ctx, p)
	}
	return nil
}

func (r *recorder) StopPodSandbox(_ context.Context, p *nri.PodSandbox) error {
	r.note("stop pod %s", p.GetId())
	return nil
}

func (r *recorder) RemovePodSandbox(_ context.Context, p *nri.PodSandbox) error {
	r.note("remove pod %s", p.GetId())
	return nil
}

func (r *recorder) CreateContainer(ctx context.Context, _ *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	r.note("create %s", c.GetId())
	if r.onCreate != nil {
		return r.onCreate(ctx, c)
	}
	return nil, nil, nil
}

func (r *recorder) UpdateContainer(ctx context.Context, _ *nri.PodSandbox, c *nri.Container, res *nri.LinuxResources) ([]*nri.ContainerUpdate, error) {
	r.note("update %s", c.GetId())
	if r.onUpdate != nil {
		return r.onUpdate(ctx, c, res)
	}
	return nil, nil
}

func (r *recorder) StopContainer(ctx context.Context, _ *nri.PodSandbox, c *nri.Container) ([]*nri.ContainerUpdate, error) {
	r.note("stop %s", c.GetId())
	if r.onStop != nil {
		return r.onStop(ctx, c)
	}
	return nil, nil
}

func (r *recorder) RemoveContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	r.note("remove %s", c.GetId())
	return nil
}

// silent is a logger for plugins.
type silent struct{}

func (silent) Debugf(context.Context, string, ...any) {}
func (silent) Infof(context.Context, string, ...any)  {}
func (silent) Warnf(context.Context, string, ...any)  {}
func (silent) Errorf(context.Context, string, ...any) {}

// start registers the plugin; it returns after Configure.
func (h *hubProcess) start(index, name string, r *recorder, opts ...stub.Option) error {
	s, err := stub.New(r, append([]stub.Option{
		stub.WithPluginName(name), stub.WithPluginIdx(index), stub.WithLogger(silent{}),
		stub.WithSocketPath(h.cfg.NRI.Socket.Path), stub.WithOnClose(func() {}),
	}, opts...)...)
	if err != nil {
		return err
	}
	r.stub = s
	if err := s.Start(context.Background()); err != nil {
		return err
	}
	h.t.Cleanup(s.Stop)
	return nil
}

func (h *hubProcess) mustStart(index, name string, r *recorder, opts ...stub.Option) *recorder {
	h.t.Helper()
	if err := h.start(index, name, r, opts...); err != nil {
		h.t.Fatal(err)
	}
	return r
}

// tapped is a stub option that gives the test the plugin's connection.
func (h *hubProcess) tapped(conn *net.Conn) stub.Option {
	return stub.WithDialer(func(path string) (net.Conn, error) {
		c, err := net.Dial("unix", path)
		*conn = c
		return c, err
	})
}

func env(key, value string) *nri.ContainerAdjustment {
	a := &nri.ContainerAdjustment{}
	a.AddEnv(key, value)
	return a
}

var errNo = errors.New("no way")

func withPolicy(fail, keep bool) stub.Option {
	return stub.WithFailurePolicy(&nri.FailurePolicy{FailRequest: fail, KeepConnected: keep})
}
