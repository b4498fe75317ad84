// Package namespace says which namespaces a container joins, which it gets for itself and how
// its users are mapped. It is pure.
package namespace

import (
	"fmt"
	"math"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

// Request is what the namespaces of a container depend on.
type Request struct {
	// Context is the container's, Sandbox the pod's configuration.
	Context *criv1.LinuxContainerSecurityContext
	Sandbox *criv1.PodSandboxConfig
	// Paths are the paths of the pod's namespaces by OCI type. A type that the pod shares
	// with the node is absent.
	Paths map[string]string
	// PID is the PID namespace to join in the modes that join one.
	PID string
	// OwnCgroup gives containers that are not privileged a cgroup namespace.
	OwnCgroup bool
}

// Set joins the pod's namespaces and makes the container's own. Errors: ErrInvalidArgument,
// ErrFailedPrecondition for a namespace that is not there.
func Set(spec *specs.Linux, req Request) error {
	opts := req.Context.GetNamespaceOptions()
	ofPod := req.Sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions()
	list := []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	for _, shared := range []struct {
		kind     specs.LinuxNamespaceType
		field    string
		own, pod criv1.NamespaceMode
	}{
		{specs.NetworkNamespace, "network", opts.GetNetwork(), ofPod.GetNetwork()},
		{specs.IPCNamespace, "ipc", opts.GetIpc(), ofPod.GetIpc()},
	} {
		// What a container shares with a pod that is in the node's namespace is the node's.
		if shared.pod == criv1.NamespaceMode_NODE {
			continue
		}
		if shared.own == criv1.NamespaceMode_NODE {
			return fmt.Errorf("config.linux.security_context.namespace_options.%s is NODE, while the pod, whose namespace its containers share, has one of its own: %w",
				shared.field, errdefs.ErrInvalidArgument)
		}
		path := req.Paths[string(shared.kind)]
		if path == "" {
			// It must not end up in the node's because a path was lost.
			return fmt.Errorf("the pod has no %s namespace: %w", shared.kind, errdefs.ErrFailedPrecondition)
		}
		list = append(list, specs.LinuxNamespace{Type: shared.kind, Path: path})
	}
	if path := req.Paths["uts"]; path != "" {
		list = append(list, specs.LinuxNamespace{Type: specs.UTSNamespace, Path: path})
	}
	pid, err := pidNamespace(opts.GetPid(), req.PID)
	if err != nil {
		return err
	}
	list = append(list, pid...)
	if req.OwnCgroup && !req.Context.GetPrivileged() {
		list = append(list, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	user, err := userNamespace(spec, req)
	if err != nil {
		return err
	}
	spec.Namespaces = append(list, user...)
	return nil
}

func pidNamespace(mode criv1.NamespaceMode, path string) ([]specs.LinuxNamespace, error) {
	switch mode {
	case criv1.NamespaceMode_NODE:
		return nil, nil
	case criv1.NamespaceMode_CONTAINER:
		return []specs.LinuxNamespace{{Type: specs.PIDNamespace}}, nil
	case criv1.NamespaceMode_POD, criv1.NamespaceMode_TARGET:
		if path == "" && mode == criv1.NamespaceMode_POD {
			// POD is also what an absent message says, and the pod shares no namespace.
			return []specs.LinuxNamespace{{Type: specs.PIDNamespace}}, nil
		}
		if path == "" {
			return nil, fmt.Errorf("there is no PID namespace to share in mode %s: %w", mode, errdefs.ErrFailedPrecondition)
		}
		return []specs.LinuxNamespace{{Type: specs.PIDNamespace, Path: path}}, nil
	default:
		return nil, fmt.Errorf("PID namespace mode %s: %w", mode, errdefs.ErrInvalidArgument)
	}
}

// userNamespace joins the pod's user namespace. The mappings of the container, if it has
// any, must be the pod's.
func userNamespace(spec *specs.Linux, req Request) ([]specs.LinuxNamespace, error) {
	uids, gids, err := UserMappings(req.Sandbox)
	if err != nil {
		return nil, err
	}
	if own := req.Context.GetNamespaceOptions().GetUsernsOptions(); own != nil {
		ownUIDs, ownGIDs, err := mappings(own)
		if err != nil {
			return nil, err
		}
		if !slices.Equal(ownUIDs, uids) || !slices.Equal(ownGIDs, gids) {
			return nil, fmt.Errorf("the user namespace of the container differs from its pod's: %w", errdefs.ErrInvalidArgument)
		}
	}
	if len(uids) == 0 {
		return nil, nil
	}
	path := req.Paths["user"]
	if path == "" {
		return nil, fmt.Errorf("the pod has no user namespace: %w", errdefs.ErrFailedPrecondition)
	}
	// The mappings repeat what the namespace has. Not all OCI runtimes read them from it, and
	// all take both if they agree.
	spec.UIDMappings, spec.GIDMappings = uids, gids
	return []specs.LinuxNamespace{{Type: specs.UserNamespace, Path: path}}, nil
}

// UserMappings returns the mappings of a pod's user namespace; none if it has no such
// namespace. Errors: ErrInvalidArgument.
func UserMappings(config *criv1.PodSandboxConfig) (uids, gids []specs.LinuxIDMapping, err error) {
	return mappings(config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions())
}

// CheckMapped says whether the daemon's own user namespace has the ids that a pod's maps to. Errors:
// ErrFailedPrecondition.
func CheckMapped(own userns.Namespace, uids, gids []specs.LinuxIDMapping) error {
	for _, m := range uids {
		if err := own.CheckUIDs(m.HostID, m.Size); err != nil {
			return err
		}
	}
	for _, m := range gids {
		if err := own.CheckGIDs(m.HostID, m.Size); err != nil {
			return err
		}
	}
	return nil
}

func mappings(user *criv1.UserNamespace) (uids, gids []specs.LinuxIDMapping, err error) {
	switch user.GetMode() {
	case criv1.NamespaceMode_POD:
		uids, gids = IDMappings(user.GetUids()), IDMappings(user.GetGids())
		if (len(uids) == 0) != (len(gids) == 0) {
			return nil, nil, fmt.Errorf("user namespace with mappings for only users or only groups: %w", errdefs.ErrInvalidArgument)
		}
		for _, list := range [][]specs.LinuxIDMapping{uids, gids} {
			if err := checkMapping(list); err != nil {
				return nil, nil, err
			}
		}
		return uids, gids, nil
	case criv1.NamespaceMode_NODE:
		if len(user.GetUids()) > 0 || len(user.GetGids()) > 0 {
			return nil, nil, fmt.Errorf("mappings for the node's user namespace: %w", errdefs.ErrInvalidArgument)
		}
		return nil, nil, nil
	default:
		return nil, nil, fmt.Errorf("user namespace mode %s: %w", user.GetMode(), errdefs.ErrInvalidArgument)
	}
}

// checkMapping refuses what root file systems cannot be shifted by: only one range is
// possible, and it must have the root user.
func checkMapping(list []specs.LinuxIDMapping) error {
	switch {
	case len(list) == 0:
		return nil
	case len(list) > 1:
		return fmt.Errorf("user namespace with %d mappings, one is possible: %w", len(list), errdefs.ErrInvalidArgument)
	case list[0].ContainerID != 0 || list[0].Size == 0:
		return fmt.Errorf("user namespace that does not map id 0: %w", errdefs.ErrInvalidArgument)
	case uint64(list[0].HostID)+uint64(list[0].Size) > math.MaxUint32:
		return fmt.Errorf("user namespace whose mapping ends beyond the last id: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// IDMappings are mappings in OCI's form.
func IDMappings(in []*criv1.IDMapping) []specs.LinuxIDMapping {
	var out []specs.LinuxIDMapping
	for _, m := range in {
		out = append(out, specs.LinuxIDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()})
	}
	return out
}

// OfInit joins all of the pod's namespaces and makes the PID namespace.
func OfInit(paths map[string]string) []specs.LinuxNamespace {
	out := []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.PIDNamespace}}
	for _, kind := range []specs.LinuxNamespaceType{specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.UserNamespace} {
		if path := paths[string(kind)]; path != "" {
			out = append(out, specs.LinuxNamespace{Type: kind, Path: path})
		}
	}
	return out
}
