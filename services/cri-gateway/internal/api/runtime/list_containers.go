package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ListContainers implements criv1.RuntimeServiceServer.
func (s *Service) ListContainers(ctx context.Context, req *criv1.ListContainersRequest) (*criv1.ListContainersResponse, error) {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return nil, err
	}
	resp := &criv1.ListContainersResponse{}
	return resp, relay.Whole(ctx, s.sandboxd, containerv1.ContainerService_ListContainers_FullMethodName, &containerv1.ListContainersRequest{Filter: req.GetFilter()}, resp)
}

// StreamContainers implements criv1.RuntimeServiceServer.
func (s *Service) StreamContainers(
	req *criv1.StreamContainersRequest, stream grpc.ServerStreamingServer[criv1.StreamContainersResponse],
) error {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return err
	}
	source, err := s.containers.StreamContainers(stream.Context(), &containerv1.StreamContainersRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*containerv1.StreamContainersResponse).GetContainers, func(part []*criv1.Container) error {
		return stream.Send(&criv1.StreamContainersResponse{Containers: part})
	})
}
