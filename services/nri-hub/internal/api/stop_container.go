package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// StopContainer tells the plugins that a container has ended.
func (s *Service) StopContainer(ctx context.Context, req *nriv1.StopContainerRequest) (*nriv1.StopContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	leg := legOf(req.GetLeg())
	resp, err := s.hub.StopContainer(dispatch.WithLeg(ctx, leg), req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.StopContainerResponse{Response: resp, Merge: mergeOf(leg)}, nil
}
