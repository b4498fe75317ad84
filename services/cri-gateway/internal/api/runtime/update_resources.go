package runtime

import (
	"context"

	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// UpdateContainerResources implements criv1.RuntimeServiceServer.
func (s *Service) UpdateContainerResources(
	ctx context.Context, req *criv1.UpdateContainerResourcesRequest,
) (*criv1.UpdateContainerResourcesResponse, error) {
	if err := validate.UpdateContainerResources(req); err != nil {
		return nil, err
	}
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	full := proto.CloneOf(req)
	full.ContainerId = id
	if err := s.sequences.UpdateContainerResources(ctx, full); err != nil {
		return nil, err
	}
	return &criv1.UpdateContainerResourcesResponse{}, nil
}

// UpdatePodSandboxResources implements criv1.RuntimeServiceServer.
func (s *Service) UpdatePodSandboxResources(
	ctx context.Context, req *criv1.UpdatePodSandboxResourcesRequest,
) (*criv1.UpdatePodSandboxResourcesResponse, error) {
	if err := validate.UpdatePodSandboxResources(req); err != nil {
		return nil, err
	}
	id, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	full := proto.CloneOf(req)
	full.PodSandboxId = id
	if err := s.sequences.UpdatePodSandboxResources(ctx, full); err != nil {
		return nil, err
	}
	return &criv1.UpdatePodSandboxResourcesResponse{}, nil
}
