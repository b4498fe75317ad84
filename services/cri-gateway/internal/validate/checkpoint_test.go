package validate_test

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

func checkRefusal(t *testing.T, name string, err error, field string) {
	t.Helper()
	switch {
	case field == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case field != "" && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), field)):
		t.Errorf("%s: %v, want InvalidArgument about %s", name, err, field)
	}
}

func TestCheckpointContainer(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*criv1.CheckpointContainerRequest)
		field  string
	}{
		"good":         {func(*criv1.CheckpointContainerRequest) {}, ""},
		"no id":        {func(r *criv1.CheckpointContainerRequest) { r.ContainerId = "" }, "container_id"},
		"no location":  {func(r *criv1.CheckpointContainerRequest) { r.Location = "" }, "location"},
		"relative":     {func(r *criv1.CheckpointContainerRequest) { r.Location = "a.tar" }, "location"},
		"dots":         {func(r *criv1.CheckpointContainerRequest) { r.Location = "/a/../b" }, "location"},
		"NUL":          {func(r *criv1.CheckpointContainerRequest) { r.Location = "/a\x00b" }, "location"},
		"long":         {func(r *criv1.CheckpointContainerRequest) { r.Location = "/" + strings.Repeat("a", 5000) }, "location"},
		"negative":     {func(r *criv1.CheckpointContainerRequest) { r.Timeout = -1 }, "timeout"},
		"with timeout": {func(r *criv1.CheckpointContainerRequest) { r.Timeout = 7 }, ""},
	} {
		req := &criv1.CheckpointContainerRequest{ContainerId: "c", Location: "/a.tar"}
		tc.change(req)
		checkRefusal(t, name, validate.CheckpointContainer(req), tc.field)
	}
}

func TestCheckpointPod(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*criv1.CheckpointPodRequest)
		field  string
	}{
		"good":         {func(*criv1.CheckpointPodRequest) {}, ""},
		"no id":        {func(r *criv1.CheckpointPodRequest) { r.PodSandboxId = "" }, "pod_sandbox_id"},
		"relative":     {func(r *criv1.CheckpointPodRequest) { r.OutputPath = "a" }, "output_path"},
		"NUL":          {func(r *criv1.CheckpointPodRequest) { r.OutputPath = "/a\x00" }, "output_path"},
		"no container": {func(r *criv1.CheckpointPodRequest) { r.ContainerIds = nil }, "container_ids"},
		"twice":        {func(r *criv1.CheckpointPodRequest) { r.ContainerIds = []string{"c", "c"} }, "container_ids[1]"},
		"malformed":    {func(r *criv1.CheckpointPodRequest) { r.ContainerIds = []string{"a/b"} }, "container_ids[0]"},
		"NUL in an option": {func(r *criv1.CheckpointPodRequest) {
			r.Options = map[string]string{"a": "\x00"}
		}, "options"},
	} {
		req := &criv1.CheckpointPodRequest{PodSandboxId: "s", OutputPath: "/a", ContainerIds: []string{"c"}}
		tc.change(req)
		checkRefusal(t, name, validate.CheckpointPod(req), tc.field)
	}
}

func TestRestorePod(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*criv1.RestorePodRequest)
		field  string
	}{
		"good":         {func(*criv1.RestorePodRequest) {}, ""},
		"relative":     {func(r *criv1.RestorePodRequest) { r.CheckpointPath = "a" }, "checkpoint_path"},
		"no config":    {func(r *criv1.RestorePodRequest) { r.Config = nil }, "config"},
		"handler":      {func(r *criv1.RestorePodRequest) { r.RuntimeHandler = "a/b" }, "runtime_handler"},
		"no container": {func(r *criv1.RestorePodRequest) { r.ContainerConfigs = nil }, "container_configs"},
		"twice": {func(r *criv1.RestorePodRequest) {
			r.ContainerConfigs = append(r.ContainerConfigs, r.GetContainerConfigs()[0])
		}, "container_configs[1].metadata.name"},
		"no name": {func(r *criv1.RestorePodRequest) { r.ContainerConfigs[0].Metadata.Name = "" }, "container_configs[0]"},
		"NUL in an option": {func(r *criv1.RestorePodRequest) {
			r.Options = map[string]string{"a": "\x00"}
		}, "options"},
	} {
		req := &criv1.RestorePodRequest{
			CheckpointPath: "/c", Config: &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}},
			ContainerConfigs: []*criv1.ContainerConfig{{Metadata: &criv1.ContainerMetadata{Name: "c"}, Image: &criv1.ImageSpec{Image: "i"}}},
		}
		tc.change(req)
		checkRefusal(t, name, validate.RestorePod(req), tc.field)
	}
}
