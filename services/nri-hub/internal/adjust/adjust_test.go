package adjust_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
)

func request() *nri.CreateContainerRequest {
	return &nri.CreateContainerRequest{
		Pod: &nri.PodSandbox{Id: "pod0"},
		Container: &nri.Container{
			Id:          "ctr0",
			Annotations: map[string]string{"orig": "1"},
			Args:        []string{"echo", "original"},
			Env:         []string{"ORIG=1", "ODD", "PATH=/bin"},
			Mounts:      []*nri.Mount{{Destination: "/orig", Source: "/src"}},
			Rlimits:     []*nri.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1}},
			Linux: &nri.LinuxContainer{
				Devices:    []*nri.LinuxDevice{{Path: "/dev/orig"}},
				Namespaces: []*nri.LinuxNamespace{{Type: "ipc"}},
				Sysctl:     map[string]string{"orig": "1"},
				NetDevices: map[string]*nri.LinuxNetDevice{"orig0": {Name: "eth7"}},
				Resources: &nri.LinuxResources{
					Memory:         &nri.LinuxMemory{Limit: nri.Int64(int64(1))},
					HugepageLimits: []*nri.HugepageLimit{{PageSize: "1G", Limit: 1}},
				},
				Rdt: &nri.LinuxRdt{ClosId: nri.String("runtime")},
			},
		},
	}
}

func linux(l *nri.LinuxContainerAdjustment) *nri.ContainerAdjustment {
	return &nri.ContainerAdjustment{Linux: l}
}

func resources(r *nri.LinuxResources) *nri.ContainerAdjustment {
	return linux(&nri.LinuxContainerAdjustment{Resources: r})
}

type step struct {
	plugin string
	adjust *nri.ContainerAdjustment
}

func apply(t *testing.T, steps ...step) (*adjust.Create, error) {
	t.Helper()
	c := adjust.NewCreate(request())
	for _, s := range steps {
		if err := c.Apply(s.plugin, &nri.CreateContainerResponse{Adjust: s.adjust}); err != nil {
			return c, err
		}
	}
	return c, nil
}

// fields has one adjustment per field that only one plugin may set.
func fields() map[string]*nri.ContainerAdjustment {
	return map[string]*nri.ContainerAdjustment{
		"annotation":   {Annotations: map[string]string{"k": "v"}},
		"mount":        {Mounts: []*nri.Mount{{Destination: "/k", Source: "/v"}}},
		"env":          {Env: []*nri.KeyValue{{Key: "K", Value: "v"}}},
		"args":         {Args: []string{"new"}},
		"rlimit":       {Rlimits: []*nri.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 7}}},
		"cdi":          {CDIDevices: []*nri.CDIDevice{{Name: "v.com/c=d"}}},
		"device":       linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "/dev/k"}}}),
		"namespace":    linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Type: "uts"}}}),
		"sysctl":       linux(&nri.LinuxContainerAdjustment{Sysctl: map[string]string{"k": "v"}}),
		"net device":   linux(&nri.LinuxContainerAdjustment{NetDevices: map[string]*nri.LinuxNetDevice{"k0": {Name: "eth1"}}}),
		"cgroups path": linux(&nri.LinuxContainerAdjustment{CgroupsPath: "/k"}),
		"oom score":    linux(&nri.LinuxContainerAdjustment{OomScoreAdj: nri.Int(0)}),
		"io priority":  linux(&nri.LinuxContainerAdjustment{IoPriority: &nri.LinuxIOPriority{}}),
		"seccomp":      linux(&nri.LinuxContainerAdjustment{SeccompPolicy: &nri.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW"}}),
		"scheduler":    linux(&nri.LinuxContainerAdjustment{Scheduler: &nri.LinuxScheduler{Nice: 3}}),
		"mem policy":   linux(&nri.LinuxContainerAdjustment{MemoryPolicy: &nri.LinuxMemoryPolicy{Nodes: "0"}}),
		"rdt clos":     linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{ClosId: nri.String("k")}}),
		"rdt schemata": linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{Schemata: nri.RepeatedString([]string{"L3"})}}),
		"rdt monitor":  linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{EnableMonitoring: nri.Bool(false)}}),

		"mem limit":       resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{Limit: nri.Int64(int64(0))}}),
		"mem reservation": resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{Reservation: nri.Int64(int64(2))}}),
		"mem swap":        resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{Swap: nri.Int64(int64(2))}}),
		"mem kernel":      resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{Kernel: nri.Int64(int64(2))}}),
		"mem kernel tcp":  resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{KernelTcp: nri.Int64(int64(2))}}),
		"mem swappiness":  resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{Swappiness: nri.UInt64(uint64(0))}}),
		"mem oom killer":  resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{DisableOomKiller: nri.Bool(false)}}),
		"mem hierarchy":   resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{UseHierarchy: nri.Bool(true)}}),
		"cpu shares":      resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{Shares: nri.UInt64(uint64(2))}}),
		"cpu quota":       resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{Quota: nri.Int64(int64(-1))}}),
		"cpu period":      resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{Period: nri.UInt64(uint64(2))}}),
		"cpu rt runtime":  resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{RealtimeRuntime: nri.Int64(int64(2))}}),
		"cpu rt period":   resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{RealtimePeriod: nri.UInt64(uint64(2))}}),
		"cpuset cpus":     resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{Cpus: "0-1"}}),
		"cpuset mems":     resources(&nri.LinuxResources{Cpu: &nri.LinuxCPU{Mems: "0"}}),
		"pids":            resources(&nri.LinuxResources{Pids: &nri.LinuxPids{Limit: 9}}),
		"hugepages":       resources(&nri.LinuxResources{HugepageLimits: []*nri.HugepageLimit{{PageSize: "1G", Limit: 9}}}),
		"blockio class":   resources(&nri.LinuxResources{BlockioClass: nri.String("k")}),
		"rdt class":       resources(&nri.LinuxResources{RdtClass: nri.String("k")}),
		"unified":         resources(&nri.LinuxResources{Unified: map[string]string{"memory.high": "1"}}),
	}
}

// names are what the fields are called in conflicts, with the key of an entry.
func names() map[string]string {
	return map[string]string{
		"annotation": "Annotations k:", "mount": "Mounts /k:", "env": "Env K:", "args": "Args :", "rlimit": "Rlimits RLIMIT_NOFILE:", "cdi": "CdiDevices v.com/c=d:",
		"device": "Devices /dev/k:", "namespace": "Namespace uts:", "sysctl": "Sysctl k:", "net device": "LinuxNetDevices k0:", "cgroups path": "CgroupsPath :",
		"oom score": "OomScoreAdj :", "io priority": "IoPriority :", "seccomp": "SeccompPolicy :", "scheduler": "LinuxSched :", "mem policy": "MemoryPolicy :",
		"rdt clos": "RdtClosID :", "rdt schemata": "RdtSchemata :", "rdt monitor": "RdtEnableMonitoring :",
		"mem limit": "MemLimit :", "mem reservation": "MemReservation :", "mem swap": "MemSwapLimit :", "mem kernel": "MemKernelLimit :", "mem kernel tcp": "MemTCPLimit :",
		"mem swappiness": "MemSwappiness :", "mem oom killer": "MemDisableOomKiller :", "mem hierarchy": "MemUseHierarchy :",
		"cpu shares": "CPUShares :", "cpu quota": "CPUQuota :", "cpu period": "CPUPeriod :", "cpu rt runtime": "CPURealtimeRuntime :", "cpu rt period": "CPURealtimePeriod :",
		"cpuset cpus": "CPUSetCPUs :", "cpuset mems": "CPUSetMems :", "pids": "PidsLimit :", "hugepages": "HugepageLimits 1G:", "blockio class": "BlockioClass :",
		"rdt class": "RdtClass :", "unified": "CgroupsUnified memory.high:",
	}
}

func TestEveryFieldIsMergedAndOwned(t *testing.T) {
	t.Parallel()
	for name, a := range fields() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := apply(t, step{"10-a", proto.CloneOf(a)}, step{"20-idle", nil})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(a, c.Response().GetAdjust(), protocmp.Transform()); diff != "" {
				t.Errorf("one plugin's adjustment changed in the merge (-want +got):\n%s", diff)
			}
			if name != "cdi" && name != "mem policy" && proto.Equal(c.Request(), request()) {
				t.Error("later plugins do not see the change")
			}
			_, err = apply(t, step{"10-a", proto.CloneOf(a)}, step{"20-b", proto.CloneOf(a)})
			if want := `plugins "20-b" and "10-a" both tried to set ` + names()[name]; !errors.Is(err, errdefs.ErrConflict) || !strings.Contains(err.Error(), want) {
				t.Errorf("second plugin: error is %v, want a conflict that says %q", err, want)
			}
			// A plugin may say the same thing twice.
			if _, err = apply(t, step{"10-a", proto.CloneOf(a)}, step{"10-a", proto.CloneOf(a)}); err != nil {
				t.Errorf("same plugin again: %v", err)
			}
		})
	}
}

func TestFieldsThatAddUp(t *testing.T) {
	t.Parallel()
	hooks := func(path string) *nri.ContainerAdjustment {
		h := []*nri.Hook{{Path: path}}
		return &nri.ContainerAdjustment{Hooks: &nri.Hooks{
			Prestart: h, CreateRuntime: h, CreateContainer: h, StartContainer: h, Poststart: h, Poststop: h,
		}}
	}
	rule := resources(&nri.LinuxResources{Devices: []*nri.LinuxDeviceCgroup{{Allow: true, Access: "r"}}})
	c, err := apply(t, step{"10-a", hooks("/a")}, step{"20-b", hooks("/b")}, step{"30-c", rule}, step{"40-d", proto.CloneOf(rule)})
	if err != nil {
		t.Fatal(err)
	}
	got := c.Response().GetAdjust()
	for name, list := range map[string][]*nri.Hook{
		"prestart": got.Hooks.Prestart, "create runtime": got.Hooks.CreateRuntime,
		"create container": got.Hooks.CreateContainer, "start container": got.Hooks.StartContainer,
		"poststart": got.Hooks.Poststart, "poststop": got.Hooks.Poststop,
	} {
		if len(list) != 2 || list[0].Path != "/a" || list[1].Path != "/b" {
			t.Errorf("%s hooks are %v, want /a then /b", name, list)
		}
	}
	if n := len(got.Linux.Resources.Devices); n != 2 {
		t.Errorf("%d device rules, want 2", n)
	}
	if owner, _ := c.Validation(nil).Owners.HooksOwner("ctr0"); owner != "10-a,20-b" {
		t.Errorf("owner of hooks is %q", owner)
	}
}

func TestRemovals(t *testing.T) {
	t.Parallel()
	type view = func(*nri.Container) bool
	tests := []struct {
		name   string
		remove *nri.ContainerAdjustment // of what the container has
		gone   view
	}{
		{
			"annotation", &nri.ContainerAdjustment{Annotations: map[string]string{"-orig": ""}},
			func(c *nri.Container) bool { return len(c.Annotations) == 0 },
		},
		{
			"mount", &nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "-/orig"}}},
			func(c *nri.Container) bool { return len(c.Mounts) == 0 },
		},
		{
			"env", &nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "-ORIG"}}},
			func(c *nri.Container) bool { return cmp.Equal(c.Env, []string{"ODD", "PATH=/bin"}) },
		},
		{
			"device", linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "-/dev/orig"}}}),
			func(c *nri.Container) bool { return len(c.Linux.Devices) == 0 },
		},
		{
			"namespace", linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Type: "-ipc"}}}),
			func(c *nri.Container) bool { return len(c.Linux.Namespaces) == 0 },
		},
		{
			"sysctl", linux(&nri.LinuxContainerAdjustment{Sysctl: map[string]string{"-orig": ""}}),
			func(c *nri.Container) bool { return len(c.Linux.Sysctl) == 0 },
		},
		{
			"net device", linux(&nri.LinuxContainerAdjustment{NetDevices: map[string]*nri.LinuxNetDevice{"-orig0": {}}}),
			func(c *nri.Container) bool { return len(c.Linux.NetDevices) == 0 },
		},
		{
			"rdt", linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{Remove: true}}),
			func(c *nri.Container) bool { return c.Linux.Rdt == nil },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			// Twice by different plugins: both agree, so there is no conflict, but for
			// namespaces, whose removal is owned.
			steps := []step{{"10-a", proto.CloneOf(tt.remove)}}
			if tt.name != "namespace" {
				steps = append(steps, step{"20-b", proto.CloneOf(tt.remove)})
			}
			c, err := apply(t, steps...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.remove, c.Response().GetAdjust(), protocmp.Transform()); diff != "" {
				t.Errorf("the removal does not reach the runtime (-want +got):\n%s", diff)
			}
			if !tt.gone(c.Request().GetContainer()) {
				t.Errorf("later plugins still see it: %v", c.Request().GetContainer())
			}
		})
	}
}

// The same place is the same, however it is written.
func TestMountTargetsInOtherWords(t *testing.T) {
	t.Parallel()
	mount := func(target string) *nri.ContainerAdjustment {
		return &nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: target, Source: "/s"}}}
	}
	if _, err := apply(t, step{"10-a", mount("/x/data")}, step{"20-b", mount("/x//y/../data/")}); !errdefs.IsConflict(err) {
		t.Errorf("error is %v", err)
	}
	given := mount("-/orig/")
	c, err := apply(t, step{"10-a", given}, step{"20-b", mount("/other/.")})
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Request().GetContainer().GetMounts()) != 1 {
		t.Errorf("later plugins see %v", c.Request().GetContainer().GetMounts())
	}
	var got []string
	for _, m := range c.Response().GetAdjust().GetMounts() {
		got = append(got, m.GetDestination())
	}
	if diff := cmp.Diff([]string{"-/orig", "/other"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if given.GetMounts()[0].GetDestination() != "-/orig/" {
		t.Error("the answer was changed")
	}
}

func TestReplacingAnotherPluginsValue(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name                 string
		first, replace, want *nri.ContainerAdjustment
	}{
		{
			"annotation",
			&nri.ContainerAdjustment{Annotations: map[string]string{"k": "1"}},
			&nri.ContainerAdjustment{Annotations: map[string]string{"-k": "", "k": "2"}},
			&nri.ContainerAdjustment{Annotations: map[string]string{"k": "2"}},
		},
		{
			"mount",
			&nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "/k", Source: "1"}}},
			&nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "-/k"}, {Destination: "/k", Source: "2"}}},
			&nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "/k", Source: "2"}}},
		},
		{
			"env",
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "K", Value: "1"}}},
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "-K"}, {Key: "K", Value: "2"}}},
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "K", Value: "2"}}},
		},
		{
			"removal only",
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "K", Value: "1"}}},
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "-K"}}},
			&nri.ContainerAdjustment{Env: []*nri.KeyValue{{Key: "-K"}}},
		},
		{
			"args",
			&nri.ContainerAdjustment{Args: []string{"1"}},
			&nri.ContainerAdjustment{Args: []string{"", "2"}},
			&nri.ContainerAdjustment{Args: []string{"2"}},
		},
		{
			"rdt, all fields",
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{ClosId: nri.String("1")}}),
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{
				Remove: true, ClosId: nri.String("2"), Schemata: nri.RepeatedString([]string{"L3"}), EnableMonitoring: nri.Bool(true),
			}}),
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{
				ClosId: nri.String("2"), Schemata: nri.RepeatedString([]string{"L3"}), EnableMonitoring: nri.Bool(true),
			}}),
		},
		{
			"rdt, some fields",
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{ClosId: nri.String("1")}}),
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{Remove: true, EnableMonitoring: nri.Bool(true)}}),
			linux(&nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{Remove: true, EnableMonitoring: nri.Bool(true)}}),
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, err := apply(t, step{"10-a", tt.first}, step{"20-b", tt.replace})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, c.Response().GetAdjust(), protocmp.Transform()); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
			if _, err := apply(t, step{"10-a", tt.first}, step{"20-b", tt.replace}, step{"30-c", tt.first}); !errors.Is(err, errdefs.ErrConflict) {
				t.Errorf("third plugin sets it again: error is %v, want a conflict", err)
			}
		})
	}
}

func TestNothingAdjustedIsNoAdjustment(t *testing.T) {
	t.Parallel()
	c, err := apply(t, step{"10-a", nil}, step{"20-b", resources(&nri.LinuxResources{Memory: &nri.LinuxMemory{}})})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Response().GetAdjust(); got != nil {
		t.Errorf("adjustment is %v, want none", got)
	}
	if diff := cmp.Diff(request().Pod, c.Validation(nil).Pod, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestValidationShowsThePristineContainer(t *testing.T) {
	t.Parallel()
	c, err := apply(t, step{"10-a", fields()["env"]})
	if err != nil {
		t.Fatal(err)
	}
	v := c.Validation([]*nri.PluginInstance{{Index: "10", Name: "a"}})
	if diff := cmp.Diff(request().Container, v.Container, protocmp.Transform()); diff != "" {
		t.Errorf("container (-pristine +got):\n%s", diff)
	}
	if owner, ok := v.Owners.EnvOwner("ctr0", "K"); !ok || owner != "10-a" {
		t.Errorf("owner of K is %q", owner)
	}
	if v.GetPluginMap()["10-a"] == nil {
		t.Error("the consulted plugin is missing")
	}
}
