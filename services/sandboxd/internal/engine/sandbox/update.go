package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Dial connects to a port in a sandbox's network.
func (u *UseCases) Dial(ctx context.Context, sandboxID string, number int) (net.Conn, error) {
	rec, err := u.p.Views.Sandbox(sandboxID)
	if err != nil {
		return nil, err
	}
	if criview.SandboxState(rec) != criv1.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("sandbox %q is not ready: %w", sandboxID, errdefs.ErrFailedPrecondition)
	}
	return u.p.Network.Dial(ctx, rec.GetNetnsPath(), number)
}

// Update changes the pod-level resources of a ready sandbox: its shim is told their
// sum, so that what it holds for the pod, such as a virtual machine, follows, and the record
// has them. nil means unchanged. Nothing has changed if it fails; it fails with
// ErrNotImplemented where a shim that serves the sandbox API cannot change them. A pod of
// processes on this node's kernel has nothing to change but its cgroup, which kubelet writes.
func (u *UseCases) Update(ctx context.Context, id string, overhead, resources *criv1.LinuxContainerResources) (*recordv1.Sandbox, error) {
	err := u.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	s, err := u.p.Table.Sandbox(id)
	if err != nil {
		return nil, err
	}
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	old := s.Record()
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
	err = u.updateShim(ctx, s, next)
	if err != nil {
		return nil, fmt.Errorf("update of sandbox %q: %w", id, err)
	}
	err = u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.Overhead, r.Resources = next.GetOverhead(), next.GetResources() })
	if err != nil {
		work.Undo(ctx, func(ctx context.Context) {
			undoErr := u.updateShim(ctx, s, old)
			if undoErr != nil {
				u.p.Log.WarnContext(ctx, "resources of a sandbox not restored", slog.String("sandbox_id", id), slog.Any("error", undoErr))
			}
		})
		return nil, err
	}
	return s.Record(), nil
}

// updateShim tells the shim the resources of a record.
func (u *UseCases) updateShim(ctx context.Context, s *table.Sandbox, rec *recordv1.Sandbox) error {
	total := podTotal(rec.GetResources(), rec.GetOverhead())
	if total == nil {
		return nil
	}
	limits, err := u.p.Specs.Limits(total)
	if err != nil {
		return err
	}
	err = u.p.Controller.Update(ctx, s.ID, limits, nil)
	if errdefs.IsNotImplemented(err) && s.Handler.Sandboxer != pod.SandboxerShim {
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
