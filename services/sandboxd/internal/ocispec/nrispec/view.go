package nrispec

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Pod returns a pod as NRI plugins see it. Its process id is that of the pod's own
// init, 0 if it has none, and so it is with its cgroup; plugins reach its namespaces by their
// paths, as long as there are any.
func Pod(rec *recordv1.Sandbox, cgroup string) *nri.PodSandbox {
	config := rec.GetConfig()
	annotations := copied(config.GetAnnotations())
	maps.Copy(annotations, pod.Annotations(rec.GetId(), config.GetMetadata()))
	annotations[pod.AnnotationType] = pod.TypeSandbox
	linux := config.GetLinux()
	overhead, resources := rec.GetOverhead(), rec.GetResources()
	if overhead == nil {
		overhead = linux.GetOverhead()
	}
	if resources == nil {
		resources = linux.GetResources()
	}
	return &nri.PodSandbox{
		Id:             rec.GetId(),
		Name:           config.GetMetadata().GetName(),
		Uid:            config.GetMetadata().GetUid(),
		Namespace:      config.GetMetadata().GetNamespace(),
		Labels:         copied(config.GetLabels()),
		Annotations:    annotations,
		RuntimeHandler: rec.GetRuntimeHandler(),
		Pid:            rec.GetPid(),
		Ips:            slices.Clone(rec.GetIps()),
		Linux: &nri.LinuxPodSandbox{
			PodOverhead:  resource.CRIToNRI(overhead),
			PodResources: resource.CRIToNRI(resources),
			CgroupParent: linux.GetCgroupParent(),
			CgroupsPath:  cgroup,
			Namespaces:   podNamespaces(rec),
		},
	}
}

func podNamespaces(rec *recordv1.Sandbox) []*nri.LinuxNamespace {
	if rec.GetState() == recordv1.SandboxState_SANDBOX_STATE_STOPPED {
		return nil // their paths lead nowhere any more
	}
	paths := copied(rec.GetNamespaces())
	if rec.GetNetnsPath() != "" {
		paths["network"] = rec.GetNetnsPath()
	}
	var out []*nri.LinuxNamespace
	for _, kind := range slices.Sorted(maps.Keys(paths)) {
		out = append(out, &nri.LinuxNamespace{Type: kind, Path: paths[kind]})
	}
	return out
}

// Container returns a container as NRI plugins see it, from its record and its
// specification.
func Container(rec *recordv1.Container, spec *specs.Spec) *nri.Container {
	config := rec.GetConfig()
	annotations := copied(spec.Annotations)
	maps.Copy(annotations, config.GetAnnotations())
	out := &nri.Container{
		Id:            rec.GetId(),
		PodSandboxId:  rec.GetSandboxId(),
		Name:          config.GetMetadata().GetName(),
		State:         stateToNRI(rec.GetState()),
		Labels:        copied(config.GetLabels()),
		Annotations:   annotations,
		Mounts:        nri.FromOCIMounts(spec.Mounts),
		Hooks:         nri.FromOCIHooks(spec.Hooks),
		Linux:         linuxToNRI(config, spec),
		Pid:           rec.GetPid(),
		CreatedAt:     createdAt(rec),
		StartedAt:     nanos(rec.GetStartedAt()),
		FinishedAt:    nanos(rec.GetFinishedAt()),
		ExitCode:      rec.GetExitCode(),
		StatusReason:  rec.GetReason(),
		StatusMessage: rec.GetMessage(),
		Image:         imageToNRI(rec),
	}
	for _, d := range config.GetCDIDevices() {
		out.CDIDevices = append(out.CDIDevices, &nri.CDIDevice{Name: d.GetName()})
	}
	if p := spec.Process; p != nil {
		out.Args = slices.Clone(p.Args)
		out.Env = slices.Clone(p.Env)
		out.User = &nri.User{Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: slices.Clone(p.User.AdditionalGids)}
		for _, l := range p.Rlimits {
			out.Rlimits = append(out.Rlimits, &nri.POSIXRlimit{Type: l.Type, Hard: l.Hard, Soft: l.Soft})
		}
	}
	return out
}

func linuxToNRI(config *criv1.ContainerConfig, spec *specs.Spec) *nri.LinuxContainer {
	out := &nri.LinuxContainer{SeccompProfile: profileToNRI(config)}
	if p := spec.Process; p != nil {
		out.OomScoreAdj = nri.Int(p.OOMScoreAdj)
		out.IoPriority = nri.FromOCILinuxIOPriority(p.IOPriority)
		out.Scheduler = nri.FromOCILinuxScheduler(p.Scheduler)
	}
	l := spec.Linux
	if l == nil {
		return out
	}
	out.Namespaces = nri.FromOCILinuxNamespaces(l.Namespaces)
	out.Devices = nri.FromOCILinuxDevices(l.Devices)
	out.Resources = nri.FromOCILinuxResources(l.Resources, nil)
	out.CgroupsPath = l.CgroupsPath
	out.Sysctl = maps.Clone(l.Sysctl)
	out.NetDevices = nri.FromOCILinuxNetDevices(l.NetDevices)
	if l.Seccomp != nil {
		out.SeccompPolicy = nri.FromOCILinuxSeccomp(l.Seccomp)
	}
	if r := l.IntelRdt; r != nil {
		out.Rdt = &nri.LinuxRdt{
			ClosId:           nri.String(r.ClosID),
			Schemata:         nri.RepeatedString(r.Schemata),
			EnableMonitoring: nri.Bool(r.EnableMonitoring),
		}
	}
	return out
}

func profileToNRI(config *criv1.ContainerConfig) *nri.SecurityProfile {
	p := config.GetLinux().GetSecurityContext().GetSeccomp()
	if p == nil {
		return nil
	}
	return &nri.SecurityProfile{
		ProfileType:  nri.SecurityProfile_ProfileType(p.GetProfileType()),
		LocalhostRef: p.GetLocalhostRef(),
	}
}

// createdAt is absent as long as plugins can keep a container from being created.
func createdAt(rec *recordv1.Container) int64 {
	if rec.GetState() == recordv1.ContainerState_CONTAINER_STATE_PREPARING {
		return 0
	}
	return nanos(rec.GetCreatedAt())
}

func imageToNRI(rec *recordv1.Container) *nri.Image {
	image := rec.GetConfig().GetImage()
	name := cmp.Or(rec.GetImageName(), image.GetUserSpecifiedImage(), image.GetImage()) // older records have none
	_, digest, _ := strings.Cut(rec.GetImageRef(), "@")
	return &nri.Image{Name: name, Digest: digest, ConfigDigest: rec.GetImageId()}
}

func stateToNRI(s recordv1.ContainerState) nri.ContainerState {
	switch s {
	case recordv1.ContainerState_CONTAINER_STATE_CREATED:
		return nri.ContainerState_CONTAINER_CREATED
	case recordv1.ContainerState_CONTAINER_STATE_RUNNING:
		return nri.ContainerState_CONTAINER_RUNNING
	case recordv1.ContainerState_CONTAINER_STATE_EXITED:
		return nri.ContainerState_CONTAINER_STOPPED
	case recordv1.ContainerState_CONTAINER_STATE_UNSPECIFIED,
		recordv1.ContainerState_CONTAINER_STATE_PREPARING,
		recordv1.ContainerState_CONTAINER_STATE_UNKNOWN:
	}
	return nri.ContainerState_CONTAINER_UNKNOWN
}

func nanos(t *timestamppb.Timestamp) int64 {
	if t == nil {
		return 0
	}
	return t.AsTime().UnixNano()
}

// copied returns a copy that is never nil.
func copied(m map[string]string) map[string]string {
	out := make(map[string]string, len(m))
	maps.Copy(out, m)
	return out
}
