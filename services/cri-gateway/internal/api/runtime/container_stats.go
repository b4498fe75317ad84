package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ContainerStats implements criv1.RuntimeServiceServer.
func (s *Service) ContainerStats(ctx context.Context, req *criv1.ContainerStatsRequest) (*criv1.ContainerStatsResponse, error) {
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	resp, err := s.containers.GetContainerStats(ctx, &containerv1.GetContainerStatsRequest{ContainerId: id})
	if err != nil {
		return nil, err
	}
	return &criv1.ContainerStatsResponse{Stats: resp.GetStats()}, nil
}

// ListContainerStats implements criv1.RuntimeServiceServer.
func (s *Service) ListContainerStats(
	ctx context.Context, req *criv1.ListContainerStatsRequest,
) (*criv1.ListContainerStatsResponse, error) {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return nil, err
	}
	resp := &criv1.ListContainerStatsResponse{}
	return resp, relay.Whole(ctx, s.sandboxd, containerv1.ContainerService_ListContainerStats_FullMethodName, &containerv1.ListContainerStatsRequest{Filter: req.GetFilter()}, resp)
}

// StreamContainerStats implements criv1.RuntimeServiceServer.
func (s *Service) StreamContainerStats(
	req *criv1.StreamContainerStatsRequest, stream grpc.ServerStreamingServer[criv1.StreamContainerStatsResponse],
) error {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return err
	}
	source, err := s.containers.StreamContainerStats(stream.Context(), &containerv1.StreamContainerStatsRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*containerv1.StreamContainerStatsResponse).GetStats, func(part []*criv1.ContainerStats) error {
		return stream.Send(&criv1.StreamContainerStatsResponse{ContainerStats: part})
	})
}
