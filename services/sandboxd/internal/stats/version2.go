package stats

import (
	"strings"
	"time"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// Weights and shares, at the ends of their ranges, are the same thing in the two versions.
const (
	minShares, maxShares = 2, 262144
	minWeight, maxWeight = 1, 10000
)

// version2 reads the unified hierarchy.
func (r *Reader) version2(group string) podmetrics.Figures {
	stat := r.keyed("", group, "memory.stat")
	cpu := r.keyed("", group, "cpu.stat")
	faults := podmetrics.Faults{Minor: stat["pgfault"], Major: stat["pgmajfault"]}
	f := podmetrics.Figures{
		CPU:           microseconds(cpu["usage_usec"]),
		User:          microseconds(cpu["user_usec"]),
		System:        microseconds(cpu["system_usec"]),
		Periods:       cpu["nr_periods"],
		Throttled:     cpu["nr_throttled"],
		ThrottledTime: microseconds(cpu["throttled_usec"]),
		Bursts:        cpu["nr_bursts"],
		BurstTime:     microseconds(cpu["burst_usec"]),
		Memory:        r.number("", group, "memory.current"),
		InactiveFile:  stat["inactive_file"],
		ActiveFile:    stat["active_file"],
		RSS:           stat["anon"],
		Cache:         stat["file"],
		MappedFile:    stat["file_mapped"],
		Kernel:        kernelMemory(stat),
		Own:           faults, // the kernel counts for whole hierarchies only
		Hierarchy:     faults,
		MemoryLimit:   limit(r.text("", group, "memory.max")),
		Tasks:         r.number("", group, "pids.current"),
		CPUPSI:        parsePressure(r.text("", group, "cpu.pressure")),
		MemoryPSI:     parsePressure(r.text("", group, "memory.pressure")),
		IOPSI:         parsePressure(r.text("", group, "io.pressure")),
	}
	if used := r.text("", group, "memory.swap.current"); used != "" {
		f.SwapCounted, f.Swap = true, parse(used)
		if l := r.text("", group, "memory.swap.max"); l != "" && l != "max" {
			f.SwapLimited, f.SwapLimit = true, parse(l)
		}
	}
	return f
}

// more2 reads what version2 leaves out.
func (r *Reader) more2(group string, f *podmetrics.Figures) {
	f.Shares = shares(r.number("", group, "cpu.weight"))
	quota, period, _ := strings.Cut(r.text("", group, "cpu.max"), " ")
	f.Quota, f.Period = parse(quota), parse(period) // "max" reads as none
	f.MaxMemory = r.number("", group, "memory.peak")
	f.MemoryReservation = limit(r.text("", group, "memory.low"))
	events := r.keyed("", group, "memory.events")
	f.MemoryFailures, f.OOMKills = events["max"], events["oom_kill"]
	f.TasksMax = parse(r.text("", group, "pids.max"))
	f.HugePages = r.hugePages("", group, ".current")
	for line := range strings.Lines(r.text("", group, "io.stat")) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		major, minor, ok := parseDevice(fields[0])
		if !ok {
			continue
		}
		var d *podmetrics.Device
		f.Devices, d = device(f.Devices, major, minor)
		for _, field := range fields[1:] {
			name, number, _ := strings.Cut(field, "=")
			count(d, name, parse(number))
		}
	}
}

// count takes in a number of io.stat.
func count(d *podmetrics.Device, name string, n uint64) {
	switch name {
	case "rbytes":
		d.Bytes["Read"] = n
	case "wbytes":
		d.Bytes["Write"] = n
	case "dbytes":
		d.Bytes["Discard"] = n
	case "rios":
		d.IOs["Read"] = n
	case "wios":
		d.IOs["Write"] = n
	case "dios":
		d.IOs["Discard"] = n
	}
}

// kernelMemory is the kernel's own part; old kernels give only its pieces.
func kernelMemory(stat map[string]uint64) uint64 {
	if all, ok := stat["kernel"]; ok {
		return all
	}
	return stat["kernel_stack"] + stat["pagetables"] + stat["percpu"] + stat["sock"] + stat["slab"]
}

func microseconds(n uint64) uint64 { return n * uint64(time.Microsecond) }

// shares is what a weight is in the terms of version 1; 0 stays 0.
func shares(weight uint64) uint64 {
	if weight == 0 {
		return 0
	}
	weight = min(weight, maxWeight)
	return minShares + (weight-minWeight)*(maxShares-minShares)/(maxWeight-minWeight)
}
