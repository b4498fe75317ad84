package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
)

// ReopenContainerLog implements criv1.RuntimeServiceServer.
func (s *Service) ReopenContainerLog(
	ctx context.Context, req *criv1.ReopenContainerLogRequest,
) (*criv1.ReopenContainerLogResponse, error) {
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	_, err = s.containers.ReopenContainerLog(ctx, &containerv1.ReopenContainerLogRequest{ContainerId: id})
	if err != nil {
		return nil, err
	}
	return &criv1.ReopenContainerLogResponse{}, nil
}
