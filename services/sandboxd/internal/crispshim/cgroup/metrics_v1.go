package cgroup

import (
	"os"
	"path/filepath"
	"strings"

	statsv1 "github.com/containerd/cgroups/v3/cgroup1/stats"
)

// userHZ is the unit of cpuacct.stat, ticks per second, which Linux fixes at 100.
const userHZ = 100

func (g Group) metricsV1() *statsv1.Metrics {
	m := &statsv1.Metrics{}
	if dir, ok := g.dirs["pids"]; ok {
		m.Pids = &statsv1.PidsStat{Current: number(dir, "pids.current"), Limit: number(dir, "pids.max")}
		if m.GetPids().GetLimit() == parse("max") {
			m.Pids.Limit = 0 // in this version 0 stands for no limit
		}
	}
	m.CPU = g.cpuV1()
	if dir, ok := g.dirs["memory"]; ok {
		m.Memory = memoryV1(dir)
		control := table(dir, "memory.oom_control")
		m.MemoryOomControl = &statsv1.MemoryOomControl{
			OomKillDisable: control["oom_kill_disable"], UnderOom: control["under_oom"], OomKill: control["oom_kill"],
		}
	}
	if dir, ok := g.dirs["blkio"]; ok {
		m.Blkio = &statsv1.BlkIOStat{
			IoServiceBytesRecursive: blkio(dir, "blkio.throttle.io_service_bytes_recursive"),
			IoServicedRecursive:     blkio(dir, "blkio.throttle.io_serviced_recursive"),
		}
	}
	return m
}

func (g Group) cpuV1() *statsv1.CPUStat {
	cpu := &statsv1.CPUStat{}
	if dir, ok := g.dirs["cpuacct"]; ok {
		ticks := table(dir, "cpuacct.stat")
		cpu.Usage = &statsv1.CPUUsage{
			Total:  number(dir, "cpuacct.usage"),
			User:   ticks["user"] * (1e9 / userHZ),
			Kernel: ticks["system"] * (1e9 / userHZ),
		}
		data, err := os.ReadFile(filepath.Join(dir, "cpuacct.usage_percpu"))
		if err == nil {
			for field := range strings.FieldsSeq(string(data)) {
				cpu.Usage.PerCPU = append(cpu.Usage.PerCPU, parse(field))
			}
		}
	}
	if dir, ok := g.dirs["cpu"]; ok {
		t := table(dir, "cpu.stat")
		cpu.Throttling = &statsv1.Throttle{
			Periods: t["nr_periods"], ThrottledPeriods: t["nr_throttled"], ThrottledTime: t["throttled_time"],
		}
	}
	return cpu
}

func memoryV1(dir string) *statsv1.MemoryStat {
	t := table(dir, "memory.stat")
	return &statsv1.MemoryStat{
		Cache: t["cache"], RSS: t["rss"], RSSHuge: t["rss_huge"], MappedFile: t["mapped_file"],
		Dirty: t["dirty"], Writeback: t["writeback"], PgPgIn: t["pgpgin"], PgPgOut: t["pgpgout"],
		PgFault: t["pgfault"], PgMajFault: t["pgmajfault"],
		InactiveAnon: t["inactive_anon"], ActiveAnon: t["active_anon"],
		InactiveFile: t["inactive_file"], ActiveFile: t["active_file"], Unevictable: t["unevictable"],
		HierarchicalMemoryLimit: t["hierarchical_memory_limit"], HierarchicalSwapLimit: t["hierarchical_memsw_limit"],
		TotalCache: t["total_cache"], TotalRSS: t["total_rss"], TotalRSSHuge: t["total_rss_huge"],
		TotalMappedFile: t["total_mapped_file"], TotalDirty: t["total_dirty"], TotalWriteback: t["total_writeback"],
		TotalPgPgIn: t["total_pgpgin"], TotalPgPgOut: t["total_pgpgout"],
		TotalPgFault: t["total_pgfault"], TotalPgMajFault: t["total_pgmajfault"],
		TotalInactiveAnon: t["total_inactive_anon"], TotalActiveAnon: t["total_active_anon"],
		TotalInactiveFile: t["total_inactive_file"], TotalActiveFile: t["total_active_file"],
		TotalUnevictable: t["total_unevictable"],
		Usage:            entryV1(dir, "memory"), Swap: entryV1(dir, "memory.memsw"),
		Kernel: entryV1(dir, "memory.kmem"), KernelTCP: entryV1(dir, "memory.kmem.tcp"),
	}
}

func entryV1(dir, prefix string) *statsv1.MemoryEntry {
	return &statsv1.MemoryEntry{
		Usage:   number(dir, prefix+".usage_in_bytes"),
		Max:     number(dir, prefix+".max_usage_in_bytes"),
		Failcnt: number(dir, prefix+".failcnt"),
		Limit:   number(dir, prefix+".limit_in_bytes"),
	}
}

// blkio reads lines such as "8:0 Read 4096".
func blkio(dir, file string) []*statsv1.BlkIOEntry {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil
	}
	var out []*statsv1.BlkIOEntry
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue
		}
		major, minor, _ := strings.Cut(fields[0], ":")
		out = append(out, &statsv1.BlkIOEntry{
			Major: parse(major), Minor: parse(minor), Op: fields[1], Value: parse(fields[2]),
		})
	}
	return out
}
