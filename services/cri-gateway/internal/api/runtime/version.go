package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/status"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// Version implements criv1.RuntimeServiceServer. It needs no backend.
func (s *Service) Version(context.Context, *criv1.VersionRequest) (*criv1.VersionResponse, error) {
	return status.Version(s.version), nil
}

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

// RuntimeConfig implements criv1.RuntimeServiceServer.
func (s *Service) RuntimeConfig(ctx context.Context, _ *criv1.RuntimeConfigRequest) (*criv1.RuntimeConfigResponse, error) {
	resp, err := s.node.GetRuntimeConfig(ctx, &nodev1.GetRuntimeConfigRequest{})
	if err != nil {
		return nil, err
	}
	return &criv1.RuntimeConfigResponse{Linux: resp.GetLinux()}, nil
}

// UpdateRuntimeConfig implements criv1.RuntimeServiceServer.
func (s *Service) UpdateRuntimeConfig(
	ctx context.Context, req *criv1.UpdateRuntimeConfigRequest,
) (*criv1.UpdateRuntimeConfigResponse, error) {
	if err := validate.UpdateRuntimeConfig(req); err != nil {
		return nil, err
	}
	_, err := s.node.UpdateRuntimeConfig(ctx, &nodev1.UpdateRuntimeConfigRequest{Config: req.GetRuntimeConfig()})
	if err != nil {
		return nil, err
	}
	return &criv1.UpdateRuntimeConfigResponse{}, nil
}
