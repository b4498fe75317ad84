package ocispec

import (
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// Where no control group is delegated, a specification asks for nothing that only one can give,
// whoever wants it.
func TestWithoutControlGroups(t *testing.T) {
	t.Parallel()
	on := v2Host()
	on.Groups = host.Delegation{None: true, Why: "test"}
	b := New(on, Options{})
	in := input()
	in.CgroupsPath = "/pods/c"
	in.Config.Linux.Resources = &criv1.LinuxContainerResources{CpuShares: 5, MemoryLimitInBytes: 1 << 30, OomScoreAdj: 7}
	spec, _, err := b.Build(in)
	if err != nil {
		t.Fatal(err)
	}
	adjusted, err := b.Adjust(spec, &nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{
		CgroupsPath: "/plugin/c", Resources: &nri.LinuxResources{Memory: &nri.LinuxMemory{Limit: nri.Int64(5)}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	init, err := b.BuildInit(InitInput{SandboxID: in.SandboxID, SandboxConfig: in.SandboxConfig, Namespaces: in.Namespaces, CgroupsPath: "/pods/p"})
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]*specs.Spec{"container": spec, "adjusted": adjusted, "init": init} {
		r := s.Linux.Resources
		if s.Linux.CgroupsPath != "" || r.CPU != nil || r.Memory != nil || r.Unified != nil || len(r.Devices) == 0 {
			t.Errorf("%s: cgroup %q, resources %+v", name, s.Linux.CgroupsPath, r)
		}
	}
	if got := *spec.Process.OOMScoreAdj; got != 7 {
		t.Errorf("OOM score %d: it needs no group", got)
	}
	for _, systemd := range []bool{false, true} {
		if got, err := b.CgroupsPath("/kubepods", "c", systemd); got != "" || err != nil {
			t.Errorf("cgroup %q, %v", got, err)
		}
	}
}

func TestCgroupsPathBelowADelegatedGroup(t *testing.T) {
	t.Parallel()
	on := testHost()
	on.Groups.Root = "/me"
	b := New(on, Options{})
	if got, err := b.CgroupsPath("", "c", false); got != "/me/crisp/c" || err != nil {
		t.Errorf("default: %q, %v", got, err)
	}
	if got, err := b.CgroupsPath("/me/pod", "c", false); got != "/me/pod/c" || err != nil {
		t.Errorf("inside: %q, %v", got, err)
	}
	if _, err := b.CgroupsPath("/kubepods/pod", "c", false); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("outside: %v", err)
	}
	if got, err := New(testHost(), Options{}).CgroupsPath("", "c", false); got != "/crisp/c" || err != nil {
		t.Errorf("of the machine: %q, %v", got, err)
	}
}

// What the node's own namespaces own cannot be mounted from a user namespace below theirs; it is
// shown as the node has it.
func TestNodesNamespacesOfAnotherOwner(t *testing.T) {
	t.Parallel()
	on := testHost()
	on.ForeignNetwork, on.ForeignIPC, on.ForeignPID = true, true, true
	mountOf := func(spec *specs.Spec, at string) string {
		i := slices.IndexFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == at })
		if i < 0 {
			return "none"
		}
		return spec.Mounts[i].Type
	}
	own, _ := build(t, on, Options{}, input())
	if got := mountOf(own, "/proc") + " " + mountOf(own, "/sys") + " " + mountOf(own, "/dev/mqueue"); got != "proc sysfs mqueue" {
		t.Errorf("in namespaces of the pod's own: %s", got)
	}
	in := input()
	in.Config.Linux.SecurityContext.NamespaceOptions.Network = criv1.NamespaceMode_NODE
	in.SandboxConfig.Linux = &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{
		NamespaceOptions: &criv1.NamespaceOption{Network: criv1.NamespaceMode_NODE, Pid: criv1.NamespaceMode_CONTAINER},
	}}
	delete(in.Namespaces, "network")
	delete(in.Namespaces, "uts")
	delete(in.Namespaces, "ipc")
	in.Config.Linux.SecurityContext.NamespaceOptions.Ipc = criv1.NamespaceMode_NODE
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions.Ipc = criv1.NamespaceMode_NODE
	in.Config.Linux.SecurityContext.NamespaceOptions.Pid = criv1.NamespaceMode_NODE
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions.Pid = criv1.NamespaceMode_NODE
	shared, _ := build(t, on, Options{}, in)
	if got := mountOf(shared, "/sys"); got != "bind" {
		t.Errorf("/sys in the node's network: %s", got)
	}
	if got := mountOf(shared, "/proc"); got != "bind" {
		t.Errorf("/proc in the node's PID namespace: %s", got)
	}
	if got := mountOf(shared, "/dev/mqueue"); got == "mqueue" {
		t.Errorf("/dev/mqueue in the node's IPC namespace: %s", got)
	}
	usual, _ := build(t, testHost(), Options{}, in)
	if got := mountOf(usual, "/sys") + " " + mountOf(usual, "/dev/mqueue"); got != "sysfs mqueue" {
		t.Errorf("for root of the machine: %s", got)
	}
}
