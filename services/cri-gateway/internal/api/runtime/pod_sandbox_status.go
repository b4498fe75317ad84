package runtime

import (
	"context"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// PodSandboxStatus implements criv1.RuntimeServiceServer.
func (s *Service) PodSandboxStatus(ctx context.Context, req *criv1.PodSandboxStatusRequest) (*criv1.PodSandboxStatusResponse, error) {
	if err := validate.ID("pod_sandbox_id", req.GetPodSandboxId()); err != nil {
		return nil, err
	}
	now := time.Now()
	resp, err := s.sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{
		SandboxId: req.GetPodSandboxId(), Verbose: req.GetVerbose(),
	})
	if err != nil {
		return nil, err
	}
	return &criv1.PodSandboxStatusResponse{
		Status:             resp.GetStatus(),
		Info:               resp.GetInfo(),
		ContainersStatuses: resp.GetContainers(),
		Timestamp:          now.UnixNano(),
	}, nil
}
