package app

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/apparmor"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/device"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/hook"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/namespace"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/nrispec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/process"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// specPort fits package ocispec to the engine.
type specPort struct {
	rules      *atomic.Pointer[ocispec.Builder] // the policies may change while the process runs
	initBinary string
	systemd    bool
	mapsIDs    func() bool // whether root file systems can be shown with other ids
}

var _ port.Specs = specPort{}

func (p specPort) builder() *ocispec.Builder { return p.rules.Load() }

// setSpecRules brings the policies of a configuration into force for containers to come.
func (a *App) setSpecRules(ctx context.Context, cfg config.Config) {
	a.specRules.Store(ocispec.New(a.host, a.specOptions(ctx, cfg)))
}

// specOptions are the policies of specifications. A default AppArmor profile that cannot be
// loaded does not keep pods from starting, except those that ask for it.
func (a *App) specOptions(ctx context.Context, all config.Config) ocispec.Options {
	cfg := all.Runtime
	opts := ocispec.Options{
		UnsetSeccomp: unsetSeccomp(all), InjectCDI: cdi(all), Classes: a.classes,
		RejectMissingMountSources: cfg.RejectMissing, Rlimits: rlimits(all), DeviceOwnership: cfg.DeviceOwnership,
		SELinux: cfg.SELinux, RejectPaths: cleaned(cfg.AbsentSources), Env: cfg.DefaultEnv, Mounts: defaultMounts(all),
		IgnoreImageVolumes: cfg.IgnoreVolumes, Workloads: workloads(all), HookFolders: cfg.HooksDirs,
	}
	if _, err := hook.Read(cfg.HooksDirs); err != nil {
		a.tel.Log.ErrorContext(ctx, "no container can be created until the hooks of runtime.hooks_dir are right", slog.Any("error", err))
	}
	if cfg.SELinux && !a.host.SELinux {
		a.tel.Log.WarnContext(ctx, "runtime.selinux has no effect: the host has no SELinux")
	}
	if !a.host.AppArmor {
		return opts
	}
	opts.AppArmorLoaded = apparmor.Loaded
	if cfg.AppArmor == "" {
		return opts
	}
	err := apparmor.LoadDefault(cfg.AppArmor)
	if err != nil {
		a.tel.Log.ErrorContext(ctx, "containers that name no AppArmor profile run without one", slog.Any("error", err))
		return opts
	}
	opts.AppArmorProfile = cfg.AppArmor
	return opts
}

// cdi is what injects CDI devices; nil without folders that describe any.
func cdi(cfg config.Config) func(*specs.Spec, []string) error {
	if len(cfg.Runtime.CDIDirs) == 0 {
		return nil
	}
	return device.CDIFromFolders(cfg.Runtime.CDIDirs)
}

func (p specPort) Container(_ context.Context, in port.SpecInput) (*specs.Spec, port.SpecResult, error) {
	group, err := p.builder().CgroupsPath(in.Sandbox.GetLinux().GetCgroupParent(), in.ContainerID, p.systemd)
	if err != nil {
		return nil, port.SpecResult{}, err
	}
	input := ocispec.Input{
		ID: in.ContainerID, Config: in.Container, SandboxID: in.SandboxID, SandboxConfig: in.Sandbox,
		Namespaces: in.Namespaces, PIDNamespace: pidNamespace(in),
		Files: in.Files, Image: in.Image, Accounts: in.Accounts, Volumes: in.Volumes, ImageMounts: in.ImageMounts, Handler: in.Handler,
		CgroupsPath: group,
		PodLabel:    in.PodLabel,
	}
	spec, result, err := p.builder().Build(input)
	if err != nil {
		return nil, port.SpecResult{}, err
	}
	return spec, port.SpecResult{User: result.User, Undo: result.Undo}, nil
}

// pidNamespace is the namespace of the process whose PID namespace is joined.
func pidNamespace(in port.SpecInput) string {
	pid := in.TargetPid
	if pid == 0 {
		pid = in.SandboxPid
	}
	if pid == 0 {
		return ""
	}
	return fmt.Sprintf("/proc/%d/ns/pid", pid)
}

func (p specPort) Init(in port.SpecInput) (*specs.Spec, error) {
	group, err := p.builder().CgroupsPath(in.Sandbox.GetLinux().GetCgroupParent(), in.SandboxID, p.systemd)
	if err != nil {
		return nil, err
	}
	return p.builder().BuildInit(ocispec.InitInput{
		SandboxID: in.SandboxID, SandboxConfig: in.Sandbox, Namespaces: in.Namespaces, Binary: p.initBinary, Handler: in.Handler,
		CgroupsPath: group,
		PodLabel:    in.PodLabel,
	})
}

func (p specPort) PodLabel(cfg *criv1.PodSandboxConfig) (string, error) {
	return p.builder().PodLabel(cfg)
}

func (p specPort) KeepLabel(label string) error { return p.builder().KeepLabel(label) }

func (p specPort) FreeLabel(label string) { p.builder().FreeLabel(label) }

func (p specPort) Exec(spec *specs.Spec, cmd []string, tty bool, handler pod.Handler) specs.Process {
	return process.Exec(spec, cmd, tty, handler.ExecCPUAffinity)
}

func (p specPort) PinRequest(cfg *criv1.PodSandboxConfig) (port.PinRequest, error) {
	uids, gids, err := namespace.UserMappings(cfg)
	if err == nil {
		err = namespace.CheckMapped(p.builder().Host().Own, uids, gids)
	}
	if err == nil && len(uids) > 0 && p.builder().Host().Own.Nested() && !p.mapsIDs() {
		err = fmt.Errorf("sandboxd runs in a user namespace itself, in which the kernel does not show the files of images with other ids: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return port.PinRequest{}, fmt.Errorf("config.linux.security_context.namespace_options.userns_options: %w", err)
	}
	opts := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	want := port.PinRequest{
		Network: opts.GetNetwork() != criv1.NamespaceMode_NODE,
		IPC:     opts.GetIpc() != criv1.NamespaceMode_NODE,
		Sysctls: cfg.GetLinux().GetSysctls(),
		UIDs:    opts.GetUsernsOptions().GetUids(),
		GIDs:    opts.GetUsernsOptions().GetGids(),
	}
	if opts.GetUsernsOptions().GetMode() != criv1.NamespaceMode_POD {
		want.UIDs, want.GIDs = nil, nil
	}
	want.UTS = want.Network // a pod in the node's network has the node's name too
	if want.UTS {
		want.Hostname = cfg.GetHostname()
	}
	return want, nil
}

func (p specPort) Adjust(spec *specs.Spec, adj *nri.ContainerAdjustment) (*specs.Spec, error) {
	return p.builder().Adjust(spec, adj)
}

func (specPort) Merge(current, update *criv1.LinuxContainerResources) *criv1.LinuxContainerResources {
	return resource.MergeCRI(current, update)
}

func (specPort) MergeNRI(current *criv1.LinuxContainerResources, update *nri.LinuxResources) *criv1.LinuxContainerResources {
	return resource.MergeCRI(current, resource.NRIToCRI(update))
}

func (p specPort) SetResources(spec *specs.Spec, r *criv1.LinuxContainerResources, plugin *nri.LinuxResources) (change, undo *specs.LinuxResources, err error) {
	on := p.builder().Host()
	if on.Groups.None {
		return nil, nil, fmt.Errorf("the container has no cgroup whose limits could change: %s: %w", on.Groups.Why, errdefs.ErrFailedPrecondition)
	}
	change, err = resource.FromCRI(r, on)
	if err != nil {
		return nil, nil, err
	}
	if plugin != nil {
		wanted, err := resource.UpdateFromNRI(plugin, on)
		if err != nil {
			return nil, nil, err
		}
		resource.Merge(change, wanted)
	}
	undo = resource.Restoring(spec.Linux.Resources, change)
	if spec.Linux.Resources == nil {
		spec.Linux.Resources = &specs.LinuxResources{}
	}
	resource.Merge(spec.Linux.Resources, change)
	if r.GetOomScoreAdj() != 0 && spec.Process != nil {
		spec.Process.OOMScoreAdj = new(p.builder().OOMScore(r.GetOomScoreAdj()))
	}
	return resource.Checked(change, on), undo, nil
}

func (p specPort) Limits(r *criv1.LinuxContainerResources) (*specs.LinuxResources, error) {
	return resource.FromCRI(r, p.builder().Host())
}

func (specPort) Resources(spec *specs.Spec) *criv1.LinuxContainerResources {
	r := resource.NRIToCRI(nri.FromOCILinuxResources(spec.Linux.Resources, nil))
	if spec.Process != nil && spec.Process.OOMScoreAdj != nil {
		r.OomScoreAdj = int64(*spec.Process.OOMScoreAdj)
	}
	return r
}

func (p specPort) PodView(s *recordv1.Sandbox) *nri.PodSandbox {
	cgroup := ""
	if s.GetPid() != 0 {
		// What is wrong with the parent was said when the pod was made.
		cgroup, _ = p.builder().CgroupsPath(s.GetConfig().GetLinux().GetCgroupParent(), s.GetId(), p.systemd)
	}
	return nrispec.Pod(s, cgroup)
}

func (specPort) ContainerView(c *recordv1.Container, spec *specs.Spec) *nri.Container {
	return nrispec.Container(c, spec)
}

// pinPort fits package namespaces to the engine.
type pinPort struct{ *namespaces.Pins }

var _ port.Namespaces = pinPort{}

func (p pinPort) Pin(ctx context.Context, sandboxID string, want port.PinRequest) (map[string]string, error) {
	return p.Pins.Pin(ctx, sandboxID, pinRequest(want))
}

func (p pinPort) SetInterfaces(sandboxID string, want port.PinRequest) error {
	return p.Pins.SetInterfaces(sandboxID, pinRequest(want))
}

func pinRequest(want port.PinRequest) namespaces.Request {
	return namespaces.Request{
		Network: want.Network, IPC: want.IPC, UTS: want.UTS, Hostname: want.Hostname, Sysctls: want.Sysctls,
		UIDs: want.UIDs, GIDs: want.GIDs,
	}
}
