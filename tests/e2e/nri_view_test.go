//go:build integration

package e2e

import (
	"context"
	"errors"
	"sync"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// viewer keeps what it is shown of pods and containers, by event and name.
type viewer struct {
	mu         sync.Mutex
	pods       map[string]*nri.PodSandbox
	containers map[string]*nri.Container
	resources  *nri.LinuxResources // of a pod, as they are to be
	refuse     error               // what updates of pods are answered with
}

func (v *viewer) connect(t *testing.T, s *system) stub.Stub {
	t.Helper()
	v.pods, v.containers = make(map[string]*nri.PodSandbox), make(map[string]*nri.Container)
	st, err := stub.New(v, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("10"), stub.WithPluginName("viewer"), stub.WithOnClose(func() {}))
	must(t, err)
	must(t, st.Start(t.Context()))
	t.Cleanup(st.Stop)
	return st
}

func (v *viewer) keep(event string, pod *nri.PodSandbox, c *nri.Container) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.pods[event] = proto.CloneOf(pod)
	if c != nil {
		v.containers[event] = proto.CloneOf(c)
	}
}

// pod is the pod as it was shown at an event, once that has come.
func (v *viewer) pod(t *testing.T, event string) *nri.PodSandbox {
	t.Helper()
	var pod *nri.PodSandbox
	eventually(t, event, func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		if pod = v.pods[event]; pod == nil {
			return errors.New("the plugin was not told")
		}
		return nil
	})
	return pod
}

func (v *viewer) RunPodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	v.keep("RunPodSandbox", pod, nil)
	return nil
}

func (v *viewer) UpdatePodSandbox(_ context.Context, pod *nri.PodSandbox, _, resources *nri.LinuxResources) error {
	v.keep("UpdatePodSandbox", pod, nil)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.resources = resources
	return v.refuse
}

func (v *viewer) PostUpdatePodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	v.keep("PostUpdatePodSandbox", pod, nil)
	return nil
}

// New resources of a pod are told to plugins before and after they are in force, and a plugin
// that refuses them leaves the old ones.
func TestPluginsAreToldOfPodUpdates(t *testing.T) {
	s := start(t, testenv.Setup{})
	v := &viewer{}
	v.connect(t, s)
	pod, _ := s.pod("resized")
	update := func(shares, memory int64) error {
		_, err := s.CRI.UpdatePodSandboxResources(t.Context(), &criv1.UpdatePodSandboxResourcesRequest{
			PodSandboxId: pod, Overhead: &criv1.LinuxContainerResources{MemoryLimitInBytes: 2 << 20},
			Resources: &criv1.LinuxContainerResources{CpuShares: shares, MemoryLimitInBytes: memory},
		})
		return err
	}
	must(t, update(400, 64<<20))
	shares := func(r *nri.LinuxResources) uint64 { return r.GetCpu().GetShares().GetValue() }
	if before := v.pod(t, "UpdatePodSandbox"); shares(before.GetLinux().GetPodResources()) != 0 || shares(v.resources) != 400 {
		t.Errorf("before: pod %v, to come %v", before.GetLinux(), v.resources)
	}
	after := v.pod(t, "PostUpdatePodSandbox").GetLinux()
	if shares(after.GetPodResources()) != 400 || after.GetPodResources().GetMemory().GetLimit().GetValue() != 64<<20 ||
		after.GetPodOverhead().GetMemory().GetLimit().GetValue() != 2<<20 {
		t.Errorf("after: %v", after)
	}
	v.mu.Lock()
	v.refuse = errors.New("not today")
	v.mu.Unlock()
	if err := update(500, 128<<20); err == nil {
		t.Error("a plugin's refusal was passed over")
	}
	v.mu.Lock()
	v.refuse = nil
	v.mu.Unlock()
	must(t, update(600, 128<<20))
	if before := v.pod(t, "UpdatePodSandbox"); shares(before.GetLinux().GetPodResources()) != 400 {
		t.Errorf("what was refused is in force: %v", before.GetLinux())
	}
}
