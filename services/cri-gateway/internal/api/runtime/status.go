package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/status"
)

// Status implements criv1.RuntimeServiceServer. A sandboxd that is away makes the node
// not ready; it is no error.
func (s *Service) Status(ctx context.Context, req *criv1.StatusRequest) (*criv1.StatusResponse, error) {
	node, err := s.node.GetStatus(ctx, &nodev1.GetStatusRequest{Verbose: req.GetVerbose()})
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	resp := status.Status(node, err)
	if err := s.self.Able(ctx); err != nil {
		status.HubAway(resp, err)
	}
	if enabled, degraded, missing, failure := s.self.Plugins(ctx); enabled {
		status.AddPlugins(resp, failure, degraded, missing)
	}
	if req.GetVerbose() {
		status.AddInfo(resp, s.self.Info(ctx))
	}
	return resp, nil
}
