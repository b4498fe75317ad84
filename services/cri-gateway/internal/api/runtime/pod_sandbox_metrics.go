package runtime

import (
	"context"

	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
)

// ListMetricDescriptors implements criv1.RuntimeServiceServer.
func (s *Service) ListMetricDescriptors(
	ctx context.Context, _ *criv1.ListMetricDescriptorsRequest,
) (*criv1.ListMetricDescriptorsResponse, error) {
	resp, err := s.sandboxes.ListMetricDescriptors(ctx, &sandboxv1.ListMetricDescriptorsRequest{})
	if err != nil {
		return nil, err
	}
	return &criv1.ListMetricDescriptorsResponse{Descriptors: resp.GetDescriptors()}, nil
}

// ListPodSandboxMetrics implements criv1.RuntimeServiceServer.
func (s *Service) ListPodSandboxMetrics(
	ctx context.Context, _ *criv1.ListPodSandboxMetricsRequest,
) (*criv1.ListPodSandboxMetricsResponse, error) {
	resp := &criv1.ListPodSandboxMetricsResponse{}
	err := s.copyMetrics(ctx, func(part []*criv1.PodSandboxMetrics) error {
		resp.PodMetrics = append(resp.PodMetrics, part...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// StreamPodSandboxMetrics implements criv1.RuntimeServiceServer.
func (s *Service) StreamPodSandboxMetrics(
	_ *criv1.StreamPodSandboxMetricsRequest, stream grpc.ServerStreamingServer[criv1.StreamPodSandboxMetricsResponse],
) error {
	return s.copyMetrics(stream.Context(), func(part []*criv1.PodSandboxMetrics) error {
		return stream.Send(&criv1.StreamPodSandboxMetricsResponse{PodSandboxMetrics: part})
	})
}

func (s *Service) copyMetrics(ctx context.Context, send func([]*criv1.PodSandboxMetrics) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the source if send fails
	source, err := s.sandboxes.StreamSandboxMetrics(ctx, &sandboxv1.StreamSandboxMetricsRequest{})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*sandboxv1.StreamSandboxMetricsResponse).GetMetrics, send)
}
