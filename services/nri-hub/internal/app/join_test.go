package app_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

// blockingSync makes the recorder's synchronisation wait for release.
func blockingSync(r *recorder) (reached <-chan struct{}, release func()) {
	in, out := make(chan struct{}), make(chan struct{})
	r.onSync = func(ctx context.Context, _ []*nri.PodSandbox, _ []*nri.Container) ([]*nri.ContainerUpdate, error) {
		close(in)
		select {
		case <-out:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return in, sync.OnceFunc(func() { close(out) })
}

func TestContainerCreatedDuringSynchronisation(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	h := startHub(t, cfg)
	g := h.connect()
	first := h.mustStart("00", "first", &recorder{})
	g.await(t, "00-first")
	late := &recorder{onCreate: func(_ context.Context, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		a := env("TOO", "late")
		a.SetLinuxCPUShares(77)
		return a, nil, nil
	}}
	reached, release := blockingSync(late)
	defer release()
	h.mustStart("10", "late", late)
	<-reached

	begin := time.Now()
	if _, err := g.create(t.Context(), "during"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took >= cfg.Timeouts.Synchronize.Std() {
		t.Errorf("creation waited %v for a plugin that joins", took)
	}
	// A container that came and went meanwhile, and one that the plugin never knew.
	if _, err := g.create(t.Context(), "short"); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"short", "unknown"} {
		if _, err := g.stopContainer(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if err := g.removeContainer(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(late.seen()); n != 0 {
		t.Errorf("the plugin got %v during its synchronisation", late.seen())
	}
	release()
	g.await(t, "00-first", "10-late")
	if _, err := g.create(t.Context(), "after"); err != nil {
		t.Fatal(err)
	}
	want := []string{"create during", "create short", "stop short", "remove short", "create after"}
	if diff := cmp.Diff(want, late.seen()); diff != "" {
		t.Errorf("events of the plugin that joined (-want +got):\n%s", diff)
	}
	if first.count("create during") != 1 {
		t.Error("the other plugin was not asked")
	}
	// What can still be done of the late adjustment is done.
	testkit.Eventually(t, patience, func() error {
		for _, u := range g.wanted() {
			for _, c := range u.GetUpdates() {
				if c.GetContainerId() == "during" && c.GetLinux().GetResources().GetCpu().GetShares().GetValue() == 77 {
					return nil
				}
			}
		}
		return errors.New("the late adjustment's resources are lost")
	})
}

func TestCreationUnderWayWhenAPluginJoins(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	entered, leave := make(chan struct{}), make(chan struct{})
	h.mustStart("00", "slow", &recorder{onCreate: func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		close(entered)
		<-leave
		return nil, nil, nil
	}})
	g.await(t, "00-slow")
	done := make(chan error, 1)
	go func() {
		_, err := g.create(context.Background(), "c1")
		done <- err
	}()
	<-entered
	// Neither in the inventory, because it is not created yet, nor in a later event.
	late := h.mustStart("10", "late", &recorder{})
	g.await(t, "00-slow", "10-late")
	close(leave)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if late.count("sync c1")+late.count("create c1") != 1 {
		t.Errorf("the plugin that joined knows of %v, want c1 once", late.seen())
	}
	if err := g.removeContainer(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	if late.count("stop c1") != 1 || late.count("remove c1") != 1 {
		t.Errorf("end of c1 is missing: %v", late.seen())
	}
}

func TestNoneLostAroundSynchronisation(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	h.mustStart("00", "first", &recorder{})
	g.await(t, "00-first")
	stop := make(chan struct{})
	var created []string
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			id := fmt.Sprintf("c%d", i)
			if _, err := g.create(context.Background(), id); err != nil {
				t.Error(err)
				return
			}
			// Committed: visible in inventories from now on.
			g.mu.Lock()
			g.containers = append(g.containers, container(id))
			g.mu.Unlock()
			created = append(created, id)
		}
	})
	var joined []*recorder
	for i := range 5 {
		r := &recorder{onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
			time.Sleep(30 * time.Millisecond)
			return nil, nil
		}}
		h.mustStart(fmt.Sprintf("1%d", i), "late", r)
		joined = append(joined, r)
		time.Sleep(20 * time.Millisecond)
	}
	g.await(t, "00-first", "10-late", "11-late", "12-late", "13-late", "14-late")
	close(stop)
	wg.Wait()
	for i, r := range joined {
		for _, id := range created {
			if n := r.count("sync "+id) + r.count("create "+id); n != 1 {
				t.Errorf("plugin %d was told %d times of %s, want once", i, n, id)
			}
		}
	}
}

func TestPluginWaitsForAGateway(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	p := h.mustStart("10", "early", &recorder{})
	time.Sleep(50 * time.Millisecond)
	if len(p.seen()) != 0 {
		t.Error("synchronised without a gateway")
	}
	g := h.connect(func(g *fakeGateway) { g.containers = []*nri.Container{container("c1")} })
	g.await(t, "10-early")
	if p.count("sync c1") != 1 {
		t.Errorf("synchronised with %v", p.seen())
	}
	// A gateway that goes away in the middle is replaced by the next one.
	g.disconnect()
	q := h.mustStart("20", "second", &recorder{})
	g2 := h.connect()
	g2.await(t, "10-early", "20-second")
	_ = q
}

func TestSplitSynchronisation(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	const n = 800 // of 20 KiB each
	huge := container("huge")
	huge.Env = []string{"BIG=" + strings.Repeat("x", 5<<20)}
	g := h.connect(func(g *fakeGateway) {
		for i := range n {
			c := container(fmt.Sprintf("c%d", i))
			c.Annotations = map[string]string{"a": strings.Repeat("x", 10<<10)}
			c.Env = []string{"A=" + strings.Repeat("x", 10<<10)}
			g.containers = append(g.containers, c)
		}
		g.containers = append(g.containers, huge)
	})
	got := make(chan int, 1)
	p := &recorder{onSync: func(_ context.Context, _ []*nri.PodSandbox, cs []*nri.Container) ([]*nri.ContainerUpdate, error) {
		got <- len(cs)
		u := &nri.ContainerUpdate{ContainerId: "c0"}
		u.SetLinuxCPUShares(1)
		return []*nri.ContainerUpdate{u}, nil
	}}
	h.mustStart("10", "p", p)
	g.await(t, "10-p")
	if have := <-got; have != n+1 {
		t.Errorf("the plugin has %d containers, want %d", have, n+1)
	}
	testkit.Eventually(t, patience, func() error {
		if n := len(g.wanted()); n != 1 {
			return fmt.Errorf("%d update requests after the synchronisation, want 1", n)
		}
		return nil
	})
	// One container that is too large for the transport is one clear error.
	c := container("big")
	c.Env = huge.Env
	_, err := g.CreateContainer(t.Context(), createRequest(g, c))
	if err == nil || !strings.Contains(err.Error(), "10-p") || !strings.Contains(err.Error(), "size") {
		t.Errorf("huge container: %v, want an error about its size", err)
	}
	if _, err := g.create(t.Context(), "small"); err != nil {
		t.Errorf("other containers suffer: %v", err)
	}
}

func TestHubRestartWithPluginThatReturns(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	h := startHub(t, cfg)
	g := h.connect()
	old := g.generation.Load()
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	g.disconnect()
	h.stop()
	if !p.shutdown.Load() {
		t.Error("the plugin was not told of the end")
	}

	h2 := startHub(t, cfg)
	g2 := h2.connect(func(g *fakeGateway) { g.containers = []*nri.Container{container("c1")} })
	if g2.generation.Load() == old {
		t.Error("the generation is the same after a restart")
	}
	if g2.state().GetReady() {
		t.Error("ready before the plugin is back")
	}
	if err := p.stub.Start(context.Background()); err != nil { // the same plugin again
		t.Fatal(err)
	}
	g2.await(t, "10-p")
	testkit.Eventually(t, patience, func() error {
		if !g2.state().GetReady() {
			return errors.New("not ready although the plugin is back")
		}
		return nil
	})
	if p.count("sync c1") != 1 {
		t.Errorf("the plugin has %v after the restart", p.seen())
	}
	g2.generation.Store(old)
	if err := g2.run(t.Context(), "p1"); !errdefs.IsUnavailable(err) {
		t.Errorf("old generation: %v", err)
	}
}

func TestCreationThatALostGatewayLeftUnfinished(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Orphan = config.Duration(100 * time.Millisecond)
	h := startHub(t, cfg)
	g := h.connect()
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	for _, id := range []string{"made", "lost"} {
		if _, err := g.create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	g.disconnect()
	g2 := h.connect(func(g *fakeGateway) { g.containers = []*nri.Container{container("made")} })
	testkit.Eventually(t, patience, func() error {
		if p.count("stop lost") != 1 || p.count("remove lost") != 1 {
			return fmt.Errorf("the plugin still knows of it: %v", p.seen())
		}
		return nil
	})
	if p.count("remove made") != 0 {
		t.Errorf("a container that exists was ended: %v", p.seen())
	}
	g2.await(t, "10-p")
}

func TestNewInstanceTakesOver(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	older := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	newer := h.mustStart("10", "p", &recorder{})
	testkit.Eventually(t, patience, func() error {
		if !older.shutdown.Load() {
			return errors.New("the older instance was not told")
		}
		return nil
	})
	g.await(t, "10-p")
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	if older.count("run p1") != 0 || newer.count("run p1") != 1 {
		t.Errorf("older got %v, newer got %v", older.seen(), newer.seen())
	}
}

func TestSynchronisationTimeLimit(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Synchronize = config.Duration(2 * time.Second)
	h := startHub(t, cfg)
	g := h.connect()
	p := &recorder{}
	reached, release := blockingSync(p)
	defer release()
	h.mustStart("10", "p", p)
	<-reached
	testkit.Eventually(t, patience, func() error {
		if p.stub.(interface{ IsStarted() bool }).IsStarted() {
			return errors.New("still connected")
		}
		return nil
	})
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
