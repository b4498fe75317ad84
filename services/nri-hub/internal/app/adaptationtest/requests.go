package adaptationtest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// caller returns a context that ends with ctx but has no deadline of its own: a gateway
// leaves a call as soon as nobody waits for it any more, and a server refuses a call with
// hardly any time left, which the suite makes.
func caller(ctx context.Context) (context.Context, context.CancelFunc) {
	cctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	return cctx, func() {
		stop()
		cancel()
	}
}

// translate gives an error the values by which the suite knows it. The hub says over gRPC
// which plugin failed, and how, as text.
func translate(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case strings.Contains(err.Error(), "no answer within"):
		return fmt.Errorf("%w: %w", err, context.DeadlineExceeded)
	case strings.Contains(err.Error(), "connection to the plugin lost"):
		return fmt.Errorf("%w: %w", err, ttrpc.ErrClosed)
	default:
		return errors.New(err.Error())
	}
}

// RunPodSandbox tells the plugins of a pod.
func (a *Adaptation) RunPodSandbox(ctx context.Context, req *nri.RunPodSandboxRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.RunPodSandbox(cctx, &nriv1.RunPodSandboxRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// PostUpdatePodSandbox tells the plugins of changed resources of a pod.
func (a *Adaptation) PostUpdatePodSandbox(ctx context.Context, req *nri.PostUpdatePodSandboxRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.PostUpdatePodSandbox(cctx, &nriv1.PostUpdatePodSandboxRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// StopPodSandbox tells the plugins that a pod stops.
func (a *Adaptation) StopPodSandbox(ctx context.Context, req *nri.StopPodSandboxRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.StopPodSandbox(cctx, &nriv1.StopPodSandboxRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// RemovePodSandbox tells the plugins that a pod is gone.
func (a *Adaptation) RemovePodSandbox(ctx context.Context, req *nri.RemovePodSandboxRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.RemovePodSandbox(cctx, &nriv1.RemovePodSandboxRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// PostCreateContainer tells the plugins that a container was created.
func (a *Adaptation) PostCreateContainer(ctx context.Context, req *nri.PostCreateContainerRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.PostCreateContainer(cctx, &nriv1.PostCreateContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// StartContainer tells the plugins that a container starts.
func (a *Adaptation) StartContainer(ctx context.Context, req *nri.StartContainerRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.StartContainer(cctx, &nriv1.StartContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// PostStartContainer tells the plugins that a container runs.
func (a *Adaptation) PostStartContainer(ctx context.Context, req *nri.PostStartContainerRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.PostStartContainer(cctx, &nriv1.PostStartContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// PostUpdateContainer tells the plugins of changed resources of a container.
func (a *Adaptation) PostUpdateContainer(ctx context.Context, req *nri.PostUpdateContainerRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.PostUpdateContainer(cctx, &nriv1.PostUpdateContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// RemoveContainer tells the plugins that a container is gone.
func (a *Adaptation) RemoveContainer(ctx context.Context, req *nri.RemoveContainerRequest) error {
	cctx, done := caller(ctx)
	defer done()
	_, err := a.client.RemoveContainer(cctx, &nriv1.RemoveContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return translate(ctx, err)
}

// UpdatePodSandbox tells the plugins of new resources of a pod.
func (a *Adaptation) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) (*nri.UpdatePodSandboxResponse, error) {
	cctx, done := caller(ctx)
	defer done()
	resp, err := a.client.UpdatePodSandbox(cctx, &nriv1.UpdatePodSandboxRequest{Generation: a.gateway.generation.Load(), Request: req})
	return resp.GetResponse(), translate(ctx, err)
}

// CreateContainer asks the plugins for adjustments.
func (a *Adaptation) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	cctx, done := caller(ctx)
	defer done()
	resp, err := a.client.CreateContainer(cctx, &nriv1.CreateContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return resp.GetResponse(), translate(ctx, err)
}

// UpdateContainer asks the plugins about new resources.
func (a *Adaptation) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	cctx, done := caller(ctx)
	defer done()
	resp, err := a.client.UpdateContainer(cctx, &nriv1.UpdateContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return resp.GetResponse(), translate(ctx, err)
}

// StopContainer tells the plugins that a container has ended.
func (a *Adaptation) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	cctx, done := caller(ctx)
	defer done()
	resp, err := a.client.StopContainer(cctx, &nriv1.StopContainerRequest{Generation: a.gateway.generation.Load(), Request: req})
	return resp.GetResponse(), translate(ctx, err)
}
