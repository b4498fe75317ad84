package app_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// All events of a pod's life, each sent through the gateway's API.
func life(g *fakeGateway, t *testing.T) map[nri.Event]func() error {
	t.Helper()
	gen, p, c := g.generation.Load(), pod("p1"), container("c1")
	return map[nri.Event]func() error{
		nri.Event_RUN_POD_SANDBOX: func() error { return g.run(t.Context(), "p1") },
		nri.Event_POST_UPDATE_POD_SANDBOX: func() error {
			_, err := g.PostUpdatePodSandbox(t.Context(), &nriv1.PostUpdatePodSandboxRequest{Generation: gen, Request: &nri.PostUpdatePodSandboxRequest{Pod: p}})
			return err
		},
		nri.Event_POST_CREATE_CONTAINER: func() error {
			_, err := g.PostCreateContainer(t.Context(), &nriv1.PostCreateContainerRequest{Generation: gen, Request: &nri.PostCreateContainerRequest{Pod: p, Container: c}})
			return err
		},
		nri.Event_START_CONTAINER: func() error {
			_, err := g.StartContainer(t.Context(), &nriv1.StartContainerRequest{Generation: gen, Request: &nri.StartContainerRequest{Pod: p, Container: c}})
			return err
		},
		nri.Event_POST_START_CONTAINER: func() error {
			_, err := g.PostStartContainer(t.Context(), &nriv1.PostStartContainerRequest{Generation: gen, Request: &nri.PostStartContainerRequest{Pod: p, Container: c}})
			return err
		},
		nri.Event_POST_UPDATE_CONTAINER: func() error {
			_, err := g.PostUpdateContainer(t.Context(), &nriv1.PostUpdateContainerRequest{Generation: gen, Request: &nri.PostUpdateContainerRequest{Pod: p, Container: c}})
			return err
		},
		nri.Event_REMOVE_CONTAINER: func() error { return g.removeContainer(t.Context(), "c1") },
		nri.Event_STOP_POD_SANDBOX: func() error {
			_, err := g.StopPodSandbox(t.Context(), &nriv1.StopPodSandboxRequest{Generation: gen, Request: &nri.StopPodSandboxRequest{Pod: p}})
			return err
		},
		nri.Event_REMOVE_POD_SANDBOX: func() error { g.removePod(t, "p1"); return nil },
	}
}

// A plugin from before the events had methods of their own is told of all of them as state
// changes, and its missing method is looked for once; one that has both is called by the methods.
func TestEventsOfOldPlugins(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var mu sync.Mutex
	told := map[string][]string{}
	note := func(plugin, what string) {
		mu.Lock()
		defer mu.Unlock()
		told[plugin] = append(told[plugin], what)
	}
	order := []nri.Event{
		nri.Event_RUN_POD_SANDBOX, nri.Event_POST_UPDATE_POD_SANDBOX, nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER,
		nri.Event_POST_START_CONTAINER, nri.Event_POST_UPDATE_CONTAINER, nri.Event_REMOVE_CONTAINER, nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX,
	}
	var events nri.EventMask
	events.Set(order...)
	register := func(idx, name string, own func(nri.Event) (proto.Message, error)) {
		methods := map[string]ttrpc.Method{
			"Configure": method(func(*nri.ConfigureRequest) (proto.Message, error) {
				return &nri.ConfigureResponse{Events: int32(events)}, nil
			}),
			"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
			"StateChange": method(func(q *nri.StateChangeEvent) (proto.Message, error) {
				note(name, fmt.Sprintf("StateChange %s %s %s", q.GetEvent().PrettyName(), q.GetPod().GetId(), q.GetContainer().GetId()))
				return &nri.Empty{}, nil
			}),
		}
		for _, e := range order {
			methods[e.PrettyName()] = method(func(*nri.Empty) (proto.Message, error) {
				note(name, e.PrettyName())
				return own(e)
			})
		}
		p := h.raw(t, methods)
		if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: name, PluginIdx: idx}); err != nil {
			t.Fatal(err)
		}
	}
	register("10", "old", func(nri.Event) (proto.Message, error) {
		return nil, status.Error(codes.Unimplemented, "no such method")
	})
	register("20", "new", func(nri.Event) (proto.Message, error) { return &nri.Empty{}, nil })
	g.await(t, "10-old", "20-new")
	all := life(g, t)
	for _, e := range order {
		if err := all[e](); err != nil {
			t.Errorf("%s: %v", e.PrettyName(), err)
		}
	}
	for _, e := range []nri.Event{nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER} { // again
		if err := all[e](); err != nil {
			t.Errorf("%s: %v", e.PrettyName(), err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	var old, new []string
	for i, e := range append(order, nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER) {
		c := " c1"
		if i < 2 || i == 7 || i == 8 {
			c = " " // an event of the pod
		}
		if i < len(order) {
			old = append(old, e.PrettyName())
		}
		old = append(old, "StateChange "+e.PrettyName()+" p1"+c)
		new = append(new, e.PrettyName())
	}
	if got := told["old"]; !slices.Equal(got, old) {
		t.Errorf("the old plugin was told %q, want %q", got, old)
	}
	if got := told["new"]; !slices.Equal(got, new) {
		t.Errorf("the new plugin was told %q, want %q", got, new)
	}
}

// Plugins are told the time limits that hold for them.
func TestConfigureTellsTheLimits(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Announced = config.Duration(40 * time.Second)
	cfg.Timeouts.Request = config.Duration(7 * time.Second)
	cfg.Plugins = []hubconfig.Plugin{{Name: "slow", Timeout: config.Duration(9 * time.Second)}}
	h := startHub(t, cfg)
	h.connect()
	for name, want := range map[string]int64{"slow": 9000, "usual": 7000} {
		told := make(chan *nri.ConfigureRequest, 1)
		p := h.raw(t, map[string]ttrpc.Method{"Configure": method(func(q *nri.ConfigureRequest) (proto.Message, error) {
			told <- q
			return nil, errors.New("enough")
		})})
		if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: name, PluginIdx: "10"}); err != nil {
			t.Fatal(err)
		}
		if q := <-told; q.GetRequestTimeout() != want || q.GetRegistrationTimeout() != 40_000 || q.GetRuntimeName() != "crisp-test" || q.GetRuntimeVersion() != "v9" || q.GetNRIVersion() == "" {
			t.Errorf("%s: configured with %v", name, q)
		}
	}
}
