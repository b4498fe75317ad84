package validate

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const maxPort = 65535

// RunPodSandbox checks a request for a new sandbox.
func RunPodSandbox(req *criv1.RunPodSandboxRequest) error {
	config := req.GetConfig()
	if config == nil {
		return invalid("config", "must be set")
	}
	return firstError(
		sandboxMetadata("config.metadata", config.GetMetadata()),
		optionalName("runtime_handler", req.GetRuntimeHandler()),
		optionalName("config.hostname", config.GetHostname()),
		logDirectory("config.log_directory", config.GetLogDirectory()),
		dns("config.dns_config", config.GetDnsConfig()),
		portMappings("config.port_mappings", config.GetPortMappings()),
		linuxSandbox("config.linux", config.GetLinux()),
		description("config", nil, config.GetLabels(), config.GetAnnotations()),
		absent("config.windows", config.GetWindows()),
		Message(req),
	)
}

func sandboxMetadata(field string, m *criv1.PodSandboxMetadata) error {
	if m == nil {
		return invalid(field, "must be set")
	}
	return firstError(
		name(field+".name", m.GetName()),
		name(field+".namespace", m.GetNamespace()),
		name(field+".uid", m.GetUid()),
	)
}

// logDirectory refuses directories whose meaning depends on the reader.
func logDirectory(field, dir string) error {
	if dir == "" {
		return nil
	}
	if !filepath.IsAbs(dir) {
		return invalid(field, "must be an absolute path")
	}
	if hasDotDot(dir) {
		return invalid(field, `must not contain ".."`)
	}
	return firstError(pathLength(field, dir), printable(field, dir))
}

func hasDotDot(path string) bool {
	return slices.Contains(strings.Split(path, "/"), "..")
}

func dns(field string, config *criv1.DNSConfig) error {
	for _, list := range []struct {
		name   string
		values []string
	}{
		{"servers", config.GetServers()},
		{"searches", config.GetSearches()},
		{"options", config.GetOptions()},
	} {
		for i, v := range list.values {
			at := fmt.Sprintf("%s.%s[%d]", field, list.name, i)
			if v == "" {
				return invalid(at, "must not be empty")
			}
			if strings.ContainsAny(v, " \t") {
				return invalid(at, "must not contain blanks")
			}
			if err := printable(at, v); err != nil {
				return err
			}
		}
	}
	return nil
}

func portMappings(field string, mappings []*criv1.PortMapping) error {
	for i, m := range mappings {
		at := fmt.Sprintf("%s[%d]", field, i)
		if p := m.GetContainerPort(); p < 0 || p > maxPort {
			return invalid(at+".container_port", "must be between 0 and %d, is %d", maxPort, p)
		}
		if p := m.GetHostPort(); p < 0 || p > maxPort {
			return invalid(at+".host_port", "must be between 0 and %d, is %d", maxPort, p)
		}
		if ip := m.GetHostIp(); ip != "" {
			if _, err := netip.ParseAddr(ip); err != nil {
				return invalid(at+".host_ip", "%q is not an IP address", ip)
			}
		}
		if j := slices.IndexFunc(mappings[:i], func(other *criv1.PortMapping) bool { return conflict(m, other) }); j >= 0 {
			return invalid(at, "claims the host port of %s[%d] for another container port", field, j)
		}
	}
	return nil
}

// conflict says whether two mappings want one port of the node for different ports of the pod.
// A port on all addresses meets the same port on each of them.
func conflict(a, b *criv1.PortMapping) bool {
	return a.GetHostPort() != 0 && a.GetHostPort() == b.GetHostPort() && a.GetProtocol() == b.GetProtocol() &&
		a.GetContainerPort() != b.GetContainerPort() && overlap(a.GetHostIp(), b.GetHostIp())
}

func overlap(a, b string) bool {
	first, second := hostAddr(a), hostAddr(b)
	switch {
	case !first.IsValid() || !second.IsValid():
		return true
	case first.IsUnspecified() || second.IsUnspecified():
		return first.Is4() == second.Is4()
	}
	return first == second
}

// hostAddr is the address of a mapping; one that names none is not valid.
func hostAddr(ip string) netip.Addr {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return netip.Addr{}
	}
	return addr.Unmap()
}

func linuxSandbox(field string, linux *criv1.LinuxPodSandboxConfig) error {
	if hasDotDot(linux.GetCgroupParent()) {
		return invalid(field+".cgroup_parent", `must not contain ".."`)
	}
	parent := linux.GetCgroupParent()
	if err := firstError(pathLength(field+".cgroup_parent", parent), printable(field+".cgroup_parent", parent)); err != nil {
		return err
	}
	for key := range linux.GetSysctls() {
		if key == "" || hasDotDot(key) {
			return invalid(field+".sysctls", "%q is not the name of a sysctl", key)
		}
	}
	if linux.GetSecurityContext().GetNamespaceOptions().GetPid() == criv1.NamespaceMode_TARGET {
		return invalid(field+".security_context.namespace_options.pid", "must not be TARGET for a sandbox")
	}
	return firstError(
		resources(field+".overhead", linux.GetOverhead()),
		resources(field+".resources", linux.GetResources()),
		namespaces(field+".security_context.namespace_options",
			linux.GetSecurityContext().GetNamespaceOptions()),
	)
}

// namespaces checks the modes. A pod has one network and one IPC namespace, or the node's: no
// container gets one of its own, or another container's.
func namespaces(field string, ns *criv1.NamespaceOption) error {
	for _, shared := range []struct {
		name string
		mode criv1.NamespaceMode
	}{
		{"network", ns.GetNetwork()},
		{"ipc", ns.GetIpc()},
		{"userns_options.mode", ns.GetUsernsOptions().GetMode()},
	} {
		if m := shared.mode; m == criv1.NamespaceMode_CONTAINER || m == criv1.NamespaceMode_TARGET {
			return invalid(field+"."+shared.name, "must be POD or NODE, is %s", m)
		}
	}
	if ns.GetPid() == criv1.NamespaceMode_TARGET && ns.GetTargetId() == "" {
		return invalid(field+".target_id", "must be set with pid mode TARGET")
	}
	if id := ns.GetTargetId(); id != "" {
		if ns.GetPid() != criv1.NamespaceMode_TARGET {
			return invalid(field+".target_id", "must be empty unless pid is TARGET")
		}
		return ID(field+".target_id", id)
	}
	return nil
}

// UpdatePodSandboxResources checks a request for new pod-level resources.
func UpdatePodSandboxResources(req *criv1.UpdatePodSandboxResourcesRequest) error {
	return firstError(
		ID("pod_sandbox_id", req.GetPodSandboxId()),
		resources("overhead", req.GetOverhead()),
		resources("resources", req.GetResources()),
		Message(req),
	)
}

// PortForward checks a request for a port forwarding URL.
func PortForward(req *criv1.PortForwardRequest) error {
	if err := ID("pod_sandbox_id", req.GetPodSandboxId()); err != nil {
		return err
	}
	for i, p := range req.GetPort() {
		if p < 1 || p > maxPort {
			return invalid(fmt.Sprintf("port[%d]", i), "must be between 1 and %d, is %d", maxPort, p)
		}
	}
	return nil
}

// UpdateRuntimeConfig checks what kubelet says of the node.
func UpdateRuntimeConfig(req *criv1.UpdateRuntimeConfigRequest) error {
	cidrs := req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()
	if cidrs == "" {
		return nil
	}
	for cidr := range strings.SplitSeq(cidrs, ",") {
		if _, err := netip.ParsePrefix(strings.TrimSpace(cidr)); err != nil {
			return invalid("runtime_config.network_config.pod_cidr", "%q is not a network prefix", cidr)
		}
	}
	return nil
}
