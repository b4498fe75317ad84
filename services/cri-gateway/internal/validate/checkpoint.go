package validate

import (
	"fmt"
	"path/filepath"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CheckpointContainer checks a request for a container's checkpoint.
func CheckpointContainer(req *criv1.CheckpointContainerRequest) error {
	return firstError(
		ID("container_id", req.GetContainerId()),
		absolute("location", req.GetLocation()),
		timeout("timeout", req.GetTimeout()),
		Message(req),
	)
}

// CheckpointPod checks a request for a pod's checkpoint.
func CheckpointPod(req *criv1.CheckpointPodRequest) error {
	err := firstError(ID("pod_sandbox_id", req.GetPodSandboxId()), absolute("output_path", req.GetOutputPath()))
	if err != nil {
		return err
	}
	if len(req.GetContainerIds()) == 0 {
		return invalid("container_ids", "must not be empty")
	}
	seen := map[string]bool{}
	for i, id := range req.GetContainerIds() {
		field := fmt.Sprintf("container_ids[%d]", i)
		if err := ID(field, id); err != nil {
			return err
		}
		if seen[id] {
			return invalid(field, "%s is there twice", id)
		}
		seen[id] = true
	}
	return Message(req)
}

// RestorePod checks a request for a pod from a checkpoint. What it makes is checked as if it
// were asked for in requests of its own.
func RestorePod(req *criv1.RestorePodRequest) error {
	err := firstError(
		absolute("checkpoint_path", req.GetCheckpointPath()),
		RunPodSandbox(&criv1.RunPodSandboxRequest{Config: req.GetConfig(), RuntimeHandler: req.GetRuntimeHandler()}),
	)
	if err != nil {
		return err
	}
	if len(req.GetContainerConfigs()) == 0 {
		return invalid("container_configs", "must not be empty")
	}
	seen := map[string]bool{}
	for i, cfg := range req.GetContainerConfigs() {
		// Any well-formed id does: the sandbox is not made yet.
		err := CreateContainer(&criv1.CreateContainerRequest{PodSandboxId: "new", Config: cfg, SandboxConfig: req.GetConfig()})
		if err != nil {
			return fmt.Errorf("container_configs[%d]: %w", i, err)
		}
		name := cfg.GetMetadata().GetName()
		if seen[name] {
			return invalid(fmt.Sprintf("container_configs[%d].metadata.name", i), "%q is there twice", name)
		}
		seen[name] = true
	}
	return Message(req)
}

// absolute checks the path of a file or folder on the node.
func absolute(field, path string) error {
	switch {
	case path == "":
		return invalid(field, "must not be empty")
	case !filepath.IsAbs(path):
		return invalid(field, "must be an absolute path")
	case hasDotDot(path):
		return invalid(field, `must not contain ".."`)
	case len(path) > maxPath:
		return invalid(field, "must not be longer than %d bytes", maxPath)
	}
	return printable(field, path)
}
