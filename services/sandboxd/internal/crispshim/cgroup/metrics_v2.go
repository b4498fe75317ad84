package cgroup

import (
	"os"
	"path/filepath"
	"strings"

	statsv2 "github.com/containerd/cgroups/v3/cgroup2/stats"
)

func (g Group) metricsV2() *statsv2.Metrics {
	dir := g.dirs[""]
	cpu := table(dir, "cpu.stat")
	events := table(dir, "memory.events")
	return &statsv2.Metrics{
		Pids: &statsv2.PidsStat{Current: number(dir, "pids.current"), Limit: number(dir, "pids.max")},
		CPU: &statsv2.CPUStat{
			UsageUsec: cpu["usage_usec"], UserUsec: cpu["user_usec"], SystemUsec: cpu["system_usec"],
			NrPeriods: cpu["nr_periods"], NrThrottled: cpu["nr_throttled"], ThrottledUsec: cpu["throttled_usec"],
			NrBursts: cpu["nr_bursts"], BurstUsec: cpu["burst_usec"],
		},
		Memory: memoryV2(dir),
		MemoryEvents: &statsv2.MemoryEvents{
			Low: events["low"], High: events["high"], Max: events["max"],
			Oom: events["oom"], OomKill: events["oom_kill"], OomGroupKill: events["oom_group_kill"],
		},
		Io: &statsv2.IOStat{Usage: ioV2(dir)},
	}
}

func memoryV2(dir string) *statsv2.MemoryStat {
	t := table(dir, "memory.stat")
	return &statsv2.MemoryStat{
		Anon: t["anon"], File: t["file"], KernelStack: t["kernel_stack"], Slab: t["slab"], Sock: t["sock"],
		Shmem: t["shmem"], FileMapped: t["file_mapped"], FileDirty: t["file_dirty"], FileWriteback: t["file_writeback"],
		AnonThp: t["anon_thp"], InactiveAnon: t["inactive_anon"], ActiveAnon: t["active_anon"],
		InactiveFile: t["inactive_file"], ActiveFile: t["active_file"], Unevictable: t["unevictable"],
		SlabReclaimable: t["slab_reclaimable"], SlabUnreclaimable: t["slab_unreclaimable"],
		Pgfault: t["pgfault"], Pgmajfault: t["pgmajfault"],
		WorkingsetRefault:     t["workingset_refault_anon"] + t["workingset_refault_file"] + t["workingset_refault"],
		WorkingsetActivate:    t["workingset_activate_anon"] + t["workingset_activate_file"] + t["workingset_activate"],
		WorkingsetNodereclaim: t["workingset_nodereclaim"],
		Pgrefill:              t["pgrefill"], Pgscan: t["pgscan"], Pgsteal: t["pgsteal"],
		Pgactivate: t["pgactivate"], Pgdeactivate: t["pgdeactivate"],
		Pglazyfree: t["pglazyfree"], Pglazyfreed: t["pglazyfreed"],
		ThpFaultAlloc: t["thp_fault_alloc"], ThpCollapseAlloc: t["thp_collapse_alloc"],
		Usage: number(dir, "memory.current"), UsageLimit: number(dir, "memory.max"), MaxUsage: number(dir, "memory.peak"),
		SwapUsage: number(dir, "memory.swap.current"), SwapLimit: number(dir, "memory.swap.max"), SwapMaxUsage: number(dir, "memory.swap.peak"),
	}
}

// ioV2 reads lines such as "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6".
func ioV2(dir string) []*statsv2.IOEntry {
	data, err := os.ReadFile(filepath.Join(dir, "io.stat"))
	if err != nil {
		return nil
	}
	var out []*statsv2.IOEntry
	for line := range strings.Lines(string(data)) {
		device, values, _ := strings.Cut(line, " ")
		major, minor, ok := strings.Cut(device, ":")
		if !ok {
			continue
		}
		e := &statsv2.IOEntry{Major: parse(major), Minor: parse(minor)}
		fields := map[string]*uint64{"rbytes": &e.Rbytes, "wbytes": &e.Wbytes, "rios": &e.Rios, "wios": &e.Wios}
		for pair := range strings.FieldsSeq(values) {
			key, value, _ := strings.Cut(pair, "=")
			if field, known := fields[key]; known {
				*field = parse(value)
			}
		}
		out = append(out, e)
	}
	return out
}
