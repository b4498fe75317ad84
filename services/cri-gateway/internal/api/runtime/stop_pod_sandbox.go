package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// StopPodSandbox implements criv1.RuntimeServiceServer.
func (s *Service) StopPodSandbox(ctx context.Context, req *criv1.StopPodSandboxRequest) (*criv1.StopPodSandboxResponse, error) {
	id, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := s.sequences.StopPodSandbox(ctx, id); err != nil {
		return nil, err
	}
	return &criv1.StopPodSandboxResponse{}, nil
}
