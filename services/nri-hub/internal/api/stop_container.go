package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// StopContainer tells the plugins that a container has ended.
func (s *Service) StopContainer(ctx context.Context, req *nriv1.StopContainerRequest) (*nriv1.StopContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	resp, err := s.hub.StopContainer(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	return &nriv1.StopContainerResponse{Response: resp}, nil
}
