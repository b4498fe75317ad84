package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// CreateContainer asks the plugins for adjustments of a container.
func (s *Service) CreateContainer(ctx context.Context, req *nriv1.CreateContainerRequest) (*nriv1.CreateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	resp, err := s.hub.CreateContainer(timed(ctx, req.GetTimeLeftMs()), req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.CreateContainerResponse{Response: resp}, nil
}
