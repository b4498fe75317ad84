package runtime

import (
	"context"

	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// CreateContainer implements criv1.RuntimeServiceServer.
func (s *Service) CreateContainer(ctx context.Context, req *criv1.CreateContainerRequest) (*criv1.CreateContainerResponse, error) {
	if err := validate.CreateContainer(req); err != nil {
		return nil, err
	}
	sandbox, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if sandbox != req.GetPodSandboxId() {
		req = proto.CloneOf(req)
		req.PodSandboxId = sandbox
	}
	id, err := s.sequences.CreateContainer(ctx, req)
	if err != nil {
		return nil, err
	}
	return &criv1.CreateContainerResponse{ContainerId: id}, nil
}
