package app_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// row is a part of the order of all plugins that one hub has, as a gateway of several hubs
// sends it.
type row struct {
	hub         *fakeGateway
	after, last string
}

// createOver takes the creation of a container of a pod along the rows, and has each hub
// conclude it.
func createOver(ctx context.Context, p *nri.PodSandbox, id string, rows ...row) (*nri.CreateContainerResponse, error) {
	var answer *nri.CreateContainerResponse
	var merge *nriv1.Merge
	for _, r := range rows {
		resp, err := r.hub.CreateContainer(ctx, &nriv1.CreateContainerRequest{
			Generation: r.hub.generation.Load(), Leg: &nriv1.Leg{After: r.after, Last: r.last, Merge: merge},
			Request: &nri.CreateContainerRequest{Pod: p, Container: container(id)},
		})
		if err != nil {
			return nil, err
		}
		answer, merge = resp.GetResponse(), resp.GetMerge()
	}
	for _, r := range rows {
		_, err := r.hub.Conclude(ctx, &nriv1.ConcludeRequest{
			Generation: r.hub.generation.Load(), Pod: p, Container: container(id), Merge: merge,
		})
		if err != nil {
			return nil, err
		}
	}
	return answer, nil
}

func envOf(resp *nri.CreateContainerResponse) []string {
	var list []string
	for _, e := range resp.GetAdjust().GetEnv() {
		list = append(list, e.GetKey()+"="+e.GetValue())
	}
	return list
}

// sets is a plugin that sets the variable of its name.
func sets(name string) *recorder {
	return &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		return env(name, "set"), nil, nil
	}}
}

// A plugin that does not answer is left out of what passes over several hubs, by its own hub,
// and is told afterwards; a pod that requires it is not made meanwhile.
func TestDegradedPluginOfOneOfSeveralHubs(t *testing.T) {
	t.Parallel()
	slow := testConfig(t)
	slow.Timeouts.Request = config.Duration(200 * time.Millisecond)
	first, second := startHub(t, testConfig(t)), startHub(t, slow)
	g, other := first.connect(), second.connect()
	first.mustStart("10", "a", sets("A"))
	first.mustStart("30", "c", sets("C"))
	release := make(chan struct{})
	b := sets("B")
	answer := b.onCreate
	b.onCreate = func(ctx context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		<-release
		return answer(ctx, c)
	}
	second.mustStart("20", "b", b)
	g.await(t, "10-a", "30-c")
	other.await(t, "20-b")
	rows := []row{{g, "", "10-a"}, {other, "", ""}, {g, "10-a", ""}}

	// The first request finds out, the next one does not wait.
	for _, id := range []string{"c1", "c2"} {
		resp, err := createOver(t.Context(), pod("p1"), id, rows...)
		if err != nil {
			t.Fatal(err)
		}
		if got := envOf(resp); !slices.Equal(got, []string{"A=set", "C=set"}) {
			t.Errorf("%s has %q of the plugins", id, got)
		}
	}
	if p, ok := other.plugin(t.Context(), "20-b"); !ok || p.GetState() != "degraded" {
		t.Fatalf("the plugin that hangs is %v", p)
	}
	guarded := pod("p1")
	guarded.Annotations = map[string]string{"required-plugins.noderesource.dev": `["b"]`}
	if _, err := createOver(t.Context(), guarded, "c3", rows...); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a plugin that is required: %v", err)
	}

	close(release)
	other.await(t, "20-b")
	testkit.Eventually(t, patience, func() error {
		if n := b.count("create c2"); n != 1 {
			return fmt.Errorf("told %d times of what it has missed", n)
		}
		return nil
	})
	for _, id := range []string{"c4", "c5"} {
		p := pod("p1")
		if id == "c5" {
			p = guarded
		}
		resp, err := createOver(t.Context(), p, id, rows...)
		if err != nil {
			t.Fatal(err)
		}
		if got := envOf(resp); !slices.Equal(got, []string{"A=set", "B=set", "C=set"}) {
			t.Errorf("%s has %q of the plugins", id, got)
		}
	}
}

// What ends while one of several hubs is away is told once to each plugin: by the hub that was
// there at once, and by the other one when it is back, also after the first was restarted too.
func TestEndsOverRestartsOfSeveralHubs(t *testing.T) {
	t.Parallel()
	var gateways [2]*fakeGateway
	var hubs [2]*hubProcess
	var plugins [2]*recorder
	names := [2]string{"p", "q"}
	configs := [2]hubconfig.Config{testConfig(t), testConfig(t)}
	up := func(i int, prepare func(*fakeGateway)) {
		hubs[i] = startHub(t, configs[i])
		gateways[i] = hubs[i].connect(prepare)
		plugins[i] = hubs[i].mustStart(fmt.Sprintf("%d0", i+1), names[i], &recorder{})
		gateways[i].await(t, fmt.Sprintf("%d0-%s", i+1, names[i]))
	}
	for i := range configs {
		up(i, func(*fakeGateway) {})
	}
	rows := func() []row { return []row{{gateways[0], "", ""}, {gateways[1], "", ""}} }
	for i := range gateways {
		_, err := gateways[i].RunPodSandbox(t.Context(), &nriv1.RunPodSandboxRequest{
			Generation: gateways[i].generation.Load(), Leg: &nriv1.Leg{}, Request: &nri.RunPodSandboxRequest{Pod: pod("p1")},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{"c1", "c2"} {
		if _, err := createOver(t.Context(), pod("p1"), id, rows()...); err != nil {
			t.Fatal(err)
		}
	}
	for _, g := range gateways {
		if _, err := g.stopContainer(t.Context(), "c1"); err != nil {
			t.Fatal(err)
		}
	}

	// The second hub is away when c1 is removed and c2 ends.
	hubs[1].stop()
	if err := gateways[0].removeContainer(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	if _, err := gateways[0].stopContainer(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, plugins[0], "stop c1", "remove c1", "stop c2")
	wantEnds(t, plugins[1], "stop c1")
	now := func(g *fakeGateway) { g.pods, g.ended = []*nri.PodSandbox{pod("p1")}, []string{"c2"} }
	up(1, now)
	wantEnds(t, plugins[1], "stop c2", "remove c1")

	// Then the first one is restarted: nobody is told anything again.
	hubs[0].stop()
	up(0, now)
	for _, g := range gateways {
		for range 2 {
			if _, err := g.stopContainer(t.Context(), "c2"); err != nil {
				t.Fatal(err)
			}
			if err := g.removeContainer(t.Context(), "c2"); err != nil {
				t.Fatal(err)
			}
			g.removePod(t, "p1")
		}
	}
	wantEnds(t, plugins[0], "remove c2", "stop pod p1", "remove pod p1")
	wantEnds(t, plugins[1], "stop c2", "remove c1", "remove c2", "stop pod p1", "remove pod p1")
}
