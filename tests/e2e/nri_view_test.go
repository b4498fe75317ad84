//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
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
	group      string              // cgroups of the process that waits for its start
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

func (v *viewer) RemovePodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	v.keep("RemovePodSandbox", pod, nil)
	return nil
}

func (v *viewer) CreateContainer(_ context.Context, pod *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	v.keep("CreateContainer", pod, c)
	return nil, nil, nil
}

// StartContainer looks at the process of the container while it waits.
func (v *viewer) StartContainer(_ context.Context, pod *nri.PodSandbox, c *nri.Container) error {
	v.keep("StartContainer", pod, c)
	group, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.GetPid()))
	v.mu.Lock()
	defer v.mu.Unlock()
	v.group = string(group)
	if c.GetName() == "refused" {
		return errors.New("not this one")
	}
	return nil
}

func (v *viewer) StopContainer(_ context.Context, pod *nri.PodSandbox, c *nri.Container) ([]*nri.ContainerUpdate, error) {
	v.keep("StopContainer", pod, c)
	return nil, nil
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

// Plugins see pods and containers as they see them with other runtimes: a container that starts
// has a process already, which waits in its cgroup; what is gone is not shown.
func TestWhatPluginsSee(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	v := &viewer{}
	v.connect(t, s)
	pod, config := s.pod("seen")
	c := containerConfig("main", "sleep 1000")
	c.Image.UserSpecifiedImage = "busybox"
	id := s.container(pod, config, c)

	shown := v.pod(t, "StartContainer")
	for key, want := range map[string]string{
		"crisp.test/pod": "seen", "io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": pod,
		"io.kubernetes.cri.sandbox-name": "seen", "io.kubernetes.cri.sandbox-namespace": "e2e", "io.kubernetes.cri.sandbox-uid": "seen-uid",
	} {
		if got := shown.GetAnnotations()[key]; got != want {
			t.Errorf("annotation %s of the pod is %q, want %q", key, got, want)
		}
	}
	network := func(p *nri.PodSandbox) string {
		for _, n := range p.GetLinux().GetNamespaces() {
			if n.GetType() == "network" {
				return n.GetPath()
			}
		}
		return ""
	}
	if _, err := os.Stat(network(shown)); err != nil {
		t.Errorf("network of the pod: %v", err)
	}
	made, starting := v.containers["CreateContainer"], v.containers["StartContainer"]
	if made.GetCreatedAt() != 0 || made.GetPid() != 0 || made.GetImage().GetName() != busybox || made.GetAnnotations()["io.kubernetes.cri.image-name"] != "busybox" {
		t.Errorf("before its creation: created at %d, process %d, image %v, annotations %v",
			made.GetCreatedAt(), made.GetPid(), made.GetImage(), made.GetAnnotations())
	}
	if starting.GetState() != nri.ContainerState_CONTAINER_CREATED || starting.GetPid() == 0 || !strings.Contains(v.group, id) {
		t.Errorf("when it starts: %s, process %d in %q", starting.GetState(), starting.GetPid(), v.group)
	}

	refused, err := s.tryContainer(pod, config, "refused")
	must(t, err)
	_, err = s.CRI.StartContainer(t.Context(), &criv1.StartContainerRequest{ContainerId: refused})
	if err == nil || !strings.Contains(err.Error(), "10-viewer") || !strings.Contains(err.Error(), "not this one") {
		t.Errorf("refused start: %v", err)
	}
	if st := s.status(refused); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 128 || !strings.Contains(st.GetMessage(), "not this one") {
		t.Errorf("after it: %v", st)
	}
	if told := v.containers["StopContainer"]; told.GetId() != refused {
		t.Errorf("the plugin was told of the end of %q", told.GetName())
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", v.containers["StartContainer"].GetPid())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its process is left: %v", err)
	}

	_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	if path := network(v.pod(t, "RemovePodSandbox")); path != "" {
		t.Errorf("a removed pod has the network %s", path)
	}
}

// A pod whose containers share a process namespace has a process, which is in a cgroup.
func TestCgroupOfAPodsOwnProcess(t *testing.T) {
	s := start(t, testenv.Setup{})
	v := &viewer{}
	v.connect(t, s)
	config := s.podConfig("shared")
	config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
	_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config})
	must(t, err)
	pod := v.pod(t, "RunPodSandbox")
	group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pod.GetPid()))
	must(t, err)
	if path := pod.GetLinux().GetCgroupsPath(); path == "" || !strings.Contains(string(group), path) {
		t.Errorf("process %d is in %s, the pod is shown in %q", pod.GetPid(), group, path)
	}
}
