package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// PostStartContainer tells the plugins that a container runs.
func (s *Service) PostStartContainer(ctx context.Context, req *nriv1.PostStartContainerRequest) (*nriv1.PostStartContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.PostStartContainer(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.PostStartContainerResponse{Response: &nri.PostStartContainerResponse{}}, nil
}
