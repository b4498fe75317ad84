package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/batch"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ListPodSandbox implements criv1.RuntimeServiceServer.
func (s *Service) ListPodSandbox(ctx context.Context, req *criv1.ListPodSandboxRequest) (*criv1.ListPodSandboxResponse, error) {
	items, err := s.listSandboxes(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &criv1.ListPodSandboxResponse{Items: items}, nil
}

// StreamPodSandboxes implements criv1.RuntimeServiceServer.
func (s *Service) StreamPodSandboxes(
	req *criv1.StreamPodSandboxesRequest, stream grpc.ServerStreamingServer[criv1.StreamPodSandboxesResponse],
) error {
	items, err := s.listSandboxes(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return batch.Send(items, func(part []*criv1.PodSandbox) error {
		return stream.Send(&criv1.StreamPodSandboxesResponse{PodSandboxes: part})
	})
}

func (s *Service) listSandboxes(ctx context.Context, filter *criv1.PodSandboxFilter) ([]*criv1.PodSandbox, error) {
	if err := validate.Filter(filter); err != nil {
		return nil, err
	}
	resp, err := s.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Filter: filter})
	if err != nil {
		return nil, err
	}
	return resp.GetItems(), nil
}
