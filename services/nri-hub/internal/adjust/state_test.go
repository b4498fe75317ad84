package adjust_test

import (
	"fmt"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
)

// overTheWire is what arrives of a state elsewhere.
func overTheWire(t *rapid.T, s adjust.State) adjust.State {
	if s.Owners != nil {
		b, err := proto.Marshal(s.Owners)
		if err != nil {
			t.Fatal(err)
		}
		s.Owners = &nri.OwningPlugins{}
		if err := proto.Unmarshal(b, s.Owners); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// A merge that goes on elsewhere after some plugins comes to the same as one that does not:
// the same answer, the same owners, the same conflicts.
func TestMergeGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		req := &nri.CreateContainerRequest{
			Pod: &nri.PodSandbox{Id: "pod"}, Container: &nri.Container{Id: "ctr", Env: []string{"A=0"}, Annotations: map[string]string{"B": "0"}},
		}
		whole, pieces := adjust.NewCreate(req), adjust.NewCreate(req)
		for i := range rapid.IntRange(1, 4).Draw(t, "plugins") {
			a := &nri.ContainerAdjustment{}
			for _, c := range changes().Draw(t, "changes") {
				if c.remove {
					a.RemoveEnv(c.key)
					a.RemoveAnnotation(c.key)
				}
				if c.set {
					a.AddEnv(c.key, c.value)
					a.AddAnnotation(c.key, c.value)
				}
			}
			if rapid.Bool().Draw(t, "cpu") {
				a.SetLinuxCPUShares(uint64(i))
			}
			u := &nri.ContainerUpdate{ContainerId: rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "other")}
			u.SetLinuxMemoryLimit(int64(i))
			resp := &nri.CreateContainerResponse{Adjust: a, Update: []*nri.ContainerUpdate{u}}
			plugin := fmt.Sprintf("%02d-p", i)
			one := whole.Apply(plugin, proto.CloneOf(resp))
			two := pieces.Apply(plugin, proto.CloneOf(resp))
			if fmt.Sprint(one) != fmt.Sprint(two) {
				t.Fatalf("%v, but elsewhere %v", one, two)
			}
			if one != nil {
				return
			}
			pieces = adjust.ResumeCreate(req, overTheWire(t, pieces.State()))
		}
		if !proto.Equal(whole.Response(), pieces.Response()) {
			t.Fatalf("%v, but elsewhere %v", whole.Response(), pieces.Response())
		}
		if !proto.Equal(whole.Validation(nil), pieces.Validation(nil)) {
			t.Fatalf("owners differ: %v, but elsewhere %v", whole.Validation(nil).GetOwners(), pieces.Validation(nil).GetOwners())
		}
		if !proto.Equal(whole.Request(), pieces.Request()) {
			t.Fatalf("the next plugin sees %v, but elsewhere %v", whole.Request(), pieces.Request())
		}
	})
}

// Updates of a container that is updated, and of others, go on elsewhere too.
func TestUpdateGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	req := &nri.UpdateContainerRequest{
		Container: &nri.Container{Id: "ctr"}, LinuxResources: &nri.LinuxResources{Cpu: &nri.LinuxCPU{Shares: nri.UInt64(1)}},
	}
	first := adjust.NewUpdate(req)
	up := &nri.ContainerUpdate{ContainerId: "ctr"}
	up.SetLinuxCPUShares(5)
	if err := first.Apply("00-a", &nri.UpdateContainerResponse{Update: []*nri.ContainerUpdate{up}}); err != nil {
		t.Fatal(err)
	}
	second := adjust.ResumeUpdate(req, first.State())
	if got := second.Request().GetLinuxResources().GetCpu().GetShares().GetValue(); got != 5 {
		t.Errorf("the next plugin sees %d shares, want 5", got)
	}
	again := &nri.ContainerUpdate{ContainerId: "ctr"}
	again.SetLinuxCPUShares(6)
	if err := second.Apply("10-b", &nri.UpdateContainerResponse{Update: []*nri.ContainerUpdate{again}}); err == nil {
		t.Error("a second plugin set what the first one owns")
	}
	if up := second.Response().GetUpdate(); len(up) != 1 || up[0].GetLinux().GetResources().GetCpu().GetShares().GetValue() != 5 {
		t.Errorf("the answer is %v", up)
	}
}
