package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// StopContainer implements criv1.RuntimeServiceServer.
func (s *Service) StopContainer(ctx context.Context, req *criv1.StopContainerRequest) (*criv1.StopContainerResponse, error) {
	if err := validate.StopContainer(req); err != nil {
		return nil, err
	}
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.sequences.StopContainer(ctx, id, req.GetTimeout()); err != nil {
		return nil, err
	}
	return &criv1.StopContainerResponse{}, nil
}
