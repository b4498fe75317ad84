// Package stats reads what containers and pods use: processor, memory, swap and process
// counts from their cgroups (both versions), pressure where the kernel has it, and traffic
// from their network namespaces.
//
// A cgroup or namespace that is gone, which happens any time, reads as zero and is no error.
// All methods may be called concurrently. The package does not know containers and keeps
// nothing but the last processor reading of each cgroup, to tell the present rate.
package stats

import (
	"path"
	"strings"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Reader reads resource use.
type Reader struct {
	root    string
	unified bool
	rates   rates
}

// New returns a reader of the cgroups below root, usually /sys/fs/cgroup. unified says that
// it is cgroup v2.
func New(root string, unified bool) *Reader {
	return &Reader{root: root, unified: unified}
}

// Container returns the use of a container. cgroupsPath is what its OCI specification has;
// layer is the use of its writable layer, which may be nil.
func (r *Reader) Container(attributes *criv1.ContainerAttributes, cgroupsPath string, layer *criv1.FilesystemUsage) *criv1.ContainerStats {
	u := r.read(Path(cgroupsPath))
	return &criv1.ContainerStats{
		Attributes: attributes, Cpu: u.cpu, Memory: u.memory, Swap: u.swap, Io: u.io, WritableLayer: layer,
	}
}

// Pod returns the use of a pod: of its cgroup, which CRI calls its parent, and of its
// network namespace; an empty path means that it has none of its own.
func (r *Reader) Pod(cgroupParent, netnsPath string, containers []*criv1.ContainerStats) *criv1.LinuxPodSandboxStats {
	out := &criv1.LinuxPodSandboxStats{Containers: containers}
	if cgroupParent == "" {
		// The pod has no cgroup: what it uses is what its containers use.
		sum(out, containers)
	} else {
		u := r.read(path.Join("/", cgroupParent))
		out.Cpu, out.Memory, out.Io = u.cpu, u.memory, u.io
		out.Process = &criv1.ProcessUsage{Timestamp: u.cpu.GetTimestamp(), ProcessCount: value(u.processes)}
	}
	if netnsPath != "" {
		out.Network = network(netnsPath)
	}
	return out
}

func sum(out *criv1.LinuxPodSandboxStats, containers []*criv1.ContainerStats) {
	now := time.Now().UnixNano()
	var cpu, workingSet, usage uint64
	for _, c := range containers {
		cpu += c.GetCpu().GetUsageCoreNanoSeconds().GetValue()
		workingSet += c.GetMemory().GetWorkingSetBytes().GetValue()
		usage += c.GetMemory().GetUsageBytes().GetValue()
	}
	out.Cpu = &criv1.CpuUsage{Timestamp: now, UsageCoreNanoSeconds: value(cpu)}
	out.Memory = &criv1.MemoryUsage{Timestamp: now, WorkingSetBytes: value(workingSet), UsageBytes: value(usage)}
}

// OOMKills returns how many processes of a cgroup the kernel killed for lack of memory.
func (r *Reader) OOMKills(cgroupsPath string) uint64 {
	group := Path(cgroupsPath)
	if r.unified {
		return r.keyed("", group, "memory.events")["oom_kill"]
	}
	return r.keyed("memory", group, "memory.oom_control")["oom_kill"]
}

// Path returns the folder of a cgroup, below the root of its hierarchy, from what an OCI
// specification has: a path, or "slice:prefix:name" for systemd.
func Path(cgroupsPath string) string {
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return path.Join("/", cgroupsPath)
	}
	unit := parts[2]
	if !strings.HasSuffix(unit, ".slice") {
		unit = parts[1] + "-" + unit + ".scope"
	}
	return path.Join("/", slice(parts[0]), unit)
}

// slice returns the folder of a systemd slice: "a-b.slice" lies in "a.slice".
func slice(name string) string {
	base, ok := strings.CutSuffix(name, ".slice")
	if !ok || base == "-" || base == "" {
		return ""
	}
	var folder, prefix string
	for part := range strings.SplitSeq(base, "-") {
		prefix += part
		folder = path.Join(folder, prefix+".slice")
		prefix += "-"
	}
	return folder
}

func value(v uint64) *criv1.UInt64Value { return &criv1.UInt64Value{Value: v} }

// rest returns what is left of a limit.
func rest(limit, used uint64) uint64 {
	if used >= limit {
		return 0
	}
	return limit - used
}
