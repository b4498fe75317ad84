package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// UpdatePodSandbox tells the plugins of new pod-level resources, before the change.
func (s *Service) UpdatePodSandbox(ctx context.Context, req *nriv1.UpdatePodSandboxRequest) (*nriv1.UpdatePodSandboxResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	if err := s.hub.UpdatePodSandbox(dispatch.WithLeg(timed(ctx, req.GetTimeLeftMs()), legOf(req.GetLeg())), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.UpdatePodSandboxResponse{Response: &nri.UpdatePodSandboxResponse{}}, nil
}
