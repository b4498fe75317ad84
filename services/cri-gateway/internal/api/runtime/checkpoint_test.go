package runtime_test

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/runtime"
)

// A pod stands still while it is captured, so that a call must say how long it may last.
func TestPodCheckpointsNeedADeadline(t *testing.T) {
	b := runtime.New(runtime.Parts{})
	checkpoint := &criv1.CheckpointPodRequest{PodSandboxId: "x", OutputPath: "/c", ContainerIds: []string{"y"}}
	restore := &criv1.RestorePodRequest{
		CheckpointPath: "/c", Config: &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}},
		ContainerConfigs: []*criv1.ContainerConfig{{Metadata: &criv1.ContainerMetadata{Name: "c"}, Image: &criv1.ImageSpec{Image: "i"}}},
	}
	_, checkpointErr := b.CheckpointPod(t.Context(), checkpoint)
	_, restoreErr := b.RestorePod(t.Context(), restore)
	for _, err := range []error{checkpointErr, restoreErr} {
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "deadline") {
			t.Errorf("without a deadline: %v", err)
		}
	}
}
