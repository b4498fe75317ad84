package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

// checkpointLimit is how long a checkpoint may take if the caller does not say.
const checkpointLimit = 5 * time.Minute

// timeLimit is the time that a request gives a checkpoint.
func timeLimit(d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return checkpointLimit, nil
	}
	limit := d.AsDuration()
	if limit <= 0 {
		return 0, fmt.Errorf("no time is left for the checkpoint: %w", context.DeadlineExceeded)
	}
	return limit, nil
}

// CheckpointContainer implements ContainerService.
func (c *Container) CheckpointContainer(ctx context.Context, req *containerv1.CheckpointContainerRequest) (*containerv1.CheckpointContainerResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	limit, err := timeLimit(req.GetTimeout())
	if err != nil {
		return nil, err
	}
	_, err = detach(ctx, c.work, limit+changeLimit, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.engine.Capture.Container(ctx, id, req.GetLocation(), limit)
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.CheckpointContainerResponse{}, nil
}

// CheckpointSandbox implements SandboxService.
func (s *Sandbox) CheckpointSandbox(ctx context.Context, req *sandboxv1.CheckpointSandboxRequest) (*sandboxv1.CheckpointSandboxResponse, error) {
	id, err := s.engine.Views.SandboxID(req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	limit, err := timeLimit(req.GetTimeout())
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, len(req.GetContainerIds()))
	for _, prefix := range req.GetContainerIds() {
		full, err := s.engine.Views.ContainerID(prefix)
		if err != nil {
			return nil, err
		}
		ids = append(ids, full)
	}
	_, err = detach(ctx, s.work, limit+changeLimit, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.engine.Capture.Pod(ctx, id, ids, req.GetOutputPath(), req.GetOptions(), limit)
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CheckpointSandboxResponse{}, nil
}

// CheckRestore implements SandboxService.
func (s *Sandbox) CheckRestore(ctx context.Context, req *sandboxv1.CheckRestoreRequest) (*sandboxv1.CheckRestoreResponse, error) {
	err := errors.Join(required("config.metadata", req.GetConfig().GetMetadata() != nil),
		required("container_configs", len(req.GetContainerConfigs()) > 0), required("checkpoint_path", req.GetCheckpointPath() != ""))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	err = s.engine.Capture.CheckRestore(ctx, req.GetCheckpointPath(), req.GetRuntimeHandler(), req.GetOptions(), req.GetConfig(), req.GetContainerConfigs())
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CheckRestoreResponse{}, nil
}
