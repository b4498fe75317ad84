// Package view shows what the engine knows: the records of visible objects, NRI's view of
// pods and containers, and the verbose information for operators.
//
// It changes nothing and takes no turn. Lists answer only from a complete state; what is
// being prepared is in none of them.
package view

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Parts are what Views are made from. All must be set.
type Parts struct {
	Table      *table.Table
	Specs      port.Specs
	Controller port.Controller
}

// Views answers questions. Its methods are safe for concurrent use.
type Views struct{ p Parts }

// New returns the views.
func New(p Parts) *Views { return &Views{p} }

// SandboxID completes an unambiguous prefix to a sandbox id. While the state is incomplete
// it fails with ErrUnavailable: what is not known then may exist.
func (v *Views) SandboxID(prefix string) (string, error) { return v.p.Table.SandboxID(prefix) }

// ContainerID completes an unambiguous prefix to a container id, as SandboxID does.
func (v *Views) ContainerID(prefix string) (string, error) { return v.p.Table.ContainerID(prefix) }

// Pod returns NRI's view of a sandbox's record.
func (v *Views) Pod(rec *recordv1.Sandbox) *nri.PodSandbox { return v.p.Specs.PodView(rec) }

// Networked returns the sandboxes that have a network or may have one, visible or not. It
// is complete once the state is.
func (v *Views) Networked() []pod.NetworkHolder { return v.p.Table.Networked() }

// Sandbox returns the record of a visible sandbox. The caller must not change it.
func (v *Views) Sandbox(id string) (*recordv1.Sandbox, error) {
	err := v.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	s, err := v.p.Table.Sandbox(id)
	if err != nil {
		return nil, err
	}
	rec := s.Record()
	if !criview.Visible(rec) {
		return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
	}
	return rec, nil
}

// SandboxInMaking is Sandbox, but finds a sandbox also while it is being prepared.
func (v *Views) SandboxInMaking(id string) (*recordv1.Sandbox, error) {
	err := v.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	s, err := v.p.Table.Sandbox(id)
	if err != nil {
		return nil, err
	}
	return s.Record(), nil
}

// RuntimeType is the type of a sandbox's shim; empty if there is no such sandbox.
func (v *Views) RuntimeType(sandboxID string) string {
	s, err := v.p.Table.Sandbox(sandboxID)
	if err != nil {
		return ""
	}
	return s.Handler.RuntimeType
}

// Container returns the record of a visible container. The caller must not change it.
func (v *Views) Container(id string) (*recordv1.Container, error) {
	err := v.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	c, err := v.p.Table.Container(id)
	if err != nil {
		return nil, err
	}
	rec := c.Record()
	if !criview.VisibleContainer(rec) {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return rec, nil
}

// Containers returns the records of all visible containers, of one sandbox if its id
// is given, oldest first.
func (v *Views) Containers(sandboxID string) ([]*recordv1.Container, error) {
	err := v.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	out := []*recordv1.Container{}
	for _, c := range v.p.Table.Containers() {
		rec := c.Record()
		if criview.VisibleContainer(rec) && (sandboxID == "" || rec.GetSandboxId() == sandboxID) {
			out = append(out, rec)
		}
	}
	slices.SortFunc(out, func(a, b *recordv1.Container) int {
		return cmp.Or(a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return out, nil
}

// Sandboxes returns the records of all visible sandboxes, oldest first.
func (v *Views) Sandboxes() ([]*recordv1.Sandbox, error) {
	err := v.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	out := []*recordv1.Sandbox{}
	for _, s := range v.p.Table.Sandboxes() {
		if rec := s.Record(); criview.Visible(rec) {
			out = append(out, rec)
		}
	}
	slices.SortFunc(out, func(a, b *recordv1.Sandbox) int {
		return cmp.Or(a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return out, nil
}

// Inventory returns NRI's view of everything that plugins may hold resources for: committed
// sandboxes that are not stopped, and their containers that have not ended.
func (v *Views) Inventory() (pods []*nri.PodSandbox, containers []*nri.Container, ended []string, _ error) {
	sandboxes, err := v.Sandboxes()
	if err != nil {
		return nil, nil, nil, err
	}
	for _, rec := range sandboxes {
		if criview.SandboxState(rec) == criv1.PodSandboxState_SANDBOX_READY {
			pods = append(pods, v.p.Specs.PodView(rec))
		} else {
			ended = append(ended, rec.GetId())
		}
	}
	var live []*table.Container
	for _, c := range v.p.Table.Containers() {
		switch c.Record().GetState() {
		case table.ContainerCreated, table.ContainerRunning:
			live = append(live, c)
		default:
			ended = append(ended, c.ID)
		}
	}
	slices.SortFunc(live, func(a, b *table.Container) int { return cmp.Compare(a.ID, b.ID) })
	containers = make([]*nri.Container, 0, len(live))
	for _, c := range live {
		containers = append(containers, v.Of(c).Container)
	}
	return pods, containers, ended, nil
}

// ImageUsers returns the ids of the containers that use an image.
func (v *Views) ImageUsers(_ context.Context, imageID string) []string {
	var out []string
	for _, c := range v.p.Table.Containers() {
		rec := c.Record()
		if rec.GetImageId() == imageID || mountsImage(rec.GetConfig(), imageID) {
			out = append(out, c.ID)
		}
	}
	slices.Sort(out)
	return out
}

// ContainerInfo is the verbose information on a container, in the form that operators know.
func (v *Views) ContainerInfo(id string) (map[string]string, error) {
	c, err := v.p.Table.Container(id)
	if err != nil {
		return nil, err
	}
	rec := c.Record()
	info, err := json.Marshal(map[string]any{
		"sandboxID": rec.GetSandboxId(), "pid": rec.GetPid(), "snapshotKey": rec.GetId(), "snapshotter": rec.GetSnapshotter(),
		"runtimeType": c.Sandbox.Handler.RuntimeType, "runtimeOptions": runtimeOptions(c.Sandbox.Handler), "cgroupsPath": rec.GetCgroupsPath(),
		"privileged":  rec.GetConfig().GetLinux().GetSecurityContext().GetPrivileged(),
		"runtimeSpec": json.RawMessage(orNull(rec.GetSpec())), "config": rec.GetConfig(),
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{"info": string(info)}, nil
}

// SandboxInfo is the verbose information on a sandbox, in the form that operators know. Its
// runtimeSpec says what there is of a pod without a process too: above all the paths of its
// namespaces, by which tools enter them.
func (v *Views) SandboxInfo(ctx context.Context, id string) (map[string]string, error) {
	s, err := v.p.Table.Sandbox(id)
	if err != nil {
		return nil, err
	}
	rec := s.Record()
	shim, err := v.p.Controller.Status(ctx, id, true)
	if err != nil && !errdefs.IsNotFound(err) {
		shim = port.ControllerStatus{Info: map[string]string{"error": err.Error()}}
	}
	info, err := json.Marshal(map[string]any{
		"pid": rec.GetPid(), "shimPid": shim.ShimPid, "shim": shim.Info, "runtimeHandler": rec.GetRuntimeHandler(),
		"runtimeType": s.Handler.RuntimeType, "runtimeOptions": runtimeOptions(s.Handler), "runtimeSpec": sandboxSpec(rec),
		"namespaces": rec.GetNamespaces(), "netNamespaceClosed": rec.GetNetnsPath() != "" && rec.GetState() == table.SandboxStopped, "ips": rec.GetIps(),
		"cniResult": json.RawMessage(orNull(rec.GetCniResult())), "config": rec.GetConfig(),
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{"info": string(info)}, nil
}

// sandboxSpec is a pod in the form of an OCI specification.
func sandboxSpec(rec *recordv1.Sandbox) *specs.Spec {
	cfg := rec.GetConfig()
	out := &specs.Spec{
		Version: specs.Version, Hostname: cfg.GetHostname(), Annotations: cfg.GetAnnotations(),
		Linux: &specs.Linux{Sysctl: cfg.GetLinux().GetSysctls()},
	}
	for _, kind := range slices.Sorted(maps.Keys(rec.GetNamespaces())) {
		out.Linux.Namespaces = append(out.Linux.Namespaces, specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: rec.GetNamespaces()[kind]})
	}
	return out
}

// runtimeOptions are the options of a handler's shim by the names that containerd has for them.
func runtimeOptions(h pod.Handler) map[string]any {
	out := map[string]any{"systemd_cgroup": h.SystemdCgroup}
	if h.BinaryName != "" {
		out["binary_name"] = h.BinaryName
	}
	if h.Root != "" {
		out["root"] = h.Root
	}
	maps.Copy(out, h.Options)
	return out
}

func orNull(b []byte) []byte {
	if len(b) == 0 {
		return []byte("null")
	}
	return b
}

// Container is a container with its pod, as NRI plugins see them.
type Container struct {
	Pod       *nri.PodSandbox
	Container *nri.Container
}

// Describe returns NRI's view of a container and its pod.
func (v *Views) Describe(id string) (Container, error) {
	c, err := v.p.Table.Container(id)
	if err != nil {
		return Container{}, err
	}
	return v.Of(c), nil
}

// Of returns NRI's view of a container and its pod.
func (v *Views) Of(c *table.Container) Container {
	spec, err := c.Spec()
	if err != nil {
		spec = &specs.Spec{}
	}
	out := Container{
		Pod:       v.p.Specs.PodView(c.Sandbox.Record()),
		Container: v.p.Specs.ContainerView(c.Record(), spec),
	}
	if pid := c.Waiting.Load(); pid != nil && out.Container.GetPid() == 0 {
		out.Container.Pid = *pid
	}
	return out
}

// mountsImage says whether a container has an image as a volume.
func mountsImage(cfg *criv1.ContainerConfig, imageID string) bool {
	for _, m := range cfg.GetMounts() {
		if m.GetImage().GetImageRef() == imageID {
			return true
		}
	}
	return false
}
