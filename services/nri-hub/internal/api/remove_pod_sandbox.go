package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// RemovePodSandbox tells the plugins that a pod is gone.
func (s *Service) RemovePodSandbox(ctx context.Context, req *nriv1.RemovePodSandboxRequest) (*nriv1.RemovePodSandboxResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.RemovePodSandbox(dispatch.WithLeg(ctx, legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.RemovePodSandboxResponse{Response: &nri.RemovePodSandboxResponse{}}, nil
}
