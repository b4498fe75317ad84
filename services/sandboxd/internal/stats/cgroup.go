package stats

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// unlimited is the smallest value that counts as no limit: version 1 writes the largest
// number of whole pages.
const unlimited = math.MaxInt64 &^ (1<<16 - 1)

// usage is what a cgroup uses.
type usage struct {
	cpu       *criv1.CpuUsage
	memory    *criv1.MemoryUsage
	swap      *criv1.SwapUsage
	io        *criv1.IoUsage
	processes uint64
}

// figures are the readings of a cgroup in the same form for both versions; limits are 0 if
// there is none.
type figures struct {
	cpu                      uint64 // nanoseconds
	memory, inactive, rss    uint64
	faults, majorFaults      uint64
	memoryLimit              uint64
	swap, swapLimit          uint64
	processes                uint64
	cpuPSI, memoryPSI, ioPSI *criv1.PsiStats
	swapCounted, swapLimited bool
}

func (r *Reader) read(group string) usage {
	now := time.Now()
	f := r.version1(group)
	if r.unified {
		f = r.version2(group)
	}
	stamp := now.UnixNano()
	working := rest(f.memory, f.inactive)
	u := usage{
		cpu: &criv1.CpuUsage{
			Timestamp: stamp, UsageCoreNanoSeconds: value(f.cpu), Psi: f.cpuPSI,
			UsageNanoCores: r.rates.observe(group, now, f.cpu),
		},
		memory: &criv1.MemoryUsage{
			Timestamp: stamp, WorkingSetBytes: value(working), UsageBytes: value(f.memory), RssBytes: value(f.rss),
			PageFaults: value(f.faults), MajorPageFaults: value(f.majorFaults), Psi: f.memoryPSI,
		},
		swap:      &criv1.SwapUsage{Timestamp: stamp},
		io:        &criv1.IoUsage{Timestamp: stamp, Psi: f.ioPSI},
		processes: f.processes,
	}
	if f.memoryLimit > 0 {
		u.memory.AvailableBytes = value(rest(f.memoryLimit, working))
	}
	if f.swapCounted {
		u.swap.SwapUsageBytes = value(f.swap)
	}
	if f.swapLimited {
		u.swap.SwapAvailableBytes = value(rest(f.swapLimit, f.swap))
	}
	return u
}

// version1 reads the hierarchies of the single controllers.
func (r *Reader) version1(group string) figures {
	stat := r.keyed("memory", group, "memory.stat")
	f := figures{
		memory:      r.number("memory", group, "memory.usage_in_bytes"),
		inactive:    stat["total_inactive_file"],
		rss:         stat["total_rss"],
		faults:      stat["total_pgfault"],
		majorFaults: stat["total_pgmajfault"],
		memoryLimit: limit(r.text("memory", group, "memory.limit_in_bytes")),
		processes:   r.number("pids", group, "pids.current"),
	}
	for _, controller := range []string{"cpuacct", "cpu,cpuacct", "cpuacct,cpu"} {
		if f.cpu = r.number(controller, group, "cpuacct.usage"); f.cpu > 0 {
			break
		}
	}
	if both := r.text("memory", group, "memory.memsw.usage_in_bytes"); both != "" {
		f.swapCounted = true
		f.swap = rest(parse(both), f.memory)
		if l := limit(r.text("memory", group, "memory.memsw.limit_in_bytes")); l > 0 {
			f.swapLimited, f.swapLimit = true, rest(l, f.memoryLimit)
		}
	}
	return f
}

// version2 reads the unified hierarchy.
func (r *Reader) version2(group string) figures {
	stat := r.keyed("", group, "memory.stat")
	f := figures{
		cpu:         r.keyed("", group, "cpu.stat")["usage_usec"] * 1000,
		memory:      r.number("", group, "memory.current"),
		inactive:    stat["inactive_file"],
		rss:         stat["anon"],
		faults:      stat["pgfault"],
		majorFaults: stat["pgmajfault"],
		memoryLimit: limit(r.text("", group, "memory.max")),
		processes:   r.number("", group, "pids.current"),
		cpuPSI:      parsePressure(r.text("", group, "cpu.pressure")),
		memoryPSI:   parsePressure(r.text("", group, "memory.pressure")),
		ioPSI:       parsePressure(r.text("", group, "io.pressure")),
	}
	if used := r.text("", group, "memory.swap.current"); used != "" {
		f.swapCounted, f.swap = true, parse(used)
		if l := r.text("", group, "memory.swap.max"); l != "" && l != "max" {
			f.swapLimited, f.swapLimit = true, parse(l)
		}
	}
	return f
}

// text reads a file of a cgroup; a missing one is empty.
func (r *Reader) text(controller, group, file string) string {
	raw, err := os.ReadFile(filepath.Join(r.root, controller, group, file)) //nolint:gosec // a file of the kernel
	if err != nil {
		return "" // gone, or not there in this kernel
	}
	return strings.TrimSpace(string(raw))
}

func (r *Reader) number(controller, group, file string) uint64 {
	return parse(r.text(controller, group, file))
}

// keyed reads a file with a name and a number in each line.
func (r *Reader) keyed(controller, group, file string) map[string]uint64 {
	return parseKeyed(r.text(controller, group, file))
}

func parseKeyed(text string) map[string]uint64 {
	out := make(map[string]uint64)
	for line := range strings.Lines(text) {
		if name, number, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			out[name] = parse(number)
		}
	}
	return out
}

// parse reads a number; what is none is 0.
func parse(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// limit reads a limit; 0 means that there is none.
func limit(s string) uint64 {
	n := parse(s)
	if n >= unlimited {
		return 0
	}
	return n
}

// parsePressure reads a pressure file; nil if the kernel does not measure it.
func parsePressure(text string) *criv1.PsiStats {
	if text == "" {
		return nil
	}
	out := &criv1.PsiStats{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		data := &criv1.PsiData{}
		for _, f := range fields[1:] {
			name, number, _ := strings.Cut(f, "=")
			switch name {
			case "avg10":
				data.Avg10 = parseFloat(number)
			case "avg60":
				data.Avg60 = parseFloat(number)
			case "avg300":
				data.Avg300 = parseFloat(number)
			case "total":
				data.Total = parse(number) * 1000
			}
		}
		switch fields[0] {
		case "some":
			out.Some = data
		case "full":
			out.Full = data
		}
	}
	return out
}

func parseFloat(s string) float64 {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0
	}
	return f
}
