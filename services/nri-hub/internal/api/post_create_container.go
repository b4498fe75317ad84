package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// PostCreateContainer tells the plugins that a container is CREATED.
func (s *Service) PostCreateContainer(ctx context.Context, req *nriv1.PostCreateContainerRequest) (*nriv1.PostCreateContainerResponse, error) {
	if err := s.checkContainer(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.PostCreateContainer(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.PostCreateContainerResponse{Response: &nri.PostCreateContainerResponse{}}, nil
}
