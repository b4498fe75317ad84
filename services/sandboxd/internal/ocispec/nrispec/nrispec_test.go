package nrispec

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// testHost is a host with fixed facts.
func testHost() host.Facts {
	return host.Facts{Seccomp: true, Swap: true, OOMScoreAdj: -500, HardLimits: map[string]uint64{"RLIMIT_NOFILE": 20000}}
}

// adjustable is a specification with something to change everywhere.
func example() *specs.Spec {
	ptr := func(v int64) *int64 { return &v }
	shares := uint64(100)
	return &specs.Spec{
		Process: &specs.Process{
			Args: []string{"/bin/app"}, Env: []string{"OLD=1", "GONE=1"},
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 10, Hard: 20}},
		},
		Mounts:      []specs.Mount{{Destination: "/proc", Type: "proc"}, {Destination: "/dev/mqueue", Type: "mqueue"}},
		Annotations: map[string]string{"io.kubernetes.cri.image-name": "app"},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: "mount"}, {Type: "ipc", Path: "/run/ns/ipc"}, {Type: "uts", Path: "/run/ns/uts"}},
			Devices:    []specs.LinuxDevice{{Path: "/dev/old", Type: "c", Major: 1, Minor: 3}},
			Resources: &specs.LinuxResources{
				Devices: []specs.LinuxDeviceCgroup{
					{Access: "rwm"}, {Allow: true, Type: "c", Major: ptr(1), Minor: ptr(3), Access: "rwm"},
				},
				Memory: &specs.LinuxMemory{Limit: ptr(1 << 20), Swap: ptr(1 << 20)},
				CPU:    &specs.LinuxCPU{Shares: &shares},
			},
		},
	}
}

// noClasses refuses every class, knownClasses makes one of every name.
type (
	noClasses    struct{}
	knownClasses struct{}
)

func (noClasses) RDTClass(string) (*specs.LinuxIntelRdt, error) {
	return nil, errdefs.ErrInvalidArgument
}

func (noClasses) BlockIOClass(string) (*specs.LinuxBlockIO, error) {
	return nil, errdefs.ErrInvalidArgument
}

func (knownClasses) RDTClass(name string) (*specs.LinuxIntelRdt, error) {
	return &specs.LinuxIntelRdt{ClosID: name}, nil
}

func (knownClasses) BlockIOClass(name string) (*specs.LinuxBlockIO, error) {
	return &specs.LinuxBlockIO{Weight: new(uint16(len(name)))}, nil
}

func destinations(spec *specs.Spec) []string {
	var out []string
	for _, m := range spec.Mounts {
		out = append(out, m.Destination)
	}
	return out
}

func TestAdjust(t *testing.T) {
	t.Parallel()
	given := example()
	spec, err := Node{Host: testHost()}.Adjust(given, &nri.ContainerAdjustment{
		Annotations: map[string]string{"new.io/a": "1", "-io.kubernetes.cri.image-name": ""},
		Env:         []*nri.KeyValue{{Key: "OLD", Value: "2"}, {Key: "-GONE"}, {Key: "NEW", Value: "3"}},
		Args:        []string{"", "/bin/other", "x"},
		Mounts:      []*nri.Mount{{Destination: "/m", Source: "/proc", Type: "bind", Options: []string{"rbind"}}, {Destination: "-/dev/mqueue"}},
		Hooks:       &nri.Hooks{CreateRuntime: []*nri.Hook{{Path: "/h1"}}, Prestart: []*nri.Hook{{Path: "/h2"}}, Poststop: []*nri.Hook{{Path: "/h3"}}},
		Rlimits:     []*nri.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1 << 20, Hard: 1 << 21}, {Type: "RLIMIT_CORE", Soft: 1, Hard: 1}},
		Linux: &nri.LinuxContainerAdjustment{
			Devices:     []*nri.LinuxDevice{{Path: "-/dev/old"}, {Path: "/dev/new", Type: "c", Major: 1, Minor: 5}},
			OomScoreAdj: &nri.OptionalInt{Value: -998},
			CgroupsPath: "/elsewhere",
			Namespaces:  []*nri.LinuxNamespace{{Type: "-uts"}, {Type: "ipc", Path: "/other"}},
			Sysctl:      map[string]string{"net.core.somaxconn": "1"},
			SeccompPolicy: &nri.LinuxSeccomp{
				DefaultAction: "SCMP_ACT_ERRNO", DefaultErrno: &nri.OptionalUInt32{Value: 38},
			},
			Resources: &nri.LinuxResources{
				Memory: &nri.LinuxMemory{
					Reservation: nri.Int64(int64(5)), Swap: nri.Int64(int64(1 << 22)), Swappiness: nri.UInt64(uint64(7)),
					Kernel: nri.Int64(int64(9)), Limit: nri.Int64(int64(1 << 21)),
				},
				Cpu:  &nri.LinuxCPU{Shares: nri.UInt64(uint64(200)), Cpus: "1"},
				Pids: &nri.LinuxPids{Limit: 50},
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	checkAdjusted(t, spec)
	// A commit that fails may come again, with another adjustment.
	if diff := cmp.Diff(example(), given); diff != "" {
		t.Errorf("the specification that was given changed (-want +got):\n%s", diff)
	}
}

func checkAdjusted(t *testing.T, spec *specs.Spec) {
	t.Helper()
	same := func(what string, want, got any) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	env := strings.Join(spec.Process.Env, " ")
	if !strings.Contains(env, "OLD=2") || !strings.Contains(env, "NEW=3") || strings.Contains(env, "GONE") || strings.Contains(env, "OLD=1") {
		t.Errorf("environment %s", env)
	}
	same("arguments", []string{"/bin/other", "x"}, spec.Process.Args)
	same("annotation", "1", spec.Annotations["new.io/a"])
	if _, ok := spec.Annotations["io.kubernetes.cri.image-name"]; ok {
		t.Error("a removed annotation is there")
	}
	if d := destinations(spec); !slices.Contains(d, "/m") || slices.Contains(d, "/dev/mqueue") {
		t.Errorf("mounts %v", d)
	}
	same("hooks", []specs.Hook{{Path: "/h1"}}, spec.Hooks.CreateRuntime)
	same("hooks", []specs.Hook{{Path: "/h3"}}, spec.Hooks.Poststop)
	same("limits", []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 20000, Hard: 20000}, {Type: "RLIMIT_CORE", Soft: 1, Hard: 1}}, spec.Process.Rlimits)
	same("score", -500, *spec.Process.OOMScoreAdj)
	same("cgroup", "/elsewhere", spec.Linux.CgroupsPath)
	same("errno", uint(38), *spec.Linux.Seccomp.DefaultErrnoRet)
	same("sysctl", map[string]string{"net.core.somaxconn": "1"}, spec.Linux.Sysctl)
	if n := spec.Linux.Namespaces; !slices.Contains(n, specs.LinuxNamespace{Type: "ipc", Path: "/other"}) || slices.ContainsFunc(n, func(n specs.LinuxNamespace) bool { return n.Type == "uts" }) {
		t.Errorf("namespaces %v", n)
	}
	if d := spec.Linux.Devices; len(d) != 1 || d[0].Path != "/dev/new" {
		t.Errorf("devices %v", d)
	}
	rules := spec.Linux.Resources.Devices
	if len(rules) != 2 || *rules[1].Minor != 5 {
		t.Errorf("rules %+v", rules)
	}
	ptr := func(v int64) *int64 { return &v }
	swappiness := uint64(7)
	same("memory", &specs.LinuxMemory{
		Limit: ptr(1 << 21), Reservation: ptr(5), Swap: ptr(1 << 22), Kernel: ptr(9), Swappiness: &swappiness, //nolint:staticcheck // plugins may set it
	}, spec.Linux.Resources.Memory)
	same("shares", uint64(200), *spec.Linux.Resources.CPU.Shares)
	same("processors", "1", spec.Linux.Resources.CPU.Cpus)
	same("processes", int64(50), *spec.Linux.Resources.Pids.Limit)
}

func TestAdjustByNothingChangesNothing(t *testing.T) {
	t.Parallel()
	for _, adj := range []*nri.ContainerAdjustment{nil, {}, {Linux: &nri.LinuxContainerAdjustment{Resources: &nri.LinuxResources{}, Rdt: &nri.LinuxRdt{}}}} {
		want := example()
		got, err := Node{Host: testHost()}.Adjust(example(), adj)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestAdjustRefuses(t *testing.T) {
	t.Parallel()
	resources := func(r *nri.LinuxResources) *nri.ContainerAdjustment {
		return &nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{Resources: r}}
	}
	for name, tt := range map[string]struct {
		adj  *nri.ContainerAdjustment
		node Node
		want error
		says string
	}{
		"block I/O class":    {resources(&nri.LinuxResources{BlockioClass: nri.String("fast")}), Node{Host: testHost()}, errdefs.ErrFailedPrecondition, ""},
		"RDT class":          {resources(&nri.LinuxResources{RdtClass: nri.String("gold")}), Node{Host: testHost()}, errdefs.ErrFailedPrecondition, ""},
		"unknown block I/O":  {resources(&nri.LinuxResources{BlockioClass: nri.String("fast")}), Node{Host: testHost(), Classes: noClasses{}}, errdefs.ErrInvalidArgument, ""},
		"unknown RDT class":  {resources(&nri.LinuxResources{RdtClass: nri.String("gold")}), Node{Host: testHost(), Classes: noClasses{}}, errdefs.ErrInvalidArgument, ""},
		"RDT class, no RDT":  {resources(&nri.LinuxResources{RdtClass: nri.String("gold")}), Node{Host: testHost(), Classes: knownClasses{}}, errdefs.ErrFailedPrecondition, "linux.resources.rdt_class"},
		"unified on v1":      {resources(&nri.LinuxResources{Unified: map[string]string{"a": "b"}}), Node{Host: testHost()}, errdefs.ErrFailedPrecondition, ""},
		"huge pages":         {resources(&nri.LinuxResources{HugepageLimits: []*nri.HugepageLimit{{PageSize: "2MB"}}}), Node{Host: testHost()}, errdefs.ErrFailedPrecondition, ""},
		"RDT without it":     {&nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{ClosId: nri.String("x")}}}, Node{Host: testHost()}, errdefs.ErrFailedPrecondition, "linux.rdt"},
		"CDI without it":     {&nri.ContainerAdjustment{CDIDevices: []*nri.CDIDevice{{Name: "v.com/c=d"}}}, Node{Host: testHost()}, errdefs.ErrFailedPrecondition, ""},
		"namespace, no type": {&nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Path: "/x"}}}}, Node{Host: testHost()}, errdefs.ErrInvalidArgument, ""},
	} {
		if _, err := tt.node.Adjust(example(), tt.adj); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: error %v, want %v that says %q", name, err, tt.want, tt.says)
		}
	}
}

// Classes that plugins choose replace those of annotations, and an empty name takes them away.
func TestAdjustClasses(t *testing.T) {
	t.Parallel()
	h := testHost()
	h.RDT = true
	b := Node{Host: h, Classes: knownClasses{}}
	spec := example()
	spec.Linux.IntelRdt = &specs.LinuxIntelRdt{ClosID: "of-the-pod"}
	choose := func(block, rdt any) {
		t.Helper()
		var err error
		spec, err = b.Adjust(spec, &nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{
			Resources: &nri.LinuxResources{BlockioClass: nri.String(block), RdtClass: nri.String(rdt)},
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	choose("1234567", nil)
	if v := spec.Linux.Resources.BlockIO; v == nil || *v.Weight != 7 || spec.Linux.IntelRdt.ClosID != "of-the-pod" {
		t.Errorf("block I/O %+v, RDT %+v", v, spec.Linux.IntelRdt)
	}
	choose(nil, "gold")
	if v := spec.Linux.IntelRdt; v == nil || v.ClosID != "gold" || spec.Linux.Resources.BlockIO == nil {
		t.Errorf("RDT %+v, block I/O %+v", v, spec.Linux.Resources.BlockIO)
	}
	choose("", "")
	if spec.Linux.IntelRdt != nil || spec.Linux.Resources.BlockIO != nil {
		t.Errorf("taken away: RDT %+v, block I/O %+v", spec.Linux.IntelRdt, spec.Linux.Resources.BlockIO)
	}
}

// What plugins say of RDT replaces or takes away what there was, and is what plugins see.
func TestAdjustRDT(t *testing.T) {
	t.Parallel()
	h := testHost()
	h.RDT = true
	given := example()
	given.Linux.IntelRdt = &specs.LinuxIntelRdt{ClosID: "of-the-pod", Schemata: []string{"L3:0=f"}}
	adjusted := func(r *nri.LinuxRdt) *specs.LinuxIntelRdt {
		t.Helper()
		spec, err := Node{Host: h}.Adjust(given, &nri.ContainerAdjustment{Linux: &nri.LinuxContainerAdjustment{Rdt: r}})
		if err != nil {
			t.Fatal(err)
		}
		return spec.Linux.IntelRdt
	}
	all := &nri.LinuxRdt{ClosId: nri.String("gold"), Schemata: nri.RepeatedString([]string{"L3:0=3", "MB:0=50"}), EnableMonitoring: nri.Bool(true)}
	want := &specs.LinuxIntelRdt{ClosID: "gold", Schemata: []string{"L3:0=3", "MB:0=50"}, EnableMonitoring: true}
	if diff := cmp.Diff(want, adjusted(all)); diff != "" {
		t.Errorf("all of it (-want +got):\n%s", diff)
	}
	want = &specs.LinuxIntelRdt{ClosID: "of-the-pod", Schemata: []string{"L3:0=f"}, EnableMonitoring: true}
	if diff := cmp.Diff(want, adjusted(&nri.LinuxRdt{EnableMonitoring: nri.Bool(true)})); diff != "" {
		t.Errorf("one field (-want +got):\n%s", diff)
	}
	if got := adjusted(&nri.LinuxRdt{Remove: true}); got != nil {
		t.Errorf("removed: %+v", got)
	}
	want = &specs.LinuxIntelRdt{ClosID: "gold"}
	if diff := cmp.Diff(want, adjusted(&nri.LinuxRdt{Remove: true, ClosId: nri.String("gold")})); diff != "" {
		t.Errorf("replaced (-want +got):\n%s", diff)
	}
	seen := Container(&recordv1.Container{}, given).GetLinux().GetRdt()
	if seen.GetClosId().GetValue() != "of-the-pod" || len(seen.GetSchemata().GetValue()) != 1 {
		t.Errorf("plugins see %v", seen)
	}
}

func TestAdjustInjectsCDI(t *testing.T) {
	t.Parallel()
	inject := func(s *specs.Spec, names []string) error {
		s.Process.Env = append(s.Process.Env, "CDI="+strings.Join(names, ","))
		return nil
	}
	spec, err := Node{Host: testHost(), InjectCDI: inject}.Adjust(example(), &nri.ContainerAdjustment{CDIDevices: []*nri.CDIDevice{{Name: "a"}, {Name: "b"}}})
	if err != nil || !slices.Contains(spec.Process.Env, "CDI=a,b") {
		t.Errorf("%v: %v", err, spec.Process.Env)
	}
}

func TestPod(t *testing.T) {
	t.Parallel()
	config := &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1"}, Linux: &criv1.LinuxPodSandboxConfig{}}
	config.Labels = map[string]string{"l": "1"}
	config.Annotations = map[string]string{"a": "1"}
	config.Linux.CgroupParent = "/kubepods/pod1"
	config.Linux.Overhead = &criv1.LinuxContainerResources{MemoryLimitInBytes: 7}
	rec := &recordv1.Sandbox{
		Id: "id", Config: config, RuntimeHandler: "runc", NetnsPath: "/run/ns/net", Ips: []string{"10.0.0.1"}, Pid: 7,
		Namespaces: map[string]string{"ipc": "/run/ns/ipc"}, State: recordv1.SandboxState_SANDBOX_STATE_STOPPING,
	}
	want := &nri.PodSandbox{
		Id: "id", Name: "web", Uid: "u-1", Namespace: "default", Labels: map[string]string{"l": "1"}, RuntimeHandler: "runc",
		Annotations: map[string]string{
			"a": "1", "io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "id", "io.kubernetes.cri.sandbox-name": "web",
			"io.kubernetes.cri.sandbox-namespace": "default", "io.kubernetes.cri.sandbox-uid": "u-1",
		},
		Ips: []string{"10.0.0.1"}, Pid: 7,
		Linux: &nri.LinuxPodSandbox{
			CgroupParent: "/kubepods/pod1", CgroupsPath: "/kubepods/pod1/id", PodOverhead: &nri.LinuxResources{Cpu: &nri.LinuxCPU{}, Memory: &nri.LinuxMemory{Limit: nri.Int64(int64(7))}},
			Namespaces: []*nri.LinuxNamespace{{Type: "ipc", Path: "/run/ns/ipc"}, {Type: "network", Path: "/run/ns/net"}},
		},
	}
	if diff := cmp.Diff(want, Pod(rec, "/kubepods/pod1/id"), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	rec.State = recordv1.SandboxState_SANDBOX_STATE_STOPPED
	if ns := Pod(rec, "").GetLinux().GetNamespaces(); len(ns) > 0 {
		t.Errorf("a stopped pod has the namespaces %v", ns)
	}
}

func TestContainer(t *testing.T) {
	t.Parallel()
	spec := example()
	config := &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: "app"}}
	config.Image = &criv1.ImageSpec{Image: "sha256:1", UserSpecifiedImage: "app:1"}
	config.Annotations = map[string]string{"own": "1"}
	at := time.Unix(5, 6)
	got := Container(&recordv1.Container{
		Id: "id", SandboxId: "pod", State: recordv1.ContainerState_CONTAINER_STATE_EXITED, Config: config,
		CreatedAt: timestamppb.New(at), ExitCode: 3, Reason: "Error", ImageId: "sha256:1", ImageRef: "app@sha256:2", ImageName: "example.com/app:1",
	}, spec)
	if got.GetState() != nri.ContainerState_CONTAINER_STOPPED || got.GetCreatedAt() != at.UnixNano() || got.GetStartedAt() != 0 ||
		got.GetExitCode() != 3 || got.GetStatusReason() != "Error" || got.GetName() != "app" || got.GetPodSandboxId() != "pod" {
		t.Errorf("container %v", got)
	}
	if i := got.GetImage(); i.GetName() != "example.com/app:1" || i.GetDigest() != "sha256:2" || i.GetConfigDigest() != "sha256:1" {
		t.Errorf("image %v", i)
	}
	if got.GetAnnotations()["own"] != "1" || got.GetAnnotations()["io.kubernetes.cri.image-name"] != "app" {
		t.Errorf("annotations %v", got.GetAnnotations())
	}
	if got.GetLinux().GetResources().GetMemory().GetLimit().GetValue() != 1<<20 || len(got.GetMounts()) != len(spec.Mounts) ||
		len(got.GetLinux().GetDevices()) != 1 || got.GetRlimits()[0].GetHard() != 20 || !slices.Equal(got.GetArgs(), spec.Process.Args) {
		t.Errorf("container %v", got)
	}
	made := Container(&recordv1.Container{State: recordv1.ContainerState_CONTAINER_STATE_PREPARING, CreatedAt: timestamppb.New(at)}, spec)
	if made.GetCreatedAt() != 0 {
		t.Errorf("a container that is being made was created at %d", made.GetCreatedAt())
	}
	empty := Container(&recordv1.Container{}, &specs.Spec{})
	if empty.GetState() != nri.ContainerState_CONTAINER_UNKNOWN {
		t.Errorf("empty %v", empty)
	}
}
