// Package resource turns what containers may use between the forms of CRI, NRI and OCI, and
// merges changes. It is pure.
package resource

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// CgroupsPath returns the cgroup of a container as an OCI specification has it. parent is
// the pod's cgroup in CRI's form, which is a path for both drivers.
func CgroupsPath(parent, id string, systemd bool) string {
	if !systemd {
		if parent == "" {
			parent = host.DefaultParent
		}
		return path.Join("/", parent, id)
	}
	slice := "system.slice"
	if parent != "" {
		slice = path.Base(parent)
	}
	return slice + ":crisp:" + id
}

// FromCRI returns CRI resources in OCI's form; a zero field is left out. A memory
// limit limits swap to the same, so that containers do not swap unless asked to, where the
// host can limit swap. Limits of huge pages are left out where the host cannot set them,
// because kubelet sends them always. Errors: ErrInvalidArgument for negative values,
// ErrFailedPrecondition for unified values without cgroup v2.
func FromCRI(r *criv1.LinuxContainerResources, on host.Facts) (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{}
	if r == nil {
		return out, nil
	}
	if r.GetCpuPeriod() < 0 || r.GetCpuShares() < 0 {
		return nil, fmt.Errorf("negative cpu period or shares: %w", errdefs.ErrInvalidArgument)
	}
	if len(r.GetUnified()) > 0 && !on.CgroupV2 {
		return nil, fmt.Errorf("unified resources need cgroup v2: %w", errdefs.ErrFailedPrecondition)
	}
	out.CPU = &specs.LinuxCPU{
		Shares: set(unsigned(r.GetCpuShares())),
		Quota:  set(r.GetCpuQuota()),
		Period: set(unsigned(r.GetCpuPeriod())),
		Cpus:   r.GetCpusetCpus(),
		Mems:   r.GetCpusetMems(),
	}
	out.Memory = &specs.LinuxMemory{Limit: set(r.GetMemoryLimitInBytes())}
	if on.Swap {
		out.Memory.Swap = set(swapLimit(r.GetMemoryLimitInBytes(), r.GetMemorySwapLimitInBytes()))
	}
	if on.Hugetlb {
		for _, l := range r.GetHugepageLimits() {
			out.HugepageLimits = append(out.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: l.GetPageSize(), Limit: l.GetLimit()})
		}
	}
	out.Unified = maps.Clone(r.GetUnified())
	return tidy(out), nil
}

// swapLimit returns the limit of memory and swap together. It is never below the limit of
// memory, which the kernel refuses; -1 is no limit.
func swapLimit(memory, swap int64) int64 {
	if swap < 0 {
		return swap
	}
	return max(swap, memory)
}

// FromNRI returns an NRI plugin's resources in OCI's form; what the plugin does
// not set is left out. Block I/O and RDT classes have no place in it: the one is values that
// who adjusts a container looks up, the other is outside of the resources. Errors: as [FromCRI].
func FromNRI(r *nri.LinuxResources, on host.Facts) (*specs.LinuxResources, error) {
	if r == nil {
		return &specs.LinuxResources{}, nil
	}
	if len(r.GetUnified()) > 0 && !on.CgroupV2 {
		return nil, fmt.Errorf("unified resources need cgroup v2: %w", errdefs.ErrFailedPrecondition)
	}
	if len(r.GetHugepageLimits()) > 0 && !on.Hugetlb {
		return nil, fmt.Errorf("huge page limits need the hugetlb controller: %w", errdefs.ErrFailedPrecondition)
	}
	out := r.ToOCI()
	if out.Pids != nil && out.Pids.Limit == nil {
		out.Pids.Limit = new(int64(nri.UnlimitedPidsLimit))
	}
	if limit := out.Memory.Limit; limit != nil && *limit == 0 {
		out.Memory.Limit = nil // zero is how plugins leave it alone
	}
	if on.Swap && out.Memory.Limit != nil && out.Memory.Swap == nil {
		out.Memory.Swap = new(*out.Memory.Limit)
	}
	return tidy(out), nil
}

// UpdateFromNRI is [FromNRI] for a container that is there already. Its classes
// are fixed: OCI runtimes have no way to change them. Errors: ErrFailedPrecondition for a class.
func UpdateFromNRI(r *nri.LinuxResources, on host.Facts) (*specs.LinuxResources, error) {
	if r.GetBlockioClass() != nil || r.GetRdtClass() != nil {
		return nil, fmt.Errorf("block I/O class %q, RDT class %q: a class can only be chosen when the container is created: %w",
			r.GetBlockioClass().GetValue(), r.GetRdtClass().GetValue(), errdefs.ErrFailedPrecondition)
	}
	return FromNRI(r, on)
}

// Merge sets in dst every value that src has. Device rules are added.
func Merge(dst, src *specs.LinuxResources) {
	if src == nil {
		return
	}
	if c := src.CPU; c != nil {
		if dst.CPU == nil {
			dst.CPU = &specs.LinuxCPU{}
		}
		pick(&dst.CPU.Shares, c.Shares)
		pick(&dst.CPU.Quota, c.Quota)
		pick(&dst.CPU.Period, c.Period)
		pick(&dst.CPU.Burst, c.Burst)
		pick(&dst.CPU.RealtimeRuntime, c.RealtimeRuntime)
		pick(&dst.CPU.RealtimePeriod, c.RealtimePeriod)
		pick(&dst.CPU.Idle, c.Idle)
		dst.CPU.Cpus = cmp.Or(c.Cpus, dst.CPU.Cpus)
		dst.CPU.Mems = cmp.Or(c.Mems, dst.CPU.Mems)
	}
	if m := src.Memory; m != nil {
		if dst.Memory == nil {
			dst.Memory = &specs.LinuxMemory{}
		}
		mergeMemory(dst.Memory, m)
	}
	if src.Pids != nil {
		dst.Pids = src.Pids
	}
	for _, l := range src.HugepageLimits {
		i := slices.IndexFunc(dst.HugepageLimits, func(h specs.LinuxHugepageLimit) bool { return h.Pagesize == l.Pagesize })
		if i < 0 {
			dst.HugepageLimits = append(dst.HugepageLimits, l)
		} else {
			dst.HugepageLimits[i] = l
		}
	}
	if len(src.Unified) > 0 && dst.Unified == nil {
		dst.Unified = make(map[string]string, len(src.Unified))
	}
	maps.Copy(dst.Unified, src.Unified)
	dst.Devices = append(dst.Devices, src.Devices...)
}

// Checked returns a change that lowers no memory limit below what is in use: a unified
// hierarchy would kill the container for it, where the older one refuses by itself.
func Checked(change *specs.LinuxResources, on host.Facts) *specs.LinuxResources {
	if !on.CgroupV2 || change.Memory == nil || change.Memory.Limit == nil {
		return change
	}
	out, memory := *change, *change.Memory
	memory.CheckBeforeUpdate = new(true)
	out.Memory = &memory
	return &out
}

// Restoring returns what takes a change back in a cgroup that had the resources before. What
// had no value before gets the one that stands for no limit, or the kernel's default. A set of
// processors or memory nodes has none, it is left to the caller, who can look at the cgroup; keys
// of the unified hierarchy that are not known here stay.
func Restoring(before, change *specs.LinuxResources) *specs.LinuxResources {
	if before == nil {
		before = &specs.LinuxResources{}
	}
	out := &specs.LinuxResources{}
	if c := change.CPU; c != nil {
		old := orEmpty(before.CPU)
		out.CPU = &specs.LinuxCPU{
			Shares: earlier(c.Shares, old.Shares, 1024), Quota: earlier(c.Quota, old.Quota, -1), Period: earlier(c.Period, old.Period, 100_000),
			Burst: earlier(c.Burst, old.Burst, 0), Idle: earlier(c.Idle, old.Idle, 0),
			RealtimeRuntime: old.RealtimeRuntime, RealtimePeriod: old.RealtimePeriod,
			Cpus: old.Cpus, Mems: old.Mems,
		}
	}
	if m := change.Memory; m != nil {
		old := orEmpty(before.Memory)
		out.Memory = &specs.LinuxMemory{
			Limit: earlier(m.Limit, old.Limit, -1), Swap: earlier(m.Swap, old.Swap, -1), Reservation: old.Reservation, Swappiness: old.Swappiness,
		}
	}
	if p := change.Pids; p != nil {
		out.Pids = &specs.LinuxPids{Limit: earlier(p.Limit, orEmpty(before.Pids).Limit, nri.UnlimitedPidsLimit)}
	}
	for key := range change.Unified {
		value, known := before.Unified[key]
		if !known {
			value, known = unlimited()[key]
		}
		if known {
			if out.Unified == nil {
				out.Unified = make(map[string]string, len(change.Unified))
			}
			out.Unified[key] = value
		}
	}
	return tidy(out)
}

// unlimited are the kernel's defaults of the files in a unified hierarchy.
func unlimited() map[string]string {
	return map[string]string{
		"memory.min": "0", "memory.low": "0", "memory.high": "max", "memory.max": "max", "memory.swap.max": "max",
		"memory.swap.high": "max", "memory.zswap.max": "max", "memory.oom.group": "0",
		"cpu.weight": "100", "cpu.max": "max 100000", "cpu.idle": "0", "pids.max": "max",
	}
}

// earlier is the value before a change, or the neutral one; nil for what does not change.
func earlier[T any](changed, before *T, neutral T) *T {
	if changed == nil || before != nil {
		return before
	}
	return &neutral
}

func orEmpty[T any](v *T) *T {
	if v == nil {
		return new(T)
	}
	return v
}

func mergeMemory(dst, src *specs.LinuxMemory) {
	pick(&dst.Limit, src.Limit)
	pick(&dst.Reservation, src.Reservation)
	pick(&dst.Swap, src.Swap)
	pick(&dst.Kernel, src.Kernel) //nolint:staticcheck // plugins may still set it
	pick(&dst.KernelTCP, src.KernelTCP)
	pick(&dst.Swappiness, src.Swappiness)
	pick(&dst.DisableOOMKiller, src.DisableOOMKiller)
	pick(&dst.UseHierarchy, src.UseHierarchy)
	pick(&dst.CheckBeforeUpdate, src.CheckBeforeUpdate)
}

// MergeCRI returns old with every value of update set that is not zero.
func MergeCRI(old, update *criv1.LinuxContainerResources) *criv1.LinuxContainerResources {
	out := &criv1.LinuxContainerResources{}
	if old != nil {
		out = proto.CloneOf(old)
	}
	if update == nil {
		return out
	}
	hugepages := out.GetHugepageLimits()
	// Merge leaves alone what is zero in the update, but appends to lists.
	proto.Merge(out, update)
	out.HugepageLimits = hugepages
	for _, l := range update.GetHugepageLimits() {
		i := slices.IndexFunc(out.GetHugepageLimits(), func(h *criv1.HugepageLimit) bool { return h.GetPageSize() == l.GetPageSize() })
		if i < 0 {
			out.HugepageLimits = append(out.HugepageLimits, proto.CloneOf(l))
		} else {
			out.HugepageLimits[i] = proto.CloneOf(l)
		}
	}
	return out
}

// NRIToCRI returns what of an NRI plugin's resources CRI can express; the rest is
// zero. Together with [MergeCRI] it keeps the status of a container true. A swap limit
// that is no more than what the memory limit alone gives is left out, so that it follows
// later changes of the memory limit.
func NRIToCRI(r *nri.LinuxResources) *criv1.LinuxContainerResources {
	out := &criv1.LinuxContainerResources{
		CpuPeriod:              signed(r.GetCpu().GetPeriod().GetValue()),
		CpuQuota:               r.GetCpu().GetQuota().GetValue(),
		CpuShares:              signed(r.GetCpu().GetShares().GetValue()),
		CpusetCpus:             r.GetCpu().GetCpus(),
		CpusetMems:             r.GetCpu().GetMems(),
		MemoryLimitInBytes:     r.GetMemory().GetLimit().GetValue(),
		MemorySwapLimitInBytes: r.GetMemory().GetSwap().GetValue(),
		Unified:                maps.Clone(r.GetUnified()),
	}
	if out.GetMemorySwapLimitInBytes() == out.GetMemoryLimitInBytes() {
		out.MemorySwapLimitInBytes = 0
	}
	for _, l := range r.GetHugepageLimits() {
		out.HugepageLimits = append(out.HugepageLimits, &criv1.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return out
}

// CRIToNRI returns CRI resources in NRI's form; nil stays nil.
func CRIToNRI(r *criv1.LinuxContainerResources) *nri.LinuxResources {
	if r == nil {
		return nil
	}
	out := &nri.LinuxResources{
		Cpu: &nri.LinuxCPU{
			Shares: nri.UInt64(set(unsigned(r.GetCpuShares()))),
			Quota:  nri.Int64(set(r.GetCpuQuota())),
			Period: nri.UInt64(set(unsigned(r.GetCpuPeriod()))),
			Cpus:   r.GetCpusetCpus(),
			Mems:   r.GetCpusetMems(),
		},
		Memory: &nri.LinuxMemory{
			Limit: nri.Int64(set(r.GetMemoryLimitInBytes())),
			Swap:  nri.Int64(set(r.GetMemorySwapLimitInBytes())),
		},
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, l := range r.GetHugepageLimits() {
		out.HugepageLimits = append(out.HugepageLimits, &nri.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return out
}

// tidy takes empty parts out.
func tidy(r *specs.LinuxResources) *specs.LinuxResources {
	if r.CPU != nil && *r.CPU == (specs.LinuxCPU{}) {
		r.CPU = nil
	}
	if r.Memory != nil && *r.Memory == (specs.LinuxMemory{}) {
		r.Memory = nil
	}
	return r
}

// set returns a pointer to a value, nil for zero.
func set[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// unsigned and signed convert between the forms in which CRI and OCI count the same thing;
// what does not fit becomes the nearest value that does.
func unsigned(v int64) uint64 { return uint64(max(0, v)) }

func signed(v uint64) int64 { return int64(min(v, math.MaxInt64)) }

// pick replaces a value by one that is there.
func pick[T any](dst **T, src *T) {
	if src != nil {
		*dst = src
	}
}
