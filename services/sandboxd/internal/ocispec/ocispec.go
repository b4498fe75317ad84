// Package ocispec makes the OCI runtime specification of containers. Its parts are below it, each
// one idea; this package puts them together in order, and adds what is left: annotations, classes
// of resources, the base specification and the pod's own process.
//
// The specification depends only on the input, on what the input's paths point to (mount
// sources, devices, profiles), and on the facts of the host that were found once.
// Nothing is changed on the node except that a missing mount source may be made as a folder;
// [Result.Undo] takes that back. The package starts no process and keeps no state; all of it
// may be called concurrently.
//
// Where the CRI text leaves a choice the habits of Kubernetes nodes are followed:
//   - A missing mount source is made as a folder, because kubelet and the conformance tests
//     rely on it; [Options.RejectMissingMountSources] gives the error that the CRI text asks for.
//   - Masked and read-only paths are exactly those of the request, because an empty list is
//     how kubelet asks for an unmasked /proc.
//   - HOME is left to the OCI runtime, which takes it from the image's user file.
package ocispec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/device"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/hook"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/mount"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/namespace"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/nrispec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/process"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/security"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/workload"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Input is everything that the specification of a container is made from.
type Input struct {
	// ID is the container's id.
	ID string
	// Config is the container's configuration as kubelet sent it.
	Config *criv1.ContainerConfig
	// SandboxID and SandboxConfig describe the container's pod.
	SandboxID     string
	SandboxConfig *criv1.PodSandboxConfig
	// Namespaces are the paths of the pod's namespaces by OCI type: "network", "ipc", "uts",
	// "user". A type that the pod shares with the node is absent.
	Namespaces map[string]string
	// PIDNamespace is the PID namespace to join: the pod's if the container shares it, or
	// the target container's. It is not used for other modes.
	PIDNamespace string
	// Files are the pod's files to mount.
	Files pod.SandboxFiles
	// Image and Accounts are of the container's image.
	Image    pod.Image
	Accounts pod.Accounts
	// ImageMounts are the folders in which image volumes are mounted on the node, by
	// container path of the CRI mount that asks for them.
	ImageMounts map[string]string
	// Volumes are mounts for the volumes that the image declares. The ones of the request
	// win over them.
	Volumes []*criv1.Mount
	// Handler is the runtime handler.
	Handler pod.Handler
	// CgroupsPath is the container's cgroup, see package resource.
	CgroupsPath string
	// PodLabel is the SELinux label of the pod, empty for none.
	PodLabel string
}

// Options are the node's policies.
type Options struct {
	// UnsetSeccomp is the profile of containers that name none: "runtime/default",
	// "localhost/<path>", or empty for unconfined.
	UnsetSeccomp string
	// AppArmorProfile is the name of the loaded profile that stands for the runtime's
	// default; empty means that there is none and such containers run unconfined.
	AppArmorProfile string
	// AppArmorLoaded says whether the kernel knows a profile of this name; nil leaves that to
	// the OCI runtime.
	AppArmorLoaded func(name string) (bool, error)
	// SELinux gives labels to pods that ask for no SELinux options, where the host has SELinux.
	SELinux bool
	// RejectMissingMountSources makes a missing mount source an error.
	RejectMissingMountSources bool
	// RejectPaths makes it one for these paths alone.
	RejectPaths []string
	// IgnoreImageVolumes leaves the volumes of images to the writable layer.
	IgnoreImageVolumes bool
	// Env are environment variables of every container, NAME=value; all others win.
	Env []string
	// Mounts are read-only mounts of every container; those of requests and images win.
	Mounts []mount.Default
	// DeviceOwnership gives the devices of a request to the user and the group that the
	// request names, instead of leaving them to the host's owners.
	DeviceOwnership bool
	// Rlimits are limits of every container, by type such as "RLIMIT_NOFILE".
	Rlimits map[string]host.Rlimit
	// Workloads are kinds of pods that have processors of their own.
	Workloads []workload.Workload
	// HookFolders have descriptions of hooks; later ones win.
	HookFolders []string
	// Classes are the configured classes of RDT and block I/O; nil means that there are none.
	Classes Classes
	// InjectCDI adds CDI devices to a specification; nil means that CDI is not available.
	InjectCDI func(*specs.Spec, []string) error
}

// Classes are resources that pods choose by annotation and NRI plugins by name.
type Classes interface {
	nrispec.Classes

	// RDT and BlockIO return nil if the annotations of a container and its pod ask for nothing.
	RDT(container string, own, pod map[string]string) (*specs.LinuxIntelRdt, error)
	BlockIO(container string, own, pod map[string]string) (*specs.LinuxBlockIO, error)
}

// Result is what is known of a container besides its specification.
type Result struct {
	// User is the user and the groups of the first process.
	User *criv1.ContainerUser
	// CreatedPaths are the folders made for missing mount sources, parents last.
	CreatedPaths []string
}

// Undo removes the folders that were made for the container, as far as they are empty.
func (r Result) Undo() {
	for _, path := range r.CreatedPaths {
		if os.Remove(path) != nil {
			return // used by somebody in the meantime, and so are its parents
		}
	}
}

// Builder makes specifications under fixed policies on one host.
type Builder struct {
	host    host.Facts
	opts    Options
	sources mount.Sources
}

// New returns a builder.
func New(host host.Facts, opts Options) *Builder {
	return &Builder{host: host, opts: opts}
}

// Host returns the facts that the builder goes by.
func (b *Builder) Host() host.Facts { return b.host }

// OOMScore is the OOM score adjustment that a container gets who asks for one.
func (b *Builder) OOMScore(asked int64) int { return b.host.ClampOOMScore(int(asked)) }

// PodLabel gives a pod its SELinux label, see [security.Policy.PodLabel].
func (b *Builder) PodLabel(cfg *criv1.PodSandboxConfig) (string, error) {
	return b.security().PodLabel(cfg.GetLinux().GetSecurityContext())
}

// KeepLabel takes a pod's label that an earlier process gave.
func (b *Builder) KeepLabel(podLabel string) error { return b.security().KeepLabel(podLabel) }

// FreeLabel gives up a pod's label.
func (b *Builder) FreeLabel(podLabel string) { b.security().FreeLabel(podLabel) }

// Adjust returns a specification with what NRI plugins want changed, see [nrispec.Node.Adjust].
func (b *Builder) Adjust(spec *specs.Spec, adj *nri.ContainerAdjustment) (*specs.Spec, error) {
	return nrispec.Node{Host: b.host, InjectCDI: b.opts.InjectCDI, Classes: b.opts.Classes}.Adjust(spec, adj)
}

// CgroupsPath returns the cgroup of a container, or of a pod's own process, as a specification has
// it; empty if it can have none. parent is the pod's cgroup in CRI's form. Errors:
// ErrFailedPrecondition for a parent that is not the daemon's to use.
func (b *Builder) CgroupsPath(parent, id string, systemd bool) (string, error) {
	if b.host.Groups.None {
		return "", nil
	}
	if systemd {
		return resource.CgroupsPath(parent, id, systemd), nil // the service manager knows what is whose
	}
	parent, err := b.host.Groups.Parent(parent)
	if err != nil {
		return "", err
	}
	return resource.CgroupsPath(parent, id, systemd), nil
}

func (b *Builder) security() security.Policy {
	return security.Policy{
		Host: b.host, UnsetSeccomp: b.opts.UnsetSeccomp, AppArmorProfile: b.opts.AppArmorProfile, AppArmorLoaded: b.opts.AppArmorLoaded,
		LabelAll: b.opts.SELinux,
	}
}

func (b *Builder) mountPolicy() mount.Policy {
	return mount.Policy{
		Security: b.security(), RejectMissing: b.opts.RejectMissingMountSources, RejectPaths: b.opts.RejectPaths,
		Sources: &b.sources, Defaults: b.opts.Mounts,
	}
}

// Build makes the specification of a container. After an error nothing is left behind.
// Errors: ErrInvalidArgument for what the request has wrong, ErrFailedPrecondition for what
// the host cannot do, ErrNotFound for a missing device, profile or mount source.
func (b *Builder) Build(in Input) (*specs.Spec, Result, error) {
	spec, err := base(in.Handler.BaseSpec)
	if err != nil {
		return nil, Result{}, err
	}
	d := &draft{Builder: b, in: in, spec: spec, sc: in.Config.GetLinux().GetSecurityContext()}
	for _, step := range []func() error{
		d.check, d.process, d.namespaces, d.resources, d.classes, d.mounts, d.confine, d.annotations, d.cdi, d.hooks,
	} {
		if err := step(); err != nil {
			d.result.Undo()
			return nil, Result{}, err
		}
	}
	b.host.Groups.Confine(spec.Linux)
	return spec, d.result, nil
}

// draft is a specification in the making.
type draft struct {
	*Builder

	in     Input
	sc     *criv1.LinuxContainerSecurityContext
	spec   *specs.Spec
	result Result
}

// check refuses what cannot be made at all.
func (d *draft) check() error {
	if d.in.Config == nil || d.in.SandboxConfig == nil {
		return fmt.Errorf("container %q: configuration is missing: %w", d.in.ID, errdefs.ErrInvalidArgument)
	}
	if d.sc.GetPrivileged() && !d.in.SandboxConfig.GetLinux().GetSecurityContext().GetPrivileged() {
		return fmt.Errorf("privileged container in a pod that is not privileged: %w", errdefs.ErrInvalidArgument)
	}
	d.spec.Root = &specs.Root{Path: "rootfs", Readonly: d.sc.GetReadonlyRootfs()}
	d.spec.Linux.CgroupsPath = d.in.CgroupsPath
	return nil
}

func (d *draft) process() error {
	hostname := d.in.SandboxConfig.GetHostname()
	if hostname == "" {
		hostname = d.host.Hostname
	}
	err := process.Set(d.spec.Process, process.Request{
		Config: d.in.Config, Image: d.in.Image.Config, Hostname: hostname, Rlimits: d.opts.Rlimits, Env: d.opts.Env,
	}, d.host)
	if err != nil {
		return err
	}
	d.result.User, err = process.SetUser(d.spec.Process, d.sc, d.in.Image.Config.User, d.in.Accounts)
	if err != nil {
		return err
	}
	return process.SetCapabilities(d.spec.Process, d.sc, d.host.Capabilities)
}

func (d *draft) namespaces() error {
	return namespace.Set(d.spec.Linux, namespace.Request{
		Context: d.sc, Sandbox: d.in.SandboxConfig, Paths: d.in.Namespaces, PID: d.in.PIDNamespace, OwnCgroup: d.host.CgroupV2,
	})
}

func (d *draft) resources() error {
	r, err := resource.FromCRI(d.in.Config.GetLinux().GetResources(), d.host)
	if err != nil {
		return err
	}
	if d.spec.Linux.Resources == nil {
		d.spec.Linux.Resources = &specs.LinuxResources{}
	}
	resource.Merge(d.spec.Linux.Resources, r)
	cpu, err := workload.CPU(d.opts.Workloads, d.in.Config.GetMetadata().GetName(), d.in.SandboxConfig.GetAnnotations())
	if err != nil {
		return err
	}
	resource.Merge(d.spec.Linux.Resources, &specs.LinuxResources{CPU: cpu})
	return device.Set(d.spec.Linux, d.devices())
}

// devices are known after the user, whose ids have been checked then.
func (d *draft) devices() device.Request {
	h := d.in.Handler
	out := device.Request{
		Asked:      d.in.Config.GetDevices(),
		Follow:     d.sources.Follow,
		OfHost:     d.sc.GetPrivileged() && !h.PrivilegedWithoutHostDevices,
		AllAllowed: d.sc.GetPrivileged() && (!h.PrivilegedWithoutHostDevices || h.AllDevicesAllowed),
	}
	if !d.opts.DeviceOwnership {
		return out
	}
	if d.sc.GetRunAsUser() != nil {
		out.UID = d.spec.Process.User.UID
	}
	if d.sc.GetRunAsGroup() != nil {
		out.GID = d.spec.Process.User.GID
	}
	return out
}

func (d *draft) mounts() error {
	if d.in.Handler.CgroupWritable && !d.sc.GetPrivileged() && !d.host.CgroupV2 {
		return fmt.Errorf("cgroup_writable of runtime handler %q needs cgroup v2, which the node does not have: %w",
			d.in.Handler.Name, errdefs.ErrFailedPrecondition)
	}
	options, err := d.selinux()
	if err != nil {
		return err
	}
	volumes := d.in.Volumes
	if d.opts.IgnoreImageVolumes {
		volumes = nil
	}
	created, err := d.mountPolicy().Set(d.spec, mount.Request{
		Config: d.in.Config, SELinux: options, Volumes: volumes, ImageMounts: d.in.ImageMounts, Files: d.in.Files,
		OwnIPC:         d.in.Namespaces[string(specs.IPCNamespace)] != "",
		CgroupWritable: d.in.Handler.CgroupWritable,
	})
	d.result.CreatedPaths = created
	return err
}

func (d *draft) confine() error {
	options, err := d.selinux()
	if err != nil {
		return err
	}
	return d.security().Set(d.spec, d.sc, options)
}

// selinux are the options in force: the container's, else the pod's, else those of the pod's label.
func (d *draft) selinux() (*criv1.SELinuxOption, error) {
	return security.OptionsInForce(d.in.PodLabel, d.sc.GetSelinuxOptions(), d.in.SandboxConfig.GetLinux().GetSecurityContext().GetSelinuxOptions())
}

// classes sets what the annotations choose.
func (d *draft) classes() error {
	if d.opts.Classes == nil {
		return nil
	}
	name, own, ofPod := d.in.Config.GetMetadata().GetName(), d.in.Config.GetAnnotations(), d.in.SandboxConfig.GetAnnotations()
	rdt, err := d.opts.Classes.RDT(name, own, ofPod)
	if err != nil {
		return err
	}
	if rdt != nil {
		d.spec.Linux.IntelRdt = rdt
	}
	block, err := d.opts.Classes.BlockIO(name, own, ofPod)
	if err != nil {
		return err
	}
	if block != nil {
		d.spec.Linux.Resources.BlockIO = block
	}
	return nil
}

func (d *draft) cdi() error {
	var names []string
	for _, dev := range d.in.Config.GetCDIDevices() {
		names = append(names, dev.GetName())
	}
	if len(names) == 0 {
		return nil
	}
	return device.InjectCDI(d.spec, names, d.opts.InjectCDI)
}

// hooks adds those that the node has for the container, behind all others but those of plugins.
func (d *draft) hooks() error {
	if len(d.opts.HookFolders) == 0 {
		return nil
	}
	annotations := maps.Clone(d.in.Config.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, d.in.SandboxConfig.GetAnnotations())
	return hook.Set(d.spec, d.opts.HookFolders, hook.Container{Annotations: annotations, BindMounts: len(d.in.Config.GetMounts()) > 0})
}

// base returns the specification that containers start from, without any mount, or the one
// in a file.
func base(path string) (*specs.Spec, error) {
	if path == "" {
		return &specs.Spec{
			Version: specs.Version,
			Process: &specs.Process{},
			Linux:   &specs.Linux{},
		}, nil
	}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("base specification %s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("base specification: %w", err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(raw, spec); err != nil {
		return nil, fmt.Errorf("base specification %s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	if spec.Process == nil {
		spec.Process = &specs.Process{}
	}
	if spec.Linux == nil {
		spec.Linux = &specs.Linux{}
	}
	return spec, nil
}
