package validate

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func resources(field string, r *criv1.LinuxContainerResources) error {
	if err := processor(field, r); err != nil {
		return err
	}
	switch {
	case r.GetMemoryLimitInBytes() < -1:
		return invalid(field+".memory_limit_in_bytes", "must not be below -1")
	case r.GetMemorySwapLimitInBytes() < -1:
		return invalid(field+".memory_swap_limit_in_bytes", "must not be below -1")
	case r.GetOomScoreAdj() < -1000 || r.GetOomScoreAdj() > 1000:
		return invalid(field+".oom_score_adj", "must be between -1000 and 1000, is %d", r.GetOomScoreAdj())
	}
	for i, limit := range r.GetHugepageLimits() {
		if !pageSize.MatchString(limit.GetPageSize()) {
			return invalid(fmt.Sprintf("%s.hugepage_limits[%d].page_size", field, i), "must be a size such as 2MB or 1GB, is %q", limit.GetPageSize())
		}
	}
	for _, key := range slices.Sorted(maps.Keys(r.GetUnified())) {
		if !groupFile.MatchString(key) {
			return invalid(field+".unified", "must have names of files such as memory.high, has %q", key)
		}
	}
	return nil
}

// Forms of what becomes names or values of files in a control group.
var (
	pageSize  = regexp.MustCompile(`^[1-9][0-9]*[KMG]B$`)
	groupFile = regexp.MustCompile(`^[a-z]+(\.[a-zA-Z0-9_]+)+$`)
	// cpuset is a list of numbers and ranges as the kernel reads it.
	cpuset = regexp.MustCompile(`^[0-9]+(-[0-9]+(:[0-9]+/[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+/[0-9]+)?)?)*$`)
)

// processor checks times and sets of processors against what the kernel takes, whatever the node.
func processor(field string, r *criv1.LinuxContainerResources) error {
	const (
		leastShares, mostShares = 2, 262144
		leastTime, mostPeriod   = 1000, 1_000_000 // microseconds
	)
	shares, quota, period := r.GetCpuShares(), r.GetCpuQuota(), r.GetCpuPeriod()
	switch {
	case shares != 0 && (shares < leastShares || shares > mostShares):
		return invalid(field+".cpu_shares", "must be 0 or between %d and %d, is %d", leastShares, mostShares, shares)
	case quota < -1 || quota > 0 && quota < leastTime:
		return invalid(field+".cpu_quota", "must be -1, 0 or at least %d, is %d", leastTime, quota)
	case period != 0 && (period < leastTime || period > mostPeriod):
		return invalid(field+".cpu_period", "must be 0 or between %d and %d, is %d", leastTime, mostPeriod, period)
	}
	return firstError(processors(field+".cpuset_cpus", r.GetCpusetCpus()), processors(field+".cpuset_mems", r.GetCpusetMems()))
}

func processors(field, set string) error {
	if set != "" && !cpuset.MatchString(set) {
		return invalid(field, "must be a list such as 0-2,7, is %q", set)
	}
	return nil
}
