package adjust_test

import (
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
)

// What two plugins answer is merged or refused, whatever it is: nothing panics, the request
// stays as it was, no key has two entries, and the outcome can be sent.
func FuzzAnswers(f *testing.F) {
	seed := func(a *nri.ContainerAdjustment, u ...*nri.ContainerUpdate) []byte {
		b, err := proto.Marshal(&nri.CreateContainerResponse{Adjust: a, Update: u})
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	first, second := &nri.ContainerAdjustment{}, &nri.ContainerAdjustment{}
	first.AddEnv("A", "1")
	first.AddAnnotation("k", "v")
	first.AddMount(&nri.Mount{Destination: "/d", Source: "/s", Type: "bind"})
	first.AddDevice(&nri.LinuxDevice{Path: "/dev/x", Type: "c"})
	first.SetLinuxCPUShares(5)
	first.SetArgs([]string{"a"})
	second.RemoveEnv("A")
	second.AddEnv("A", "2")
	second.RemoveAnnotation("k")
	second.RemoveMount("/d")
	second.UpdateArgs([]string{"b"})
	second.AddCDIDevice(&nri.CDIDevice{Name: "v.com/c=d"})
	update := &nri.ContainerUpdate{ContainerId: "other"}
	update.SetLinuxMemoryLimit(7)
	f.Add(seed(first), seed(second, update))
	f.Add([]byte{}, seed(second))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		req := &nri.CreateContainerRequest{
			Pod:       &nri.PodSandbox{Id: "pod"},
			Container: &nri.Container{Id: "ctr", Env: []string{"A=0", "odd"}, Annotations: map[string]string{"k": "0"}},
		}
		before := proto.CloneOf(req)
		create, others := adjust.NewCreate(req), adjust.NewOthers()
		changed := adjust.NewUpdate(&nri.UpdateContainerRequest{Pod: req.GetPod(), Container: req.GetContainer()})
		for i, text := range [][]byte{a, b} {
			var resp nri.CreateContainerResponse
			if proto.Unmarshal(text, &resp) != nil {
				return
			}
			plugin := []string{"00-a", "10-b"}[i]
			// Refused as a whole or not; the two others go on in any case.
			_ = others.Apply(plugin, proto.CloneOf(&resp).GetUpdate(), resp.GetEvict())
			_ = changed.Apply(plugin, &nri.UpdateContainerResponse{Update: proto.CloneOf(&resp).GetUpdate(), Evict: resp.GetEvict()})
			if create.Apply(plugin, &resp) != nil {
				break
			}
		}
		if !proto.Equal(req, before) {
			t.Error("the request was changed")
		}
		answer := create.Response()
		for k := range answer.GetAdjust().GetAnnotations() {
			if _, two := answer.GetAdjust().GetAnnotations()[nri.MarkForRemoval(k)]; two {
				t.Errorf("annotation %q is set and removed", k)
			}
		}
		seen := map[string]bool{}
		for _, m := range answer.GetAdjust().GetMounts() {
			key := nri.ClearRemovalMarker(m.GetDestination())
			if seen[key] {
				t.Errorf("mount %q has two entries", key)
			}
			seen[key] = true
		}
		for _, m := range []proto.Message{answer, changed.Response(), create.Validation(nil)} {
			if _, err := proto.Marshal(m); err != nil {
				t.Errorf("outcome cannot be sent: %v", err)
			}
		}
		if _, err := proto.Marshal(&nri.StopContainerResponse{Update: others.Updates()}); err != nil {
			t.Errorf("updates cannot be sent: %v", err)
		}
	})
}
