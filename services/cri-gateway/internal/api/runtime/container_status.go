package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ContainerStatus implements criv1.RuntimeServiceServer.
func (s *Service) ContainerStatus(ctx context.Context, req *criv1.ContainerStatusRequest) (*criv1.ContainerStatusResponse, error) {
	if err := validate.ID("container_id", req.GetContainerId()); err != nil {
		return nil, err
	}
	resp, err := s.containers.GetContainer(ctx, &containerv1.GetContainerRequest{
		ContainerId: req.GetContainerId(), Verbose: req.GetVerbose(),
	})
	if err != nil {
		return nil, err
	}
	return &criv1.ContainerStatusResponse{Status: resp.GetStatus(), Info: resp.GetInfo()}, nil
}
