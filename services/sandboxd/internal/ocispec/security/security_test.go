package security

import (
	"slices"
	"testing"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSELinuxOptions(t *testing.T) {
	t.Parallel()
	own, ofPod := &criv1.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0:c1"}, &criv1.SELinuxOption{Level: "s0:c2"}
	for name, tt := range map[string]struct {
		own, pod *criv1.SELinuxOption
		want     []string
	}{
		"nothing":       {nil, nil, nil},
		"empty":         {&criv1.SELinuxOption{}, nil, nil},
		"the pod's":     {&criv1.SELinuxOption{}, ofPod, []string{"level:s0:c2"}},
		"the container": {own, ofPod, []string{"user:u", "role:r", "type:t", "level:s0:c1"}},
	} {
		if got := labelOptions(SELinuxOptions(tt.own, tt.pod)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
