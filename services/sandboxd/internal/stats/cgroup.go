package stats

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// usage is what a cgroup uses, in CRI's terms.
type usage struct {
	cpu    *criv1.CpuUsage
	memory *criv1.MemoryUsage
	swap   *criv1.SwapUsage
	io     *criv1.IoUsage
	tasks  uint64
}

// read reads a cgroup.
func (r *Reader) read(group string) usage { return r.usage(group, r.basics(group)) }

// usage turns figures into CRI's terms. key names them from one reading to the next.
func (r *Reader) usage(key string, f podmetrics.Figures) usage {
	now := time.Now()
	stamp := now.UnixNano()
	working := f.WorkingSet()
	u := usage{
		cpu: &criv1.CpuUsage{
			Timestamp: stamp, UsageCoreNanoSeconds: value(f.CPU), Psi: f.CPUPSI,
			UsageNanoCores: r.rates.observe(key, now, f.CPU),
		},
		memory: &criv1.MemoryUsage{
			Timestamp: stamp, WorkingSetBytes: value(working), UsageBytes: value(f.Memory), RssBytes: value(f.RSS),
			PageFaults: value(f.Hierarchy.Minor), MajorPageFaults: value(f.Hierarchy.Major), Psi: f.MemoryPSI,
		},
		swap:  &criv1.SwapUsage{Timestamp: stamp},
		io:    &criv1.IoUsage{Timestamp: stamp, Psi: f.IOPSI},
		tasks: f.Tasks,
	}
	if f.MemoryLimit > 0 {
		u.memory.AvailableBytes = value(rest(f.MemoryLimit, working))
	}
	if f.SwapCounted {
		u.swap.SwapUsageBytes = value(f.Swap)
	}
	if f.SwapLimited {
		u.swap.SwapAvailableBytes = value(rest(f.SwapLimit, f.Swap))
	}
	return u
}

// text reads a file of a cgroup; a missing one is empty.
func (r *Reader) text(controller, group, file string) string {
	raw, err := os.ReadFile(filepath.Join(r.root, controller, group, file))
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

func isFolder(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
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
