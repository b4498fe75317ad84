package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
)

// SandboxRecord returns the record of a visible sandbox. The caller must not change it.
func (e *Engine) SandboxRecord(id string) (*recordv1.Sandbox, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	s, err := e.sandbox(id)
	if err != nil {
		return nil, err
	}
	rec := s.rec.Load()
	if !criview.Visible(rec) {
		return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
	}
	return rec, nil
}

// PreparedView returns NRI's view of a sandbox in any state.
func (e *Engine) PreparedView(id string) (*nri.PodSandbox, error) {
	s, err := e.sandbox(id)
	if err != nil {
		return nil, err
	}
	return e.p.Specs.PodView(s.rec.Load()), nil
}

// PodView returns NRI's view of a record.
func (e *Engine) PodView(rec *recordv1.Sandbox) *nri.PodSandbox { return e.p.Specs.PodView(rec) }

// ContainerRecord returns the record of a visible container. The caller must not change it.
func (e *Engine) ContainerRecord(id string) (*recordv1.Container, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	c, err := e.container(id)
	if err != nil {
		return nil, err
	}
	rec := c.rec.Load()
	if !criview.VisibleContainer(rec) {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return rec, nil
}

// ContainerRecords returns the records of all visible containers, of one sandbox if its id
// is given, oldest first.
func (e *Engine) ContainerRecords(sandboxID string) ([]*recordv1.Container, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	e.mu.RLock()
	out := make([]*recordv1.Container, 0, len(e.containers))
	for _, c := range e.containers {
		rec := c.rec.Load()
		if criview.VisibleContainer(rec) && (sandboxID == "" || rec.GetSandboxId() == sandboxID) {
			out = append(out, rec)
		}
	}
	e.mu.RUnlock()
	slices.SortFunc(out, func(a, b *recordv1.Container) int {
		return cmp.Or(a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return out, nil
}

// SandboxRecords returns the records of all visible sandboxes, oldest first.
func (e *Engine) SandboxRecords() ([]*recordv1.Sandbox, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	e.mu.RLock()
	out := make([]*recordv1.Sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		if rec := s.rec.Load(); criview.Visible(rec) {
			out = append(out, rec)
		}
	}
	e.mu.RUnlock()
	slices.SortFunc(out, func(a, b *recordv1.Sandbox) int {
		return cmp.Or(a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return out, nil
}

// Inventory returns NRI's view of everything that plugins may hold resources for: committed
// sandboxes that are not stopped, and their containers that have not ended.
func (e *Engine) Inventory() ([]*nri.PodSandbox, []*nri.Container, error) {
	sandboxes, err := e.SandboxRecords()
	if err != nil {
		return nil, nil, err
	}
	var pods []*nri.PodSandbox
	for _, rec := range sandboxes {
		if criview.SandboxState(rec) == criv1.PodSandboxState_SANDBOX_READY {
			pods = append(pods, e.p.Specs.PodView(rec))
		}
	}
	e.mu.RLock()
	var live []*container
	for _, c := range e.containers {
		if s := c.rec.Load().GetState(); s == containerCreated || s == containerRunning {
			live = append(live, c)
		}
	}
	e.mu.RUnlock()
	slices.SortFunc(live, func(a, b *container) int { return cmp.Compare(a.id, b.id) })
	containers := make([]*nri.Container, 0, len(live))
	for _, c := range live {
		containers = append(containers, e.view(c).Container)
	}
	return pods, containers, nil
}

// ImageUsers returns the ids of the containers that use an image.
func (e *Engine) ImageUsers(_ context.Context, imageID string) []string {
	e.mu.RLock()
	defer e.mu.RUnlock()
	var out []string
	for id, c := range e.containers {
		rec := c.rec.Load()
		if rec.GetImageId() == imageID || mountsImage(rec.GetConfig(), imageID) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Dial connects to a port in a sandbox's network.
func (e *Engine) Dial(ctx context.Context, sandboxID string, port int) (net.Conn, error) {
	rec, err := e.SandboxRecord(sandboxID)
	if err != nil {
		return nil, err
	}
	if criview.SandboxState(rec) != criv1.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("sandbox %q is not ready: %w", sandboxID, errdefs.ErrFailedPrecondition)
	}
	return e.p.Network.Dial(ctx, rec.GetNetnsPath(), port)
}

// ContainerInfo is the verbose information on a container, in the form that operators know.
func (e *Engine) ContainerInfo(id string) (map[string]string, error) {
	c, err := e.container(id)
	if err != nil {
		return nil, err
	}
	rec := c.rec.Load()
	info, err := json.Marshal(map[string]any{
		"sandboxID": rec.GetSandboxId(), "pid": rec.GetPid(), "snapshotKey": rec.GetId(), "snapshotter": rec.GetSnapshotter(),
		"runtimeType": c.sandbox.handler.RuntimeType, "cgroupsPath": rec.GetCgroupsPath(),
		"runtimeSpec": json.RawMessage(orNull(rec.GetSpec())), "config": rec.GetConfig(),
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{"info": string(info)}, nil
}

// SandboxInfo is the verbose information on a sandbox.
func (e *Engine) SandboxInfo(ctx context.Context, id string) (map[string]string, error) {
	s, err := e.sandbox(id)
	if err != nil {
		return nil, err
	}
	rec := s.rec.Load()
	shim, err := e.p.Controller.Status(ctx, id, true)
	if err != nil && !errdefs.IsNotFound(err) {
		shim = ControllerStatus{Info: map[string]string{"error": err.Error()}}
	}
	info, err := json.Marshal(map[string]any{
		"pid": rec.GetPid(), "shimPid": shim.ShimPid, "shim": shim.Info, "runtimeHandler": rec.GetRuntimeHandler(),
		"runtimeType": s.handler.RuntimeType, "namespaces": rec.GetNamespaces(), "ips": rec.GetIps(),
		"cniResult": json.RawMessage(orNull(rec.GetCniResult())), "config": rec.GetConfig(),
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{"info": string(info)}, nil
}

func orNull(b []byte) []byte {
	if len(b) == 0 {
		return []byte("null")
	}
	return b
}
