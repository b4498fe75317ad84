// Package hostport is about the ports of the node that pods have: what a pod asks for, and which
// pod holds what.
package hostport

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Mapping is one port of the node that leads to a pod, in the form of the CNI capability
// portMappings.
type Mapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
}

// Mappings are what a pod asks for. It drops mappings without a host port, which expose
// nothing, and repeated ones. Errors: ErrInvalidArgument.
func Mappings(in []*criv1.PortMapping) ([]Mapping, error) {
	var out []Mapping
	for _, m := range in {
		if m.GetHostPort() == 0 {
			continue
		}
		if !isPort(m.GetHostPort()) || !isPort(m.GetContainerPort()) {
			return nil, fmt.Errorf("port mapping %d to %d: %w", m.GetHostPort(), m.GetContainerPort(), errdefs.ErrInvalidArgument)
		}
		hostIP, err := hostAddress(m.GetHostIp())
		if err != nil {
			return nil, err
		}
		p := Mapping{
			HostPort: m.GetHostPort(), ContainerPort: m.GetContainerPort(),
			Protocol: strings.ToLower(m.GetProtocol().String()), HostIP: hostIP,
		}
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out, nil
}

// hostAddress is the usual form of an address of the node; empty for all of them.
func hostAddress(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return "", fmt.Errorf("port mapping on host address %q, which is no IP address without zone: %w", s, errdefs.ErrInvalidArgument)
	}
	return addr.Unmap().String(), nil
}

func isPort(n int32) bool { return n > 0 && n <= math.MaxUint16 }

// Ports knows which pod has which ports of the node. Plugins do not refuse a port that
// another pod has: of two rules for one port only the first would ever work. A pod keeps its
// ports until its network is released, since its rules stay until then. The zero value has
// no ports. Safe for concurrent use.
type Ports struct {
	mu      sync.Mutex
	holders map[string]holder // by sandbox id
}

type holder struct {
	pod   *criv1.PodSandboxMetadata
	ports []Mapping
}

// Claim reserves the ports for a sandbox, all or none. Sandboxes of one pod may have them
// together: the next one of a pod need not wait for the release of the one before. Errors:
// ErrFailedPrecondition naming the holder.
func (h *Ports) Claim(sandboxID string, meta *criv1.PodSandboxMetadata, ports []Mapping) error {
	if len(ports) == 0 {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, other := range h.holders {
		if id == sandboxID || samePod(meta, other.pod) {
			continue
		}
		for _, theirs := range other.ports {
			for _, mine := range ports {
				if mine.conflicts(theirs) {
					return fmt.Errorf("host port %s is held by pod %s, sandbox %q, as %s: %w", mine, other.pod.GetNamespace()+"/"+other.pod.GetName(), id, theirs, errdefs.ErrFailedPrecondition)
				}
			}
		}
	}
	h.put(sandboxID, meta, ports)
	return nil
}

// Add is Claim for ports that a pod has already.
func (h *Ports) Add(sandboxID string, meta *criv1.PodSandboxMetadata, ports []Mapping) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.put(sandboxID, meta, ports)
}

func (h *Ports) put(sandboxID string, meta *criv1.PodSandboxMetadata, ports []Mapping) {
	if h.holders == nil {
		h.holders = map[string]holder{}
	}
	h.holders[sandboxID] = holder{pod: meta, ports: ports}
}

func samePod(a, b *criv1.PodSandboxMetadata) bool {
	return a.GetUid() == b.GetUid() && a.GetName() == b.GetName() && a.GetNamespace() == b.GetNamespace()
}

// Release gives up the ports of a sandbox, if it has any.
func (h *Ports) Release(sandboxID string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.holders, sandboxID)
}

// String is the port as people write it.
func (p Mapping) String() string {
	if p.HostIP == "" {
		return fmt.Sprintf("%d/%s", p.HostPort, p.Protocol)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(netip.MustParseAddr(p.HostIP), uint16(p.HostPort)), p.Protocol)
}

// conflicts says whether two mappings are of one port of the node.
func (p Mapping) conflicts(other Mapping) bool {
	return p.HostPort == other.HostPort && p.Protocol == other.Protocol && overlap(p.HostIP, other.HostIP)
}

// overlap says whether two host addresses have one in common. An empty one stands for all,
// an unspecified one for all of its family.
func overlap(a, b string) bool {
	if a == "" || b == "" || a == b {
		return true
	}
	x, y := netip.MustParseAddr(a), netip.MustParseAddr(b)
	return x.Is4() == y.Is4() && (x.IsUnspecified() || y.IsUnspecified())
}
