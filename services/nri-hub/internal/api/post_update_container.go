package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// PostUpdateContainer tells the plugins that a container's resources were changed.
func (s *Service) PostUpdateContainer(ctx context.Context, req *nriv1.PostUpdateContainerRequest) (*nriv1.PostUpdateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.PostUpdateContainer(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.PostUpdateContainerResponse{Response: &nri.PostUpdateContainerResponse{}}, nil
}
