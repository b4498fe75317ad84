package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// CreateContainer asks the plugins for adjustments of a container.
func (s *Service) CreateContainer(ctx context.Context, req *nriv1.CreateContainerRequest) (*nriv1.CreateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	leg := legOf(req.GetLeg())
	resp, err := s.hub.CreateContainer(dispatch.WithLeg(timed(ctx, req.GetTimeLeftMs()), leg), req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.CreateContainerResponse{Response: resp, Merge: mergeOf(leg)}, nil
}
