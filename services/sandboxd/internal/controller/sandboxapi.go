package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// namespaceNetwork is the OCI name of the network namespace.
const namespaceNetwork = string(runtimespec.NetworkNamespace)

// Shim is the controller for shims that serve the sandbox API.
type Shim struct {
	shims *shim.Manager
	tasks *Tasks
}

// NewShim returns the controller.
func NewShim(shims *shim.Manager, tasks *Tasks) *Shim { return &Shim{shims: shims, tasks: tasks} }

// Create starts the shim and lets it create the sandbox. If it fails nothing is left.
func (s *Shim) Create(ctx context.Context, spec port.SandboxSpec) error {
	config, err := sandboxConfig(spec)
	if err != nil {
		return err
	}
	i, err := s.shims.Create(ctx, shim.Spec{SandboxID: spec.ID, Handler: spec.Handler, Config: config})
	if err != nil {
		return fmt.Errorf("create sandbox %q: %w", spec.ID, err)
	}
	if spec.Init != nil {
		// The shim makes the process; what it leaves when it dies is cleaned up by this mark.
		if err := i.Bundle().MarkInit(); err != nil {
			return errors.Join(fmt.Errorf("create sandbox %q: %w", spec.ID, err), s.shims.Shutdown(ctx, spec.ID))
		}
	}
	if err := i.Start(ctx); err != nil {
		return err
	}
	req := &sandboxapi.CreateSandboxRequest{
		SandboxID:  spec.ID,
		BundlePath: i.Bundle().Dir(),
		NetnsPath:  spec.Namespaces[namespaceNetwork],
	}
	for _, m := range spec.InitRootfs {
		req.Rootfs = append(req.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	if spec.Config != nil {
		req.Annotations = maps.Clone(spec.Config.GetAnnotations())
		req.Options, err = typeurl.MarshalAnyToProto(spec.Config)
	}
	if err == nil {
		err = i.Sandbox(ctx, "CreateSandbox", req, &sandboxapi.CreateSandboxResponse{})
	}
	if err != nil {
		return errors.Join(fmt.Errorf("create sandbox %q: %w", spec.ID, err), s.shims.Shutdown(ctx, spec.ID))
	}
	return nil
}

// Start lets the shim start the sandbox.
func (s *Shim) Start(ctx context.Context, id string) (port.Instance, error) {
	var resp sandboxapi.StartSandboxResponse
	if err := s.call(ctx, id, "StartSandbox", &sandboxapi.StartSandboxRequest{SandboxID: id}, &resp); err != nil {
		return port.Instance{}, errors.Join(err, s.Shutdown(ctx, id))
	}
	created := timeOf(resp.GetCreatedAt())
	if created.IsZero() {
		created = time.Now()
	}
	return port.Instance{Pid: resp.GetPid(), CreatedAt: created}, nil
}

// Platform asks for the platform of the sandbox's containers.
func (s *Shim) Platform(ctx context.Context, id string) (ocispec.Platform, error) {
	var resp sandboxapi.PlatformResponse
	if err := s.call(ctx, id, "Platform", &sandboxapi.PlatformRequest{SandboxID: id}, &resp); err != nil {
		return ocispec.Platform{}, err
	}
	p := resp.GetPlatform()
	return ocispec.Platform{
		OS: p.GetOS(), Architecture: p.GetArchitecture(), Variant: p.GetVariant(), OSVersion: p.GetOsVersion(),
	}, nil
}

// Stop lets the shim stop the sandbox. A sandbox whose shim is dead is stopped.
func (s *Shim) Stop(ctx context.Context, id string, timeout time.Duration) error {
	i, err := s.shims.Get(id)
	if err != nil {
		return err
	}
	if i.Status().Ended {
		return nil
	}
	secs := min(int64((timeout+time.Second-1)/time.Second), math.MaxUint32)
	req := &sandboxapi.StopSandboxRequest{SandboxID: id, TimeoutSecs: uint32(max(secs, 0))}
	return s.call(ctx, id, "StopSandbox", req, &sandboxapi.StopSandboxResponse{})
}

// Wait returns when the sandbox or its shim has ended.
func (s *Shim) Wait(ctx context.Context, id string) (pod.Exit, error) {
	i, err := s.shims.Get(id)
	if err != nil {
		return pod.Exit{}, err
	}
	for delay := waitRetryFirst; ; delay = min(2*delay, waitRetryMost) {
		if err := i.Settle(ctx); err != nil {
			return pod.Exit{}, fmt.Errorf("sandbox %q: %w", id, err)
		}
		if i.Status().Ended {
			return shimExit(i), nil
		}
		var resp sandboxapi.WaitSandboxResponse
		err := s.call(ctx, id, "WaitSandbox", &sandboxapi.WaitSandboxRequest{SandboxID: id}, &resp)
		if err == nil {
			return pod.Exit{Code: resp.GetExitStatus(), At: timeOf(resp.GetExitedAt())}, nil
		}
		if errdefs.IsNotFound(err) {
			return pod.Exit{}, err
		}
		if !pause.For(ctx, delay) {
			return pod.Exit{}, fmt.Errorf("sandbox %q: %w", id, context.Cause(ctx))
		}
	}
}

// Status asks the shim for the state of the sandbox. It fails with ErrNotFound for an unknown
// sandbox; one whose shim is dead or does not answer is not alive.
func (s *Shim) Status(ctx context.Context, id string, verbose bool) (port.ControllerStatus, error) {
	i, err := s.shims.Get(id)
	if err != nil {
		return port.ControllerStatus{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	out := shimStatus(i, verbose)
	var resp sandboxapi.SandboxStatusResponse
	req := &sandboxapi.SandboxStatusRequest{SandboxID: id, Verbose: verbose}
	if err := s.call(ctx, id, "SandboxStatus", req, &resp); err != nil {
		out.Alive = false
		return out, nil
	}
	out.Pid = resp.GetPid()
	if at := timeOf(resp.GetExitedAt()); !at.IsZero() && at.Unix() > 0 {
		out.ExitedAt, out.Alive = at, false
	}
	if verbose {
		maps.Copy(out.Info, resp.GetInfo())
	}
	return out, nil
}

// Shutdown lets the shim end, makes sure that it has, and removes everything that is held
// for the sandbox.
func (s *Shim) Shutdown(ctx context.Context, id string) error {
	i, err := s.shims.Get(id)
	if err == nil && i.Status().Alive {
		i.ExpectEnd()
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		// What goes wrong here is put right by killing the shim.
		err := i.Sandbox(sctx, "ShutdownSandbox", &sandboxapi.ShutdownSandboxRequest{SandboxID: id},
			&sandboxapi.ShutdownSandboxResponse{})
		cancel()
		if err == nil && i.Bundle().HasInit() {
			_ = i.Bundle().RemoveContainer(id)
		}
	}
	return s.shims.Shutdown(ctx, id)
}

// Metrics asks the shim for the sandbox's metrics.
func (s *Shim) Metrics(ctx context.Context, id string) (*anypb.Any, error) {
	var resp sandboxapi.SandboxMetricsResponse
	if err := s.call(ctx, id, "SandboxMetrics", &sandboxapi.SandboxMetricsRequest{SandboxID: id}, &resp); err != nil {
		return nil, err
	}
	return resp.GetMetrics().GetData(), nil
}

// Update hands changed resources and annotations to the shim. It fails with
// ErrNotImplemented if the shim cannot change them.
func (s *Shim) Update(ctx context.Context, id string, resources *runtimespec.LinuxResources, annotations map[string]string) error {
	spec := runtimespec.Spec{Annotations: annotations, Linux: &runtimespec.Linux{Resources: resources}}
	encoded, err := json.Marshal(&spec)
	if err != nil {
		return fmt.Errorf("update sandbox %q: %w: %w", id, err, errdefs.ErrInvalidArgument)
	}
	req := &sandboxapi.UpdateSandboxRequest{
		SandboxID: id,
		Sandbox:   &types.Sandbox{SandboxID: id, Spec: &anypb.Any{TypeUrl: typeSpec, Value: encoded}},
		Fields:    []string{"spec"},
	}
	return s.call(ctx, id, "UpdateSandbox", req, &sandboxapi.UpdateSandboxResponse{})
}

func (s *Shim) call(ctx context.Context, id, method string, req, resp proto.Message) error {
	i, err := s.shims.Get(id)
	if err != nil {
		return err
	}
	if err := i.Sandbox(ctx, method, req, resp); err != nil {
		return fmt.Errorf("sandbox %q: %w", id, err)
	}
	return nil
}
