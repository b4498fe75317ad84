package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// RemoveContainer tells the plugins that a container is gone.
func (s *Service) RemoveContainer(ctx context.Context, req *nriv1.RemoveContainerRequest) (*nriv1.RemoveContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.RemoveContainer(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.RemoveContainerResponse{Response: &nri.RemoveContainerResponse{}}, nil
}
