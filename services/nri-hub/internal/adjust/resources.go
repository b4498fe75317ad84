package adjust

import (
	nri "github.com/containerd/nri/pkg/api"
)

// resources merges cgroup resources into one or two targets. The leaf values of a are
// shared with the targets; nobody changes them in place.
func (m *merge) resources(a *nri.LinuxResources, targets ...*nri.LinuxResources) error {
	if err := m.memory(a.GetMemory(), targets); err != nil {
		return err
	}
	if err := m.cpu(a.GetCpu(), targets); err != nil {
		return err
	}
	for _, l := range a.GetHugepageLimits() {
		if err := m.ownEntry(nri.Field_HugepageLimits, l.GetPageSize()); err != nil {
			return err
		}
		for _, t := range targets {
			t.HugepageLimits = replaceLimit(t.HugepageLimits, l)
		}
	}
	if err := m.unified(a.GetUnified(), targets); err != nil {
		return err
	}
	for _, t := range targets {
		err := run([]func() error{
			func() error { return set(m, nri.Field_BlockioClass, a.GetBlockioClass(), &t.BlockioClass) },
			func() error { return set(m, nri.Field_RdtClass, a.GetRdtClass(), &t.RdtClass) },
			func() error { return set(m, nri.Field_PidsLimit, a.GetPids(), &t.Pids) },
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *merge) memory(a *nri.LinuxMemory, targets []*nri.LinuxResources) error {
	if a == nil {
		return nil
	}
	for _, r := range targets {
		if r.Memory == nil {
			r.Memory = &nri.LinuxMemory{}
		}
		t := r.Memory
		err := run([]func() error{
			func() error { return set(m, nri.Field_MemLimit, a.Limit, &t.Limit) },
			func() error { return set(m, nri.Field_MemReservation, a.Reservation, &t.Reservation) },
			func() error { return set(m, nri.Field_MemSwapLimit, a.Swap, &t.Swap) },
			func() error { return set(m, nri.Field_MemKernelLimit, a.Kernel, &t.Kernel) },
			func() error { return set(m, nri.Field_MemTCPLimit, a.KernelTcp, &t.KernelTcp) },
			func() error { return set(m, nri.Field_MemSwappiness, a.Swappiness, &t.Swappiness) },
			func() error { return set(m, nri.Field_MemDisableOomKiller, a.DisableOomKiller, &t.DisableOomKiller) },
			func() error { return set(m, nri.Field_MemUseHierarchy, a.UseHierarchy, &t.UseHierarchy) },
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *merge) cpu(a *nri.LinuxCPU, targets []*nri.LinuxResources) error {
	if a == nil {
		return nil
	}
	for _, r := range targets {
		if r.Cpu == nil {
			r.Cpu = &nri.LinuxCPU{}
		}
		t := r.Cpu
		err := run([]func() error{
			func() error { return set(m, nri.Field_CPUShares, a.Shares, &t.Shares) },
			func() error { return set(m, nri.Field_CPUQuota, a.Quota, &t.Quota) },
			func() error { return set(m, nri.Field_CPUPeriod, a.Period, &t.Period) },
			func() error { return set(m, nri.Field_CPURealtimeRuntime, a.RealtimeRuntime, &t.RealtimeRuntime) },
			func() error { return set(m, nri.Field_CPURealtimePeriod, a.RealtimePeriod, &t.RealtimePeriod) },
			func() error { return setString(m, nri.Field_CPUSetCPUs, a.Cpus, &t.Cpus) },
			func() error { return setString(m, nri.Field_CPUSetMems, a.Mems, &t.Mems) },
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *merge) unified(items map[string]string, targets []*nri.LinuxResources) error {
	for k, v := range items {
		if err := m.ownEntry(nri.Field_CgroupsUnified, k); err != nil {
			return err
		}
		for _, t := range targets {
			ensure(&t.Unified)
			t.Unified[k] = v
		}
	}
	return nil
}

// replaceLimit sets the limit of one page size; a size is never there twice.
func replaceLimit(limits []*nri.HugepageLimit, l *nri.HugepageLimit) []*nri.HugepageLimit {
	for i := range limits {
		if limits[i].GetPageSize() == l.GetPageSize() {
			limits[i] = l
			return limits
		}
	}
	return append(limits, l)
}
