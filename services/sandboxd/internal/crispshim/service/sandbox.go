package service

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"sync"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

var _ sandboxapi.TTRPCSandboxService = (*Services)(nil)

// The states of a sandbox, by the names that containerd uses.
const (
	stateReady    = "SANDBOX_READY"
	stateNotReady = "SANDBOX_NOTREADY"
)

// sandbox is the pod's sandbox.
type sandbox struct {
	id      string
	spec    task.Spec
	hasInit bool
	// ended is closed when the sandbox was stopped.
	ended chan struct{}

	// mu guards the rest.
	mu   sync.Mutex
	init *task.Container // nil without one
	// annotations and resources are those of the sandbox now; resources in JSON, nil if none
	// were ever given.
	annotations map[string]string
	resources   json.RawMessage
	created     time.Time
	exit        reaper.Exit
	stopped     bool
}

// stop notes the end of the sandbox.
func (b *sandbox) stop(e reaper.Exit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped {
		return
	}
	b.stopped, b.exit = true, e
	close(b.ended)
}

// process is the sandbox's own first process; nil if it has none.
func (b *sandbox) process() *task.Process {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.init == nil {
		return nil
	}
	p, err := b.init.Process("")
	if err != nil {
		return nil
	}
	return p
}

func (s *Services) sandboxOf(id string) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandbox == nil || s.sandbox.id != id {
		return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
	}
	return s.sandbox, nil
}

// CreateSandbox makes the sandbox. A shim has one.
func (s *Services) CreateSandbox(_ context.Context, r *sandboxapi.CreateSandboxRequest) (*sandboxapi.CreateSandboxResponse, error) {
	hasInit, err := task.HasProcess(r.GetBundlePath())
	if err != nil {
		return nil, err
	}
	o, err := s.optionsOf(r.GetOptions())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandbox != nil {
		return nil, fmt.Errorf("sandbox %q: %w", s.sandbox.id, errdefs.ErrAlreadyExists)
	}
	s.sandbox = &sandbox{
		id: r.GetSandboxID(), hasInit: hasInit, ended: make(chan struct{}), annotations: maps.Clone(r.GetAnnotations()),
		spec: task.Spec{ID: r.GetSandboxID(), Bundle: r.GetBundlePath(), Rootfs: r.GetRootfs(), Options: o},
	}
	return &sandboxapi.CreateSandboxResponse{}, nil
}

// StartSandbox starts the sandbox's own process, if it has one.
func (s *Services) StartSandbox(ctx context.Context, r *sandboxapi.StartSandboxRequest) (*sandboxapi.StartSandboxResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	resp := &sandboxapi.StartSandboxResponse{}
	if b.hasInit {
		c, err := s.startInit(ctx, b)
		if err != nil {
			return nil, fmt.Errorf("sandbox %q: %w", b.id, err)
		}
		resp.Pid = pidOf(c, "")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.created.IsZero() {
		b.created = time.Now()
	}
	resp.CreatedAt = timestamppb.New(b.created)
	return resp, nil
}

func (s *Services) startInit(ctx context.Context, b *sandbox) (*task.Container, error) {
	c, err := s.create(ctx, b.spec)
	if err != nil {
		return nil, err
	}
	p, err := c.Process("")
	if err != nil {
		return nil, err
	}
	if _, err := p.Start(ctx); err != nil {
		if c.Destroy(context.WithoutCancel(ctx)) == nil {
			s.forget(c)
		}
		return nil, err
	}
	b.mu.Lock()
	b.init = c
	b.mu.Unlock()
	return c, nil
}

// Platform is the platform of the machine.
func (s *Services) Platform(_ context.Context, r *sandboxapi.PlatformRequest) (*sandboxapi.PlatformResponse, error) {
	if _, err := s.sandboxOf(r.GetSandboxID()); err != nil {
		return nil, err
	}
	return &sandboxapi.PlatformResponse{Platform: &types.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}}, nil
}

// StopSandbox kills the sandbox's own process: it has nothing to finish, and as process 1 of its
// namespace it would not hear of a politer signal that comes right after its start. Containers are
// not touched.
func (s *Services) StopSandbox(ctx context.Context, r *sandboxapi.StopSandboxRequest) (*sandboxapi.StopSandboxResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	e := reaper.Exit{At: time.Now()}
	if p := b.process(); p != nil {
		err = p.Signal(unix.SIGKILL)
		if err == nil || errdefs.IsNotFound(err) {
			e, err = p.Wait(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("sandbox %q: %w", b.id, err)
		}
	}
	b.stop(e)
	return &sandboxapi.StopSandboxResponse{}, nil
}

// WaitSandbox waits for the end of the sandbox: of its own process, or that it is stopped.
func (s *Services) WaitSandbox(ctx context.Context, r *sandboxapi.WaitSandboxRequest) (*sandboxapi.WaitSandboxResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	var e reaper.Exit
	if p := b.process(); p != nil {
		if e, err = p.Wait(ctx); err != nil {
			return nil, err
		}
	} else {
		select {
		case <-b.ended:
			e = b.exit
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return &sandboxapi.WaitSandboxResponse{ExitStatus: uint32(e.Status), ExitedAt: timestamppb.New(e.At)}, nil
}

// SandboxStatus tells the state of the sandbox.
func (s *Services) SandboxStatus(_ context.Context, r *sandboxapi.SandboxStatusRequest) (*sandboxapi.SandboxStatusResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	resp := &sandboxapi.SandboxStatusResponse{SandboxID: b.id, State: stateReady}
	p := b.process()
	b.mu.Lock()
	created, stopped, exit := b.created, b.stopped, b.exit
	b.mu.Unlock()
	if p != nil {
		state, e := p.State()
		resp.Pid = uint32(p.Pid())
		if state == task.Stopped {
			stopped, exit = true, e
		}
	}
	if !created.IsZero() {
		resp.CreatedAt = timestamppb.New(created)
	}
	if stopped || created.IsZero() {
		resp.State = stateNotReady
	}
	if stopped {
		resp.ExitedAt = timestamppb.New(exit.At)
	}
	if r.GetVerbose() {
		resp.Info = s.info(b)
	}
	return resp, nil
}

// PingSandbox answers if the sandbox is there.
func (s *Services) PingSandbox(_ context.Context, r *sandboxapi.PingRequest) (*sandboxapi.PingResponse, error) {
	_, err := s.sandboxOf(r.GetSandboxID())
	return &sandboxapi.PingResponse{}, err
}

// ShutdownSandbox ends and removes whatever is left in the pod, and the shim.
func (s *Services) ShutdownSandbox(ctx context.Context, r *sandboxapi.ShutdownSandboxRequest) (*sandboxapi.ShutdownSandboxResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	if err := s.destroyAll(ctx); err != nil {
		return nil, fmt.Errorf("sandbox %q: %w", b.id, err)
	}
	b.stop(reaper.Exit{At: time.Now()})
	s.mu.Lock()
	s.sandbox = nil
	s.mu.Unlock()
	s.stop()
	return &sandboxapi.ShutdownSandboxResponse{}, nil
}

// group is the control group of the sandbox: its own process's, else that above its
// containers.
func (s *Services) group(b *sandbox) (cgroup.Group, error) {
	b.mu.Lock()
	init := b.init
	b.mu.Unlock()
	if init != nil {
		return init.Group(), nil
	}
	for _, c := range s.all() {
		return c.Group().Parent(), nil
	}
	return cgroup.Group{}, fmt.Errorf("sandbox %q has no process yet: %w", b.id, errdefs.ErrFailedPrecondition)
}

// SandboxMetrics reads the metrics of the sandbox's control group.
func (s *Services) SandboxMetrics(_ context.Context, r *sandboxapi.SandboxMetricsRequest) (*sandboxapi.SandboxMetricsResponse, error) {
	b, err := s.sandboxOf(r.GetSandboxID())
	if err != nil {
		return nil, err
	}
	g, err := s.group(b)
	if err != nil {
		return nil, err
	}
	m, err := g.Metrics()
	if err != nil {
		return nil, fmt.Errorf("sandbox %q: %w", b.id, err)
	}
	return &sandboxapi.SandboxMetricsResponse{Metrics: &types.Metric{ID: b.id, Timestamp: timestamppb.Now(), Data: m}}, nil
}
