package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// PostUpdatePodSandbox tells the plugins of new pod-level resources, after the change.
func (s *Service) PostUpdatePodSandbox(ctx context.Context, req *nriv1.PostUpdatePodSandboxRequest) (*nriv1.PostUpdatePodSandboxResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.PostUpdatePodSandbox(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.PostUpdatePodSandboxResponse{Response: &nri.PostUpdatePodSandboxResponse{}}, nil
}
