package sequence

import (
	"maps"

	nri "github.com/containerd/nri/pkg/api"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// nriResources says the same in NRI's terms. CRI writes "unchanged" as zero, NRI as absent.
func nriResources(r *criv1.LinuxContainerResources) *nri.LinuxResources {
	if r == nil {
		return nil
	}
	out := &nri.LinuxResources{
		Memory:  &nri.LinuxMemory{},
		Cpu:     &nri.LinuxCPU{Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems()},
		Unified: maps.Clone(r.GetUnified()),
	}
	if v := r.GetCpuShares(); v != 0 {
		out.Cpu.Shares = nri.UInt64(uint64(v))
	}
	if v := r.GetCpuQuota(); v != 0 {
		out.Cpu.Quota = nri.Int64(v)
	}
	if v := r.GetCpuPeriod(); v != 0 {
		out.Cpu.Period = nri.UInt64(uint64(v))
	}
	if v := r.GetMemoryLimitInBytes(); v != 0 {
		out.Memory.Limit = nri.Int64(v)
	}
	if v := r.GetMemorySwapLimitInBytes(); v != 0 {
		out.Memory.Swap = nri.Int64(v)
	}
	for _, l := range r.GetHugepageLimits() {
		out.HugepageLimits = append(out.HugepageLimits, &nri.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return out
}
