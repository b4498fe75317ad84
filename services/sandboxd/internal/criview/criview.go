// Package criview turns sandboxd's records into CRI messages. All of it is pure.
package criview

import (
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// SandboxState is READY only for a committed sandbox whose shim lives.
func SandboxState(r *recordv1.Sandbox) criv1.PodSandboxState {
	if r.GetState() == recordv1.SandboxState_SANDBOX_STATE_READY && r.GetExitedAt() == nil {
		return criv1.PodSandboxState_SANDBOX_READY
	}
	return criv1.PodSandboxState_SANDBOX_NOTREADY
}

// ContainerState translates a visible container's state.
func ContainerState(r *recordv1.Container) criv1.ContainerState {
	switch r.GetState() {
	case recordv1.ContainerState_CONTAINER_STATE_CREATED:
		return criv1.ContainerState_CONTAINER_CREATED
	case recordv1.ContainerState_CONTAINER_STATE_RUNNING:
		return criv1.ContainerState_CONTAINER_RUNNING
	case recordv1.ContainerState_CONTAINER_STATE_EXITED:
		return criv1.ContainerState_CONTAINER_EXITED
	default:
		return criv1.ContainerState_CONTAINER_UNKNOWN
	}
}

// Visible says whether lists show a sandbox.
func Visible(r *recordv1.Sandbox) bool {
	return r.GetState() != recordv1.SandboxState_SANDBOX_STATE_PREPARING
}

// VisibleContainer says whether lists show a container.
func VisibleContainer(r *recordv1.Container) bool {
	return r.GetState() != recordv1.ContainerState_CONTAINER_STATE_PREPARING
}

// Sandbox is the entry of a sandbox in a list.
func Sandbox(r *recordv1.Sandbox) *criv1.PodSandbox {
	cfg := r.GetConfig()
	return &criv1.PodSandbox{
		Id: r.GetId(), Metadata: cfg.GetMetadata(), State: SandboxState(r),
		CreatedAt: r.GetCreatedAt().AsTime().UnixNano(),
		Labels:    cfg.GetLabels(), Annotations: cfg.GetAnnotations(), RuntimeHandler: r.GetRuntimeHandler(),
	}
}

// SandboxStatus is the status of a sandbox. A stopped one has no addresses.
func SandboxStatus(r *recordv1.Sandbox) *criv1.PodSandboxStatus {
	cfg := r.GetConfig()
	st := &criv1.PodSandboxStatus{
		Id: r.GetId(), Metadata: cfg.GetMetadata(), State: SandboxState(r),
		CreatedAt: r.GetCreatedAt().AsTime().UnixNano(),
		Network:   &criv1.PodSandboxNetworkStatus{},
		Linux: &criv1.LinuxPodSandboxStatus{Namespaces: &criv1.Namespace{
			Options: cfg.GetLinux().GetSecurityContext().GetNamespaceOptions(),
		}},
		Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(), RuntimeHandler: r.GetRuntimeHandler(),
	}
	if st.GetLinux().GetNamespaces().GetOptions() == nil {
		st.Linux.Namespaces.Options = &criv1.NamespaceOption{}
	}
	if ips := r.GetIps(); len(ips) > 0 && r.GetState() != recordv1.SandboxState_SANDBOX_STATE_STOPPED {
		st.Network.Ip = ips[0]
		for _, ip := range ips[1:] {
			st.Network.AdditionalIps = append(st.Network.AdditionalIps, &criv1.PodIP{Ip: ip})
		}
	}
	return st
}

// Container is the entry of a container in a list.
func Container(r *recordv1.Container) *criv1.Container {
	cfg := r.GetConfig()
	return &criv1.Container{
		Id: r.GetId(), PodSandboxId: r.GetSandboxId(), Metadata: cfg.GetMetadata(),
		Image: image(cfg), ImageRef: r.GetImageRef(), ImageId: r.GetImageId(),
		State: ContainerState(r), CreatedAt: r.GetCreatedAt().AsTime().UnixNano(),
		Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(),
	}
}

// ContainerStatus is the status of a container.
func ContainerStatus(r *recordv1.Container) *criv1.ContainerStatus {
	cfg := r.GetConfig()
	st := &criv1.ContainerStatus{
		Id: r.GetId(), Metadata: cfg.GetMetadata(), State: ContainerState(r),
		CreatedAt: r.GetCreatedAt().AsTime().UnixNano(),
		Image:     image(cfg), ImageRef: r.GetImageRef(), ImageId: r.GetImageId(),
		Reason: r.GetReason(), Message: r.GetMessage(), ExitCode: r.GetExitCode(),
		Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(), Mounts: cfg.GetMounts(),
		LogPath: r.GetLogPath(), Resources: &criv1.ContainerResources{Linux: r.GetResources()}, User: r.GetUser(),
		StopSignal: stopSignal(r.GetStopSignal()),
	}
	if t := r.GetStartedAt(); t != nil {
		st.StartedAt = t.AsTime().UnixNano()
	}
	if t := r.GetFinishedAt(); t != nil {
		st.FinishedAt = t.AsTime().UnixNano()
	}
	return st
}

// image is the image as the pod named it.
func image(cfg *criv1.ContainerConfig) *criv1.ImageSpec {
	in := cfg.GetImage()
	name := in.GetUserSpecifiedImage()
	if name == "" {
		name = in.GetImage()
	}
	return &criv1.ImageSpec{
		Image: name, UserSpecifiedImage: in.GetUserSpecifiedImage(),
		Annotations: in.GetAnnotations(), RuntimeHandler: in.GetRuntimeHandler(),
	}
}

func stopSignal(name string) criv1.Signal {
	name = "SIGNAL_" + strings.NewReplacer("+", "PLUS", "-", "MINUS").Replace(name)
	return criv1.Signal(criv1.Signal_value[name])
}

// MatchSandbox applies a CRI filter; a nil one matches all.
func MatchSandbox(s *criv1.PodSandbox, f *criv1.PodSandboxFilter) bool {
	return strings.HasPrefix(s.GetId(), f.GetId()) &&
		(f.GetState() == nil || f.GetState().GetState() == s.GetState()) &&
		matchLabels(s.GetLabels(), f.GetLabelSelector())
}

// MatchContainer applies a CRI filter; a nil one matches all.
func MatchContainer(c *criv1.Container, f *criv1.ContainerFilter) bool {
	return strings.HasPrefix(c.GetId(), f.GetId()) &&
		strings.HasPrefix(c.GetPodSandboxId(), f.GetPodSandboxId()) &&
		(f.GetState() == nil || f.GetState().GetState() == c.GetState()) &&
		matchLabels(c.GetLabels(), f.GetLabelSelector())
}

func matchLabels(labels, selector map[string]string) bool {
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}
