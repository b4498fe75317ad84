package backend_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// holds counts how often calls were held back.
type holds struct{ n atomic.Int32 }

func (h *holds) Held(time.Duration) { h.n.Add(1) }

// executor notes what plugins want.
type executor struct {
	failed []*nri.ContainerUpdate
	err    error
}

func (e *executor) ApplyUpdates(_ context.Context, _ []*nri.ContainerUpdate, _ []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	return e.failed, e.err
}

type bench struct {
	*backend.Hub
	stand    *backendtest.Hub
	journal  *backendtest.Journal
	sandboxd *backendtest.Sandboxd
	executor *executor
	holds    *holds
}

func newBench(t *testing.T, cfg backend.HubConfig, state *nriv1.HubState) *bench {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	journal := &backendtest.Journal{}
	b := &bench{
		stand:    backendtest.NewHub(journal, state),
		journal:  journal,
		sandboxd: backendtest.NewSandboxd(journal),
		executor: &executor{},
		holds:    &holds{},
	}
	node := backend.NewSandboxd(testkit.GRPC(t, tel, b.sandboxd.Registrations()...), testkit.Patience).Node
	b.Hub = backend.NewHub(testkit.GRPC(t, tel, b.stand.Registrations()...), cfg, b.holds, slog.New(slog.DiscardHandler))
	background(t, func(ctx context.Context) { _ = b.Run(ctx, node, b.executor) })
	return b
}

// background runs f until the end of the test.
func background(t *testing.T, f func(ctx context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	var task sync.WaitGroup
	task.Go(func() { f(ctx) })
	t.Cleanup(func() {
		cancel()
		task.Wait()
	})
}

func ready(generation uint64) *nriv1.HubState {
	return &nriv1.HubState{Generation: generation, SubscribedEvents: backendtest.AllEvents(), Ready: true}
}

func (b *bench) run(ctx context.Context) error {
	return b.Notify(ctx, nri.Event_RUN_POD_SANDBOX, &nri.PodSandbox{Id: "p"}, nil)
}

func TestHubCallsOnlyWhatIsSubscribed(t *testing.T) {
	var mask nri.EventMask
	mask.Set(nri.Event_STOP_CONTAINER)
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, &nriv1.HubState{SubscribedEvents: int32(mask), Ready: true})
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.StopContainer(t.Context(), &nri.StopContainerRequest{}); err != nil {
		t.Fatal(err)
	}
	// The hub makes the missing stop out of a removal.
	if err := b.Notify(t.Context(), nri.Event_REMOVE_CONTAINER, nil, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"hub.StopContainer", "hub.RemoveContainer"}, b.journal.Take()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestHubHoldsCallsUntilPluginsAreBack(t *testing.T) {
	waiting := ready(1)
	waiting.Ready = false
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience, Require: true}, waiting)
	var call sync.WaitGroup
	call.Go(func() {
		if err := b.run(t.Context()); err != nil {
			t.Errorf("held call: %v", err)
		}
	})
	time.Sleep(50 * time.Millisecond)
	if calls := b.journal.Take(); len(calls) != 0 {
		t.Errorf("calls before the plugins were back: %v", calls)
	}
	b.stand.Announce(ready(1))
	call.Wait()
	if b.holds.n.Load() != 1 {
		t.Errorf("%d calls held, want 1", b.holds.n.Load())
	}
}

func TestHubOfAnotherGenerationIsCalledAgain(t *testing.T) {
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, ready(1))
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.stand.Restart(ready(2))
	if err := b.run(t.Context()); err != nil {
		t.Errorf("call after a restart: %v", err)
	}
}

func TestHubAnswersUnavailableWithoutBeingAway(t *testing.T) {
	b := newBench(t, backend.HubConfig{Hold: 200 * time.Millisecond}, ready(1))
	testkit.Eventually(t, testkit.Patience, func() error { return b.Ready(t.Context()) })
	b.stand.Failures.Fail("RunPodSandbox", fmt.Errorf("plugin says no: %w", errdefs.ErrUnavailable))
	if err := b.run(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("call: %v, want the hub's answer and not the policy's", err)
	}
}

func TestAbsentHub(t *testing.T) {
	for _, require := range []bool{false, true} {
		t.Run(fmt.Sprintf("require=%v", require), func(t *testing.T) {
			const hold = 2 * time.Second
			hub := backend.NewHub(absent(t), backend.HubConfig{Hold: hold, Require: require}, &holds{}, slog.New(slog.DiscardHandler))
			background(t, func(ctx context.Context) { _ = hub.Run(ctx, nil, &executor{}) })

			start := time.Now()
			for range 3 {
				err := hub.Notify(t.Context(), nri.Event_RUN_POD_SANDBOX, nil, nil)
				if errdefs.IsUnavailable(err) != require {
					t.Errorf("call: %v, with require %v", err, require)
				}
			}
			if took := time.Since(start); took < hold/2 || took > 5*hold/2 {
				t.Errorf("three calls took %s; only the first should be held, for %s", took, hold)
			}
			if err := hub.Ready(t.Context()); err == nil {
				t.Error("a hub that is not there is ready")
			}
			hub.SetPolicy(hold, !require)
			err := hub.Notify(t.Context(), nri.Event_RUN_POD_SANDBOX, nil, nil)
			if errdefs.IsUnavailable(err) == require || hub.Required() == require {
				t.Errorf("call: %v, with the policy changed to require %v", err, !require)
			}
		})
	}
}

// While the hub is away, a pod that requires plugins is not made without them, whatever
// the policy for the others is.
func TestGuardedPodsWaitForAnAbsentHub(t *testing.T) {
	const annotation = "required-plugins.noderesource.dev/pod"
	pods := map[string]*nri.PodSandbox{
		"prod":      {Namespace: "prod"},
		"system":    {Namespace: "kube-system"},
		"labelled":  {Namespace: "dev", Labels: map[string]string{"rdma": "1"}},
		"dev":       {Namespace: "dev"},
		"annotated": {Namespace: "dev", Annotations: map[string]string{annotation: "[x]"}},
	}
	check := func(t *testing.T, hub *backend.Hub, refused ...string) {
		t.Helper()
		for name, pod := range pods {
			for call, err := range map[string]error{
				"RunPodSandbox": hub.Notify(t.Context(), nri.Event_RUN_POD_SANDBOX, pod, nil),
				"CreateContainer": func() error {
					_, err := hub.CreateContainer(t.Context(), &nri.CreateContainerRequest{Pod: pod})
					return err
				}(),
			} {
				if errdefs.IsUnavailable(err) != slices.Contains(refused, name) {
					t.Errorf("%s of pod %s: %v", call, name, err)
				}
			}
			if err := hub.Notify(t.Context(), nri.Event_REMOVE_POD_SANDBOX, pod, nil); err != nil {
				t.Errorf("removal of pod %s: %v", name, err)
			}
		}
	}
	t.Run("never there", func(t *testing.T) {
		hub := backend.NewHub(absent(t), backend.HubConfig{}, &holds{}, slog.New(slog.DiscardHandler))
		check(t, hub, "annotated")
	})
	for _, ignores := range []bool{false, true} {
		t.Run(fmt.Sprintf("gone, ignores annotations %v", ignores), func(t *testing.T) {
			state := ready(1)
			state.IgnoresAnnotations = ignores
			state.Guards = []*nriv1.Guard{
				{NotNamespaces: []string{"dev"}},
				{Labels: map[string]string{"rdma": "*"}},
				{Namespaces: []string{"kube-*"}, Exempt: true},
			}
			tel, _ := testkit.Telemetry(t)
			conn := testkit.GRPC(t, tel, backendtest.NewHub(&backendtest.Journal{}, state).Registrations()...)
			hub := backend.NewHub(conn, backend.HubConfig{}, &holds{}, slog.New(slog.DiscardHandler))
			ctx, cancel := context.WithCancel(t.Context())
			var task sync.WaitGroup
			task.Go(func() { _ = hub.Run(ctx, nil, &executor{}) })
			testkit.Eventually(t, testkit.Patience, func() error { return hub.Ready(t.Context()) })
			cancel() // the stream ends, as it does when the hub goes away
			task.Wait()
			refused := []string{"prod", "labelled"}
			if !ignores {
				refused = append(refused, "annotated")
			}
			check(t, hub, refused...)
		})
	}
}

// A pod's own annotation brings it to the hub although no plugin listens.
func TestAnnotatedPodIsAskedAbout(t *testing.T) {
	state := ready(1)
	state.SubscribedEvents = 0
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, state)
	for _, pod := range []*nri.PodSandbox{
		{Id: "plain"},
		{Id: "named", Annotations: map[string]string{"required-plugins.noderesource.dev/container.x": "[a]"}},
	} {
		if err := b.Notify(t.Context(), nri.Event_RUN_POD_SANDBOX, pod, nil); err != nil {
			t.Fatal(err)
		}
	}
	if calls := b.journal.Take(); len(calls) != 1 {
		t.Errorf("calls are %v, want one", calls)
	}
}

func TestHubGetsTheInventory(t *testing.T) {
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, ready(1))
	b.sandboxd.AddContainer("sb", "c1")
	b.sandboxd.AddContainer("sb", "c2")
	b.stand.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_InventoryRequest{
		InventoryRequest: &nriv1.InventoryRequest{RequestId: 9},
	}})
	var got []string
	for more := true; more; {
		m, err := b.stand.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		chunk := m.GetInventory()
		if chunk.GetRequestId() != 9 || chunk.GetError() != "" {
			t.Fatalf("chunk %v, want an answer to 9 without error", chunk)
		}
		for _, p := range chunk.GetPods() {
			got = append(got, "pod "+p.GetId())
		}
		for _, c := range chunk.GetContainers() {
			got = append(got, "container "+c.GetId())
		}
		more = chunk.GetMore()
	}
	if diff := cmp.Diff([]string{"pod sb", "container c1", "container c2"}, got); diff != "" {
		t.Errorf("inventory (-want +got):\n%s", diff)
	}
}

func TestHubIsToldThatThereIsNoInventory(t *testing.T) {
	b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, ready(1))
	b.sandboxd.Failures.Fail("ListInventory", errdefs.ErrUnavailable)
	b.stand.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_InventoryRequest{
		InventoryRequest: &nriv1.InventoryRequest{RequestId: 1},
	}})
	m, err := b.stand.Receive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if c := m.GetInventory(); c.GetError() == "" || c.GetMore() {
		t.Errorf("chunk %v, want a last one with an error", c)
	}
}

func TestHubUpdates(t *testing.T) {
	wanted := []*nri.ContainerUpdate{{ContainerId: "a"}, {ContainerId: "b"}}
	for _, tt := range []struct {
		name   string
		failed []*nri.ContainerUpdate
		err    error
		want   int
	}{
		{"done", nil, nil, 0},
		{"one failed", wanted[:1], nil, 1},
		{"not begun", nil, errors.New("stopping"), 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, backend.HubConfig{Hold: testkit.Patience}, ready(1))
			b.executor.failed, b.executor.err = tt.failed, tt.err
			b.stand.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_UpdateRequest{
				UpdateRequest: &nriv1.UpdateRequest{RequestId: 4, Plugin: "p", Updates: wanted},
			}})
			m, err := b.stand.Receive(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if r := m.GetUpdateResult(); r.GetRequestId() != 4 || len(r.GetFailed()) != tt.want {
				t.Errorf("result %v, want %d failures for request 4", r, tt.want)
			}
		})
	}
}

func TestSessionIsReopenedWithItsToken(t *testing.T) {
	tel, _ := testkit.Telemetry(t)
	stand := backendtest.NewSandboxd(&backendtest.Journal{})
	conn := testkit.GRPC(t, tel, stand.Registrations()...)
	node := backend.NewSandboxd(conn, testkit.Patience).Node
	session := backend.NewSession(node, testkit.Patience, slog.New(slog.DiscardHandler))
	background(t, func(ctx context.Context) { _ = session.Run(ctx) })

	token, err := session.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for round := 2; round <= 3; round++ {
		stand.HangUp()
		testkit.Eventually(t, testkit.Patience, func() error {
			if n := len(stand.Sessions()); n < round {
				return fmt.Errorf("%d sessions, want %d", n, round)
			}
			return session.Ready(t.Context())
		})
	}
	for _, s := range stand.Sessions() {
		if s != token {
			t.Errorf("session opened with %q, want %q each time", s, token)
		}
	}
}

func TestSessionThatIsAway(t *testing.T) {
	node := backend.NewSandboxd(absent(t), 100*time.Millisecond).Node
	session := backend.NewSession(node, 100*time.Millisecond, slog.New(slog.DiscardHandler))
	background(t, func(ctx context.Context) { _ = session.Run(ctx) })
	if _, err := session.Token(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("Token: %v, want Unavailable", err)
	}
	start := time.Now()
	if _, err := node.GetStatus(t.Context(), &nodev1.GetStatusRequest{}); !errdefs.IsUnavailable(err) {
		t.Errorf("GetStatus: %v, want Unavailable", err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("GetStatus took %s for a sandboxd that is not there", took)
	}
}

func absent(t *testing.T) *grpc.ClientConn {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	conn, err := rpc.Dial(rpc.DefaultClientConfig(filepath.Join(t.TempDir(), "none.sock")), tel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
