// Package stats reads what containers and pods use: processor, memory, swap and process
// counts from their cgroups (both versions), pressure where the kernel has it, and traffic
// from their network namespaces.
//
// A cgroup or namespace that is gone, which happens any time, reads as zero and is no error.
// All methods may be called concurrently. The package does not know containers and keeps
// nothing but the last processor reading of each cgroup, to tell the present rate.
package stats

import (
	"cmp"
	"path"
	"slices"
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// Reader reads resource use.
type Reader struct {
	root    string
	proc    string
	unified bool
	rates   rates
}

// New returns a reader of the cgroups below root, usually /sys/fs/cgroup. unified says that
// it is cgroup v2.
func New(root string, unified bool) *Reader {
	return &Reader{root: root, proc: "/proc", unified: unified}
}

// Container returns the use of a container. cgroupsPath is what its OCI specification has; of a
// container without a cgroup nothing is known but its layer. layer is the use of its writable
// layer, which may be nil.
func (r *Reader) Container(attributes *criv1.ContainerAttributes, cgroupsPath string, layer *criv1.FilesystemUsage) *criv1.ContainerStats {
	if cgroupsPath == "" {
		return &criv1.ContainerStats{Attributes: attributes, WritableLayer: layer}
	}
	u := r.read(Path(cgroupsPath))
	return &criv1.ContainerStats{
		Attributes: attributes, Cpu: u.cpu, Memory: u.memory, Swap: u.swap, Io: u.io, WritableLayer: layer,
	}
}

// Pod returns the use of a pod: of its own cgroup, which CRI calls the parent of its
// containers, and of its network namespace if it has one of its own. Without a cgroup it is
// the sum over the groups of its containers that run. containers are their stats.
func (r *Reader) Pod(
	cgroupParent, netnsPath string, groups []string, containers []*criv1.ContainerStats,
) *criv1.LinuxPodSandboxStats {
	group := ParentPath(cgroupParent)
	out := &criv1.LinuxPodSandboxStats{Containers: containers}
	switch {
	case r.exists(group):
		r.read(group).describe(out)
	case !slices.Contains(groups, ""): // else they have none
		r.usage(strings.Join(groups, " "), r.sum(groups)).describe(out)
	}
	if netnsPath != "" {
		out.Network = r.network(netnsPath)
	}
	return out
}

// describe writes the use into the stats of a pod.
func (u usage) describe(to *criv1.LinuxPodSandboxStats) {
	to.Cpu, to.Memory, to.Io = u.cpu, u.memory, u.io
	to.Process = &criv1.ProcessUsage{Timestamp: u.cpu.GetTimestamp(), ProcessCount: value(u.tasks)}
}

// sum adds up what groups use. Limits and pressure have no sum.
func (r *Reader) sum(groups []string) podmetrics.Figures {
	var all podmetrics.Figures
	for _, g := range groups {
		f := r.basics(Path(g))
		all.CPU += f.CPU
		all.Memory += f.Memory
		all.InactiveFile += f.InactiveFile
		all.RSS += f.RSS
		all.Hierarchy.Minor += f.Hierarchy.Minor
		all.Hierarchy.Major += f.Hierarchy.Major
		all.Tasks += f.Tasks
	}
	return all
}

// OOMKills returns how many processes of a cgroup the kernel killed for lack of memory.
func (r *Reader) OOMKills(cgroupsPath string) uint64 {
	if cgroupsPath == "" {
		return 0
	}
	group := Path(cgroupsPath)
	if r.unified {
		return r.keyed("", group, "memory.events")["oom_kill"]
	}
	return r.keyed("memory", group, "memory.oom_control")["oom_kill"]
}

// Sets returns the processors and the memory nodes that a cgroup may use, as lists in the
// kernel's form; empty if it is gone or has no such limits.
func (r *Reader) Sets(cgroupsPath string) (cpus, mems string) {
	if cgroupsPath == "" {
		return "", ""
	}
	group := Path(cgroupsPath)
	if !r.unified {
		return r.text("cpuset", group, "cpuset.cpus"), r.text("cpuset", group, "cpuset.mems")
	}
	of := func(file string) string {
		// An empty set is the parent's.
		return cmp.Or(r.text("", group, file), r.text("", group, file+".effective"))
	}
	return of("cpuset.cpus"), of("cpuset.mems")
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
