package command

import (
	"strings"
	"testing"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestOptionsOfRunc(t *testing.T) {
	t.Parallel()
	handler := func(options map[string]any) pod.Handler {
		return pod.Handler{Name: "x", RuntimeType: "io.containerd.runc.v2", BinaryName: "crun", Root: "/r", SystemdCgroup: true, Options: options}
	}
	encoded, err := Options(handler(map[string]any{"ShimCgroup": "/shims", "NoPivotRoot": true, "IoUid": int64(7)}))
	if err != nil {
		t.Fatal(err)
	}
	got := &runcoptions.Options{}
	if err := proto.Unmarshal(encoded.GetValue(), got); err != nil {
		t.Fatal(err)
	}
	want := &runcoptions.Options{BinaryName: "crun", Root: "/r", SystemdCgroup: true, ShimCgroup: "/shims", NoPivotRoot: true, IoUid: 7}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for key, said := range map[string]string{"Colour": "Colour", "BinaryName": "binary_name", "SystemdCgroup": "cgroup_driver"} {
		_, err := Options(handler(map[string]any{key: "x"}))
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), said) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if _, err := Options(handler(map[string]any{"ShimCgroup": 7})); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a number as a path: %v", err)
	}
}
