package app_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

func TestRegisterConfigureSynchronizeDispatch(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	ended := container("ended")
	ended.State = nri.ContainerState_CONTAINER_STOPPED
	g := h.connect(func(g *fakeGateway) {
		g.pods = []*nri.PodSandbox{pod("p1")}
		g.containers = []*nri.Container{container("c1"), ended}
	})
	if ev := g.state().GetSubscribedEvents(); ev != 0 {
		t.Errorf("without plugins the mask is %x, want 0", ev)
	}

	var order []string
	var mu sync.Mutex
	adjusting := func(name, key string) *recorder {
		return &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, fmt.Sprintf("%s sees %v", name, c.GetEnv()))
			u := &nri.ContainerUpdate{ContainerId: "c1"}
			if name == "a" {
				u.SetLinuxPidLimits(7)
			} else {
				u.SetLinuxCPUShares(3)
			}
			return env(key, name), []*nri.ContainerUpdate{u}, nil
		}}
	}
	b, a := adjusting("b", "B"), adjusting("a", "A")
	a.onConfigure = func(cfg, runtime, version string) (stub.EventMask, error) {
		if cfg != "" || runtime != "crisp-test" || version != "v9" {
			t.Errorf("configured with (%q, %q, %q)", cfg, runtime, version)
		}
		return 0, nil
	}
	h.mustStart("10", "b", b)
	h.mustStart("10", "a", a)
	g.await(t, "10-a", "10-b")
	if diff := cmp.Diff([]string{"sync pod p1", "sync c1"}, a.seen()); diff != "" {
		t.Errorf("synchronised with (-want +got):\n%s", diff)
	}
	if got := a.stub.RuntimeNRIVersion(); !strings.HasPrefix(got, "v0.") {
		t.Errorf("plugin was told NRI version %q", got)
	}

	if err := g.run(t.Context(), "p2"); err != nil {
		t.Fatal(err)
	}
	resp, err := g.create(t.Context(), "c2")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a sees []", "b sees [A=a]"}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if got := resp.GetAdjust().GetEnv(); len(got) != 2 {
		t.Errorf("merged environment is %v", got)
	}
	up := resp.GetUpdate()
	if len(up) != 1 || up[0].GetLinux().GetResources().GetPids().GetLimit() != 7 ||
		up[0].GetLinux().GetResources().GetCpu().GetShares().GetValue() != 3 {
		t.Errorf("merged updates are %v", up)
	}

	b.onCreate = a.onCreate
	_, err = g.create(t.Context(), "c3")
	if !errdefs.IsConflict(err) || !strings.Contains(err.Error(), `"10-b" and "10-a" both tried to set Env`) {
		t.Errorf("conflict: %v", err)
	}

	// A refusal names the plugin and stops the request there.
	a.onRun = func(context.Context, *nri.PodSandbox) error { return errNo }
	err = g.run(t.Context(), "p3")
	if !errdefs.IsAborted(err) || !strings.Contains(err.Error(), `plugin "10-a": RunPodSandbox: no way`) {
		t.Errorf("refusal: %v", err)
	}
	if b.count("run p3") != 0 {
		t.Error("the second plugin was asked although the first one had refused")
	}

	// Each call of a plugin is a span below that of the request, and says how it ended.
	calls := map[string]sdktrace.ReadOnlySpan{}
	for _, s := range h.span.Named("nri.plugin") {
		var what []string
		for _, a := range s.Attributes() {
			what = append(what, a.Value.String())
		}
		calls[strings.Join(what, " ")] = s
	}
	if s := calls["10-b CreateContainer"]; s == nil || !s.Parent().IsValid() || s.Status().Code == codes.Error {
		t.Errorf("spans of calls are %v", slices.Collect(maps.Keys(calls)))
	}
	if s := calls["10-a RunPodSandbox rejected"]; s == nil || s.Status().Code != codes.Error || !strings.Contains(s.Status().Description, "no way") {
		t.Errorf("span of the refusal: %v among %v", s, slices.Collect(maps.Keys(calls)))
	}
}

func TestWrongGenerationIsUnavailable(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	for _, generation := range []uint64{0, g.generation.Load() + 2} {
		_, err := g.RunPodSandbox(t.Context(), &nriv1.RunPodSandboxRequest{
			Generation: generation, Request: &nri.RunPodSandboxRequest{Pod: pod("p1")},
		})
		if !errdefs.IsUnavailable(err) {
			t.Errorf("generation %d: %v, want Unavailable", generation, err)
		}
	}
	_, err := g.StartContainer(t.Context(), &nriv1.StartContainerRequest{
		Generation: g.generation.Load(), Request: &nri.StartContainerRequest{Pod: pod("p1")},
	})
	if !errdefs.IsInvalidArgument(err) {
		t.Errorf("without container: %v, want InvalidArgument", err)
	}
}

func TestFailurePolicy(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name              string
		policy            *nri.FailurePolicy
		disconnect        bool // the plugin's rule says so
		cut               bool // the connection breaks instead of a timeout
		fails, stays      bool
		required          bool
		wantInsteadOfFail string
	}{
		{name: "timeout, default", stays: true},
		{name: "timeout, disconnect by rule", disconnect: true},
		{name: "timeout, fail request", policy: &nri.FailurePolicy{FailRequest: true}, fails: true},
		{name: "timeout, keep connected", policy: &nri.FailurePolicy{KeepConnected: true}, stays: true},
		{name: "timeout, both", policy: &nri.FailurePolicy{FailRequest: true, KeepConnected: true}, fails: true, stays: true},
		{name: "connection lost, default", cut: true},
		{name: "connection lost, keep connected", policy: &nri.FailurePolicy{KeepConnected: true}, cut: true},
		{name: "connection lost, fail request", policy: &nri.FailurePolicy{FailRequest: true}, cut: true, fails: true},
		{name: "timeout, required", required: true, fails: true},
		{name: "connection lost, required", required: true, cut: true, fails: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t)
			rule := hanging("bad", 300*time.Millisecond)
			if tt.required {
				cfg.RequiredPlugins = []string{"bad"}
			}
			if tt.disconnect {
				rule.OnTimeout = hubconfig.Disconnect
			}
			cfg.Plugins = []hubconfig.Plugin{rule}
			h := startHub(t, cfg)
			g := h.connect()
			var conn net.Conn
			release := make(chan struct{})
			defer close(release)
			var blocking atomic.Bool
			blocking.Store(true)
			bad := &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
				if !blocking.Load() {
					return nil, nil, nil
				}
				if tt.cut {
					_ = conn.Close()
				}
				<-release
				return nil, nil, nil
			}}
			opts := []stub.Option{h.tapped(&conn)}
			if tt.policy != nil {
				opts = append(opts, stub.WithFailurePolicy(tt.policy))
			}
			h.mustStart("10", "bad", bad, opts...)
			good := h.mustStart("20", "good", &recorder{})
			g.await(t, "10-bad", "20-good")

			_, err := g.create(t.Context(), "c1")
			if (err != nil) != tt.fails {
				t.Fatalf("error is %v, want one: %v", err, tt.fails)
			}
			if err != nil && !strings.Contains(err.Error(), "10-bad") {
				t.Errorf("error does not name the plugin: %v", err)
			}
			if tt.required && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("required plugin: %v, want FailedPrecondition", err)
			}
			if asked := good.count("create c1") == 1; asked == tt.fails {
				t.Errorf("next plugin asked: %v", asked)
			}
			if tt.stays {
				if state, _ := g.plugin(t.Context(), "10-bad"); state.GetState() != "degraded" {
					t.Errorf("plugin is %q, want degraded", state.GetState())
				}
			}
			blocking.Store(false)
			want := []string{"20-good"}
			if tt.stays {
				// What happens without it shows that it answers again; a policy to fail
				// requests leaves nothing but to try.
				want = []string{"10-bad", "20-good"}
				n := 0
				testkit.Eventually(t, patience, func() error {
					n++
					_, _ = g.create(t.Context(), fmt.Sprint("again", n))
					if got := g.active(t.Context()); !slices.Equal(got, want) {
						return fmt.Errorf("active are %v", got)
					}
					return nil
				})
			}
			g.await(t, want...)
		})
	}
}

func TestMetricsOfPlugins(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{
		hanging("hangs", 300*time.Millisecond),
		{Name: "late", Timeouts: map[string]config.Duration{"Synchronize": config.Duration(300 * time.Millisecond)}},
	}
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	defer close(release)
	h.mustStart("10", "refuses", &recorder{onRun: func(context.Context, *nri.PodSandbox) error { return errNo }})
	g.await(t, "10-refuses")
	if err := g.run(t.Context(), "p1"); err == nil {
		t.Error("not refused")
	}
	h.mustStart("05", "hangs", &recorder{onRun: func(context.Context, *nri.PodSandbox) error {
		<-release
		return nil
	}})
	g.await(t, "05-hangs", "10-refuses")
	if err := g.run(t.Context(), "p2"); err == nil {
		t.Error("not refused")
	}
	if err := h.start("20", "late", &recorder{onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
		<-release
		return nil, nil
	}}); err != nil {
		t.Error(err)
	}
	// Names and values of the counters with the labels in alphabetical order, and of the gauges.
	testkit.Eventually(t, patience, func() error {
		families, err := h.tel.Registry.Gather()
		if err != nil {
			return err
		}
		got := make(map[string]float64)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		for name, want := range map[string]float64{
			"crisp_nri_plugin_invocations_total RunPodSandbox 10-refuses rejected": 2,
			"crisp_nri_plugin_invocations_total RunPodSandbox 05-hangs timeout":    1,
			"crisp_nri_plugin_invocations_total Synchronize 20-late timeout":       1,
			"crisp_nri_plugin_invocations_total Configure 10-refuses ok":           1,
			"crisp_nri_plugin_latency_seconds RunPodSandbox 10-refuses":            2,
			"crisp_nri_active_plugins":                                             1,
			"crisp_nri_degraded_plugins":                                           1,
		} {
			if got[name] != want {
				return fmt.Errorf("%s is %v, want %v", name, got[name], want)
			}
		}
		return nil
	})
}

func TestCallerThatLeavesIsNobodysFailure(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	release := make(chan struct{})
	h.mustStart("10", "slow", &recorder{onRun: func(context.Context, *nri.PodSandbox) error {
		<-release
		return nil
	}})
	g.await(t, "10-slow")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel)
	if err := g.run(ctx, "p1"); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want the caller's end", err)
	}
	close(release)
	if err := g.run(t.Context(), "p2"); err != nil {
		t.Errorf("the plugin was dropped: %v", err)
	}
	g.await(t, "10-slow")
}

func TestRequiredPluginThatIsAway(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.RequiredPlugins = []string{"guard"}
	cfg.Timeouts.Settle = config.Duration(3 * time.Second)
	h := startHub(t, cfg)
	g := h.connect()
	mask := nri.EventMask(g.state().GetSubscribedEvents())
	if !mask.IsSet(nri.Event_RUN_POD_SANDBOX) || !mask.IsSet(nri.Event_CREATE_CONTAINER) {
		t.Errorf("mask %x lets requests pass without the hub", mask)
	}
	if g.state().GetReady() {
		t.Error("ready although a required plugin is missing")
	}
	for name, call := range map[string]func() error{
		"RunPodSandbox":   func() error { return g.run(t.Context(), "p1") },
		"CreateContainer": func() error { _, err := g.create(t.Context(), "c1"); return err },
	} {
		if err := call(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "guard") {
			t.Errorf("%s: %v, want FailedPrecondition that names the plugin", name, err)
		}
	}
	testkit.Eventually(t, patience, func() error {
		if !g.state().GetReady() {
			return errors.New("not settled")
		}
		return nil
	})
	if err := g.run(t.Context(), "p1"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("after settling: %v, want FailedPrecondition", err)
	}
	h.mustStart("10", "guard", &recorder{})
	g.await(t, "10-guard")
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Error(err)
	}
}

func TestEndsReachEachPluginOnce(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	p := &recorder{onStop: func(context.Context, *nri.Container) ([]*nri.ContainerUpdate, error) {
		u := &nri.ContainerUpdate{ContainerId: "other"}
		u.SetLinuxCPUShares(9)
		return []*nri.ContainerUpdate{u}, nil
	}}
	h.mustStart("10", "p", p)
	g.await(t, "10-p")
	for _, id := range []string{"c1", "c2"} {
		if _, err := g.create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := g.stopContainer(t.Context(), "c1")
	if err != nil || len(resp.GetUpdate()) != 1 {
		t.Errorf("stop: %v, %v; want the plugin's update", resp, err)
	}
	for range 2 {
		if resp, err := g.stopContainer(t.Context(), "c1"); err != nil || len(resp.GetUpdate()) != 0 {
			t.Errorf("second stop: %v, %v", resp, err)
		}
		for _, id := range []string{"c1", "c2"} {
			if err := g.removeContainer(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
	}
	want := []string{"create c1", "create c2", "stop c1", "remove c1", "stop c2", "remove c2"}
	if diff := cmp.Diff(want, p.seen()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	// c2's stop came with the removal, whose answer has no place for updates.
	testkit.Eventually(t, patience, func() error {
		if n := len(g.wanted()); n != 1 {
			return fmt.Errorf("%d update requests, want 1", n)
		}
		return nil
	})
}

func TestPluginsWorkSideBySideAndOneByOne(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	const requests = 50
	var inFlight [2]atomic.Int32
	both := make(chan struct{}) // both have a request
	var orders [2][]string
	for i, name := range []string{"a", "b"} {
		h.mustStart("10", name, &recorder{onRun: func(ctx context.Context, p *nri.PodSandbox) error {
			if n := inFlight[i].Add(1); n != 1 {
				t.Errorf("plugin %s has %d requests in flight", name, n)
			}
			orders[i] = append(orders[i], p.GetId()) // safe: one at a time
			switch {
			case i == 0 && len(orders[0]) == 2:
				close(both)
			case i == 1 && len(orders[1]) == 1:
				// The first request has come on to here, and its next one to the plugin before.
				select {
				case <-both:
				case <-ctx.Done():
					t.Error("one plugin's work holds up the other's")
				}
			}
			time.Sleep(time.Millisecond)
			inFlight[i].Add(-1)
			return nil
		}})
	}
	g.await(t, "10-a", "10-b")
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			if err := g.run(t.Context(), fmt.Sprintf("p%d", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if !slices.Equal(orders[0], orders[1]) {
		t.Errorf("plugins saw different orders:\n%v\n%v", orders[0], orders[1])
	}
}

func TestValidators(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Validator.Enable = true
	cfg.Validator.RequiredPlugins = []string{"10-a"}
	cfg.Plugins = []hubconfig.Plugin{hanging("a", 2*time.Second)}
	h := startHub(t, cfg)
	g := h.connect()
	if _, err := g.create(t.Context(), "c1"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "10-a") {
		t.Errorf("required plugin of the validator missing: %v", err)
	}
	block := make(chan struct{})
	var hang atomic.Bool
	h.mustStart("10", "a", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if hang.Load() {
			<-block
		}
		return env("K", "forbidden"), nil, nil
	}}, stub.WithFailurePolicy(&nri.FailurePolicy{KeepConnected: true}))
	g.await(t, "10-a")
	if _, err := g.create(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	// Asked is not answered.
	hang.Store(true)
	if _, err := g.create(t.Context(), "c3"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("required plugin timed out: %v, want FailedPrecondition", err)
	}
	hang.Store(false)
	close(block)

	v := &validatorPlugin{}
	s, err := stub.New(v, stub.WithPluginName("v"), stub.WithPluginIdx("00"), stub.WithLogger(silent{}),
		stub.WithSocketPath(h.cfg.NRI.Socket.Path), stub.WithOnClose(func() {}))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	g.await(t, "00-v", "10-a")
	if _, err := g.create(t.Context(), "c4"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "K is not allowed") {
		t.Errorf("validating plugin: %v", err)
	}
}

type validatorPlugin struct{}

func (*validatorPlugin) ValidateContainerAdjustment(_ context.Context, req *nri.ValidateContainerAdjustmentRequest) error {
	if owner, ok := req.GetOwners().EnvOwner(req.GetContainer().GetId(), "K"); ok && owner == "10-a" {
		return errors.New("K is not allowed")
	}
	return nil
}

func TestUpdateContainer(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	p := &recorder{}
	h.mustStart("10", "p", p)
	g.await(t, "10-p")
	update := func() ([]*nri.ContainerUpdate, error) {
		resp, err := g.UpdateContainer(t.Context(), &nriv1.UpdateContainerRequest{
			Generation: g.generation.Load(),
			Request: &nri.UpdateContainerRequest{
				Pod: pod("p1"), Container: container("c1"),
				LinuxResources: &nri.LinuxResources{Pids: &nri.LinuxPids{Limit: 5}},
			},
		})
		return resp.GetResponse().GetUpdate(), err
	}
	if up, err := update(); err != nil || len(up) != 0 {
		t.Errorf("untouched: %v, %v", up, err)
	}
	p.onUpdate = func(_ context.Context, c *nri.Container, r *nri.LinuxResources) ([]*nri.ContainerUpdate, error) {
		u := &nri.ContainerUpdate{ContainerId: c.GetId()}
		u.SetLinuxPidLimits(r.GetPids().GetLimit() + 1)
		return []*nri.ContainerUpdate{u}, nil
	}
	up, err := update()
	if err != nil || len(up) != 1 || up[0].GetLinux().GetResources().GetPids().GetLimit() != 6 {
		t.Errorf("changed by the plugin: %v, %v", up, err)
	}
}
