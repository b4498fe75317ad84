// Package controller makes and ends sandboxes, and drives the processes in them, through
// shims.
//
// Podsandbox works with every shim of containerd's shim API version 2 and needs no process
// of its own in a pod, except where the pod shares its process namespace. Shim works with
// shims that serve the sandbox API, such as those of virtual machines. Router chooses
// between them. Tasks drives the processes of containers through either.
//
// All of them are safe for concurrent use and hold no state of their own: what they need is
// in the shims and their bundles. They send no events and keep no records.
package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// statusTimeout bounds the question whether a shim answers.
const statusTimeout = 2 * time.Second

// Podsandbox is the controller for shims that know only tasks.
type Podsandbox struct {
	shims *shim.Manager
	tasks *Tasks
}

// NewPodsandbox returns the controller.
func NewPodsandbox(shims *shim.Manager, tasks *Tasks) *Podsandbox {
	return &Podsandbox{shims: shims, tasks: tasks}
}

// Create makes the sandbox's bundle.
func (p *Podsandbox) Create(ctx context.Context, spec port.SandboxSpec) error {
	config, err := sandboxConfig(spec)
	if err != nil {
		return err
	}
	i, err := p.shims.Create(ctx, shim.Spec{SandboxID: spec.ID, Handler: spec.Handler, Config: config})
	if err != nil {
		return fmt.Errorf("create sandbox %q: %w", spec.ID, err)
	}
	if spec.Init == nil {
		return nil
	}
	if err := saveInit(i.Bundle(), spec); err != nil {
		return errors.Join(fmt.Errorf("create sandbox %q: %w", spec.ID, err), p.shims.Shutdown(ctx, spec.ID))
	}
	return nil
}

// Start starts the shim and, if the sandbox has one, its init process. If it fails the
// sandbox is gone.
func (p *Podsandbox) Start(ctx context.Context, id string) (port.Instance, error) {
	i, err := p.shims.Get(id)
	if err != nil {
		return port.Instance{}, err
	}
	if err := i.Start(ctx); err != nil {
		return port.Instance{}, err
	}
	started := port.Instance{CreatedAt: time.Now()}
	if !i.Bundle().HasInit() {
		return started, nil
	}
	pid, err := p.tasks.startInit(ctx, i)
	if err != nil {
		return port.Instance{}, errors.Join(fmt.Errorf("init of sandbox %q: %w", id, err), p.shims.Shutdown(ctx, id))
	}
	started.Pid = pid
	return started, nil
}

// Platform is the platform of the machine.
func (p *Podsandbox) Platform(_ context.Context, id string) (ocispec.Platform, error) {
	if _, err := p.shims.Get(id); err != nil {
		return ocispec.Platform{}, err
	}
	return platforms.DefaultSpec(), nil
}

// Stop kills the sandbox's own init process, if it has one: it has nothing to finish, and as process
// 1 of its namespace it would not hear of a politer signal that comes right after its start. Containers
// are not touched. It fails with ErrNotFound for an unknown sandbox.
func (p *Podsandbox) Stop(ctx context.Context, id string, _ time.Duration) error {
	i, err := p.shims.Get(id)
	if err != nil {
		return err
	}
	if !i.Bundle().HasInit() || i.Status().Ended {
		return nil
	}
	if err := p.tasks.Kill(ctx, id, id, "", syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	wctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	_, err = p.tasks.Wait(wctx, id, id, "")
	switch {
	case err == nil, errdefs.IsNotFound(err):
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("init of sandbox %q does not end: %w", id, errdefs.ErrUnavailable)
}

// Wait returns when the sandbox's init process has ended, or, without one, its shim.
func (p *Podsandbox) Wait(ctx context.Context, id string) (pod.Exit, error) {
	i, err := p.shims.Get(id)
	if err != nil {
		return pod.Exit{}, err
	}
	if i.Bundle().HasInit() {
		return p.tasks.Wait(ctx, id, id, "")
	}
	select {
	case <-i.Ended():
	case <-ctx.Done():
		return pod.Exit{}, context.Cause(ctx)
	}
	return shimExit(i), nil
}

// shimExit is the end of a sandbox that ended with its shim.
func shimExit(i *shim.Instance) pod.Exit {
	st := i.Status()
	if st.DiedAt.IsZero() {
		return pod.Exit{Pid: st.Pid, At: time.Now()}
	}
	return pod.Exit{Pid: st.Pid, Code: pod.ExitCodeUnknown, At: st.DiedAt}
}

// Status asks the shim whether it answers. It fails with ErrNotFound for an unknown sandbox.
func (p *Podsandbox) Status(ctx context.Context, id string, verbose bool) (port.ControllerStatus, error) {
	i, err := p.shims.Get(id)
	if err != nil {
		return port.ControllerStatus{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	out := shimStatus(i, verbose)
	out.Alive = out.Alive && p.tasks.ping(ctx, i) == nil
	if !i.Bundle().HasInit() {
		return out, nil
	}
	st, err := p.tasks.State(ctx, id, id, "")
	if err != nil || st.Status == statusStopped {
		out.Alive = false
		out.ExitedAt = st.Exit.At
		return out, nil
	}
	out.Pid = st.Pid
	return out, nil
}

// shimStatus is what is known of a sandbox without asking its shim.
func shimStatus(i *shim.Instance, verbose bool) port.ControllerStatus {
	st := i.Status()
	out := port.ControllerStatus{Alive: st.Alive, ShimPid: st.Pid, ExitedAt: st.DiedAt}
	if verbose {
		out.Info = map[string]string{
			"shim":         i.Meta().ShimPath,
			"runtime_type": i.Meta().RuntimeType,
			"sandboxer":    i.Meta().Sandboxer,
			"bundle":       i.Bundle().Dir(),
			"address":      st.Endpoint.Address,
			"protocol":     st.Endpoint.Protocol,
			"version":      strconv.Itoa(st.Endpoint.Version),
		}
	}
	return out
}

// Shutdown ends the shim and removes everything that is held for the sandbox.
func (p *Podsandbox) Shutdown(ctx context.Context, id string) error {
	i, err := p.shims.Get(id)
	if err == nil && i.Bundle().HasInit() && i.Status().Alive {
		p.tasks.endInit(ctx, i)
	}
	return p.shims.Shutdown(ctx, id)
}

// Metrics are those of the sandbox's init process. It fails with ErrNotImplemented without
// one: the pod's control group tells more.
func (p *Podsandbox) Metrics(ctx context.Context, id string) (*anypb.Any, error) {
	i, err := p.shims.Get(id)
	if err != nil {
		return nil, err
	}
	if !i.Bundle().HasInit() {
		return nil, fmt.Errorf("metrics of sandbox %q without a process: %w", id, errdefs.ErrNotImplemented)
	}
	return p.tasks.Stats(ctx, id, id)
}

// Update changes the resources of the sandbox's init process. It fails with
// ErrNotImplemented without one.
func (p *Podsandbox) Update(ctx context.Context, id string, resources *runtimespec.LinuxResources, annotations map[string]string) error {
	i, err := p.shims.Get(id)
	if err != nil {
		return err
	}
	if !i.Bundle().HasInit() {
		return fmt.Errorf("update of sandbox %q without a process: %w", id, errdefs.ErrNotImplemented)
	}
	return p.tasks.Update(ctx, id, id, resources, annotations)
}

// sandboxConfig is the config.json of a sandbox's bundle: its init's specification, or just
// the annotation by which a shim groups containers.
func sandboxConfig(spec port.SandboxSpec) ([]byte, error) {
	config := map[string]json.RawMessage{}
	if spec.Init != nil {
		if err := json.Unmarshal(spec.Init, &config); err != nil {
			return nil, fmt.Errorf("init specification of sandbox %q: %w: %w", spec.ID, err, errdefs.ErrInvalidArgument)
		}
	} else {
		config["ociVersion"] = json.RawMessage(strconv.Quote(runtimespec.Version))
	}
	annotations := map[string]string{}
	if raw, ok := config["annotations"]; ok {
		if err := json.Unmarshal(raw, &annotations); err != nil {
			return nil, fmt.Errorf("annotations of sandbox %q: %w: %w", spec.ID, err, errdefs.ErrInvalidArgument)
		}
	}
	annotations[pod.AnnotationSandboxID] = spec.ID
	raw, err := json.Marshal(annotations)
	if err != nil {
		return nil, err
	}
	config["annotations"] = raw
	return json.Marshal(config)
}
