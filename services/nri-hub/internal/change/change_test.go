package change_test

import (
	"slices"
	"strings"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
)

func adjustment() *nri.ContainerAdjustment {
	a := &nri.ContainerAdjustment{}
	a.AddEnv("A", "new")
	a.RemoveEnv("B")
	a.AddAnnotation("k", "v")
	a.AddMount(&nri.Mount{Source: "/s", Destination: "/d", Type: "bind", Options: []string{"ro", "bind"}})
	a.SetArgs([]string{"sleep", "1"})
	a.AddRlimit("RLIMIT_NOFILE", 20, 10)
	a.AddHooks(&nri.Hooks{Prestart: []*nri.Hook{{Path: "/hook"}}})
	a.SetLinuxCPUShares(7)
	a.SetLinuxPidLimits(5)
	a.SetLinuxMemoryLimit(100)
	a.AddLinuxUnified("memory.high", "max")
	a.SetLinuxOomScoreAdj(nil)
	return a
}

func TestOf(t *testing.T) {
	t.Parallel()
	c := &nri.Container{
		Env:    []string{"A=first", "A=old", "B=gone"},
		Args:   []string{"true"},
		Mounts: []*nri.Mount{{Source: "/x", Destination: "/d", Type: "bind"}},
		Linux:  &nri.LinuxContainer{Resources: &nri.LinuxResources{Cpu: &nri.LinuxCPU{Shares: nri.UInt64(uint64(2))}}},
	}
	want := []change.Change{
		{Field: "annotations", Key: "k", New: "v"},
		{Field: "args", Old: "[true]", New: "[sleep 1]"},
		{Field: "env", Key: "A", Old: "old", New: "new"},
		{Field: "env", Key: "B", Old: "gone", Removed: true},
		{Field: "hooks.prestart", Key: "/hook", New: "path=/hook"},
		{Field: "linux.resources.cpu.shares", Old: "2", New: "7"},
		{Field: "linux.resources.memory.limit", New: "100"},
		{Field: "linux.resources.pids.limit", New: "5"},
		{Field: "linux.resources.unified", Key: "memory.high", New: "max"},
		{Field: "mounts", Key: "/d", Old: "destination=/d type=bind source=/x", New: "destination=/d type=bind source=/s options=[ro bind]"},
		{Field: "rlimits", Key: "RLIMIT_NOFILE", New: "type=RLIMIT_NOFILE hard=20 soft=10"},
	}
	if diff := cmp.Diff(want, change.Of(c, adjustment())); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if got := change.Of(c, nil); got != nil {
		t.Errorf("nothing changes %v", got)
	}
}

func TestOfResources(t *testing.T) {
	t.Parallel()
	after := &nri.LinuxResources{Memory: &nri.LinuxMemory{Limit: nri.Int64(int64(9))}}
	before := &nri.LinuxResources{Memory: &nri.LinuxMemory{Limit: nri.Int64(int64(4))}}
	want := []change.Change{{Field: "linux.resources.memory.limit", Old: "4", New: "9"}}
	if diff := cmp.Diff(want, change.OfResources(before, after)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if got := change.OfResources(nil, after); len(got) != 1 || got[0].Old != "" {
		t.Errorf("without anything before: %v", got)
	}
}

func TestStripLeavesWhatIsKept(t *testing.T) {
	t.Parallel()
	a := adjustment()
	change.Strip(a, func(f string) bool { return f == "env" || strings.HasPrefix(f, "linux.resources.cpu.") })
	var fields []string
	for _, c := range change.Of(&nri.Container{}, a) {
		fields = append(fields, c.Field)
	}
	if want := []string{"env", "env", "linux.resources.cpu.shares"}; !slices.Equal(fields, want) {
		t.Errorf("left are %v, want %v", fields, want)
	}
	if a.GetLinux().GetResources().Memory != nil {
		t.Error("an empty group is left")
	}
	change.Strip(a, func(string) bool { return false })
	if a.Strip() != nil {
		t.Errorf("left is %v", a)
	}
}

// Each name that a change can have is one that can be allowed.
func TestFieldsHoldEveryChange(t *testing.T) {
	t.Parallel()
	fields := change.Fields()
	for _, c := range change.Of(&nri.Container{}, adjustment()) {
		if !slices.Contains(fields, c.Field) {
			t.Errorf("%s is not among the fields", c.Field)
		}
	}
	for _, want := range []string{"cdi_devices", "linux.seccomp_policy", "linux.resources", "linux.rdt.clos_id", change.Evict} {
		if !slices.Contains(fields, want) {
			t.Errorf("%s is missing in %v", want, fields)
		}
	}
}

func TestLongValuesAreCut(t *testing.T) {
	t.Parallel()
	a := &nri.ContainerAdjustment{}
	a.AddEnv("A", strings.Repeat("x", 1<<20))
	if got := change.Of(&nri.Container{}, a)[0].New; len(got) > 2048 {
		t.Errorf("value has %d bytes", len(got))
	}
}
