package app_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func (g *fakeGateway) removePod(t *testing.T, id string) {
	t.Helper()
	_, err := g.RemovePodSandbox(t.Context(), &nriv1.RemovePodSandboxRequest{
		Generation: g.generation.Load(), Request: &nri.RemovePodSandboxRequest{Pod: pod(id)},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// eventsOf are the ends that a plugin was told.
func (r *recorder) ends() []string {
	return slices.DeleteFunc(r.seen(), func(e string) bool {
		return !slices.Contains([]string{"stop c1", "stop c2", "remove c1", "remove c2", "stop pod p1", "remove pod p1", "stop pod p2", "remove pod p2"}, e)
	})
}

func wantEnds(t *testing.T, p *recorder, want ...string) {
	t.Helper()
	testkit.Eventually(t, patience, func() error {
		if got := p.ends(); !slices.Equal(got, want) {
			return fmt.Errorf("ends are %v, want %v", got, want)
		}
		return nil
	})
}

// What ends while the hub is away is told to a plugin that knew it, once, by the next hub.
func TestEndsWhileTheHubIsAway(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	h := startHub(t, cfg)
	g := h.connect()
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"c1", "c2"} {
		if _, err := g.create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.stopContainer(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	wantEnds(t, p, "stop c1")
	h.stop()

	// c1 is removed and c2 has ended meanwhile; the pod is still there. The machine was
	// restarted in between: only the ledger is left.
	if err := os.Remove(filepath.Join(cfg.RunFolder, "plugins.json")); err != nil {
		t.Fatal(err)
	}
	again := startHub(t, cfg)
	g = again.connect(func(g *fakeGateway) {
		g.pods = []*nri.PodSandbox{pod("p1")}
		g.ended = []string{"c2"}
	})
	next := again.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	wantEnds(t, next, "stop c2", "remove c1")
	if err := g.removeContainer(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	g.removePod(t, "p1")
	g.removePod(t, "p1")
	wantEnds(t, next, "stop c2", "remove c1", "remove c2", "stop pod p1", "remove pod p1")
	again.stop()

	// Nothing is owed twice.
	third := startHub(t, cfg)
	g = third.connect()
	last := third.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	if err := g.run(t.Context(), "p2"); err != nil {
		t.Fatal(err)
	}
	if got := last.ends(); len(got) != 0 {
		t.Errorf("told again: %v", got)
	}
}

// A plugin that was away hears of what has ended meanwhile.
func TestEndsWhileThePluginIsAway(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	other := h.mustStart("20", "other", &recorder{})
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p", "20-other")
	for _, id := range []string{"c1", "c2"} {
		if _, err := g.create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	p.stub.Stop()
	g.await(t, "20-other")
	if err := g.removeContainer(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	g.containers = []*nri.Container{container("c2")}
	g.mu.Unlock()
	back := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p", "20-other")
	wantEnds(t, back, "stop c1", "remove c1")
	if err := g.removeContainer(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	want := []string{"stop c1", "remove c1", "stop c2", "remove c2"}
	wantEnds(t, back, want...)
	wantEnds(t, other, want...)
}

// A gateway that died between a removal and its news leaves nobody behind.
func TestRemovalThatALostGatewayDidNotTell(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Orphan = config.Duration(100 * time.Millisecond)
	h := startHub(t, cfg)
	g := h.connect()
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	_, err := g.PostCreateContainer(t.Context(), &nriv1.PostCreateContainerRequest{
		Generation: g.generation.Load(), Request: &nri.PostCreateContainerRequest{Pod: pod("p1"), Container: container("c1")},
	})
	if err != nil {
		t.Fatal(err)
	}
	g.disconnect()
	g = h.connect() // with nothing in its inventory
	want := []string{"stop c1", "remove c1", "stop pod p1", "remove pod p1"}
	wantEnds(t, p, want...)
	// What has ended and is not removed is no removal.
	if _, err := g.create(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	g.disconnect()
	g = h.connect(func(g *fakeGateway) { g.ended = []string{"c2"} })
	time.Sleep(500 * time.Millisecond)
	wantEnds(t, p, want...)
	g.removePod(t, "p1")
	wantEnds(t, p, want...)
}
