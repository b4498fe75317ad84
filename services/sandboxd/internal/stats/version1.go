package stats

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// tick is the unit in which version 1 counts user and system time; it is fixed by the
// kernel's interface.
const tick = 10 * time.Millisecond

// hybrid is the folder of the hierarchy of version 2 that systemd mounts beside those of
// version 1. It has no controllers, but the kernel measures pressure in it.
const hybrid = "unified"

// version1 reads the hierarchies of the single controllers.
func (r *Reader) version1(group string) podmetrics.Figures {
	stat := r.keyed("memory", group, "memory.stat")
	f := podmetrics.Figures{
		Memory:       r.number("memory", group, "memory.usage_in_bytes"),
		InactiveFile: stat["total_inactive_file"],
		ActiveFile:   stat["total_active_file"],
		RSS:          stat["total_rss"],
		Cache:        stat["total_cache"],
		MappedFile:   stat["total_mapped_file"],
		Own:          podmetrics.Faults{Minor: stat["pgfault"], Major: stat["pgmajfault"]},
		Hierarchy:    podmetrics.Faults{Minor: stat["total_pgfault"], Major: stat["total_pgmajfault"]},
		MemoryLimit:  limit(r.text("memory", group, "memory.limit_in_bytes")),
		Tasks:        r.number("pids", group, "pids.current"),
		CPUPSI:       parsePressure(r.text(hybrid, group, "cpu.pressure")),
		MemoryPSI:    parsePressure(r.text(hybrid, group, "memory.pressure")),
		IOPSI:        parsePressure(r.text(hybrid, group, "io.pressure")),
	}
	f.CPU = parse(r.firstText(group, "cpuacct.usage", accounting()...))
	if both := r.text("memory", group, "memory.memsw.usage_in_bytes"); both != "" {
		f.SwapCounted = true
		f.Swap = rest(parse(both), f.Memory)
		if l := limit(r.text("memory", group, "memory.memsw.limit_in_bytes")); l > 0 {
			f.SwapLimited, f.SwapLimit = true, rest(l, f.MemoryLimit)
		}
	}
	return f
}

// accounting and scheduling are the names that the hierarchies of the processor may have.
func accounting() []string { return []string{"cpuacct", "cpu,cpuacct", "cpuacct,cpu"} }

func scheduling() []string { return []string{"cpu", "cpu,cpuacct", "cpuacct,cpu"} }

// more1 reads what version1 leaves out.
func (r *Reader) more1(group string, f *podmetrics.Figures) {
	times := parseKeyed(r.firstText(group, "cpuacct.stat", accounting()...))
	f.User, f.System = times["user"]*uint64(tick), times["system"]*uint64(tick)
	throttle := parseKeyed(r.firstText(group, "cpu.stat", scheduling()...))
	f.Periods, f.Throttled, f.ThrottledTime = throttle["nr_periods"], throttle["nr_throttled"], throttle["throttled_time"]
	f.Bursts, f.BurstTime = throttle["nr_bursts"], throttle["burst_time"]
	f.Shares = parse(r.firstText(group, "cpu.shares", scheduling()...))
	f.Period = parse(r.firstText(group, "cpu.cfs_period_us", scheduling()...))
	f.Quota = parse(r.firstText(group, "cpu.cfs_quota_us", scheduling()...)) // -1 reads as none
	f.MaxMemory = r.number("memory", group, "memory.max_usage_in_bytes")
	f.MemoryFailures = r.number("memory", group, "memory.failcnt")
	f.MemoryReservation = limit(r.text("memory", group, "memory.soft_limit_in_bytes"))
	f.Kernel = r.number("memory", group, "memory.kmem.usage_in_bytes")
	f.OOMKills = r.keyed("memory", group, "memory.oom_control")["oom_kill"]
	f.TasksMax = parse(r.text("pids", group, "pids.max"))
	f.HugePages = r.hugePages("hugetlb", group, ".usage_in_bytes")
	for i := range f.HugePages {
		h := &f.HugePages[i]
		h.Max, h.MaxKnown = r.number("hugetlb", group, "hugetlb."+h.Size+".max_usage_in_bytes"), true
	}
	for _, file := range []string{"blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes"} {
		if text := r.text("blkio", group, file); text != "" {
			f.Devices = operations(f.Devices, text, func(d *podmetrics.Device) map[string]uint64 { return d.Bytes })
			break
		}
	}
	for _, file := range []string{"blkio.throttle.io_serviced_recursive", "blkio.throttle.io_serviced"} {
		if text := r.text("blkio", group, file); text != "" {
			f.Devices = operations(f.Devices, text, func(d *podmetrics.Device) map[string]uint64 { return d.IOs })
			break
		}
	}
}

// operations reads lines like "8:0 Read 4096".
func operations(devices []podmetrics.Device, text string, into func(*podmetrics.Device) map[string]uint64) []podmetrics.Device {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue // the total over all devices
		}
		major, minor, ok := parseDevice(fields[0])
		if !ok {
			continue
		}
		var d *podmetrics.Device
		devices, d = device(devices, major, minor)
		into(d)[fields[1]] = parse(fields[2])
	}
	return devices
}

// firstText reads a file from the first controller that has it.
func (r *Reader) firstText(group, file string, controllers ...string) string {
	for _, controller := range controllers {
		if text := r.text(controller, group, file); text != "" {
			return text
		}
	}
	return ""
}

// hugePages reads the use of huge pages of all sizes.
func (r *Reader) hugePages(controller, group, usage string) []podmetrics.HugePages {
	entries, err := os.ReadDir(filepath.Join(r.root, controller, group))
	if err != nil {
		return nil // gone, or not there in this kernel
	}
	var out []podmetrics.HugePages
	for _, e := range entries {
		size, ok := strings.CutPrefix(strings.TrimSuffix(e.Name(), usage), "hugetlb.")
		if !ok || !strings.HasSuffix(e.Name(), usage) || strings.Contains(size, ".") {
			continue
		}
		out = append(out, podmetrics.HugePages{Size: size, Usage: r.number(controller, group, e.Name())})
	}
	return out
}
