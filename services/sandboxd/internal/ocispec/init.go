package ocispec

import (
	"fmt"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

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
	// CgroupsPath is the cgroup of the process, see [CgroupsPath].
	CgroupsPath string
}

// initOOMScore keeps the kernel from choosing the init of a pod, as kubelet asks for.
const initOOMScore = -998

// BuildInit makes the specification of the init process of a pod whose containers share one
// PID namespace. It can do nothing but wait for children: no rights, a read-only root.
func (b *Builder) BuildInit(in InitInput) (*specs.Spec, error) {
	if in.SandboxConfig == nil {
		return nil, fmt.Errorf("sandbox %q: configuration is missing: %w", in.SandboxID, errdefs.ErrInvalidArgument)
	}
	uids, gids, err := UserMappings(in.SandboxConfig)
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
		Env:             []string{defaultPath},
		NoNewPrivileges: true,
		Capabilities:    &specs.LinuxCapabilities{},
		OOMScoreAdj:     new(b.host.clampOOMScore(initOOMScore)),
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
	spec.Linux.Resources = &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: anyAccess}}}
	spec.Linux.Namespaces = initNamespaces(in.Namespaces)
	spec.Annotations = podAnnotations(in.SandboxID, in.SandboxConfig, in.Handler)
	spec.Annotations[annotationType] = typeSandbox
	if err := b.secureInit(spec, in.SandboxConfig.GetLinux().GetSecurityContext()); err != nil {
		return nil, fmt.Errorf("init of sandbox %q: %w", in.SandboxID, err)
	}
	return spec, nil
}

// secureInit runs the init process as the pod's security context says. Where it says nothing
// the process has the default seccomp profile: it needs no other calls.
func (b *Builder) secureInit(spec *specs.Spec, sc *criv1.LinuxSandboxSecurityContext) error {
	user, err := initUser(sc)
	if err != nil {
		return err
	}
	spec.Process.User = user
	p, err := profile(sc.GetSeccomp(), sc.GetSeccompProfilePath()) //nolint:staticcheck // old clients still set it
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	switch {
	case p != nil:
		if spec.Linux.Seccomp, err = seccompProfile(p, b.host, spec); err != nil {
			return fmt.Errorf("seccomp: %w", err)
		}
	case b.host.Seccomp:
		spec.Linux.Seccomp = seccomp.DefaultProfile(spec)
	}
	if spec.Process.ApparmorProfile, err = b.apparmorProfile(sc.GetApparmor()); err != nil {
		return fmt.Errorf("apparmor: %w", err)
	}
	return b.selinuxOfInit(spec, sc.GetSelinuxOptions())
}

func (b *Builder) selinuxOfInit(spec *specs.Spec, opts *criv1.SELinuxOption) error {
	if len(labelOptions(opts)) == 0 {
		return nil
	}
	if !b.host.SELinux {
		return fmt.Errorf("selinux: the host has no SELinux: %w", errdefs.ErrFailedPrecondition)
	}
	var err error
	spec.Process.SelinuxLabel, spec.Linux.MountLabel, err = label.InitLabels(labelOptions(opts))
	if err != nil {
		return fmt.Errorf("selinux: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// initUser is the user of the pod's own process. It has no image that could name one.
func initUser(sc *criv1.LinuxSandboxSecurityContext) (specs.User, error) {
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return specs.User{}, fmt.Errorf("group %d is given without a user: %w", sc.GetRunAsGroup().GetValue(), errdefs.ErrInvalidArgument)
	}
	var out specs.User
	for _, id := range []struct {
		what  string
		asked *criv1.Int64Value
		to    *uint32
	}{{"user", sc.GetRunAsUser(), &out.UID}, {"group", sc.GetRunAsGroup(), &out.GID}} {
		if id.asked == nil {
			continue
		}
		n, err := accountID(id.asked.GetValue())
		if err != nil {
			return specs.User{}, fmt.Errorf("%s %d: %w", id.what, id.asked.GetValue(), err)
		}
		*id.to = n
	}
	for _, g := range sc.GetSupplementalGroups() {
		n, err := accountID(g)
		if err != nil {
			return specs.User{}, fmt.Errorf("supplemental group %d: %w", g, err)
		}
		out.AdditionalGids = appendNew(out.AdditionalGids, n)
	}
	return out, nil
}

// initNamespaces joins all of the pod's namespaces and makes the PID namespace.
func initNamespaces(paths map[string]string) []specs.LinuxNamespace {
	out := []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.PIDNamespace}}
	for _, kind := range []specs.LinuxNamespaceType{specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.UserNamespace} {
		if path := paths[string(kind)]; path != "" {
			out = append(out, specs.LinuxNamespace{Type: kind, Path: path})
		}
	}
	return out
}
