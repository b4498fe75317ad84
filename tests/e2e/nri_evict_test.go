//go:build integration

package e2e

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// evictor is a plugin on the bare protocol: NRI's own stub has no way to ask for evictions.
type evictor struct {
	nri.PluginService // what it has not subscribed to

	runtime nri.RuntimeService

	mu    sync.Mutex
	known map[string]string // ids of containers by name
	ends  []string          // names of containers, at each StopContainer
	next  func(id func(name string) string) (answer []*nri.ContainerEviction, by *nri.UpdateContainersRequest)
}

// connect registers the plugin until the test ends.
func (e *evictor) connect(t *testing.T, socket string) {
	t.Helper()
	e.known = make(map[string]string)
	conn, err := net.Dial("unix", socket)
	must(t, err)
	mux := multiplex.Multiplex(conn)
	listener, err := mux.Listen(multiplex.PluginServiceConn)
	must(t, err)
	server, err := ttrpc.NewServer()
	must(t, err)
	nri.RegisterPluginService(server, e)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(context.WithoutCancel(t.Context()), listener) })
	back, err := mux.Open(multiplex.RuntimeServiceConn)
	must(t, err)
	client := ttrpc.NewClient(back)
	t.Cleanup(func() {
		_, _, _ = client.Close(), server.Close(), mux.Close()
		serving.Wait()
	})
	e.runtime = nri.NewRuntimeClient(client)
	_, err = e.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "evictor", PluginIdx: "10"})
	must(t, err)
}

func (e *evictor) Configure(context.Context, *nri.ConfigureRequest) (*nri.ConfigureResponse, error) {
	return &nri.ConfigureResponse{Events: int32(nri.MustParseEventMask("CreateContainer,UpdateContainer,StopContainer"))}, nil
}

func (*evictor) Synchronize(context.Context, *nri.SynchronizeRequest) (*nri.SynchronizeResponse, error) {
	return &nri.SynchronizeResponse{}, nil
}

func (*evictor) Shutdown(context.Context, *nri.Empty) (*nri.Empty, error) { return &nri.Empty{}, nil }

// wants gives what the test wants of this answer, once, after it has asked by itself.
func (e *evictor) wants() ([]*nri.ContainerEviction, error) {
	e.mu.Lock()
	next, known := e.next, e.known
	e.next = nil
	e.mu.Unlock()
	if next == nil {
		return nil, nil
	}
	answer, by := next(func(name string) string { return known[name] })
	if by == nil {
		return answer, nil
	}
	_, err := e.runtime.UpdateContainers(context.Background(), by)
	return answer, err
}

func (e *evictor) CreateContainer(_ context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	e.mu.Lock()
	e.known[req.GetContainer().GetName()] = req.GetContainer().GetId()
	e.mu.Unlock()
	evict, err := e.wants()
	return &nri.CreateContainerResponse{Evict: evict}, err
}

func (e *evictor) UpdateContainer(context.Context, *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	evict, err := e.wants()
	return &nri.UpdateContainerResponse{Evict: evict}, err
}

func (e *evictor) StopContainer(_ context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ends = append(e.ends, req.GetContainer().GetName())
	return &nri.StopContainerResponse{}, nil
}

// What plugins want gone is stopped, in the way of the signal first; kubelet sees it end, the
// plugin is told once, and who caused it has what it wanted.
func TestPluginsEvictContainers(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	e := &evictor{}
	e.connect(t, s.NRISocket())
	diary := s.follow(t.Context())
	pod, config := s.pod("crowded")
	names := []string{"by-create", "by-update", "by-itself", "in-handler"}
	victims := make(map[string]string)
	for _, name := range names {
		victims[name] = s.container(pod, config, containerConfig(name, "trap 'exit 7' TERM; while :; do sleep 0.1; done"))
	}
	evict := func(name string, id func(string) string) []*nri.ContainerEviction {
		return []*nri.ContainerEviction{{ContainerId: id(name), Reason: "room for others"}}
	}
	set := func(next func(id func(string) string) ([]*nri.ContainerEviction, *nri.UpdateContainersRequest)) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.next = next
	}
	gone := func(name string) {
		t.Helper()
		eventually(t, name+" has ended", func() error {
			if st := s.status(victims[name]); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 7 {
				return fmt.Errorf("state %s, exit code %d", st.GetState(), st.GetExitCode())
			}
			stopped := func(ev *criv1.ContainerEventResponse) bool {
				return ev.GetContainerEventType() == criv1.ContainerEventType_CONTAINER_STOPPED_EVENT
			}
			if !slices.ContainsFunc(diary.of(victims[name]), stopped) {
				return fmt.Errorf("no event of its end")
			}
			return nil
		})
	}

	set(func(id func(string) string) ([]*nri.ContainerEviction, *nri.UpdateContainersRequest) {
		return append(evict("by-create", id), &nri.ContainerEviction{ContainerId: "unknown"}), nil
	})
	winner := s.container(pod, config, containerConfig("winner", "sleep 1000"))
	if st := s.status(victims["by-create"]); st.GetState() != criv1.ContainerState_CONTAINER_EXITED {
		t.Errorf("the new container was made while the evicted one is in state %s", st.GetState())
	}
	gone("by-create")

	set(func(id func(string) string) ([]*nri.ContainerEviction, *nri.UpdateContainersRequest) {
		return evict("by-update", id), nil
	})
	_, err := s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
		ContainerId: winner, Linux: &criv1.LinuxContainerResources{CpuShares: 400},
	})
	must(t, err)
	gone("by-update")

	_, err = e.runtime.UpdateContainers(t.Context(), &nri.UpdateContainersRequest{
		Evict: evict("by-itself", func(name string) string { return victims[name] }),
	})
	must(t, err)
	gone("by-itself")

	// From inside of a handler: the end could not be told to a plugin that waits for it.
	set(func(id func(string) string) ([]*nri.ContainerEviction, *nri.UpdateContainersRequest) {
		return nil, &nri.UpdateContainersRequest{Evict: evict("in-handler", id)}
	})
	begin := time.Now()
	s.container(pod, config, containerConfig("another", "sleep 1000"))
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("a plugin that evicts in the middle of a request held it up for %v", took)
	}
	gone("in-handler")

	eventually(t, "the plugin was told of the ends", func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if !slices.Equal(e.ends, names) {
			return fmt.Errorf("told of %q, want %q", e.ends, names)
		}
		return nil
	})
	if st := s.status(winner); st.GetState() != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container that others were evicted for is in state %s", st.GetState())
	}
}
