package api

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
)

// Sandbox serves crisp.sandbox.v1.SandboxService.
type Sandbox struct {
	sandboxv1.UnsafeSandboxServiceServer

	engine *engine.Engine
	stats  *Stats
	work   *Work
}

// NewSandbox returns the service.
func NewSandbox(e *engine.Engine, stats *Stats, work *Work) *Sandbox {
	return &Sandbox{engine: e, stats: stats, work: work}
}

type preparedSandbox struct {
	rec      *recordv1.Sandbox
	existing bool
}

// PrepareSandbox implements SandboxService.
func (s *Sandbox) PrepareSandbox(ctx context.Context, req *sandboxv1.PrepareSandboxRequest) (*sandboxv1.PrepareSandboxResponse, error) {
	err := required("config.metadata", req.GetConfig().GetMetadata() != nil)
	if err != nil {
		return nil, err
	}
	p, err := detach(ctx, s.work, prepareLimit, func(ctx context.Context) (preparedSandbox, error) {
		rec, existing, err := s.engine.Sandboxes.Prepare(ctx, req.GetSessionToken(), req.GetConfig(), req.GetRuntimeHandler())
		return preparedSandbox{rec, existing}, err
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.PrepareSandboxResponse{
		SandboxId: p.rec.GetId(), Existing: p.existing, Pod: s.engine.Views.Pod(p.rec),
	}, nil
}

// CommitSandbox implements SandboxService.
func (s *Sandbox) CommitSandbox(ctx context.Context, req *sandboxv1.CommitSandboxRequest) (*sandboxv1.CommitSandboxResponse, error) {
	err := detachErr(ctx, s.work, func(ctx context.Context) error {
		return s.engine.Sandboxes.Commit(ctx, req.GetSandboxId())
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CommitSandboxResponse{}, nil
}

// AbortSandbox implements SandboxService.
func (s *Sandbox) AbortSandbox(ctx context.Context, req *sandboxv1.AbortSandboxRequest) (*sandboxv1.AbortSandboxResponse, error) {
	err := required("sandbox_id", req.GetSandboxId() != "")
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, s.work, func(ctx context.Context) error {
		return s.engine.Sandboxes.Abort(ctx, req.GetSandboxId())
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.AbortSandboxResponse{}, nil
}

// sandboxID completes the id of a stop or removal; an unknown one is reported as "".
func (s *Sandbox) sandboxID(prefix string) (string, error) {
	id, err := s.engine.Views.SandboxID(prefix)
	if errdefs.IsNotFound(err) {
		return "", nil
	}
	return id, err
}

// QuiesceSandbox implements SandboxService.
func (s *Sandbox) QuiesceSandbox(ctx context.Context, req *sandboxv1.QuiesceSandboxRequest) (*sandboxv1.QuiesceSandboxResponse, error) {
	if !s.engine.Recovered() {
		return nil, fmt.Errorf("sandboxd is still recovering its state: %w", errdefs.ErrUnavailable)
	}
	id, err := s.sandboxID(req.GetSandboxId())
	if err != nil || id == "" {
		return &sandboxv1.QuiesceSandboxResponse{}, err
	}
	return detach(ctx, s.work, changeLimit, func(ctx context.Context) (*sandboxv1.QuiesceSandboxResponse, error) {
		rec, containers, err := s.engine.Sandboxes.Quiesce(ctx, id)
		if err != nil || rec == nil {
			return &sandboxv1.QuiesceSandboxResponse{}, err
		}
		resp := &sandboxv1.QuiesceSandboxResponse{Found: true, Pod: s.engine.Views.Pod(rec)}
		for _, c := range containers {
			view, err := s.engine.Views.Describe(c.GetId())
			if err != nil {
				continue // removed meanwhile
			}
			resp.Containers = append(resp.Containers, view.Container)
		}
		return resp, nil
	})
}

// StopSandbox implements SandboxService.
func (s *Sandbox) StopSandbox(ctx context.Context, req *sandboxv1.StopSandboxRequest) (*sandboxv1.StopSandboxResponse, error) {
	id, err := s.sandboxID(req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, s.work, func(ctx context.Context) error { return s.engine.Sandboxes.Stop(ctx, id) })
	if err != nil {
		return nil, err
	}
	rec, err := s.engine.Views.Sandbox(id)
	if err != nil {
		return &sandboxv1.StopSandboxResponse{}, nil //nolint:nilerr // unknown, or removed meanwhile
	}
	return &sandboxv1.StopSandboxResponse{Pod: s.engine.Views.Pod(rec)}, nil
}

// RemoveSandbox implements SandboxService.
func (s *Sandbox) RemoveSandbox(ctx context.Context, req *sandboxv1.RemoveSandboxRequest) (*sandboxv1.RemoveSandboxResponse, error) {
	id, err := s.sandboxID(req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, s.work, func(ctx context.Context) error { return s.engine.Sandboxes.Remove(ctx, id) })
	if err != nil {
		return nil, err
	}
	return &sandboxv1.RemoveSandboxResponse{}, nil
}

// GetSandbox implements SandboxService.
func (s *Sandbox) GetSandbox(ctx context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	id, err := s.engine.Views.SandboxID(req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	rec, err := s.engine.Views.Sandbox(id)
	if err != nil {
		return nil, err
	}
	resp := &sandboxv1.GetSandboxResponse{Status: criview.SandboxStatus(rec)}
	containers, err := s.engine.Views.Containers(id)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		resp.Containers = append(resp.Containers, criview.ContainerStatus(c))
	}
	if req.GetVerbose() {
		resp.Info, err = s.engine.Views.SandboxInfo(ctx, id)
	}
	return resp, err
}

// UpdateSandboxResources implements SandboxService.
func (s *Sandbox) UpdateSandboxResources(ctx context.Context, req *sandboxv1.UpdateSandboxResourcesRequest) (*sandboxv1.UpdateSandboxResourcesResponse, error) {
	rec, err := detach(ctx, s.work, changeLimit, func(ctx context.Context) (*recordv1.Sandbox, error) {
		return s.engine.Sandboxes.Update(ctx, req.GetSandboxId(), req.GetOverhead(), req.GetResources())
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.UpdateSandboxResourcesResponse{Pod: s.engine.Views.Pod(rec)}, nil
}

// GetSandboxStats implements SandboxService.
func (s *Sandbox) GetSandboxStats(ctx context.Context, req *sandboxv1.GetSandboxStatsRequest) (*sandboxv1.GetSandboxStatsResponse, error) {
	id, err := s.engine.Views.SandboxID(req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	rec, err := s.engine.Views.Sandbox(id)
	if err != nil {
		return nil, err
	}
	st, err := s.stats.sandbox(ctx, rec)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.GetSandboxStatsResponse{Stats: st}, nil
}
