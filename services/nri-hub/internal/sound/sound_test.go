package sound

import (
	"strings"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
)

func linux(l *nri.LinuxContainerAdjustment) *nri.ContainerAdjustment {
	return &nri.ContainerAdjustment{Linux: l}
}

func TestAdjustment(t *testing.T) {
	t.Parallel()
	for field, a := range map[string]*nri.ContainerAdjustment{
		`mounts[1].destination: "data" is not an absolute path`: {Mounts: []*nri.Mount{{Destination: "/a"}, {Destination: "data"}}},
		`mounts[0].destination: "" is not`:                      {Mounts: []*nri.Mount{{Source: "/a"}}},
		`mounts[0].destination: "data" is not`:                  {Mounts: []*nri.Mount{{Destination: "-data"}}},
		`mounts[0].source: "/a\x00b" has a byte`:                {Mounts: []*nri.Mount{{Destination: "/a", Source: "/a\x00b"}}},
		`mounts[0].options[1]: "a\x00" has`:                     {Mounts: []*nri.Mount{{Destination: "/a", Options: []string{"ro", "a\x00"}}}},
		`env[0].key: "" is no name`:                             {Env: []*nri.KeyValue{{Value: "v"}}},
		`env[0].key: "-" is no name`:                            {Env: []*nri.KeyValue{{Key: "-"}}},
		`env[0].key: "A=B" is no name`:                          {Env: []*nri.KeyValue{{Key: "A=B"}}},
		`env[0].value: "\x00" has`:                              {Env: []*nri.KeyValue{{Key: "A", Value: "\x00"}}},
		`args[1]: "a\x00" has`:                                  {Args: []string{"", "a\x00"}},
		`args[0]: "\xff" is not valid UTF-8`:                    {Args: []string{"\xff"}},
		`annotations: "" is an empty key`:                       {Annotations: map[string]string{"": "v"}},
		`annotations["a\x00"]: "a\x00" has`:                     {Annotations: map[string]string{"a\x00": "v"}},
		`annotations["a"]: "v\x00" has`:                         {Annotations: map[string]string{"a": "v\x00"}},
		`hooks.poststop[0].path: "sh" is not`:                   {Hooks: &nri.Hooks{Poststop: []*nri.Hook{{Path: "sh"}}}},
		`hooks.prestart[0].timeout: 0 is no`:                    {Hooks: &nri.Hooks{Prestart: []*nri.Hook{{Path: "/sh", Timeout: nri.Int(0)}}}},
		`rlimits[0].type: "" is no`:                             {Rlimits: []*nri.POSIXRlimit{{}}},
		`rlimits[0].soft: 3 is above`:                           {Rlimits: []*nri.POSIXRlimit{{Type: "RLIMIT_CORE", Hard: 2, Soft: 3}}},
		`CDI_devices[0].name: "" is no`:                         {CDIDevices: []*nri.CDIDevice{{}}},
		`linux.devices[0].path: "dev" is not`:                   linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "dev", Type: "c"}}}),
		`linux.devices[0].type: "x" is no`:                      linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "/dev/x", Type: "x"}}}),
		`linux.devices[0].major: -1 is`:                         linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "/dev/x", Type: "c", Major: -1}}}),
		`linux.devices[0].minor: -1 is`:                         linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "/dev/x", Type: "c", Minor: -1}}}),
		`linux.namespaces[0].type: "" is no`:                    linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Path: "/x"}}}),
		`linux.namespaces[0].path: "x" is not`:                  linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Type: "network", Path: "x"}}}),
		`linux.sysctl: "-" is an empty`:                         linux(&nri.LinuxContainerAdjustment{Sysctl: map[string]string{"-": ""}}),
		`linux.net_devices: "" is an empty`:                     linux(&nri.LinuxContainerAdjustment{NetDevices: map[string]*nri.LinuxNetDevice{"": {}}}),
		`linux.oom_score_adj: 1001 is`:                          linux(&nri.LinuxContainerAdjustment{OomScoreAdj: nri.Int(1001)}),
		`linux.io_priority.priority: 8 is`:                      linux(&nri.LinuxContainerAdjustment{IoPriority: &nri.LinuxIOPriority{Priority: 8}}),
		`linux.cgroups_path: "a\x00" has`:                       linux(&nri.LinuxContainerAdjustment{CgroupsPath: "a\x00"}),
		`linux.resources.memory.limit: -2 is`:                   linux(&nri.LinuxContainerAdjustment{Resources: &nri.LinuxResources{Memory: &nri.LinuxMemory{Limit: nri.Int64(-2)}}}),
		`linux.resources.pids.limit: -2 is`:                     linux(&nri.LinuxContainerAdjustment{Resources: &nri.LinuxResources{Pids: &nri.LinuxPids{Limit: -2}}}),
	} {
		if err := Adjustment(a); err == nil || !strings.HasPrefix(err.Error(), field) {
			t.Errorf("error is %v, want %q", err, field)
		}
	}
}

// What is odd but can be is let through.
func TestWhatCanBe(t *testing.T) {
	t.Parallel()
	good := &nri.ContainerAdjustment{
		Annotations: map[string]string{"-gone": "", "empty": ""},
		Args:        []string{"", "sh"},
		Mounts:      []*nri.Mount{{Destination: "-/gone"}, {Destination: "/a"}, {Destination: "/a", Type: "tmpfs"}},
		Env:         []*nri.KeyValue{{Key: "-GONE"}, {Key: "EMPTY"}, {Key: "ünder.score"}, {Key: "A", Value: "a=b\n"}},
		Hooks:       &nri.Hooks{Prestart: []*nri.Hook{{Path: "/sh", Timeout: nri.Int(1)}, {Path: "/sh"}}},
		Rlimits:     []*nri.POSIXRlimit{{Type: "RLIMIT_CORE"}},
		Linux: &nri.LinuxContainerAdjustment{
			Devices:    []*nri.LinuxDevice{{Path: "-/dev/x"}, {Path: "/dev/y", Type: "c", Major: 1, Minor: 3}},
			Namespaces: []*nri.LinuxNamespace{{Type: "-network"}, {Type: "ipc"}},
			Resources: &nri.LinuxResources{
				Memory: &nri.LinuxMemory{Limit: nri.Int64(-1)}, Cpu: &nri.LinuxCPU{Quota: nri.Int64(-1)}, Pids: &nri.LinuxPids{Limit: -1},
			},
		},
	}
	for _, a := range []*nri.ContainerAdjustment{nil, {}, good} {
		if err := Adjustment(a); err != nil {
			t.Error(err)
		}
	}
	if err := Answer(good, []*nri.ContainerUpdate{{ContainerId: "c", Linux: &nri.LinuxContainerUpdate{Resources: good.Linux.Resources}}},
		[]*nri.ContainerEviction{{ContainerId: "c", Reason: "why"}}); err != nil {
		t.Error(err)
	}
}

func TestAnswerNamesThePart(t *testing.T) {
	t.Parallel()
	ok := &nri.ContainerUpdate{ContainerId: "c"}
	for want, err := range map[string]error{
		`adjust.env[0].key: "" is`:                Answer(&nri.ContainerAdjustment{Env: []*nri.KeyValue{{}}}, nil, nil),
		`update[1].container_id: "" is no id`:     Answer(nil, []*nri.ContainerUpdate{ok, {}}, nil),
		`update[0].container_id: "x`:              Answer(nil, []*nri.ContainerUpdate{{ContainerId: strings.Repeat("x", 1<<20)}}, nil),
		`evict[0].container_id: "" is no id`:      Answer(nil, nil, []*nri.ContainerEviction{{Reason: "r"}}),
		`evict[0].reason: "\x00" has a byte`:      Answer(nil, nil, []*nri.ContainerEviction{{ContainerId: "c", Reason: "\x00"}}),
		`update[0].linux.resources.cpu.quota: -2`: Answer(nil, []*nri.ContainerUpdate{{ContainerId: "c", Linux: &nri.LinuxContainerUpdate{Resources: &nri.LinuxResources{Cpu: &nri.LinuxCPU{Quota: nri.Int64(-2)}}}}}, nil),
		`update[0].linux.resources.memory.limit: -3`: Answer(nil, []*nri.ContainerUpdate{{ContainerId: "c", Linux: &nri.LinuxContainerUpdate{Resources: &nri.LinuxResources{
			Memory: &nri.LinuxMemory{Limit: nri.Int64(-3), Swap: nri.Int64(-2)}, Cpu: &nri.LinuxCPU{Quota: nri.Int64(-2)},
		}}}}, nil),
		`update[0].linux.resources.unified["a"]:`: Answer(nil, []*nri.ContainerUpdate{{ContainerId: "c", Linux: &nri.LinuxContainerUpdate{Resources: &nri.LinuxResources{Unified: map[string]string{"a": "\x00"}}}}}, nil),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error is %.200v, want %q", err, want)
		} else if len(err.Error()) > 1000 {
			t.Errorf("error of %d bytes", len(err.Error()))
		}
	}
}
