package main

import (
	"context"
	"os"
	"sync"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// sandbox serves the sandbox API for one sandbox.
type sandbox struct {
	mu      sync.Mutex
	created *sandboxapi.CreateSandboxRequest
	once    sync.Once
	stopped chan struct{}
	at      time.Time
}

func (s *sandbox) CreateSandbox(_ context.Context, r *sandboxapi.CreateSandboxRequest) (*sandboxapi.CreateSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.GetAnnotations()["fake/refuse"] != "" {
		return nil, status.Error(codes.InvalidArgument, "refused as asked")
	}
	s.created = r
	return &sandboxapi.CreateSandboxResponse{}, nil
}

func (s *sandbox) StartSandbox(context.Context, *sandboxapi.StartSandboxRequest) (*sandboxapi.StartSandboxResponse, error) {
	return &sandboxapi.StartSandboxResponse{Pid: uint32(os.Getpid()), CreatedAt: timestamppb.Now()}, nil
}

func (s *sandbox) Platform(context.Context, *sandboxapi.PlatformRequest) (*sandboxapi.PlatformResponse, error) {
	return &sandboxapi.PlatformResponse{Platform: &types.Platform{OS: "linux", Architecture: "riscv64"}}, nil
}

func (s *sandbox) StopSandbox(context.Context, *sandboxapi.StopSandboxRequest) (*sandboxapi.StopSandboxResponse, error) {
	s.once.Do(func() {
		s.mu.Lock()
		s.at = time.Now()
		s.mu.Unlock()
		close(s.stopped)
	})
	return &sandboxapi.StopSandboxResponse{}, nil
}

func (s *sandbox) WaitSandbox(ctx context.Context, _ *sandboxapi.WaitSandboxRequest) (*sandboxapi.WaitSandboxResponse, error) {
	select {
	case <-s.stopped:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &sandboxapi.WaitSandboxResponse{ExitStatus: 9, ExitedAt: timestamppb.New(s.at)}, nil
}

func (s *sandbox) SandboxStatus(context.Context, *sandboxapi.SandboxStatusRequest) (*sandboxapi.SandboxStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &sandboxapi.SandboxStatusResponse{
		Pid:  uint32(os.Getpid()),
		Info: map[string]string{"netns": s.created.GetNetnsPath()},
	}
	if !s.at.IsZero() {
		out.ExitedAt = timestamppb.New(s.at)
	}
	return out, nil
}

func (s *sandbox) PingSandbox(context.Context, *sandboxapi.PingRequest) (*sandboxapi.PingResponse, error) {
	return &sandboxapi.PingResponse{}, nil
}

func (s *sandbox) ShutdownSandbox(context.Context, *sandboxapi.ShutdownSandboxRequest) (*sandboxapi.ShutdownSandboxResponse, error) {
	// Some shims are gone before their answer is out.
	os.Exit(0)
	return &sandboxapi.ShutdownSandboxResponse{}, nil
}

func (s *sandbox) SandboxMetrics(context.Context, *sandboxapi.SandboxMetricsRequest) (*sandboxapi.SandboxMetricsResponse, error) {
	return &sandboxapi.SandboxMetricsResponse{Metrics: &types.Metric{Data: &anypb.Any{TypeUrl: "fake/metrics"}}}, nil
}

func (s *sandbox) UpdateSandbox(context.Context, *sandboxapi.UpdateSandboxRequest) (*sandboxapi.UpdateSandboxResponse, error) {
	return nil, status.Error(codes.Unimplemented, "no update")
}
