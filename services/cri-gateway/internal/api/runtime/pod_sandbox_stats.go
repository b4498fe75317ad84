package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// PodSandboxStats implements criv1.RuntimeServiceServer.
func (s *Service) PodSandboxStats(ctx context.Context, req *criv1.PodSandboxStatsRequest) (*criv1.PodSandboxStatsResponse, error) {
	id, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	resp, err := s.sandboxes.GetSandboxStats(ctx, &sandboxv1.GetSandboxStatsRequest{SandboxId: id})
	if err != nil {
		return nil, err
	}
	return &criv1.PodSandboxStatsResponse{Stats: resp.GetStats()}, nil
}

// ListPodSandboxStats implements criv1.RuntimeServiceServer.
func (s *Service) ListPodSandboxStats(
	ctx context.Context, req *criv1.ListPodSandboxStatsRequest,
) (*criv1.ListPodSandboxStatsResponse, error) {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return nil, err
	}
	resp := &criv1.ListPodSandboxStatsResponse{}
	return resp, relay.Whole(ctx, s.sandboxd, sandboxv1.SandboxService_ListSandboxStats_FullMethodName, &sandboxv1.ListSandboxStatsRequest{Filter: req.GetFilter()}, resp)
}

// StreamPodSandboxStats implements criv1.RuntimeServiceServer.
func (s *Service) StreamPodSandboxStats(
	req *criv1.StreamPodSandboxStatsRequest, stream grpc.ServerStreamingServer[criv1.StreamPodSandboxStatsResponse],
) error {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return err
	}
	source, err := s.sandboxes.StreamSandboxStats(stream.Context(), &sandboxv1.StreamSandboxStatsRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*sandboxv1.StreamSandboxStatsResponse).GetStats, func(part []*criv1.PodSandboxStats) error {
		return stream.Send(&criv1.StreamPodSandboxStatsResponse{PodSandboxStats: part})
	})
}
