package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// UpdateContainer asks the plugins about new resources of a container.
func (s *Service) UpdateContainer(ctx context.Context, req *nriv1.UpdateContainerRequest) (*nriv1.UpdateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	leg := legOf(req.GetLeg())
	resp, err := s.hub.UpdateContainer(dispatch.WithLeg(timed(ctx, req.GetTimeLeftMs()), leg), req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.UpdateContainerResponse{Response: resp, Merge: mergeOf(leg)}, nil
}
