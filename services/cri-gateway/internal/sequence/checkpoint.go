package sequence

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// CheckpointContainer writes a running container as an archive to location. A limit of zero
// leaves the time to sandboxd.
func (s *Sequences) CheckpointContainer(ctx context.Context, id, location string, limit time.Duration) error {
	req := &containerv1.CheckpointContainerRequest{ContainerId: id, Location: location}
	spec := s.spec("checkpoint_container", "", nil)
	if limit > 0 {
		req.Timeout = durationpb.New(limit)
		spec.Limit += limit
	}
	_, err := operation.Do(ctx, s.ops, spec, func(ctx context.Context) (struct{}, error) {
		_, err := s.containers.CheckpointContainer(ctx, req)
		return struct{}{}, err
	})
	return err
}

// CheckpointPod writes running containers of a sandbox into a folder within a time limit.
func (s *Sequences) CheckpointPod(ctx context.Context, req *criv1.CheckpointPodRequest, limit time.Duration) error {
	spec := s.spec("checkpoint_pod", "", nil)
	spec.Limit += limit
	_, err := operation.Do(ctx, s.ops, spec, func(ctx context.Context) (struct{}, error) {
		_, err := s.sandboxes.CheckpointSandbox(ctx, &sandboxv1.CheckpointSandboxRequest{
			SandboxId: req.GetPodSandboxId(), ContainerIds: req.GetContainerIds(), OutputPath: req.GetOutputPath(),
			Options: req.GetOptions(), Timeout: durationpb.New(limit),
		})
		return struct{}{}, err
	})
	return err
}

// RestorePod makes a sandbox and its containers from a checkpoint, within a time limit. The
// containers are not started. If it fails, or the caller has gone meanwhile, everything that
// it made is removed.
func (s *Sequences) RestorePod(ctx context.Context, req *criv1.RestorePodRequest, limit time.Duration) (*criv1.RestorePodResponse, error) {
	spec := s.spec("restore_pod", "", nil)
	spec.Limit = limit
	return operation.Do(ctx, s.ops, spec, func(work context.Context) (*criv1.RestorePodResponse, error) {
		return s.restorePod(work, ctx.Err, req)
	})
}

// restorePod does the work of RestorePod; gone says why nobody waits for the answer any more.
func (s *Sequences) restorePod(ctx context.Context, gone func() error, req *criv1.RestorePodRequest) (resp *criv1.RestorePodResponse, err error) {
	_, err = s.sandboxes.CheckRestore(ctx, &sandboxv1.CheckRestoreRequest{
		CheckpointPath: req.GetCheckpointPath(), Config: req.GetConfig(), RuntimeHandler: req.GetRuntimeHandler(),
		Options: req.GetOptions(), ContainerConfigs: req.GetContainerConfigs(),
	})
	if err != nil {
		return nil, err
	}
	id, existing, err := s.makePodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: req.GetConfig(), RuntimeHandler: req.GetRuntimeHandler()})
	if err != nil {
		return nil, err
	}
	if existing {
		return nil, fmt.Errorf("sandbox %s has this name: %w", id, errdefs.ErrAlreadyExists)
	}
	defer func() {
		if err != nil {
			s.undoRestore(ctx, id)
		}
	}()
	resp = &criv1.RestorePodResponse{PodSandboxId: id}
	for _, cfg := range req.GetContainerConfigs() {
		container, err := s.makeContainer(ctx, &criv1.CreateContainerRequest{PodSandboxId: id, Config: cfg, SandboxConfig: req.GetConfig()}, req.GetCheckpointPath())
		if err != nil {
			return nil, fmt.Errorf("restore container %q: %w", cfg.GetMetadata().GetName(), err)
		}
		resp.RestoredContainers = append(resp.RestoredContainers, &criv1.RestoredContainer{
			Name: cfg.GetMetadata().GetName(), ContainerId: container,
		})
	}
	if err := gone(); err != nil {
		return nil, fmt.Errorf("restore of sandbox %s: nobody waits for it: %w", id, err)
	}
	return resp, nil
}

func (s *Sequences) undoRestore(ctx context.Context, id string) {
	ctx, cancel := s.undoing(ctx)
	defer cancel()
	if err := s.removePodSandbox(ctx, id); err != nil {
		s.log.ErrorContext(ctx, "sandbox of a failed restore not removed", slog.String("sandbox_id", id), slog.Any("error", err))
	}
}
