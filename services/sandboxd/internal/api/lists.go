package api

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/api/pieces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
)

// ListSandboxes implements SandboxService.
func (s *Sandbox) ListSandboxes(_ context.Context, req *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	items, err := pieces.Collect(s.each(req.GetFilter()))
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxesResponse{Items: items}, nil
}

// StreamSandboxes implements SandboxService.
func (s *Sandbox) StreamSandboxes(
	req *sandboxv1.StreamSandboxesRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxesResponse],
) error {
	return pieces.Stream(s.each(req.GetFilter()), func(part []*criv1.PodSandbox) error {
		return to.Send(&sandboxv1.StreamSandboxesResponse{Items: part})
	})
}

// each hands on the matching sandboxes.
func (s *Sandbox) each(filter *criv1.PodSandboxFilter) func(func(*criv1.PodSandbox) error) error {
	return func(do func(*criv1.PodSandbox) error) error {
		recs, err := s.engine.Views.Sandboxes()
		if err != nil {
			return err
		}
		for _, rec := range recs {
			item := criview.Sandbox(rec)
			if !criview.MatchSandbox(item, filter) {
				continue
			}
			if err := do(item); err != nil {
				return err
			}
		}
		return nil
	}
}

// ListSandboxStats implements SandboxService.
func (s *Sandbox) ListSandboxStats(ctx context.Context, req *sandboxv1.ListSandboxStatsRequest) (*sandboxv1.ListSandboxStatsResponse, error) {
	stats, err := pieces.Collect(s.eachStats(ctx, req.GetFilter()))
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxStatsResponse{Stats: stats}, nil
}

// StreamSandboxStats implements SandboxService.
func (s *Sandbox) StreamSandboxStats(
	req *sandboxv1.StreamSandboxStatsRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxStatsResponse],
) error {
	return pieces.Stream(s.eachStats(to.Context(), req.GetFilter()), func(part []*criv1.PodSandboxStats) error {
		return to.Send(&sandboxv1.StreamSandboxStatsResponse{Stats: part})
	})
}

// eachStats hands on the stats of the matching sandboxes that are ready.
func (s *Sandbox) eachStats(ctx context.Context, f *criv1.PodSandboxStatsFilter) func(func(*criv1.PodSandboxStats) error) error {
	filter := &criv1.PodSandboxFilter{Id: f.GetId(), LabelSelector: f.GetLabelSelector()}
	return func(do func(*criv1.PodSandboxStats) error) error {
		waited, cancel := patient(ctx)
		defer cancel()
		return s.eachReady(ctx, filter, func(rec *recordv1.Sandbox) error {
			st, err := s.stats.sandbox(waited, rec)
			if errors.Is(err, errdefs.ErrNotFound) {
				return nil // removed meanwhile
			}
			if err != nil {
				return err
			}
			return do(st)
		})
	}
}

// eachReady hands on the records of the matching sandboxes that are ready.
func (s *Sandbox) eachReady(ctx context.Context, filter *criv1.PodSandboxFilter, do func(*recordv1.Sandbox) error) error {
	recs, err := s.engine.Views.Sandboxes()
	if err != nil {
		return err
	}
	for _, rec := range recs {
		if criview.SandboxState(rec) != criv1.PodSandboxState_SANDBOX_READY || !criview.MatchSandbox(criview.Sandbox(rec), filter) {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := do(rec); err != nil {
			return err
		}
	}
	return nil
}

// StreamSandboxMetrics implements SandboxService.
func (s *Sandbox) StreamSandboxMetrics(
	_ *sandboxv1.StreamSandboxMetricsRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxMetricsResponse],
) error {
	ctx := to.Context()
	round := s.stats.newRound()
	each := func(do func(*criv1.PodSandboxMetrics) error) error {
		return s.eachReady(ctx, nil, func(rec *recordv1.Sandbox) error {
			m, err := s.stats.metrics(ctx, rec, round)
			if err != nil {
				return err
			}
			return do(m)
		})
	}
	return pieces.Stream(each, func(part []*criv1.PodSandboxMetrics) error {
		return to.Send(&sandboxv1.StreamSandboxMetricsResponse{Metrics: part})
	})
}

// ListMetricDescriptors implements SandboxService. It answers before recovery is done.
func (s *Sandbox) ListMetricDescriptors(
	context.Context, *sandboxv1.ListMetricDescriptorsRequest,
) (*sandboxv1.ListMetricDescriptorsResponse, error) {
	return &sandboxv1.ListMetricDescriptorsResponse{Descriptors: s.stats.table.Descriptors()}, nil
}

// ListContainers implements ContainerService.
func (c *Container) ListContainers(_ context.Context, req *containerv1.ListContainersRequest) (*containerv1.ListContainersResponse, error) {
	items, err := pieces.Collect(c.each(req.GetFilter()))
	if err != nil {
		return nil, err
	}
	return &containerv1.ListContainersResponse{Containers: items}, nil
}

// StreamContainers implements ContainerService.
func (c *Container) StreamContainers(
	req *containerv1.StreamContainersRequest, to grpc.ServerStreamingServer[containerv1.StreamContainersResponse],
) error {
	return pieces.Stream(c.each(req.GetFilter()), func(part []*criv1.Container) error {
		return to.Send(&containerv1.StreamContainersResponse{Containers: part})
	})
}

// each hands on the matching containers.
func (c *Container) each(filter *criv1.ContainerFilter) func(func(*criv1.Container) error) error {
	return func(do func(*criv1.Container) error) error {
		recs, err := c.engine.Views.Containers("")
		if err != nil {
			return err
		}
		for _, rec := range recs {
			item := criview.Container(rec)
			if !criview.MatchContainer(item, filter) {
				continue
			}
			if err := do(item); err != nil {
				return err
			}
		}
		return nil
	}
}

// ListContainerStats implements ContainerService.
func (c *Container) ListContainerStats(ctx context.Context, req *containerv1.ListContainerStatsRequest) (*containerv1.ListContainerStatsResponse, error) {
	stats, err := pieces.Collect(c.eachStats(ctx, req.GetFilter()))
	if err != nil {
		return nil, err
	}
	return &containerv1.ListContainerStatsResponse{Stats: stats}, nil
}

// StreamContainerStats implements ContainerService.
func (c *Container) StreamContainerStats(
	req *containerv1.StreamContainerStatsRequest, to grpc.ServerStreamingServer[containerv1.StreamContainerStatsResponse],
) error {
	return pieces.Stream(c.eachStats(to.Context(), req.GetFilter()), func(part []*criv1.ContainerStats) error {
		return to.Send(&containerv1.StreamContainerStatsResponse{Stats: part})
	})
}

// eachStats hands on the stats of the matching containers that run.
func (c *Container) eachStats(ctx context.Context, f *criv1.ContainerStatsFilter) func(func(*criv1.ContainerStats) error) error {
	filter := &criv1.ContainerFilter{Id: f.GetId(), PodSandboxId: f.GetPodSandboxId(), LabelSelector: f.GetLabelSelector()}
	return func(do func(*criv1.ContainerStats) error) error {
		recs, err := c.engine.Views.Containers("")
		if err != nil {
			return err
		}
		waited, cancel := patient(ctx)
		defer cancel()
		for _, rec := range recs {
			if criview.ContainerState(rec) != criv1.ContainerState_CONTAINER_RUNNING || !criview.MatchContainer(criview.Container(rec), filter) {
				continue
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := do(c.stats.container(waited, rec)); err != nil {
				return err
			}
		}
		return nil
	}
}

// StreamImages implements ImageService.
func (i *Image) StreamImages(req *imagev1.StreamImagesRequest, to grpc.ServerStreamingServer[imagev1.StreamImagesResponse]) error {
	each := func(do func(*criv1.Image) error) error {
		list, err := i.images.List(to.Context(), req.GetFilter())
		if err != nil {
			return err
		}
		for _, image := range list {
			if err := do(image); err != nil {
				return err
			}
		}
		return nil
	}
	return pieces.Stream(each, func(part []*criv1.Image) error {
		return to.Send(&imagev1.StreamImagesResponse{Images: part})
	})
}
