package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

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
