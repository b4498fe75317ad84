package api

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// RunPodSandbox tells the plugins of a pod that is about to become READY.
func (s *Service) RunPodSandbox(ctx context.Context, req *nriv1.RunPodSandboxRequest) (*nriv1.RunPodSandboxResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req.GetRequest()); err != nil {
		return nil, err
	}
	leg := legOf(req.GetLeg())
	if err := s.hub.RunPodSandbox(dispatch.WithLeg(timed(ctx, req.GetTimeLeftMs()), leg), req.GetRequest()); err != nil {
		return nil, err
	}
	return &nriv1.RunPodSandboxResponse{Response: &nri.RunPodSandboxResponse{}, Merge: mergeOf(leg)}, nil
}
