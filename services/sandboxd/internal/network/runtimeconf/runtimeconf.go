// Package runtimeconf is what CNI plugins are told about a pod: the arguments that all get, and
// those of the capabilities that a plugin may have. All of it is pure.
package runtimeconf

import (
	"fmt"
	"math"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/hostport"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Annotations that limit the bandwidth of a pod.
const (
	AnnotationIngress = "kubernetes.io/ingress-bandwidth"
	AnnotationEgress  = "kubernetes.io/egress-bandwidth"
)

// bandwidth and dns are the arguments of the CNI capabilities of these names.
type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

type dns struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

// For is what all plugins of a network are told about a pod.
func For(req pod.NetworkRequest, ifName, netns string, capabilities map[string]any) *libcni.RuntimeConf {
	meta := req.Config.GetMetadata()
	return &libcni.RuntimeConf{
		ContainerID: req.SandboxID,
		NetNS:       netns,
		IfName:      ifName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", argument(meta.GetNamespace())},
			{"K8S_POD_NAME", argument(meta.GetName())},
			{"K8S_POD_INFRA_CONTAINER_ID", req.SandboxID},
			{"K8S_POD_UID", argument(meta.GetUid())},
		},
		CapabilityArgs: capabilities,
	}
}

// argument takes out of a value what would end it in CNI_ARGS. Names of Kubernetes objects
// never have it.
func argument(v string) string { return strings.NewReplacer(";", "", "=", "").Replace(v) }

// Capabilities are what plugins with the capabilities of these names get. Errors:
// ErrInvalidArgument for a bad port mapping or bandwidth.
func Capabilities(config *criv1.PodSandboxConfig) (map[string]any, error) {
	out := make(map[string]any)
	ports, err := hostport.Mappings(config.GetPortMappings())
	if err != nil {
		return nil, err
	}
	if len(ports) > 0 {
		out["portMappings"] = ports
	}
	limits, err := bandwidthOf(config.GetAnnotations())
	if err != nil {
		return nil, err
	}
	if limits != (bandwidth{}) {
		out["bandwidth"] = limits
	}
	if d := config.GetDnsConfig(); len(d.GetServers()) > 0 || len(d.GetSearches()) > 0 || len(d.GetOptions()) > 0 {
		out["dns"] = dns{Servers: d.GetServers(), Searches: d.GetSearches(), Options: d.GetOptions()}
	}
	if parent := config.GetLinux().GetCgroupParent(); parent != "" {
		out["cgroupPath"] = parent
	}
	if len(config.GetAnnotations()) > 0 {
		out["io.kubernetes.cri.pod-annotations"] = config.GetAnnotations()
	}
	return out, nil
}

// Told is what of a pod's configuration plugins are told.
func Told(config *criv1.PodSandboxConfig) *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{
		Metadata: config.GetMetadata(), PortMappings: config.GetPortMappings(), Annotations: config.GetAnnotations(),
		DnsConfig: config.GetDnsConfig(),
		Linux:     &criv1.LinuxPodSandboxConfig{CgroupParent: config.GetLinux().GetCgroupParent()},
	}
}

// bandwidthOf reads the limits, in bits per second. Bursts are not limited.
func bandwidthOf(annotations map[string]string) (bandwidth, error) {
	var out bandwidth
	for _, l := range []struct {
		name        string
		rate, burst *uint64
	}{
		{AnnotationIngress, &out.IngressRate, &out.IngressBurst},
		{AnnotationEgress, &out.EgressRate, &out.EgressBurst},
	} {
		value, ok := annotations[l.name]
		if !ok {
			continue
		}
		rate, err := parseQuantity(value)
		if err != nil {
			return bandwidth{}, fmt.Errorf("annotation %s: %w", l.name, err)
		}
		if rate < 1e3 || rate > 1e15 {
			return bandwidth{}, fmt.Errorf("annotation %s: %q is not between 1k and 1P: %w", l.name, value, errdefs.ErrInvalidArgument)
		}
		*l.rate, *l.burst = uint64(rate), math.MaxUint32
	}
	return out, nil
}
