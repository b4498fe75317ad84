package change_test

import (
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
)

// The changes in an answer are told and taken out, whatever the answer is; of what is
// stripped as a whole nothing is left to tell.
func FuzzChanges(f *testing.F) {
	a := &nri.ContainerAdjustment{}
	a.AddEnv("A", "1")
	a.AddAnnotation("k", "v")
	a.AddMount(&nri.Mount{Destination: "/d"})
	a.SetLinuxMemoryLimit(3)
	a.AddLinuxUnified("k", "v")
	a.AddRlimit("RLIMIT_NOFILE", 1, 1)
	seed, err := proto.Marshal(a)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, text []byte) {
		var adjust nri.ContainerAdjustment
		if proto.Unmarshal(text, &adjust) != nil {
			return
		}
		for _, c := range []*nri.Container{nil, {Id: "c", Env: []string{"A=0", "odd"}}} {
			change.Of(c, &adjust)
		}
		change.OfResources(nil, adjust.GetLinux().GetResources())
		change.Strip(&adjust, func(string) bool { return false })
		if left := change.Of(nil, &adjust); len(left) > 0 {
			t.Errorf("stripped of everything, there is still %v", left)
		}
	})
}
