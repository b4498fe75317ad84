package security

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
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

func TestSeccompProfiles(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "profile.json")
	for text, good := range map[string]bool{
		`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"op":"SCMP_CMP_EQ"}]}]}`: true,
		`{"defaultAction":"SCMP_ACT_FOO"}`: false,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_BAR"}]}`:                               false,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_LOG","args":[{"op":"SCMP_CMP_XX"}]}]}`: false,
		`{"syscalls":[]}`: false,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := readSeccomp(file)
		if good != (err == nil) || (!good && !errdefs.IsInvalidArgument(err)) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
