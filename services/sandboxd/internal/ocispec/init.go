package ocispec

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/device"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/namespace"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/process"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/security"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// InitPath is where the pod's own init process finds its program.
const InitPath = "/init"

// InitInput is what the specification of a pod's own init process is made from.
type InitInput struct {
	// SandboxID and SandboxConfig describe the pod.
	SandboxID     string
	SandboxConfig *criv1.PodSandboxConfig
	// Namespaces are the paths of the pod's namespaces by OCI type.
	Namespaces map[string]string
	// Binary is the path of the static program on the node. It is mounted at [InitPath];
	// empty means that the root file system has it there.
	Binary string
	// Handler is the runtime handler.
	Handler pod.Handler
	// CgroupsPath is the cgroup of the process, see package resource.
	CgroupsPath string
	// PodLabel is the SELinux label of the pod, empty for none.
	PodLabel string
}

// initOOMScore keeps the kernel from choosing the init of a pod, as kubelet asks for.
const initOOMScore = -998

// BuildInit makes the specification of the init process of a pod whose containers share one
// PID namespace. It can do nothing but wait for children: no rights, a read-only root.
func (b *Builder) BuildInit(in InitInput) (*specs.Spec, error) {
	if in.SandboxConfig == nil {
		return nil, fmt.Errorf("sandbox %q: configuration is missing: %w", in.SandboxID, errdefs.ErrInvalidArgument)
	}
	uids, gids, err := namespace.UserMappings(in.SandboxConfig)
	if err != nil {
		return nil, err
	}
	spec, err := base("")
	if err != nil {
		return nil, err
	}
	spec.Root = &specs.Root{Path: "rootfs", Readonly: true}
	spec.Process = &specs.Process{
		Args:            []string{InitPath},
		Cwd:             "/",
		Env:             []string{process.DefaultPath},
		NoNewPrivileges: true,
		Capabilities:    &specs.LinuxCapabilities{},
		OOMScoreAdj:     new(b.host.ClampOOMScore(initOOMScore)),
	}
	spec.Mounts = []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
	}
	if in.Binary != "" {
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Destination: InitPath, Type: "bind", Source: in.Binary,
			Options: []string{"bind", "rprivate", "ro", "nosuid", "nodev"},
		})
	}
	spec.Linux.CgroupsPath = in.CgroupsPath
	spec.Linux.UIDMappings, spec.Linux.GIDMappings = uids, gids
	spec.Linux.Resources = &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{device.None()}}
	spec.Linux.Namespaces = namespace.OfInit(in.Namespaces)
	spec.Annotations = podAnnotations(in.SandboxID, in.SandboxConfig, in.Handler)
	spec.Annotations[pod.AnnotationType] = pod.TypeSandbox
	sc := in.SandboxConfig.GetLinux().GetSecurityContext()
	if spec.Process.User, err = process.InitUser(sc); err != nil {
		return nil, fmt.Errorf("init of sandbox %q: %w", in.SandboxID, err)
	}
	options, err := security.OptionsInForce(in.PodLabel, sc.GetSelinuxOptions())
	if err == nil {
		err = b.security().SetInit(spec, sc, options)
	}
	if err != nil {
		return nil, fmt.Errorf("init of sandbox %q: %w", in.SandboxID, err)
	}
	b.host.Groups.Confine(spec.Linux)
	return spec, nil
}
