package sequence

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// CreateContainer makes a container and returns its id. A call with the sandbox, name and
// attempt of one in flight joins it.
func (s *Sequences) CreateContainer(ctx context.Context, req *criv1.CreateContainerRequest) (string, error) {
	m := req.GetConfig().GetMetadata()
	key := fmt.Sprintf("%s/%s/%d", req.GetPodSandboxId(), m.GetName(), m.GetAttempt())
	return operation.Do(ctx, s.ops, s.spec("create_container", key, req), func(ctx context.Context) (string, error) {
		return s.makeContainer(ctx, req, "")
	})
}

// makeContainer makes a container, from the folder of a checkpoint if there is one.
func (s *Sequences) makeContainer(ctx context.Context, req *criv1.CreateContainerRequest, checkpoint string) (id string, err error) {
	ctx, end := s.hub.Begin(ctx)
	defer end()
	token, err := s.session.Token(ctx)
	if err != nil {
		return "", err
	}
	prepared, err := s.containers.PrepareContainer(ctx, &containerv1.PrepareContainerRequest{
		SessionToken:  token,
		SandboxId:     req.GetPodSandboxId(),
		Config:        req.GetConfig(),
		SandboxConfig: req.GetSandboxConfig(),

		CheckpointPath: checkpoint,
	})
	if err != nil {
		return "", fmt.Errorf("prepare container in sandbox %s: %w", req.GetPodSandboxId(), err)
	}
	id = prepared.GetContainerId()
	if prepared.GetExisting() {
		return id, nil
	}
	defer func() {
		if err != nil {
			s.undoContainer(ctx, prepared.GetContainerId(), prepared.GetPod(), prepared.GetContainer())
		}
	}()
	adjustment, err := s.adjust(ctx, prepared)
	if err != nil {
		return "", fmt.Errorf("container %s: plugins: %w", id, err)
	}
	var committed *containerv1.CommitContainerResponse
	err = s.commit(ctx, func(token string) error {
		committed, err = s.containers.CommitContainer(ctx, &containerv1.CommitContainerRequest{
			SessionToken: token, ContainerId: id, Adjustment: adjustment,
		})
		return err
	})
	if err != nil {
		return "", fmt.Errorf("commit container %s: %w", id, err)
	}
	end() // from here on the inventory has it
	s.tell(ctx, nri.Event_POST_CREATE_CONTAINER, committed.GetPod(), committed.GetContainer())
	return id, nil
}

// adjust asks the plugins about a prepared container, and makes room for it as they say
// before it is committed.
func (s *Sequences) adjust(ctx context.Context, p *containerv1.PrepareContainerResponse) (*nri.ContainerAdjustment, error) {
	resp, err := s.hub.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: p.GetPod(), Container: p.GetContainer()})
	if err != nil {
		return nil, err
	}
	s.evict(ctx, resp.GetEvict())
	if err := s.updateOthers(ctx, p.GetContainerId(), resp.GetUpdate()); err != nil {
		return nil, err
	}
	return resp.GetAdjust(), nil
}

func (s *Sequences) undoContainer(ctx context.Context, id string, pod *nri.PodSandbox, container *nri.Container) {
	ctx, cancel := s.undoing(ctx)
	defer cancel()
	s.tellStopped(ctx, pod, container)
	s.tell(ctx, nri.Event_REMOVE_CONTAINER, pod, container)
	if _, err := s.containers.AbortContainer(ctx, &containerv1.AbortContainerRequest{ContainerId: id}); err != nil {
		s.log.ErrorContext(ctx, "container not aborted, its session's end will do it",
			slog.String("container_id", id), slog.Any("error", err))
	}
}

// StartContainer starts a created container. A second call while the first is in flight
// joins it.
func (s *Sequences) StartContainer(ctx context.Context, id string) error {
	_, err := operation.Do(ctx, s.ops, s.spec("start_container", id, nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.startContainer(ctx, id)
	})
	return err
}

func (s *Sequences) startContainer(ctx context.Context, id string) error {
	wants, err := s.hub.Wants(ctx, nri.Event_START_CONTAINER)
	if err != nil {
		return fmt.Errorf("container %s: plugins: %w", id, err)
	}
	if wants {
		if err := s.askStart(ctx, id); err != nil {
			return err
		}
	}
	started, err := s.containers.StartContainer(ctx, &containerv1.StartContainerRequest{ContainerId: id})
	if err != nil {
		s.tellNotStarted(ctx, id)
		return fmt.Errorf("start container %s: %w", id, err)
	}
	s.tell(ctx, nri.Event_POST_START_CONTAINER, started.GetPod(), started.GetContainer())
	return nil
}

// askStart tells the plugins that a container starts: its process is there, in its cgroup and
// namespaces, and waits. A refusal is a start that fails.
func (s *Sequences) askStart(ctx context.Context, id string) error {
	made, err := s.containers.CreateTask(ctx, &containerv1.CreateTaskRequest{ContainerId: id})
	if err != nil {
		s.tellNotStarted(ctx, id)
		return fmt.Errorf("start container %s: %w", id, err)
	}
	err = s.hub.Notify(ctx, nri.Event_START_CONTAINER, made.GetPod(), made.GetContainer())
	if err == nil {
		return nil
	}
	err = fmt.Errorf("container %s: plugins: %w", id, err)
	if errdefs.IsUnavailable(err) || ctx.Err() != nil {
		return err // nobody has refused it: it can be started again
	}
	undo, cancel := s.undoing(ctx)
	defer cancel()
	if _, refuseErr := s.containers.RefuseStart(undo, &containerv1.RefuseStartRequest{ContainerId: id, Reason: err.Error()}); refuseErr != nil {
		s.log.WarnContext(ctx, "process of a refused start remains until its container is removed",
			slog.String("container_id", id), slog.Any("error", refuseErr))
	}
	s.tellNotStarted(ctx, id)
	return err
}

// tellNotStarted tells the plugins of the end of a container that failed to start: no
// process ends that would make an exit event.
func (s *Sequences) tellNotStarted(ctx context.Context, id string) {
	ctx, cancel := s.undoing(ctx)
	defer cancel()
	wants, err := s.hub.Wants(ctx, nri.Event_STOP_CONTAINER)
	if err != nil || !wants {
		return
	}
	c, err := s.describe(ctx, id)
	if err != nil || c.GetContainer().GetState() != nri.ContainerState_CONTAINER_STOPPED {
		return // refused for its state, such as a container that runs already
	}
	s.tellStopped(ctx, c.GetPod(), c.GetContainer())
}

func (s *Sequences) describe(ctx context.Context, id string) (*containerv1.DescribeContainerResponse, error) {
	resp, err := s.containers.DescribeContainer(ctx, &containerv1.DescribeContainerRequest{ContainerId: id})
	if err != nil {
		return nil, fmt.Errorf("describe container %s: %w", id, err)
	}
	return resp, nil
}

// maxStopTimeout bounds a container's own timeout, so that sums with it stay in range.
const maxStopTimeout = 366 * 24 * time.Hour

// StopContainer stops a container. Calls for the same container are not joined: each has
// its own patience, and sandboxd lets the shortest win. An unknown container is no error.
func (s *Sequences) StopContainer(ctx context.Context, id string, timeoutSeconds int64) error {
	patience := maxStopTimeout
	if timeoutSeconds < int64(maxStopTimeout/time.Second) {
		patience = time.Duration(timeoutSeconds) * time.Second
	}
	spec := s.spec("stop_container", "", nil)
	spec.Limit += patience
	_, err := operation.Do(ctx, s.ops, spec, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.stopContainer(ctx, id, int64(patience/time.Second))
	})
	return err
}

func (s *Sequences) stopContainer(ctx context.Context, id string, timeoutSeconds int64) error {
	stopped, err := s.containers.StopContainer(ctx, &containerv1.StopContainerRequest{
		ContainerId: id, TimeoutSeconds: timeoutSeconds,
	})
	if err != nil {
		return fmt.Errorf("stop container %s: %w", id, err)
	}
	if stopped.GetFound() {
		s.tellStopped(ctx, stopped.GetPod(), stopped.GetContainer())
	}
	return nil
}

// RemoveContainer kills a container if it runs and removes it. An unknown one is no error.
func (s *Sequences) RemoveContainer(ctx context.Context, id string) error {
	_, err := operation.Do(ctx, s.ops, s.spec("remove_container", id, nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.removeContainer(ctx, id)
	})
	return err
}

func (s *Sequences) removeContainer(ctx context.Context, id string) error {
	// The removal kills a running container by itself. Stopping it first matters only
	// to plugins, which see its end while it is still there.
	wants, err := s.hub.Wants(ctx, nri.Event_STOP_CONTAINER)
	if err == nil && wants {
		if err := s.stopContainer(ctx, id, 0); err != nil {
			return err
		}
	}
	removed, err := s.containers.RemoveContainer(ctx, &containerv1.RemoveContainerRequest{ContainerId: id})
	if err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	if removed.GetFound() {
		s.tell(ctx, nri.Event_REMOVE_CONTAINER, removed.GetPod(), removed.GetContainer())
	}
	return nil
}

// ContainerExited tells the plugins of a container that ended by itself. A container that
// is gone, or an id that is not a container's, is no error.
func (s *Sequences) ContainerExited(ctx context.Context, id string) error {
	wants, err := s.hub.Wants(ctx, nri.Event_STOP_CONTAINER)
	if err != nil || !wants {
		return err
	}
	c, err := s.describe(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	s.tellStopped(ctx, c.GetPod(), c.GetContainer())
	return nil
}
