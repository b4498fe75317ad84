package criview

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

func TestSandboxStatus(t *testing.T) {
	rec := &recordv1.Sandbox{
		Id: "s", State: recordv1.SandboxState_SANDBOX_STATE_READY, CreatedAt: &timestamppb.Timestamp{Seconds: 1, Nanos: 2},
		Config: &criv1.PodSandboxConfig{
			Metadata: &criv1.PodSandboxMetadata{Name: "n", Attempt: 3}, Labels: map[string]string{"a": "b"},
		},
		Ips: []string{"10.0.0.2", "fd00::2"}, RuntimeHandler: "h",
	}
	want := &criv1.PodSandboxStatus{
		Id: "s", Metadata: &criv1.PodSandboxMetadata{Name: "n", Attempt: 3}, State: criv1.PodSandboxState_SANDBOX_READY,
		CreatedAt: 1_000_000_002, Labels: map[string]string{"a": "b"}, RuntimeHandler: "h",
		Network: &criv1.PodSandboxNetworkStatus{Ip: "10.0.0.2", AdditionalIps: []*criv1.PodIP{{Ip: "fd00::2"}}},
		Linux:   &criv1.LinuxPodSandboxStatus{Namespaces: &criv1.Namespace{Options: &criv1.NamespaceOption{}}},
	}
	if diff := cmp.Diff(want, SandboxStatus(rec), protocmp.Transform()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	rec.ExitedAt = timestamppb.Now()
	if got := SandboxStatus(rec).GetState(); got != criv1.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("a sandbox without a living shim is %v", got)
	}
	rec.State = recordv1.SandboxState_SANDBOX_STATE_STOPPED
	if got := SandboxStatus(rec).GetNetwork().GetIp(); got != "" {
		t.Errorf("a stopped sandbox has the address %q", got)
	}
}

func TestContainerStatus(t *testing.T) {
	rec := &recordv1.Container{
		Id: "c", SandboxId: "s", State: recordv1.ContainerState_CONTAINER_STATE_EXITED, ExitCode: 137, Reason: "OOMKilled",
		CreatedAt: &timestamppb.Timestamp{Seconds: 1}, StartedAt: &timestamppb.Timestamp{Seconds: 2}, FinishedAt: &timestamppb.Timestamp{Seconds: 3},
		Config:     &criv1.ContainerConfig{Image: &criv1.ImageSpec{Image: "sha256:1", UserSpecifiedImage: "busybox", Annotations: map[string]string{"a": "b"}}},
		StopSignal: "SIGRTMIN+3", ImageRef: "busybox@sha256:2", ImageId: "sha256:1",
	}
	got := ContainerStatus(rec)
	if got.GetImage().GetImage() != "busybox" || got.GetImage().GetAnnotations()["a"] != "b" || got.GetImageRef() != "busybox@sha256:2" || got.GetImageId() != "sha256:1" {
		t.Errorf("image = %v, %s, %s", got.GetImage(), got.GetImageRef(), got.GetImageId())
	}
	if got.GetStopSignal() != criv1.Signal_SIGNAL_SIGRTMINPLUS3 {
		t.Errorf("stop signal = %v", got.GetStopSignal())
	}
	if got.GetCreatedAt() != 1e9 || got.GetStartedAt() != 2e9 || got.GetFinishedAt() != 3e9 || got.GetExitCode() != 137 {
		t.Errorf("status = %v", got)
	}
	created := ContainerStatus(&recordv1.Container{State: recordv1.ContainerState_CONTAINER_STATE_CREATED})
	if created.GetStartedAt() != 0 || created.GetFinishedAt() != 0 {
		t.Errorf("a container that never ran has times: %v", created)
	}
}

func TestFilters(t *testing.T) {
	pod := &criv1.PodSandbox{Id: "abc", State: criv1.PodSandboxState_SANDBOX_READY, Labels: map[string]string{"k": "v", "x": ""}}
	state := func(s criv1.PodSandboxState) *criv1.PodSandboxStateValue {
		return &criv1.PodSandboxStateValue{State: s}
	}
	for name, tc := range map[string]struct {
		filter *criv1.PodSandboxFilter
		want   bool
	}{
		"none":         {nil, true},
		"empty":        {&criv1.PodSandboxFilter{}, true},
		"prefix":       {&criv1.PodSandboxFilter{Id: "ab"}, true},
		"other id":     {&criv1.PodSandboxFilter{Id: "b"}, false},
		"state":        {&criv1.PodSandboxFilter{State: state(criv1.PodSandboxState_SANDBOX_READY)}, true},
		"other state":  {&criv1.PodSandboxFilter{State: state(criv1.PodSandboxState_SANDBOX_NOTREADY)}, false},
		"label":        {&criv1.PodSandboxFilter{LabelSelector: map[string]string{"k": "v"}}, true},
		"empty label":  {&criv1.PodSandboxFilter{LabelSelector: map[string]string{"x": ""}}, true},
		"absent label": {&criv1.PodSandboxFilter{LabelSelector: map[string]string{"y": ""}}, false},
	} {
		if got := MatchSandbox(pod, tc.filter); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
	c := &criv1.Container{Id: "abc", PodSandboxId: "pod1", Labels: map[string]string{"k": "v"}, State: criv1.ContainerState_CONTAINER_RUNNING}
	exited := &criv1.ContainerStateValue{State: criv1.ContainerState_CONTAINER_EXITED}
	if !MatchContainer(c, &criv1.ContainerFilter{Id: "ab", LabelSelector: map[string]string{"k": "v"}}) ||
		MatchContainer(c, &criv1.ContainerFilter{Id: "ac"}) || MatchContainer(c, &criv1.ContainerFilter{LabelSelector: map[string]string{"k": "w"}}) {
		t.Error("container filters by id and label do not match as they should")
	}
	if !MatchContainer(c, &criv1.ContainerFilter{PodSandboxId: "pod1"}) || MatchContainer(c, &criv1.ContainerFilter{PodSandboxId: "pod2"}) ||
		MatchContainer(c, &criv1.ContainerFilter{State: exited}) || !MatchContainer(c, nil) {
		t.Error("container filters do not match as they should")
	}
}
