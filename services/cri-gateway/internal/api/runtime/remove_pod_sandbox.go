package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// RemovePodSandbox implements criv1.RuntimeServiceServer.
func (s *Service) RemovePodSandbox(ctx context.Context, req *criv1.RemovePodSandboxRequest) (*criv1.RemovePodSandboxResponse, error) {
	id, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := s.sequences.RemovePodSandbox(ctx, id); err != nil {
		return nil, err
	}
	return &criv1.RemovePodSandboxResponse{}, nil
}
