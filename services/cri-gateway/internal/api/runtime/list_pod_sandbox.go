package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ListPodSandbox implements criv1.RuntimeServiceServer.
func (s *Service) ListPodSandbox(ctx context.Context, req *criv1.ListPodSandboxRequest) (*criv1.ListPodSandboxResponse, error) {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return nil, err
	}
	resp := &criv1.ListPodSandboxResponse{}
	return resp, relay.Whole(ctx, s.sandboxd, sandboxv1.SandboxService_ListSandboxes_FullMethodName, &sandboxv1.ListSandboxesRequest{Filter: req.GetFilter()}, resp)
}

// StreamPodSandboxes implements criv1.RuntimeServiceServer.
func (s *Service) StreamPodSandboxes(
	req *criv1.StreamPodSandboxesRequest, stream grpc.ServerStreamingServer[criv1.StreamPodSandboxesResponse],
) error {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return err
	}
	source, err := s.sandboxes.StreamSandboxes(stream.Context(), &sandboxv1.StreamSandboxesRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*sandboxv1.StreamSandboxesResponse).GetItems, func(part []*criv1.PodSandbox) error {
		return stream.Send(&criv1.StreamPodSandboxesResponse{PodSandboxes: part})
	})
}
