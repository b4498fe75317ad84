package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// StartContainer tells the plugins that a container is about to start.
func (s *Service) StartContainer(ctx context.Context, req *nriv1.StartContainerRequest) (*nriv1.StartContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.StartContainer(dispatch.WithLeg(timed(ctx, req.GetTimeLeftMs()), legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.StartContainerResponse{Response: &nri.StartContainerResponse{}}, nil
}
