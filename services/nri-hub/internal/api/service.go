// Package api serves crisp.nri.v1.HubService to the gateway.
//
// It checks requests, turns them into calls of the hub and keeps the gateway's standing
// stream. Errors are errdefs sentinels; the server maps them. Nothing is decided here.
package api

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Hub is what the service serves.
type Hub interface {
	Generation() uint64
	State() (roster.State, <-chan struct{})
	Required() rule.Required
	Plugins() []member.Status
	Attach(gw outward.Gateway, runtime outward.Runtime) (detach func())
	Reconcile(ctx context.Context, gw outward.Gateway)
	DryRun(ctx context.Context, pod *nri.PodSandbox, container *nri.Container) (hub.Rehearsal, error)

	Requires(pod *nri.PodSandbox, container string) ([]string, time.Duration, error)
	Conclude(ctx context.Context, pod *nri.PodSandbox, container *nri.Container, all dispatch.Leg) error
	RunPodSandbox(ctx context.Context, req *nri.RunPodSandboxRequest) error
	UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error
	PostUpdatePodSandbox(ctx context.Context, req *nri.PostUpdatePodSandboxRequest) error
	StopPodSandbox(ctx context.Context, req *nri.StopPodSandboxRequest) error
	RemovePodSandbox(ctx context.Context, req *nri.RemovePodSandboxRequest) error

	CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error)
	PostCreateContainer(ctx context.Context, req *nri.PostCreateContainerRequest) error
	StartContainer(ctx context.Context, req *nri.StartContainerRequest) error
	PostStartContainer(ctx context.Context, req *nri.PostStartContainerRequest) error
	UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error)
	PostUpdateContainer(ctx context.Context, req *nri.PostUpdateContainerRequest) error
	StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error)
	RemoveContainer(ctx context.Context, req *nri.RemoveContainerRequest) error
}

var _ Hub = (*hub.Hub)(nil)

// Service implements the gRPC service. Use New.
type Service struct {
	nriv1.UnimplementedHubServiceServer

	hub     Hub
	log     *slog.Logger
	readers sync.WaitGroup
}

// New makes the service.
func New(h Hub, log *slog.Logger) *Service { return &Service{hub: h, log: log} }

// Wait returns when nothing is done for a stream any more. Call it after the server has stopped.
func (s *Service) Wait() { s.readers.Wait() }

// checkPod refuses a request from a gateway that has not synchronised with this start
// of the hub, and one without a pod.
func (s *Service) checkPod(generation uint64, req interface{ GetPod() *nri.PodSandbox }) error {
	if generation != s.hub.Generation() {
		return fmt.Errorf("request for generation %d of the hub, which is now %d: %w",
			generation, s.hub.Generation(), errdefs.ErrUnavailable)
	}
	if req.GetPod().GetId() == "" {
		return fmt.Errorf("request.pod.id: missing: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// subject is a request about a container.
type subject interface {
	GetPod() *nri.PodSandbox
	GetContainer() *nri.Container
}

func (s *Service) checkContainer(generation uint64, req subject) error {
	if err := s.checkPod(generation, req); err != nil {
		return err
	}
	if req.GetContainer().GetId() == "" {
		return fmt.Errorf("request.container.id: missing: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// timed adds to the context of a request how long its caller still waits.
func timed(ctx context.Context, leftMillis int64) context.Context {
	if leftMillis <= 0 {
		return ctx
	}
	return dispatch.WithDeadline(ctx, time.Now().Add(time.Duration(leftMillis)*time.Millisecond))
}
