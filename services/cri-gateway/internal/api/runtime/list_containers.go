package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/batch"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ListContainers implements criv1.RuntimeServiceServer.
func (s *Service) ListContainers(ctx context.Context, req *criv1.ListContainersRequest) (*criv1.ListContainersResponse, error) {
	containers, err := s.listContainers(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &criv1.ListContainersResponse{Containers: containers}, nil
}

// StreamContainers implements criv1.RuntimeServiceServer.
func (s *Service) StreamContainers(
	req *criv1.StreamContainersRequest, stream grpc.ServerStreamingServer[criv1.StreamContainersResponse],
) error {
	containers, err := s.listContainers(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return batch.Send(containers, func(part []*criv1.Container) error {
		return stream.Send(&criv1.StreamContainersResponse{Containers: part})
	})
}

func (s *Service) listContainers(ctx context.Context, filter *criv1.ContainerFilter) ([]*criv1.Container, error) {
	if err := validate.Filter(filter); err != nil {
		return nil, err
	}
	resp, err := s.containers.ListContainers(ctx, &containerv1.ListContainersRequest{Filter: filter})
	if err != nil {
		return nil, err
	}
	return resp.GetContainers(), nil
}
