package api

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
)

// Container serves crisp.container.v1.ContainerService.
type Container struct {
	containerv1.UnsafeContainerServiceServer

	engine *engine.Engine
	stats  *Stats
	work   *Work
}

// NewContainer returns the service.
func NewContainer(e *engine.Engine, stats *Stats, work *Work) *Container {
	return &Container{engine: e, stats: stats, work: work}
}

// PrepareContainer implements ContainerService.
func (c *Container) PrepareContainer(ctx context.Context, req *containerv1.PrepareContainerRequest) (*containerv1.PrepareContainerResponse, error) {
	err := errors.Join(required("config.metadata", req.GetConfig().GetMetadata() != nil),
		required("config.image.image", req.GetConfig().GetImage().GetImage() != ""))
	if err != nil {
		return nil, err
	}
	return detach(ctx, c.work, prepareLimit, func(ctx context.Context) (*containerv1.PrepareContainerResponse, error) {
		id, existing, err := c.engine.Containers.Prepare(ctx, req.GetSessionToken(), req.GetSandboxId(), req.GetConfig(), req.GetCheckpointPath())
		if err != nil {
			return nil, err
		}
		view, err := c.engine.Views.Describe(id)
		if err != nil {
			return nil, err
		}
		return &containerv1.PrepareContainerResponse{
			ContainerId: id, Existing: existing, Pod: view.Pod, Container: view.Container,
		}, nil
	})
}

// CommitContainer implements ContainerService.
func (c *Container) CommitContainer(ctx context.Context, req *containerv1.CommitContainerRequest) (*containerv1.CommitContainerResponse, error) {
	view, err := c.change(ctx, req.GetContainerId(), func(ctx context.Context) error {
		return c.engine.Containers.Commit(ctx, req.GetContainerId(), req.GetAdjustment())
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.CommitContainerResponse{Pod: view.Pod, Container: view.Container}, nil
}

// change runs detached work on a container and describes the outcome.
func (c *Container) change(ctx context.Context, id string, fn func(ctx context.Context) error) (view.Container, error) {
	return detach(ctx, c.work, changeLimit, func(ctx context.Context) (view.Container, error) {
		err := fn(ctx)
		if err != nil {
			return view.Container{}, err
		}
		return c.engine.Views.Describe(id)
	})
}

// AbortContainer implements ContainerService.
func (c *Container) AbortContainer(ctx context.Context, req *containerv1.AbortContainerRequest) (*containerv1.AbortContainerResponse, error) {
	err := required("container_id", req.GetContainerId() != "")
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, c.work, func(ctx context.Context) error {
		return c.engine.Containers.Abort(ctx, req.GetContainerId())
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.AbortContainerResponse{}, nil
}

// CreateTask implements ContainerService.
func (c *Container) CreateTask(ctx context.Context, req *containerv1.CreateTaskRequest) (*containerv1.CreateTaskResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	view, err := c.change(ctx, id, func(ctx context.Context) error { return c.engine.Tasks.Create(ctx, id) })
	if err != nil {
		return nil, err
	}
	return &containerv1.CreateTaskResponse{Pod: view.Pod, Container: view.Container}, nil
}

// RefuseStart implements ContainerService.
func (c *Container) RefuseStart(ctx context.Context, req *containerv1.RefuseStartRequest) (*containerv1.RefuseStartResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, c.work, func(ctx context.Context) error {
		return c.engine.Tasks.Refuse(ctx, id, errors.New(req.GetReason()))
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.RefuseStartResponse{}, nil
}

// StartContainer implements ContainerService.
func (c *Container) StartContainer(ctx context.Context, req *containerv1.StartContainerRequest) (*containerv1.StartContainerResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	view, err := c.change(ctx, id, func(ctx context.Context) error { return c.engine.Tasks.Start(ctx, id) })
	if err != nil {
		return nil, err
	}
	return &containerv1.StartContainerResponse{Pod: view.Pod, Container: view.Container}, nil
}

// containerID completes the id of a stop or removal; an unknown one is reported as "".
func (c *Container) containerID(prefix string) (string, error) {
	id, err := c.engine.Views.ContainerID(prefix)
	if errdefs.IsNotFound(err) {
		return "", nil
	}
	return id, err
}

// StopContainer implements ContainerService.
func (c *Container) StopContainer(ctx context.Context, req *containerv1.StopContainerRequest) (*containerv1.StopContainerResponse, error) {
	id, err := c.containerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	timeout := seconds(req.GetTimeoutSeconds())
	view, err := detach(ctx, c.work, timeout+changeLimit, func(ctx context.Context) (*view.Container, error) {
		return c.engine.Containers.Stop(ctx, id, timeout)
	})
	if err != nil || view == nil {
		return &containerv1.StopContainerResponse{}, err
	}
	return &containerv1.StopContainerResponse{Found: true, Pod: view.Pod, Container: view.Container}, nil
}

// RemoveContainer implements ContainerService.
func (c *Container) RemoveContainer(ctx context.Context, req *containerv1.RemoveContainerRequest) (*containerv1.RemoveContainerResponse, error) {
	id, err := c.containerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	view, err := detach(ctx, c.work, changeLimit, func(ctx context.Context) (*view.Container, error) {
		return c.engine.Containers.Remove(ctx, id)
	})
	if err != nil || view == nil {
		return &containerv1.RemoveContainerResponse{}, err
	}
	return &containerv1.RemoveContainerResponse{Found: true, Pod: view.Pod, Container: view.Container}, nil
}

// GetContainer implements ContainerService.
func (c *Container) GetContainer(_ context.Context, req *containerv1.GetContainerRequest) (*containerv1.GetContainerResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	rec, err := c.engine.Views.Container(id)
	if err != nil {
		return nil, err
	}
	resp := &containerv1.GetContainerResponse{
		Status: criview.ContainerStatus(rec), SandboxId: rec.GetSandboxId(),
		Tty: rec.GetConfig().GetTty(), Stdin: rec.GetConfig().GetStdin(),
	}
	if req.GetVerbose() {
		resp.Info, err = c.engine.Views.ContainerInfo(id)
	}
	return resp, err
}

// DescribeContainer implements ContainerService.
func (c *Container) DescribeContainer(_ context.Context, req *containerv1.DescribeContainerRequest) (*containerv1.DescribeContainerResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	view, err := c.engine.Views.Describe(id)
	if err != nil {
		return nil, err
	}
	return &containerv1.DescribeContainerResponse{Pod: view.Pod, Container: view.Container}, nil
}

// UpdateContainerResources implements ContainerService.
func (c *Container) UpdateContainerResources(ctx context.Context, req *containerv1.UpdateContainerResourcesRequest) (*containerv1.UpdateContainerResourcesResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	view, err := detach(ctx, c.work, changeLimit, func(ctx context.Context) (view.Container, error) {
		return c.engine.Containers.Update(ctx, id, req.GetLinux(), req.GetNri(), req.GetAnnotations())
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.UpdateContainerResourcesResponse{Pod: view.Pod, Container: view.Container}, nil
}

// ReopenContainerLog implements ContainerService.
func (c *Container) ReopenContainerLog(ctx context.Context, req *containerv1.ReopenContainerLogRequest) (*containerv1.ReopenContainerLogResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	err = c.engine.Exec.ReopenLog(ctx, id)
	if err != nil {
		return nil, err
	}
	return &containerv1.ReopenContainerLogResponse{}, nil
}

// GetContainerStats implements ContainerService.
func (c *Container) GetContainerStats(ctx context.Context, req *containerv1.GetContainerStatsRequest) (*containerv1.GetContainerStatsResponse, error) {
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	rec, err := c.engine.Views.Container(id)
	if err != nil {
		return nil, err
	}
	return &containerv1.GetContainerStatsResponse{Stats: c.stats.container(ctx, rec)}, nil
}
