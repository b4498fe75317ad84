package app_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

func createRequest(g *fakeGateway, c *nri.Container) *nriv1.CreateContainerRequest {
	return &nriv1.CreateContainerRequest{
		Generation: g.generation.Load(), Request: &nri.CreateContainerRequest{Pod: pod("p1"), Container: c},
	}
}

// rawPlugin is a plugin without the stub.
type rawPlugin struct {
	runtime nri.RuntimeService
	closed  chan struct{}
}

func (h *hubProcess) raw(t *testing.T, methods map[string]ttrpc.Method) *rawPlugin {
	t.Helper()
	c, err := net.Dial("unix", h.cfg.NRI.Socket.Path)
	if err != nil {
		t.Fatal(err)
	}
	mux := multiplex.Multiplex(c)
	l, err := mux.Listen(multiplex.PluginServiceConn)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	srv.RegisterService("nri.pkg.api.v1alpha1.Plugin", &ttrpc.ServiceDesc{Methods: methods})
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(context.Background(), l) })
	rc, err := mux.Open(multiplex.RuntimeServiceConn)
	if err != nil {
		t.Fatal(err)
	}
	p := &rawPlugin{closed: make(chan struct{})}
	client := ttrpc.NewClient(rc, ttrpc.WithOnClose(func() { close(p.closed) }))
	p.runtime = nri.NewRuntimeClient(client)
	t.Cleanup(func() {
		_ = client.Close()
		_ = srv.Close()
		_ = mux.Close()
		wg.Wait()
	})
	return p
}

func method[Q any](answer func(*Q) (proto.Message, error)) ttrpc.Method {
	return func(_ context.Context, unmarshal func(any) error) (any, error) {
		q := new(Q)
		if err := unmarshal(q); err != nil {
			return nil, err
		}
		return answer(q)
	}
}

func TestPluginWithoutNewMethodsAndWithUnknownEvents(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	changes := make(chan string, 10)
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure": method(func(q *nri.ConfigureRequest) (proto.Message, error) {
			if q.GetNRIVersion() == "" || q.GetRegistrationTimeout() <= q.GetRequestTimeout() {
				return nil, errors.New("incomplete configuration")
			}
			return &nri.ConfigureResponse{Events: 1<<20 | int32(nri.MustParseEventMask("RunPodSandbox", "UpdatePodSandbox", "StartContainer"))}, nil
		}),
		"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
		"StateChange": method(func(q *nri.StateChangeEvent) (proto.Message, error) {
			changes <- fmt.Sprintf("%s %s%s", q.GetEvent(), q.GetPod().GetId(), q.GetContainer().GetId())
			return &nri.Empty{}, nil
		}),
	})
	if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "old", PluginIdx: "05"}); err != nil {
		t.Fatal(err)
	}
	g.await(t, "05-old")
	for _, id := range []string{"p1", "p2"} {
		if err := g.run(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if got, want := <-changes, "RUN_POD_SANDBOX "+id; got != want {
			t.Errorf("state change %q, want %q", got, want)
		}
	}
	if _, err := g.UpdatePodSandbox(t.Context(), &nriv1.UpdatePodSandboxRequest{
		Generation: g.generation.Load(), Request: &nri.UpdatePodSandboxRequest{Pod: pod("p1")},
	}); err != nil {
		t.Errorf("event without state change: %v", err)
	}
	status, err := g.GetStatus(t.Context(), &nriv1.GetStatusRequest{})
	if err != nil || len(status.GetPlugins()) != 1 {
		t.Fatal(status, err)
	}
	if s := status.GetPlugins()[0]; s.GetEvents()>>14 != 0 || s.GetPid() != int32(os.Getpid()) || s.GetCalls() < 3 {
		t.Errorf("status is %v", s)
	}
}

func TestPluginThatCannotTakeASplitSynchronisation(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect(func(g *fakeGateway) {
		for i := range 5 {
			c := container(fmt.Sprint("c", i))
			c.Annotations = map[string]string{"a": strings.Repeat("x", 1<<20)}
			g.containers = append(g.containers, c)
		}
	})
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure":   method(func(*nri.ConfigureRequest) (proto.Message, error) { return &nri.ConfigureResponse{}, nil }),
		"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
	})
	if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "old", PluginIdx: "05"}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.closed:
	case <-time.After(patience):
		t.Error("the plugin works with a part of the truth")
	}
	g.await(t)
}

func TestRefusedRegistration(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	for name, start := range map[string]func() error{
		"bad index": func() error { return h.start("1", "p", &recorder{}) },
		"bad name":  func() error { return h.start("10", "p q", &recorder{}) },
	} {
		done := make(chan error, 1)
		go func() { done <- start() }()
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "invalid plugin") {
				t.Errorf("%s: error is %v", name, err)
			}
		case <-time.After(patience):
			t.Errorf("%s: the plugin hangs", name)
		}
	}
}

func TestUpdatesByPlugins(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect(func(g *fakeGateway) {
		g.fail = func(u *nri.ContainerUpdate) bool { return u.GetContainerId() == "gone" }
	})
	stranger := h.raw(t, nil)
	if _, err := stranger.runtime.UpdateContainers(t.Context(), &nri.UpdateContainersRequest{
		Update: []*nri.ContainerUpdate{{ContainerId: "c1"}},
	}); err == nil || !strings.Contains(err.Error(), "not registered") {
		t.Errorf("update before registration: %v", err)
	}
	p := &recorder{}
	// From inside a handler: no deadlock, and the failed ones come back.
	p.onRun = func(context.Context, *nri.PodSandbox) error {
		failed, err := p.stub.UpdateContainers([]*nri.ContainerUpdate{{ContainerId: "c1"}, {ContainerId: "gone"}})
		if err != nil || len(failed) != 1 || failed[0].GetContainerId() != "gone" {
			return fmt.Errorf("failed updates are %v, error is %w", failed, err)
		}
		return nil
	}
	h.mustStart("10", "p", p)
	g.await(t, "10-p")
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Error(err)
	}
	many := make([]*nri.ContainerUpdate, 10_000)
	for i := range many {
		many[i] = &nri.ContainerUpdate{ContainerId: fmt.Sprint("c", i)}
	}
	if failed, err := p.stub.UpdateContainers(many); err != nil || len(failed) != 0 {
		t.Errorf("10000 updates: %d failed, %v", len(failed), err)
	}
	if u := g.wanted()[0]; u.GetPlugin() != "10-p" {
		t.Errorf("update comes from %q", u.GetPlugin())
	}
}

func TestBrokenConnectionsHurtNobodyElse(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	const limit = 5 * time.Second
	cfg.Timeouts.Registration = config.Duration(limit)
	h := startHub(t, cfg)
	g := h.connect()
	dial := func() net.Conn {
		c, err := net.Dial("unix", cfg.NRI.Socket.Path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	garbage := make([]byte, 4096)
	_, _ = rand.Read(garbage)
	conns := map[string]net.Conn{"silent": dial(), "random bytes": dial(), "huge frame": dial(), "half a frame": dial()}
	_, _ = conns["random bytes"].Write(garbage)
	_, _ = conns["huge frame"].Write([]byte{0, 0, 0, 2, 0xff, 0xff, 0xff, 0xff})
	_, _ = conns["half a frame"].Write([]byte{0, 0, 0, 2, 0, 0, 1, 0, 'x'})
	begin := time.Now()
	h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	if took := time.Since(begin); took >= limit {
		t.Errorf("registration took %v next to silent connections", took)
	}
	for name, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
			t.Errorf("%s: still connected", name)
		}
	}
}

func TestOversizedAnswerDropsThatPluginOnly(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{hanging("big", 500*time.Millisecond)}
	h := startHub(t, cfg)
	g := h.connect()
	h.mustStart("10", "big", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		return env("K", strings.Repeat("x", 5<<20)), nil, nil
	}})
	h.mustStart("20", "p", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		return env("K", "v"), nil, nil
	}})
	g.await(t, "10-big", "20-p")
	resp, err := g.create(t.Context(), "c1")
	if err != nil || len(resp.GetAdjust().GetEnv()) != 1 {
		t.Errorf("%v, %v", resp, err)
	}
	g.await(t, "20-p")
}

// launchedPlugin is the child process of TestLaunchedPlugin.
func launchedPlugin() int {
	fmt.Println("environment:", strings.Join(os.Environ(), " "))
	fmt.Fprint(os.Stderr, "no newline at the end")
	r := &recorder{onShutdown: func() { fmt.Println("told to shut down") }}
	r.onConfigure = func(cfg, _, _ string) (stub.EventMask, error) {
		fmt.Println("config:", cfg)
		return 0, nil
	}
	r.onRun = func(_ context.Context, p *nri.PodSandbox) error {
		if p.GetId() == "die" {
			os.Exit(3)
		}
		return nil
	}
	s, err := stub.New(r, stub.WithLogger(silent{}), stub.WithOnClose(func() {}))
	if err == nil {
		err = s.Run(context.Background())
	}
	if err != nil {
		return 1
	}
	return 0
}

func TestLaunchedPlugin(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	for _, dir := range []string{cfg.Launch.Folder, cfg.Launch.ConfigFolder} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(cfg.Launch.Folder, "10-self")); err != nil {
		t.Fatal(err)
	}
	write := func(path, content string, mode os.FileMode) {
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(cfg.Launch.Folder, "README"), "not a plugin", 0o755)
	write(filepath.Join(cfg.Launch.Folder, "20-broken"), "not a program", 0o755)
	write(filepath.Join(cfg.Launch.ConfigFolder, "self.conf"), "wrong file", 0o644)
	write(filepath.Join(cfg.Launch.ConfigFolder, "10-self.conf"), "hello", 0o644)

	var log testkit.Buffer
	tel, spans := testkit.TelemetryTo(t, &log)
	h := startHubWith(t, cfg, tel, spans)
	g := h.connect()
	g.await(t, "10-self")
	status, err := g.GetStatus(t.Context(), &nriv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	pid := status.GetPlugins()[0].GetPid()
	if !status.GetPlugins()[0].GetLaunched() || pid == 0 || pid == int32(os.Getpid()) {
		t.Errorf("status is %v", status.GetPlugins()[0])
	}
	for _, want := range []string{
		"environment: NRI_PLUGIN_NAME=self NRI_PLUGIN_IDX=10 NRI_PLUGIN_SOCKET=3\"",
		"config: hello\"", "README", "20-broken",
	} {
		testkit.Eventually(t, patience, func() error {
			if !strings.Contains(log.String(), want) {
				return fmt.Errorf("log lacks %q", want)
			}
			return nil
		})
	}

	// It dies in the middle of a request: the request goes on, and it comes back.
	if err := g.run(t.Context(), "die"); err != nil {
		t.Errorf("request with a dying plugin: %v", err)
	}
	testkit.Eventually(t, patience, func() error {
		status, err := g.GetStatus(t.Context(), &nriv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		for _, p := range status.GetPlugins() {
			if p.GetActive() && p.GetPid() != pid {
				return nil
			}
		}
		return errors.New("not started again")
	})

	// The folder is watched.
	if err := os.Rename(filepath.Join(cfg.Launch.Folder, "10-self"), filepath.Join(cfg.Launch.Folder, "11-other")); err != nil {
		t.Fatal(err)
	}
	g.await(t, "11-other")
	h.stop()
	if !strings.Contains(log.String(), "told to shut down") {
		t.Error("the plugin was not told before it was stopped")
	}
}
