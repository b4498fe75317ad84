package runtime

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// maxMargin is the most that is taken off a caller's time for resuming or undoing.
const maxMargin = 10 * time.Second

// CheckpointContainer implements criv1.RuntimeServiceServer. It takes no longer than the
// request's timeout, or the caller's time.
func (s *Service) CheckpointContainer(ctx context.Context, req *criv1.CheckpointContainerRequest) (*criv1.CheckpointContainerResponse, error) {
	if err := validate.CheckpointContainer(req); err != nil {
		return nil, err
	}
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	limit := time.Duration(0)
	if deadline, ok := ctx.Deadline(); ok {
		limit = inTime(deadline)
	}
	if own := req.GetTimeout(); own > 0 && (limit == 0 || own < int64(limit/time.Second)) {
		limit = time.Duration(min(own, int64(maxTimeout/time.Second))) * time.Second
	}
	if err := s.sequences.CheckpointContainer(ctx, id, req.GetLocation(), limit); err != nil {
		return nil, err
	}
	return &criv1.CheckpointContainerResponse{}, nil
}

// maxTimeout keeps sums with a caller's timeout in range.
const maxTimeout = 366 * 24 * time.Hour

// CheckpointPod implements criv1.RuntimeServiceServer. A call without a deadline is refused,
// because the pod stands still until the call ends.
func (s *Service) CheckpointPod(ctx context.Context, req *criv1.CheckpointPodRequest) (*criv1.CheckpointPodResponse, error) {
	if err := validate.CheckpointPod(req); err != nil {
		return nil, err
	}
	limit, err := deadlineOf(ctx)
	if err != nil {
		return nil, err
	}
	id, err := s.sandboxID(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	req = proto.CloneOf(req)
	req.PodSandboxId = id
	if err := s.sequences.CheckpointPod(ctx, req, limit); err != nil {
		return nil, err
	}
	return &criv1.CheckpointPodResponse{}, nil
}

// RestorePod implements criv1.RuntimeServiceServer. A call without a deadline is refused, as
// the protocol asks for one.
func (s *Service) RestorePod(ctx context.Context, req *criv1.RestorePodRequest) (*criv1.RestorePodResponse, error) {
	if err := validate.RestorePod(req); err != nil {
		return nil, err
	}
	limit, err := deadlineOf(ctx)
	if err != nil {
		return nil, err
	}
	return s.sequences.RestorePod(ctx, req, limit)
}

// deadlineOf is the time that a call has for its work. Errors: InvalidArgument for a call
// without a deadline, DeadlineExceeded.
func deadlineOf(ctx context.Context) (time.Duration, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0, fmt.Errorf("the call must have a deadline: %w", errdefs.ErrInvalidArgument)
	}
	limit := inTime(deadline)
	if limit <= 0 {
		return 0, context.DeadlineExceeded
	}
	return limit, nil
}

// inTime is how long work may take so that what it paused or made is put right before the
// deadline.
func inTime(deadline time.Time) time.Duration {
	left := time.Until(deadline)
	return left - min(left/5, maxMargin)
}
