package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// RunPodSandbox implements criv1.RuntimeServiceServer.
func (s *Service) RunPodSandbox(ctx context.Context, req *criv1.RunPodSandboxRequest) (*criv1.RunPodSandboxResponse, error) {
	if err := validate.RunPodSandbox(req); err != nil {
		return nil, err
	}
	id, err := s.sequences.RunPodSandbox(ctx, req)
	if err != nil {
		return nil, err
	}
	return &criv1.RunPodSandboxResponse{PodSandboxId: id}, nil
}
