package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// RemoveContainer implements criv1.RuntimeServiceServer.
func (s *Service) RemoveContainer(ctx context.Context, req *criv1.RemoveContainerRequest) (*criv1.RemoveContainerResponse, error) {
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.sequences.RemoveContainer(ctx, id); err != nil {
		return nil, err
	}
	return &criv1.RemoveContainerResponse{}, nil
}
