package app_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// createIn is create for a pod of one's own.
func (g *fakeGateway) createIn(ctx context.Context, p *nri.PodSandbox, id string) (*nri.CreateContainerResponse, error) {
	c := container(id)
	c.PodSandboxId = p.GetId()
	resp, err := g.CreateContainer(ctx, &nriv1.CreateContainerRequest{
		Generation: g.generation.Load(), Request: &nri.CreateContainerRequest{Pod: p, Container: c},
	})
	return resp.GetResponse(), err
}

func podIn(namespace, id string, labels map[string]string) *nri.PodSandbox {
	return &nri.PodSandbox{Id: id, Name: "pod-" + id, Namespace: namespace, Labels: labels}
}

type createHook func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error)

// answers makes a hook of an adjustment.
func answers(adjust func() *nri.ContainerAdjustment, updates ...*nri.ContainerUpdate) createHook {
	return func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		return adjust(), updates, nil
	}
}

// A plugin that hangs costs the first request its time limit and the others nothing, gets
// later, in order, what it missed, and takes part again.
func TestHungPluginIsDegradedAndComesBack(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	const limit = 3 * time.Second
	cfg.Plugins = []hubconfig.Plugin{hanging("hung", limit)}
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	p := &recorder{}
	p.onCreate = func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		<-release
		a := env("K", "v")
		a.SetLinuxCPUShares(9)
		return a, nil, nil
	}
	h.mustStart("10", "hung", p)
	good := h.mustStart("20", "good", &recorder{})
	g.await(t, "10-hung", "20-good")
	timed := func(id string) time.Duration {
		begin := time.Now()
		if _, err := g.create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		return time.Since(begin)
	}
	if took := timed("c0"); took < limit*9/10 {
		t.Errorf("the first request took %v, less than the time limit", took)
	}
	for i := range 5 {
		// That it answers other events proves nothing.
		if err := g.run(t.Context(), fmt.Sprint("p", i)); err != nil {
			t.Error(err)
		}
		time.Sleep(150 * time.Millisecond)
		if took := timed(fmt.Sprintf("c%d", i+1)); took >= limit {
			t.Errorf("request %d waited %v for a degraded plugin", i+1, took)
		}
	}
	if got := g.state().GetDegraded(); !slices.Equal(got, []string{"10-hung"}) {
		t.Errorf("the gateway is told of %v", got)
	}
	// One that is gone again before the plugin has heard of it is no news.
	if _, err := g.stopContainer(t.Context(), "c5"); err != nil {
		t.Error(err)
	}
	if err := g.removeContainer(t.Context(), "c5"); err != nil {
		t.Error(err)
	}
	close(release)
	g.await(t, "10-hung", "20-good")
	var created []string
	for _, e := range p.seen() {
		if strings.HasPrefix(e, "create ") || strings.HasPrefix(e, "stop ") {
			created = append(created, e)
		}
	}
	// c1 may have been tried while the plugin still hung.
	if want := []string{"create c0", "create c1", "create c2", "create c3", "create c4"}; !slices.Equal(created, want) {
		t.Errorf("the plugin was told %v, want %v", created, want)
	}
	if n := len(good.seen()); n != 13 {
		t.Errorf("the other plugin was told %v", good.seen())
	}
	// What can still be done of late answers is done.
	testkit.Eventually(t, patience, func() error {
		updated := map[string]bool{}
		for _, u := range g.wanted() {
			for _, c := range u.GetUpdates() {
				updated[c.GetContainerId()] = true
			}
		}
		if len(updated) != 5 {
			return fmt.Errorf("updated are %v", updated)
		}
		return nil
	})
	if resp, err := g.create(t.Context(), "c9"); err != nil || len(resp.GetAdjust().GetEnv()) != 1 {
		t.Errorf("after it came back: %v, %v", resp, err)
	}
}

// A plugin is degraded by so many timeouts in a row as the configuration says, and an answer
// in between begins the count anew.
func TestTimeoutsInARowDegrade(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Degraded.After = 2
	cfg.Degraded.MinPause = config.Duration(time.Minute)
	cfg.Degraded.MaxPause = config.Duration(time.Minute)
	cfg.Plugins = []hubconfig.Plugin{hanging("slow", 300*time.Millisecond)}
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	defer close(release)
	h.mustStart("10", "slow", &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if strings.HasPrefix(c.GetId(), "hangs") {
			<-release
		}
		return nil, nil, nil
	}})
	g.await(t, "10-slow")
	for i, tt := range []struct{ id, state string }{
		{"hangs1", "active"}, {"answers", "active"}, {"hangs2", "active"}, {"hangs3", "degraded"},
	} {
		if _, err := g.create(t.Context(), tt.id); err != nil {
			t.Fatal(err)
		}
		if p, _ := g.plugin(t.Context(), "10-slow"); p.GetState() != tt.state {
			t.Errorf("after request %d, %s, the plugin is %s, want %s", i, tt.id, p.GetState(), tt.state)
		}
	}
}

// A degraded plugin whose policy is to fail requests fails them at once.
func TestDegradedPluginFailsFastWherePolicySaysSo(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	const limit = 3 * time.Second
	cfg.Plugins = []hubconfig.Plugin{hanging("strict", limit)}
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	defer close(release)
	h.mustStart("10", "strict", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		<-release
		return nil, nil, nil
	}}, withPolicy(true, true))
	g.await(t, "10-strict")
	if _, err := g.create(t.Context(), "c1"); err == nil {
		t.Fatal("the first request went on")
	}
	begin := time.Now()
	_, err := g.create(t.Context(), "c2")
	if err == nil || !strings.Contains(err.Error(), "10-strict") || time.Since(begin) >= limit {
		t.Errorf("second request: %v after %v", err, time.Since(begin))
	}
	if _, err := g.stopContainer(t.Context(), "c1"); err != nil {
		t.Errorf("a stop fails: %v", err)
	}
}

func TestEventsOfChosenPodsOnly(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "choosy", Events: hubconfig.Pods{Namespaces: []string{"team-*"}, Labels: map[string]string{"app": "db"}}}}
	h := startHub(t, cfg)
	db := map[string]string{"app": "db"}
	in, out := podIn("team-a", "in", db), podIn("team-a", "out", nil)
	inside, outside := container("inside"), container("outside")
	inside.PodSandboxId, outside.PodSandboxId = "in", "out"
	g := h.connect(func(g *fakeGateway) {
		g.pods = []*nri.PodSandbox{in, out}
		g.containers = []*nri.Container{inside, outside}
	})
	p := h.mustStart("10", "choosy", &recorder{})
	g.await(t, "10-choosy")
	for _, tt := range []*nri.PodSandbox{in, out, podIn("other", "far", db)} {
		if _, err := g.createIn(t.Context(), tt, "c-"+tt.GetId()); err != nil {
			t.Fatal(err)
		}
		_, err := g.RemoveContainer(t.Context(), &nriv1.RemoveContainerRequest{Generation: g.generation.Load(), Request: &nri.RemoveContainerRequest{
			Pod: tt, Container: container("c-" + tt.GetId()),
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"sync pod in", "sync inside", "create c-in", "stop c-in", "remove c-in"}
	if got := p.seen(); !slices.Equal(got, want) {
		t.Errorf("the plugin was told %v, want %v", got, want)
	}
}

// Time limits are those of the rule, for the request if it says so.
func TestTimeLimitsOfRules(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{
		Name: "10-patient", Timeout: config.Duration(300 * time.Millisecond),
		Timeouts: map[string]config.Duration{"CreateContainer": config.Duration(20 * time.Second), "Synchronize": config.Duration(20 * time.Second)},
	}}
	cfg.Timeouts.Synchronize = config.Duration(100 * time.Millisecond)
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	defer close(release)
	h.mustStart("10", "patient", &recorder{
		onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
			time.Sleep(300 * time.Millisecond)
			return nil, nil
		},
		onRun: func(context.Context, *nri.PodSandbox) error { <-release; return nil },
		onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
			time.Sleep(600 * time.Millisecond)
			return env("A", "b"), nil, nil
		},
	})
	g.await(t, "10-patient")
	if resp, err := g.create(t.Context(), "c1"); err != nil || len(resp.GetAdjust().GetEnv()) != 1 {
		t.Errorf("within the request's own limit: %v, %v", resp, err)
	}
	begin := time.Now()
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < 280*time.Millisecond || took >= cfg.Timeouts.Request.Std() {
		t.Errorf("RunPodSandbox took %v, want the plugin's limit of 300ms", took)
	}
}

// What a caller has left is divided: a slow plugin does not eat the time of the next, and
// is not to blame for having had less than its limit.
func TestCallersTimeIsDivided(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	release := make(chan struct{})
	defer close(release)
	h.mustStart("10", "slow", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		<-release
		return nil, nil, nil
	}})
	var told atomic.Int64
	h.mustStart("20", "next", &recorder{onCreate: func(ctx context.Context, _ *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if d, ok := ctx.Deadline(); ok {
			told.Store(int64(time.Until(d)))
		}
		return env("NEXT", "1"), nil, nil
	}})
	g.await(t, "10-slow", "20-next")
	const left = 6 * time.Second
	resp, err := g.CreateContainer(t.Context(), &nriv1.CreateContainerRequest{
		Generation: g.generation.Load(), TimeLeftMs: left.Milliseconds(),
		Request: &nri.CreateContainerRequest{Pod: pod("p1"), Container: container("c1")},
	})
	if err != nil || len(resp.GetResponse().GetAdjust().GetEnv()) != 1 {
		t.Errorf("the next plugin had no part: %v, %v", resp, err)
	}
	if d := time.Duration(told.Load()); d <= 0 || d > left*11/20 {
		t.Errorf("the plugin was told %v, want about half of %v", d, left)
	}
	g.await(t, "10-slow", "20-next")
}

func TestPluginThatWorksInParallel(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "wide", Parallel: 4}}
	h := startHub(t, cfg)
	g := h.connect()
	var flying atomic.Int32
	full := make(chan struct{})
	fill := sync.OnceFunc(func() { close(full) })
	h.mustStart("10", "wide", &recorder{onRun: func(ctx context.Context, _ *nri.PodSandbox) error {
		n := flying.Add(1)
		defer flying.Add(-1)
		if n == 4 {
			fill()
		}
		if n > 4 {
			t.Errorf("%d requests are in flight at once, want 4", n)
		}
		select {
		case <-full: // the first ones wait for their fourth
			time.Sleep(20 * time.Millisecond)
		case <-ctx.Done():
			t.Error("there are never 4 requests in flight at once")
		}
		return nil
	}})
	g.await(t, "10-wide")
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if err := g.run(t.Context(), fmt.Sprint("p", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestRightsToChange(t *testing.T) {
	t.Parallel()
	shares := &nri.ContainerUpdate{ContainerId: "far"}
	shares.SetLinuxCPUShares(5)
	both := answers(func() *nri.ContainerAdjustment {
		a := env("OK", "1")
		a.AddMount(&nri.Mount{Destination: "/x", Source: "/y", Type: "bind"})
		return a
	})
	onlyEnv := &[]string{"env"}
	tests := map[string]struct {
		rights hubconfig.Rights
		hook   createHook
		fails  string
		env    int
		update int
	}{
		"field that is not allowed":  {rights: hubconfig.Rights{Fields: onlyEnv}, hook: both, fails: "mounts"},
		"taken out instead":          {rights: hubconfig.Rights{Fields: onlyEnv, Violation: hubconfig.Strip}, hook: both, env: 1},
		"everything is allowed":      {hook: both, env: 1},
		"nothing is allowed":         {rights: hubconfig.Rights{Fields: &[]string{}}, hook: both, fails: "env"},
		"another namespace":          {rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"else"}}}, hook: both, fails: "namespace \"default\""},
		"its namespace":              {rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"default"}}}, hook: both, env: 1},
		"update of one far away":     {rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"default"}}}, hook: answers(func() *nri.ContainerAdjustment { return nil }, shares), fails: "far"},
		"update is stripped":         {rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"default"}}, Violation: hubconfig.Strip}, hook: answers(func() *nri.ContainerAdjustment { return env("A", "1") }, shares), env: 1},
		"update of resources is not": {rights: hubconfig.Rights{Fields: onlyEnv}, hook: answers(func() *nri.ContainerAdjustment { return nil }, shares), fails: "linux.resources.cpu.shares"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t)
			cfg.Plugins = []hubconfig.Plugin{{Name: "p", Rights: tt.rights}}
			h := startHub(t, cfg)
			far := container("far")
			far.PodSandboxId = "elsewhere"
			g := h.connect(func(g *fakeGateway) {
				g.pods = []*nri.PodSandbox{podIn("prod", "elsewhere", nil)}
				g.containers = []*nri.Container{far}
			})
			h.mustStart("10", "p", &recorder{onCreate: tt.hook})
			g.await(t, "10-p")
			resp, err := g.create(t.Context(), "c1")
			if tt.fails != "" {
				if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), tt.fails) || !strings.Contains(err.Error(), "10-p") {
					t.Errorf("error is %v, want PermissionDenied that names %q", err, tt.fails)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if n := len(resp.GetAdjust().GetEnv()); n != tt.env {
				t.Errorf("%d variables in %v, want %d", n, resp, tt.env)
			}
			for _, u := range resp.GetUpdate() {
				if u.GetLinux().GetResources().GetCpu() != nil {
					t.Errorf("update passed: %v", u)
				}
			}
			g.await(t, "10-p")
		})
	}
}

// Rights hold for what a plugin wants by itself, too.
func TestRightsOfUnsolicitedUpdates(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{
		{Name: "p", Rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"mine"}}}},
		{Name: "watcher", ObserveOnly: true},
	}
	h := startHub(t, cfg)
	mine, theirs := container("mine"), container("theirs")
	mine.PodSandboxId, theirs.PodSandboxId = "pm", "pt"
	g := h.connect(func(g *fakeGateway) {
		g.pods = []*nri.PodSandbox{podIn("mine", "pm", nil), podIn("theirs", "pt", nil)}
		g.containers = []*nri.Container{mine, theirs}
	})
	p := h.mustStart("10", "p", &recorder{})
	w := h.mustStart("20", "watcher", &recorder{})
	g.await(t, "10-p", "20-watcher")
	update := func(id string) *nri.ContainerUpdate {
		u := &nri.ContainerUpdate{ContainerId: id}
		u.SetLinuxCPUShares(3)
		return u
	}
	failed, err := p.stub.UpdateContainers([]*nri.ContainerUpdate{update("mine"), update("theirs"), update("unknown")})
	if err != nil || len(failed) != 2 || failed[0].GetContainerId() != "theirs" || failed[1].GetContainerId() != "unknown" {
		t.Errorf("failed are %v, %v; want those that are not its own", failed, err)
	}
	if got := g.wanted(); len(got) != 1 || len(got[0].GetUpdates()) != 1 || got[0].GetUpdates()[0].GetContainerId() != "mine" {
		t.Errorf("the gateway was asked for %v", got)
	}
	if failed, err := w.stub.UpdateContainers([]*nri.ContainerUpdate{update("mine")}); err != nil || len(failed) != 1 {
		t.Errorf("plugin that only observes: %v, %v", failed, err)
	}
	if len(g.wanted()) != 1 {
		t.Error("the wish of a plugin that only observes was carried out")
	}
}

func TestWhoMayBeAPlugin(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	uid := uint32(os.Getuid())
	cfg := testConfig(t)
	cfg.NRI.ListedOnly = true
	cfg.Plugins = []hubconfig.Plugin{
		{Name: "right", Rights: hubconfig.Rights{UIDs: []uint32{uid}, GIDs: []uint32{uint32(os.Getgid())}, Executables: []string{self}}},
		{Name: "user", Rights: hubconfig.Rights{UIDs: []uint32{uid + 1}}},
		{Name: "group", Rights: hubconfig.Rights{GIDs: []uint32{uid + 7}}},
		{Name: "program", Rights: hubconfig.Rights{Executables: []string{"/usr/bin/other"}}},
	}
	h := startHub(t, cfg)
	g := h.connect()
	h.mustStart("10", "right", &recorder{})
	for name, want := range map[string]string{
		"user": "user", "group": "group", "program": "program", "stranger": "not listed",
	} {
		err := h.start("10", name, &recorder{})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want a refusal that says %q", name, err, want)
		}
	}
	g.await(t, "10-right")
	p, _ := g.plugin(t.Context(), "10-right")
	if p.GetUid() != uid || p.GetExecutable() != self || p.GetKind() != "external" {
		t.Errorf("told is %v", p)
	}
}

// A plugin that only observes is asked and changes nothing, whatever it answers.
func TestObserveOnly(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "*-watcher", ObserveOnly: true}}
	h := startHub(t, cfg)
	g := h.connect()
	var refuse atomic.Bool
	var seen atomic.Value
	h.mustStart("10", "watcher", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if refuse.Load() {
			return nil, nil, errNo
		}
		return env("SAME", "watcher"), nil, nil
	}})
	h.mustStart("20", "real", &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		seen.Store(c.GetEnv())
		return env("SAME", "real"), nil, nil
	}})
	g.await(t, "10-watcher", "20-real")
	resp, err := g.create(t.Context(), "c1")
	if err != nil || len(resp.GetAdjust().GetEnv()) != 1 || resp.GetAdjust().GetEnv()[0].GetValue() != "real" {
		t.Errorf("answer is %v, %v; want that of the other plugin, without a conflict", resp, err)
	}
	if got := seen.Load().([]string); len(got) != 0 {
		t.Errorf("the next plugin saw %v", got)
	}
	refuse.Store(true)
	if _, err := g.create(t.Context(), "c2"); err != nil {
		t.Errorf("its refusal counts: %v", err)
	}
}

func TestRequiredByNamespaceLabelAndAnnotation(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Settle = config.Duration(100 * time.Millisecond)
	cfg.Required.Rules = []hubconfig.Demand{
		{Plugins: []string{"guard"}, Pods: hubconfig.Pods{Namespaces: []string{"prod"}}},
		{Plugins: []string{"net"}, Pods: hubconfig.Pods{Labels: map[string]string{"rdma": "*"}}},
	}
	cfg.Required.Exempt = []hubconfig.Demand{
		{Plugins: []string{"guard"}, Pods: hubconfig.Pods{Namespaces: []string{"prod"}, Labels: map[string]string{"app": "guard"}}},
	}
	h := startHub(t, cfg)
	g := h.connect()
	if len(g.state().GetGuards()) != 2 || !slices.Equal(g.state().GetMissing(), []string{"guard", "net"}) {
		t.Errorf("state is %v", g.state())
	}
	annotated := podIn("dev", "p5", nil)
	annotated.Annotations = map[string]string{"required-plugins.noderesource.dev/container.ctr-c5": `["extra"]`}
	for id, tt := range map[string]struct {
		pod  *nri.PodSandbox
		want string
	}{
		"c1": {podIn("prod", "p1", nil), "guard"},
		"c2": {podIn("dev", "p2", nil), ""},
		"c3": {podIn("dev", "p3", map[string]string{"rdma": "yes"}), "net"},
		"c4": {podIn("prod", "p4", map[string]string{"app": "guard"}), ""},
		"c5": {annotated, "extra"},
		"c6": {annotated, ""},
	} {
		_, err := g.createIn(t.Context(), tt.pod, id)
		if tt.want == "" && err != nil || tt.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want it to name %q", id, err, tt.want)
		}
	}
}

// A required plugin that is away for a moment is waited for.
func TestRequiredPluginIsWaitedFor(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.RequiredPlugins = []string{"guard"}
	cfg.Required.Wait = config.Duration(20 * time.Second)
	h := startHub(t, cfg)
	g := h.connect()
	done := make(chan error, 1)
	go func() { done <- g.run(t.Context(), "p1") }()
	select {
	case err := <-done:
		t.Fatal("it did not wait:", err)
	case <-time.After(300 * time.Millisecond):
	}
	p := h.mustStart("10", "guard", &recorder{})
	if err := <-done; err != nil {
		t.Error(err)
	}
	if p.count("run p1") != 1 {
		t.Errorf("the plugin was told %v", p.seen())
	}
}

// A required plugin that hangs fails what needs it, at once, and what does not need it
// goes on; it is tried again when somebody needs it.
func TestRequiredPluginThatHangs(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{hanging("guard", time.Second)}
	cfg.Required.Wait = config.Duration(20 * time.Millisecond)
	cfg.Degraded.MinPause = config.Duration(5 * time.Second)
	cfg.Required.Rules = []hubconfig.Demand{{Plugins: []string{"guard"}, Pods: hubconfig.Pods{Namespaces: []string{"prod"}}}}
	h := startHub(t, cfg)
	g := h.connect()
	var hang atomic.Bool
	hang.Store(true)
	release := make(chan struct{})
	defer close(release)
	p := h.mustStart("10", "guard", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if hang.Load() {
			<-release
		}
		return nil, nil, nil
	}})
	g.await(t, "10-guard")
	prod := podIn("prod", "p1", nil)
	if _, err := g.createIn(t.Context(), prod, "c1"); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("without an answer: %v", err)
	}
	// Neither of these waits for its answer.
	if _, err := g.createIn(t.Context(), prod, "c2"); !errdefs.IsFailedPrecondition(err) || p.count("create c2") != 0 {
		t.Errorf("second request: %v, want a failure at once; the plugin was told %v", err, p.seen())
	}
	if _, err := g.createIn(t.Context(), podIn("dev", "p2", nil), "c3"); err != nil || p.count("create c3") != 0 {
		t.Errorf("pod that does not need it: %v; the plugin was told %v", err, p.seen())
	}
	hang.Store(false)
	testkit.Eventually(t, patience, func() error {
		_, err := g.createIn(t.Context(), prod, "c4")
		return err
	})
}

// A dry run asks the plugins, tells what each of them wants, and leaves nothing behind.
func TestDryRun(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var refuse atomic.Bool
	other := &nri.ContainerUpdate{ContainerId: "other"}
	other.SetLinuxCPUShares(5)
	a := h.mustStart("10", "a", &recorder{onCreate: answers(func() *nri.ContainerAdjustment { return env("A", "1") }, other)})
	b := h.mustStart("20", "b", &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		if refuse.Load() {
			return nil, nil, errNo
		}
		adj := &nri.ContainerAdjustment{}
		adj.RemoveEnv("A")
		adj.AddEnv("A", "2")
		return adj, nil, nil
	}})
	g.await(t, "10-a", "20-b")
	dry := func() *nriv1.DryRunResponse {
		resp, err := g.DryRun(t.Context(), &nriv1.DryRunRequest{Pod: podIn("x", "", nil), Container: &nri.Container{Name: "c"}})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	resp := dry()
	var told []string
	for _, c := range resp.GetChanges() {
		told = append(told, fmt.Sprintf("%s %s %s %s>%s", c.GetPlugin(), c.GetField(), c.GetKey(), c.GetOldValue(), c.GetNewValue()))
	}
	want := []string{"10-a env A >1", "10-a linux.resources.cpu.shares  >5", "20-b env A 1>", "20-b env A 1>2"}
	if !slices.Equal(told, want) || resp.GetFailure() != "" || len(resp.GetResponse().GetAdjust().GetEnv()) != 1 {
		t.Errorf("dry run tells %q and %v, want %q", told, resp, want)
	}
	for name, p := range map[string]*recorder{"a": a, "b": b} {
		seen := p.seen()
		if len(seen) != 3 || !strings.HasPrefix(seen[0], "create ") || !strings.HasPrefix(seen[1], "stop ") || !strings.HasPrefix(seen[2], "remove ") {
			t.Errorf("plugin %s was told %v", name, seen)
		}
	}
	if len(g.wanted()) != 0 {
		t.Error("updates were carried out")
	}
	if st, _ := g.plugin(t.Context(), "10-a"); st.GetObjects() != 0 {
		t.Errorf("%d objects are remembered", st.GetObjects())
	}
	refuse.Store(true)
	if resp := dry(); !strings.Contains(resp.GetFailure(), "20-b") || resp.GetResponse() != nil {
		t.Errorf("refusal: %v", resp)
	}
	if _, err := g.DryRun(t.Context(), &nriv1.DryRunRequest{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("without a pod: %v", err)
	}
}

// Who needs what is told only when it has been configured.
func TestUpdateBeforeConfigureIsRefused(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var early error
	p := &recorder{}
	p.onConfigure = func(string, string, string) (mask nri.EventMask, _ error) {
		_, early = p.stub.UpdateContainers([]*nri.ContainerUpdate{{ContainerId: "c1"}})
		return 0, nil
	}
	h.mustStart("10", "p", p)
	g.await(t, "10-p")
	if early == nil || !strings.Contains(early.Error(), "configured") {
		t.Errorf("error is %v", early)
	}
	if _, err := p.stub.UpdateContainers([]*nri.ContainerUpdate{{ContainerId: "c1"}}); err != nil {
		t.Error(errors.Join(errors.New("after it was configured"), err))
	}
}
