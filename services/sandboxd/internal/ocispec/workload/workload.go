// Package workload says what containers may use of the processors if an annotation of their pod
// puts them into a workload of the node, in the form that CRI-O has for it. It is pure.
//
// A workload has a default for each resource; an annotation of the pod that ends in the name of a
// container has others for that container, as JSON. The package changes nothing in what may be
// used of anything but processors, and nothing after a container was created.
package workload

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Workload is a kind of pod that has processors of its own.
type Workload struct {
	// Name is for messages.
	Name string
	// Activation is the annotation, of any value, that puts a pod into the workload.
	Activation string
	// Prefix and the name of a container, with a slash between them, are the annotation that has
	// the resources of that container; empty for none.
	Prefix string
	// Resources are what containers have that no annotation says otherwise of.
	Resources Resources
}

// Resources are what a container may use of the processors; zero values leave it as it is.
type Resources struct {
	Shares uint64 `json:"cpushares"`
	Set    string `json:"cpuset"`
	Quota  int64  `json:"cpuquota"`
	Period uint64 `json:"cpuperiod"`
	// Limit is in thousandths of a processor; a quota wins over it.
	Limit int64 `json:"cpulimit"`
}

const (
	defaultPeriod = 100_000
	// leastQuota is what the kernel accepts.
	leastQuota = 1000
	// mostLimit is more processors than any node has.
	mostLimit = 1 << 30
)

// CPU is what a container gets instead of what was asked for, by the annotations of its pod; nil if
// the pod is in no workload. Errors: ErrInvalidArgument for an annotation that cannot be read, and
// for a pod in two workloads.
func CPU(list []Workload, container string, pod map[string]string) (*specs.LinuxCPU, error) {
	var found *Workload
	for i, w := range list {
		if _, ok := pod[w.Activation]; !ok {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("annotations %q and %q: a pod is in one workload only, not in %q and %q: %w",
				found.Activation, w.Activation, found.Name, w.Name, errdefs.ErrInvalidArgument)
		}
		found = &list[i]
	}
	if found == nil {
		return nil, nil //nolint:nilnil // no workload is a regular answer
	}
	r := found.Resources
	key := found.Prefix + "/" + container
	if text, ok := pod[key]; ok && found.Prefix != "" {
		own, err := read(text)
		if err != nil {
			return nil, fmt.Errorf("annotation %q: %w", key, err)
		}
		r = own.over(r)
	}
	return r.cpu(), nil
}

// read reads the annotation of a container.
func read(text string) (Resources, error) {
	var r Resources
	in := json.NewDecoder(bytes.NewReader([]byte(text)))
	in.DisallowUnknownFields()
	err := in.Decode(&r)
	if err != nil {
		return Resources{}, fmt.Errorf("%.200q is no object of cpushares, cpuset, cpuquota, cpuperiod and cpulimit: %w: %w", text, err, errdefs.ErrInvalidArgument)
	}
	return r, r.Validate()
}

// isSet says whether a text is a list of processors, such as "0-3,8".
func isSet(text string) bool {
	ok, err := regexp.MatchString(`^\d+(-\d+)?(,\d+(-\d+)?)*$`, text)
	return ok && err == nil
}

// Validate says whether the values can be. Errors: ErrInvalidArgument.
func (r Resources) Validate() error {
	switch {
	case r.Set != "" && !isSet(r.Set):
		return fmt.Errorf("cpuset %q: write for example \"0-3,8\": %w", r.Set, errdefs.ErrInvalidArgument)
	case r.Quota < -1 || r.Quota > 0 && r.Quota < leastQuota:
		return fmt.Errorf("cpuquota %d: -1 (none) or at least %d microseconds wanted: %w", r.Quota, leastQuota, errdefs.ErrInvalidArgument)
	case r.Period > 0 && (r.Period < 1000 || r.Period > 1_000_000):
		return fmt.Errorf("cpuperiod %d: 1000 to 1000000 microseconds wanted: %w", r.Period, errdefs.ErrInvalidArgument)
	case r.Limit < 0 || r.Limit > mostLimit:
		return fmt.Errorf("cpulimit %d: thousandths of a processor wanted: %w", r.Limit, errdefs.ErrInvalidArgument)
	case r.Shares == 1 || r.Shares > 262144:
		return fmt.Errorf("cpushares %d: 2 to 262144 wanted: %w", r.Shares, errdefs.ErrInvalidArgument)
	}
	return nil
}

// over are the resources with those that are not set taken from others. A limit of its own is one
// instead of the others' quota.
func (r Resources) over(others Resources) Resources {
	if r.Limit != 0 && r.Quota == 0 {
		others.Quota = 0
	}
	return Resources{
		Shares: cmp.Or(r.Shares, others.Shares), Set: cmp.Or(r.Set, others.Set), Quota: cmp.Or(r.Quota, others.Quota),
		Period: cmp.Or(r.Period, others.Period), Limit: cmp.Or(r.Limit, others.Limit),
	}
}

func (r Resources) cpu() *specs.LinuxCPU {
	out := &specs.LinuxCPU{Cpus: r.Set}
	if r.Shares != 0 {
		out.Shares = &r.Shares
	}
	if r.Quota == 0 && r.Limit != 0 {
		r.Period = cmp.Or(r.Period, defaultPeriod)
		r.Quota = max(r.Limit*int64(r.Period)/1000, leastQuota)
	}
	if r.Quota != 0 {
		out.Quota = &r.Quota
	}
	if r.Period != 0 {
		out.Period = &r.Period
	}
	return out
}
