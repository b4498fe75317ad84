package engine

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// UpdateSandbox changes the pod-level resources of a ready sandbox: its shim is told their
// sum, so that what it holds for the pod, such as a virtual machine, follows, and the record
// has them. nil means unchanged. Nothing has changed if it fails; it fails with
// ErrNotImplemented where a shim that serves the sandbox API cannot change them. A pod of
// processes on this node's kernel has nothing to change but its cgroup, which kubelet writes.
func (e *Engine) UpdateSandbox(ctx context.Context, id string, overhead, resources *criv1.LinuxContainerResources) (*recordv1.Sandbox, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	s, err := e.sandbox(id)
	if err != nil {
		return nil, err
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	old := s.rec.Load()
	if criview.SandboxState(old) != criv1.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("sandbox %q is not ready: %w", id, errdefs.ErrFailedPrecondition)
	}
	next := proto.CloneOf(old)
	if overhead != nil {
		next.Overhead = proto.CloneOf(overhead)
	}
	if resources != nil {
		next.Resources = proto.CloneOf(resources)
	}
	err = e.updateShim(ctx, s, next)
	if err != nil {
		return nil, fmt.Errorf("update of sandbox %q: %w", id, err)
	}
	err = e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.Overhead, r.Resources = next.GetOverhead(), next.GetResources() })
	if err != nil {
		undo(ctx, func(ctx context.Context) {
			undoErr := e.updateShim(ctx, s, old)
			if undoErr != nil {
				e.log.WarnContext(ctx, "resources of a sandbox not restored", slog.String("sandbox_id", id), slog.Any("error", undoErr))
			}
		})
		return nil, err
	}
	return s.rec.Load(), nil
}

// updateShim tells the shim the resources of a record.
func (e *Engine) updateShim(ctx context.Context, s *sandbox, rec *recordv1.Sandbox) error {
	total := podTotal(rec.GetResources(), rec.GetOverhead())
	if total == nil {
		return nil
	}
	limits, err := e.p.Specs.SetResources(&specs.Spec{}, total, nil)
	if err != nil {
		return err
	}
	err = e.p.Controller.Update(ctx, s.id, limits, nil)
	if errdefs.IsNotImplemented(err) && s.handler.Sandboxer != pod.SandboxerShim {
		return nil
	}
	return err
}

// podTotal is what a pod may use in all: its containers' resources and the overhead of its
// sandbox. What is not limited for the containers is not limited for the pod. nil if nothing
// is known.
func podTotal(resources, overhead *criv1.LinuxContainerResources) *criv1.LinuxContainerResources {
	if resources == nil {
		return nil
	}
	total := proto.CloneOf(resources)
	if total.GetCpuShares() > 0 {
		total.CpuShares += max(overhead.GetCpuShares(), 0)
	}
	if total.GetCpuQuota() > 0 && total.GetCpuPeriod() > 0 && overhead.GetCpuQuota() > 0 && overhead.GetCpuPeriod() > 0 {
		total.CpuQuota += overhead.GetCpuQuota() * total.GetCpuPeriod() / overhead.GetCpuPeriod()
	}
	if total.GetMemoryLimitInBytes() > 0 {
		total.MemoryLimitInBytes += max(overhead.GetMemoryLimitInBytes(), 0)
	}
	return total
}
