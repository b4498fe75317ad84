package runtime

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// ExecSync implements criv1.RuntimeServiceServer.
func (s *Service) ExecSync(ctx context.Context, req *criv1.ExecSyncRequest) (*criv1.ExecSyncResponse, error) {
	if err := validate.ExecSync(req); err != nil {
		return nil, err
	}
	id, err := s.containerID(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	resp, err := s.containers.ExecSync(ctx, &containerv1.ExecSyncRequest{
		ContainerId: id, Cmd: req.GetCmd(), TimeoutSeconds: req.GetTimeout(),
	})
	if err != nil {
		return nil, err
	}
	return &criv1.ExecSyncResponse{
		Stdout: resp.GetStdout(), Stderr: resp.GetStderr(), ExitCode: resp.GetExitCode(),
	}, nil
}

// Exec implements criv1.RuntimeServiceServer. The command runs when a client opens the URL.
func (s *Service) Exec(ctx context.Context, req *criv1.ExecRequest) (*criv1.ExecResponse, error) {
	if err := validate.Exec(req); err != nil {
		return nil, err
	}
	container, err := s.running(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	full := proto.CloneOf(req)
	full.ContainerId = container.GetStatus().GetId()
	url, err := s.streams.ExecURL(full)
	if err != nil {
		return nil, err
	}
	return &criv1.ExecResponse{Url: url}, nil
}

// running returns a container that runs. Errors: NotFound, FailedPrecondition.
func (s *Service) running(ctx context.Context, id string) (*containerv1.GetContainerResponse, error) {
	resp, err := s.containers.GetContainer(ctx, &containerv1.GetContainerRequest{ContainerId: id})
	if err != nil {
		return nil, err
	}
	if state := resp.GetStatus().GetState(); state != criv1.ContainerState_CONTAINER_RUNNING {
		return nil, fmt.Errorf("container %s is not running but in state %s: %w", id, state, errdefs.ErrFailedPrecondition)
	}
	return resp, nil
}
