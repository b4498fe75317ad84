package resource

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/testing/protocmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"pgregory.net/rapid"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

// v1 is a host without a unified hierarchy and without huge pages.
func v1() host.Facts { return host.Facts{Swap: true} }

func TestClassesOfAContainerThatIsThereAreFixed(t *testing.T) {
	t.Parallel()
	for _, r := range []*nri.LinuxResources{{BlockioClass: nri.String("fast")}, {RdtClass: nri.String("")}} {
		if _, err := UpdateFromNRI(r, v1()); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%v: error %v", r, err)
		}
	}
}

func TestUnlimitedPids(t *testing.T) {
	t.Parallel()
	r, err := FromNRI(&nri.LinuxResources{Pids: &nri.LinuxPids{Limit: -1}}, v1())
	if err != nil || r.Pids == nil || *r.Pids.Limit != -1 {
		t.Errorf("%+v, %v", r.Pids, err)
	}
}

func TestFromCRI(t *testing.T) {
	t.Parallel()
	ptr := func(v int64) *int64 { return &v }
	for _, tt := range []struct {
		name string
		in   *criv1.LinuxContainerResources
		swap bool
		want *specs.LinuxResources
	}{
		{"nothing", nil, true, &specs.LinuxResources{}},
		{"memory", &criv1.LinuxContainerResources{MemoryLimitInBytes: 5}, true, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(5), Swap: ptr(5)}}},
		{"memory without swap control", &criv1.LinuxContainerResources{MemoryLimitInBytes: 5, MemorySwapLimitInBytes: 9}, false, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(5)}}},
		{"swap", &criv1.LinuxContainerResources{MemoryLimitInBytes: 5, MemorySwapLimitInBytes: 9}, true, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(5), Swap: ptr(9)}}},
		{"swap below memory", &criv1.LinuxContainerResources{MemoryLimitInBytes: 5, MemorySwapLimitInBytes: 3}, true, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(5), Swap: ptr(5)}}},
		{"swap without limit", &criv1.LinuxContainerResources{MemoryLimitInBytes: 5, MemorySwapLimitInBytes: -1}, true, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(5), Swap: ptr(-1)}}},
		{"huge pages that cannot be limited", &criv1.LinuxContainerResources{HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB"}}}, true, &specs.LinuxResources{}},
		{"processor", &criv1.LinuxContainerResources{CpuQuota: -1}, true, &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: ptr(-1)}}},
	} {
		h := v1()
		h.Swap = tt.swap
		got, err := FromCRI(tt.in, h)
		if diff := cmp.Diff(tt.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", tt.name, err, diff)
		}
	}
}

func TestCheckedLimitsOfMemory(t *testing.T) {
	t.Parallel()
	limited := &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(5))}}
	if got := Checked(limited, host.Facts{CgroupV2: true}).Memory; got.CheckBeforeUpdate == nil || !*got.CheckBeforeUpdate || *got.Limit != 5 {
		t.Errorf("unified: %+v", got)
	}
	if limited.Memory.CheckBeforeUpdate != nil || Checked(limited, v1()).Memory.CheckBeforeUpdate != nil {
		t.Error("a check that nobody asked for")
	}
	if got := Checked(&specs.LinuxResources{}, host.Facts{CgroupV2: true}); got.Memory != nil {
		t.Errorf("without a limit: %+v", got.Memory)
	}
}

// What takes a change back has the earlier value of all that changes, and lifts limits where
// there was none.
func TestRestoring(t *testing.T) {
	t.Parallel()
	number, unsigned := func(v int64) *int64 { return &v }, func(v uint64) *uint64 { return &v }
	change := &specs.LinuxResources{
		CPU:    &specs.LinuxCPU{Shares: unsigned(7), Quota: number(8), Period: unsigned(9), Cpus: "0"},
		Memory: &specs.LinuxMemory{Limit: number(10), Swap: number(11)}, Pids: &specs.LinuxPids{Limit: number(12)},
		Unified: map[string]string{"memory.high": "13", "memory.low": "14", "memory.min": "15", "odd": "16"},
	}
	before := &specs.LinuxResources{
		CPU:    &specs.LinuxCPU{Shares: unsigned(1), Cpus: "0-1"},
		Memory: &specs.LinuxMemory{Limit: number(2), Swap: number(3), Reservation: number(4)}, Pids: &specs.LinuxPids{Limit: number(5)},
		Unified: map[string]string{"memory.high": "6", "other": "7"},
	}
	for name, tt := range map[string]struct{ before, change, want *specs.LinuxResources }{
		"from nothing": {nil, change, &specs.LinuxResources{
			CPU:    &specs.LinuxCPU{Shares: unsigned(1024), Quota: number(-1), Period: unsigned(100000)},
			Memory: &specs.LinuxMemory{Limit: number(-1), Swap: number(-1)}, Pids: &specs.LinuxPids{Limit: number(-1)},
			Unified: map[string]string{"memory.high": "max", "memory.low": "0", "memory.min": "0"},
		}},
		"from limits": {before, change, &specs.LinuxResources{
			CPU:    &specs.LinuxCPU{Shares: unsigned(1), Quota: number(-1), Period: unsigned(100000), Cpus: "0-1"},
			Memory: &specs.LinuxMemory{Limit: number(2), Swap: number(3), Reservation: number(4)}, Pids: &specs.LinuxPids{Limit: number(5)},
			Unified: map[string]string{"memory.high": "6", "memory.low": "0", "memory.min": "0"},
		}},
		"no change": {before, &specs.LinuxResources{}, &specs.LinuxResources{}},
	} {
		if diff := cmp.Diff(tt.want, Restoring(tt.before, tt.change)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestMergeCRI(t *testing.T) {
	t.Parallel()
	old := &criv1.LinuxContainerResources{
		CpuShares: 1, MemoryLimitInBytes: 2, CpusetCpus: "0", OomScoreAdj: 3, Unified: map[string]string{"a": "1", "b": "1"},
		HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 1}},
	}
	update := &criv1.LinuxContainerResources{
		MemoryLimitInBytes: 5, Unified: map[string]string{"b": "2"}, HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB", Limit: 0}, {PageSize: "4MB", Limit: 4}},
	}
	want := &criv1.LinuxContainerResources{
		CpuShares: 1, MemoryLimitInBytes: 5, CpusetCpus: "0", OomScoreAdj: 3, Unified: map[string]string{"a": "1", "b": "2"},
		HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB", Limit: 0}, {PageSize: "1GB", Limit: 1}, {PageSize: "4MB", Limit: 4}},
	}
	if diff := cmp.Diff(want, MergeCRI(old, update), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if old.GetMemoryLimitInBytes() != 2 || old.GetUnified()["b"] != "1" || old.GetHugepageLimits()[0].GetLimit() != 1 {
		t.Errorf("the old values were changed: %v", old)
	}
	if diff := cmp.Diff(old, MergeCRI(old, nil), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(old, MergeCRI(nil, old), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestResourcesSurviveTheWayThroughNRI makes resources, looks at them as a plugin does and
// takes over what it saw.
func TestResourcesSurviveTheWayThroughNRI(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.Int64Range(0, 1<<40)
		in := &criv1.LinuxContainerResources{
			CpuPeriod: number.Draw(t, "period"), CpuQuota: number.Draw(t, "quota"), CpuShares: number.Draw(t, "shares"),
			MemoryLimitInBytes: number.Draw(t, "memory"), CpusetCpus: rapid.StringMatching("[0-9]?").Draw(t, "cpus"),
		}
		seen := CRIToNRI(in)
		if diff := cmp.Diff(in, NRIToCRI(seen), protocmp.Transform()); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
		fromCRI, err := FromCRI(in, v1())
		if err != nil {
			t.Fatal(err)
		}
		fromNRI, err := FromNRI(seen, v1())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(fromCRI, fromNRI); diff != "" {
			t.Fatalf("(-cri +nri):\n%s", diff)
		}
		merged := &specs.LinuxResources{}
		Merge(merged, fromCRI)
		Merge(merged, fromCRI)
		if diff := cmp.Diff(fromCRI, merged); diff != "" {
			t.Fatalf("merging twice (-want +got):\n%s", diff)
		}
	})
}

func TestCgroupsPath(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		parent  string
		systemd bool
		want    string
	}{
		{"/kubepods/burstable/pod1", false, "/kubepods/burstable/pod1/id"},
		{"", false, "/crisp/id"},
		{"/kubepods.slice/kubepods-pod1.slice", true, "kubepods-pod1.slice:crisp:id"},
		{"", true, "system.slice:crisp:id"},
	} {
		if got := CgroupsPath(tt.parent, "id", tt.systemd); got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}
