package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// StopPodSandbox tells the plugins that a pod stops.
func (s *Service) StopPodSandbox(ctx context.Context, req *nriv1.StopPodSandboxRequest) (*nriv1.StopPodSandboxResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.StopPodSandbox(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.StopPodSandboxResponse{Response: &nri.StopPodSandboxResponse{}}, nil
}
