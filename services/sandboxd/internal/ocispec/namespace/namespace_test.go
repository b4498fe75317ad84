package namespace

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

// A root file system can be shifted by one range that has the root user, and by no other.
func TestUserMappings(t *testing.T) {
	t.Parallel()
	mapping := func(container, host, length uint32) *criv1.IDMapping {
		return &criv1.IDMapping{ContainerId: container, HostId: host, Length: length}
	}
	good := []*criv1.IDMapping{mapping(0, 1000, 65536)}
	for name, c := range map[string]struct {
		ids []*criv1.IDMapping
		ok  bool
	}{
		"one range":    {good, true},
		"to the end":   {[]*criv1.IDMapping{mapping(0, 1<<32-1-10, 10)}, true},
		"two ranges":   {[]*criv1.IDMapping{mapping(0, 1000, 10), mapping(10, 5000, 10)}, false},
		"without root": {[]*criv1.IDMapping{mapping(1, 1000, 10)}, false},
		"empty":        {[]*criv1.IDMapping{mapping(0, 1000, 0)}, false},
		"too high":     {[]*criv1.IDMapping{mapping(0, 1<<32-10, 10)}, false},
	} {
		for _, user := range []*criv1.UserNamespace{{Uids: c.ids, Gids: good}, {Uids: good, Gids: c.ids}} {
			uids, gids, err := mappings(user)
			if c.ok && (err != nil || len(uids) != 1 || len(gids) != 1) || !c.ok && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v %v %v", name, uids, gids, err)
			}
		}
	}
}

// A container shares the network and the IPC namespace of its pod. One that asks for the node's
// beside a pod with its own gets neither.
func TestNamespacesOfThePodAreShared(t *testing.T) {
	t.Parallel()
	const node, pod = criv1.NamespaceMode_NODE, criv1.NamespaceMode_POD
	paths := map[string]string{"network": "/ns/net", "ipc": "/ns/ipc", "uts": "/ns/uts"}
	for name, c := range map[string]struct {
		network, ipc, podNetwork, podIPC criv1.NamespaceMode
		ok                               bool
	}{
		"the pod's":                {pod, pod, pod, pod, true},
		"node's with the pod":      {node, node, node, node, true},
		"the pod's is the node's":  {pod, pod, node, node, true},
		"the node's network alone": {node, pod, pod, pod, false},
		"the node's IPC alone":     {pod, node, pod, pod, false},
	} {
		own := &criv1.NamespaceOption{Network: c.network, Ipc: c.ipc, Pid: criv1.NamespaceMode_CONTAINER}
		ofPod := &criv1.NamespaceOption{Network: c.podNetwork, Ipc: c.podIPC}
		spec := &specs.Linux{}
		err := Set(spec, Request{
			Context: &criv1.LinuxContainerSecurityContext{NamespaceOptions: own},
			Sandbox: &criv1.PodSandboxConfig{Linux: &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{NamespaceOptions: ofPod}}},
			Paths:   paths,
		})
		if c.ok && err != nil || !c.ok && !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
		joined := map[string]string{}
		for _, ns := range spec.Namespaces {
			joined[string(ns.Type)] = ns.Path
		}
		if _, ok := joined["network"]; c.ok && ok != (c.podNetwork == pod) {
			t.Errorf("%s: %v", name, joined)
		}
	}
}

func TestMappingsToIDsThatSandboxdLacks(t *testing.T) {
	t.Parallel()
	own := userns.Namespace{UIDs: userns.Ranges{{First: 0, Count: 65536}}, GIDs: userns.Ranges{{First: 0, Count: 131072}}}
	inside := []specs.LinuxIDMapping{{HostID: 1000, Size: 60000}}
	outside := []specs.LinuxIDMapping{{HostID: 65536, Size: 65536}}
	if err := CheckMapped(own, inside, outside); err != nil {
		t.Error(err)
	}
	for _, err := range []error{CheckMapped(own, outside, outside), CheckMapped(own, inside, []specs.LinuxIDMapping{{HostID: 131072, Size: 1}})} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("error %v", err)
		}
	}
	if err := CheckMapped(userns.Namespace{}, outside, outside); err != nil {
		t.Errorf("for root of the machine: %v", err)
	}
}
