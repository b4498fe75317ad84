package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// UpdateContainer asks the plugins about new resources of a container.
func (s *Service) UpdateContainer(ctx context.Context, req *nriv1.UpdateContainerRequest) (*nriv1.UpdateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	resp, err := s.hub.UpdateContainer(timed(ctx, req.GetTimeLeftMs()), req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.UpdateContainerResponse{Response: resp}, nil
}
