package podmetrics

import (
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func processor() []metric {
	return []metric{
		{
			name: "container_cpu_usage_seconds_total", help: "Processor time used, in seconds.",
			kind: criv1.MetricType_COUNTER, labels: []string{"cpu"}, points: allProcessors,
		},
		counter("container_cpu_user_seconds_total", "Processor time used in user mode, in seconds.",
			func(f *Figures) uint64 { return seconds(f.User) }),
		counter("container_cpu_system_seconds_total", "Processor time used in the kernel, in seconds.",
			func(f *Figures) uint64 { return seconds(f.System) }),
		limited(counter("container_cpu_cfs_periods_total", "Periods of the scheduler's quota that have elapsed.",
			func(f *Figures) uint64 { return f.Periods })),
		limited(counter("container_cpu_cfs_throttled_periods_total", "Periods in which the quota was used up.",
			func(f *Figures) uint64 { return f.Throttled })),
		limited(counter("container_cpu_cfs_throttled_seconds_total", "Time for which the quota held processes back, in seconds.",
			func(f *Figures) uint64 { return seconds(f.ThrottledTime) })),
		limited(counter("container_cpu_cfs_burst_periods_total", "Periods in which more than the quota was used.",
			func(f *Figures) uint64 { return f.Bursts })),
		limited(counter("container_cpu_cfs_burst_seconds_total", "Time used beyond the quota, in seconds.",
			func(f *Figures) uint64 { return seconds(f.BurstTime) })),
	}
}

// allProcessors is the time used of all processors together. kubelet's own reading says so
// in a label, since it may know each of them.
func allProcessors(s Sample) []point {
	if s.Cgroup == nil {
		return nil
	}
	return []point{{labels: []string{"total"}, value: seconds(s.Cgroup.CPU)}}
}

// limited keeps a line of the table to groups that have a quota.
func limited(m metric) metric {
	all := m.points
	m.points = func(s Sample) []point {
		if s.Cgroup == nil || s.Cgroup.Quota == 0 {
			return nil // no quota is no value
		}
		return all(s)
	}
	return m
}

func memory() []metric {
	return append(memorySizes(),
		counter("container_memory_failcnt", "Times that memory use met its limit.",
			func(f *Figures) uint64 { return f.MemoryFailures }),
		counter("container_oom_events_total", "Processes killed for lack of memory.",
			func(f *Figures) uint64 { return f.OOMKills }),
		metric{
			name: "container_memory_failures_total", help: "Page faults, by kind and by whether child groups count.",
			kind: criv1.MetricType_COUNTER, labels: []string{"failure_type", "scope"}, points: faults,
		},
		metric{
			name: "container_hugetlb_usage_bytes", help: "Huge pages in use, in bytes.",
			kind: criv1.MetricType_GAUGE, labels: []string{"pagesize"},
			points: hugePages(func(h HugePages) (uint64, bool) { return h.Usage, true }),
		},
		metric{
			name: "container_hugetlb_max_usage_bytes", help: "Most huge pages that were in use at a time, in bytes.",
			kind: criv1.MetricType_GAUGE, labels: []string{"pagesize"},
			points: hugePages(func(h HugePages) (uint64, bool) { return h.Max, h.MaxKnown }),
		})
}

func memorySizes() []metric {
	return []metric{
		gauge("container_memory_usage_bytes", "Memory in use, caches included, in bytes.",
			func(f *Figures) uint64 { return f.Memory }),
		gauge("container_memory_working_set_bytes", "Memory in use without file caches that can be dropped, in bytes.",
			func(f *Figures) uint64 { return f.WorkingSet() }),
		gauge("container_memory_max_usage_bytes", "Most memory that was in use at a time, in bytes.",
			func(f *Figures) uint64 { return f.MaxMemory }),
		gauge("container_memory_rss", "Anonymous memory, in bytes.",
			func(f *Figures) uint64 { return f.RSS }),
		gauge("container_memory_cache", "Memory of the page cache, in bytes.",
			func(f *Figures) uint64 { return f.Cache }),
		gauge("container_memory_mapped_file", "Memory of mapped files, in bytes.",
			func(f *Figures) uint64 { return f.MappedFile }),
		gauge("container_memory_kernel_usage", "Memory that the kernel holds for the group, in bytes.",
			func(f *Figures) uint64 { return f.Kernel }),
		gauge("container_memory_swap", "Swap in use, in bytes.",
			func(f *Figures) uint64 { return f.Swap }),
		gauge("container_memory_total_active_file_bytes", "File caches in active use, in bytes.",
			func(f *Figures) uint64 { return f.ActiveFile }),
		gauge("container_memory_total_inactive_file_bytes", "File caches that can be dropped, in bytes.",
			func(f *Figures) uint64 { return f.InactiveFile }),
	}
}

func faults(s Sample) []point {
	if s.Cgroup == nil {
		return nil
	}
	own, all := s.Cgroup.Own, s.Cgroup.Hierarchy
	return []point{
		{labels: []string{"pgfault", "container"}, value: own.Minor},
		{labels: []string{"pgmajfault", "container"}, value: own.Major},
		{labels: []string{"pgfault", "hierarchy"}, value: all.Minor},
		{labels: []string{"pgmajfault", "hierarchy"}, value: all.Major},
	}
}

func hugePages(value func(HugePages) (n uint64, known bool)) func(Sample) []point {
	return func(s Sample) []point {
		if s.Cgroup == nil {
			return nil
		}
		var out []point
		for _, h := range s.Cgroup.HugePages {
			if n, known := value(h); known {
				out = append(out, point{labels: []string{h.Size}, value: n})
			}
		}
		return out
	}
}

func pressure() []metric {
	const some, full = "some", "full"
	stalled := func(name, help, kind string, of func(*Figures) *criv1.PsiStats) metric {
		return metric{name: name, help: help, kind: criv1.MetricType_COUNTER, points: func(s Sample) []point {
			if s.Cgroup == nil || of(s.Cgroup) == nil {
				return nil // the kernel does not measure it
			}
			data := of(s.Cgroup).GetSome()
			if kind == full {
				data = of(s.Cgroup).GetFull()
			}
			return []point{{value: seconds(data.GetTotal())}}
		}}
	}
	cpu := func(f *Figures) *criv1.PsiStats { return f.CPUPSI }
	mem := func(f *Figures) *criv1.PsiStats { return f.MemoryPSI }
	io := func(f *Figures) *criv1.PsiStats { return f.IOPSI }
	return []metric{
		stalled("container_pressure_cpu_waiting_seconds_total", "Time in which some tasks waited for the processor, in seconds.", some, cpu),
		stalled("container_pressure_cpu_stalled_seconds_total", "Time in which all tasks waited for the processor, in seconds.", full, cpu),
		stalled("container_pressure_memory_waiting_seconds_total", "Time in which some tasks waited for memory, in seconds.", some, mem),
		stalled("container_pressure_memory_stalled_seconds_total", "Time in which all tasks waited for memory, in seconds.", full, mem),
		stalled("container_pressure_io_waiting_seconds_total", "Time in which some tasks waited for input or output, in seconds.", some, io),
		stalled("container_pressure_io_stalled_seconds_total", "Time in which all tasks waited for input or output, in seconds.", full, io),
	}
}

func spec() []metric {
	return []metric{
		limited(gauge("container_spec_cpu_quota", "Quota of the processor in microseconds a period.",
			func(f *Figures) uint64 { return f.Quota })),
		gauge("container_spec_cpu_period", "Period of the scheduler's quota, in microseconds.",
			func(f *Figures) uint64 { return f.Period }),
		gauge("container_spec_cpu_shares", "Share of the processor.",
			func(f *Figures) uint64 { return f.Shares }),
		gauge("container_spec_memory_limit_bytes", "Limit of memory in bytes; 0 for none.",
			func(f *Figures) uint64 { return f.MemoryLimit }),
		gauge("container_spec_memory_swap_limit_bytes", "Limit of swap in bytes; 0 for none.",
			func(f *Figures) uint64 { return f.SwapLimit }),
		gauge("container_spec_memory_reservation_limit_bytes", "Memory that is kept for the group, in bytes; 0 for none.",
			func(f *Figures) uint64 { return f.MemoryReservation }),
	}
}
