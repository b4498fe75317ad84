package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// StartContainer implements criv1.RuntimeServiceServer.
func (s *Service) StartContainer(ctx context.Context, req *criv1.StartContainerRequest) (*criv1.StartContainerResponse, error) {
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.sequences.StartContainer(ctx, id); err != nil {
		return nil, err
	}
	return &criv1.StartContainerResponse{}, nil
}
