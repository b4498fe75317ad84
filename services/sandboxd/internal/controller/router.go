package controller

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// Router is the controller of all sandboxes: it hands each call to the controller that the
// sandbox was made by.
type Router struct {
	shims   *shim.Manager
	byName  map[string]port.Controller
	unknown port.Controller
}

// New returns a router over both controllers, working through the manager's shims.
func New(shims *shim.Manager, tasks *Tasks) *Router {
	podsandbox := NewPodsandbox(shims, tasks)
	return &Router{
		shims: shims,
		byName: map[string]port.Controller{
			"":                      podsandbox,
			pod.SandboxerPodsandbox: podsandbox,
			pod.SandboxerShim:       NewShim(shims, tasks),
		},
		unknown: podsandbox,
	}
}

// of returns the controller of a sandbox. A sandbox that is not known, or whose bundle says
// nothing, is left to a controller that can at least remove it.
func (r *Router) of(id string) port.Controller {
	i, err := r.shims.Get(id)
	if err != nil {
		return r.unknown
	}
	if c, ok := r.byName[i.Meta().Sandboxer]; ok {
		return c
	}
	return r.unknown
}

// Create makes a sandbox with the controller that its handler names.
func (r *Router) Create(ctx context.Context, spec port.SandboxSpec) error {
	c, ok := r.byName[spec.Handler.Sandboxer]
	if !ok {
		return fmt.Errorf("sandboxer %q of runtime handler %q: %w",
			spec.Handler.Sandboxer, spec.Handler.Name, errdefs.ErrInvalidArgument)
	}
	return c.Create(ctx, spec)
}

// Start starts a created sandbox.
func (r *Router) Start(ctx context.Context, id string) (port.Instance, error) {
	return r.of(id).Start(ctx, id)
}

// Platform is the platform of the sandbox's containers.
func (r *Router) Platform(ctx context.Context, id string) (ocispec.Platform, error) {
	return r.of(id).Platform(ctx, id)
}

// Stop stops a sandbox.
func (r *Router) Stop(ctx context.Context, id string, timeout time.Duration) error {
	return r.of(id).Stop(ctx, id, timeout)
}

// Wait returns when the sandbox has ended.
func (r *Router) Wait(ctx context.Context, id string) (pod.Exit, error) {
	return r.of(id).Wait(ctx, id)
}

// Status is the state of a sandbox.
func (r *Router) Status(ctx context.Context, id string, verbose bool) (port.ControllerStatus, error) {
	return r.of(id).Status(ctx, id, verbose)
}

// Shutdown ends a sandbox's shim and removes what is held for the sandbox.
func (r *Router) Shutdown(ctx context.Context, id string) error {
	return r.of(id).Shutdown(ctx, id)
}

// Metrics are the metrics of a sandbox.
func (r *Router) Metrics(ctx context.Context, id string) (*anypb.Any, error) {
	return r.of(id).Metrics(ctx, id)
}

// Update changes the resources and annotations of a sandbox.
func (r *Router) Update(ctx context.Context, id string, resources *runtimespec.LinuxResources, annotations map[string]string) error {
	return r.of(id).Update(ctx, id, resources, annotations)
}
