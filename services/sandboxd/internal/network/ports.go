package network

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hostPorts knows which pod has which ports of the node. Plugins do not refuse a port that
// another pod has: of two rules for one port only the first would ever work. A pod keeps its
// ports until its network is released, since its rules stay until then. The zero value has
// no ports. Safe for concurrent use.
type hostPorts struct {
	mu      sync.Mutex
	holders map[string]portHolder // by sandbox id
}

type portHolder struct {
	pod   *criv1.PodSandboxMetadata
	ports []portMapping
}

// claim reserves the ports for a sandbox, all or none. Sandboxes of one pod may have them
// together: the next one of a pod need not wait for the release of the one before. Errors:
// ErrFailedPrecondition naming the holder.
func (h *hostPorts) claim(sandboxID string, meta *criv1.PodSandboxMetadata, ports []portMapping) error {
	if len(ports) == 0 {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, holder := range h.holders {
		if id == sandboxID || samePod(meta, holder.pod) {
			continue
		}
		for _, theirs := range holder.ports {
			for _, mine := range ports {
				if mine.conflicts(theirs) {
					return fmt.Errorf("host port %s is held by pod %s, sandbox %q, as %s: %w", mine, holder.pod.GetNamespace()+"/"+holder.pod.GetName(), id, theirs, errdefs.ErrFailedPrecondition)
				}
			}
		}
	}
	h.put(sandboxID, meta, ports)
	return nil
}

// add is claim for ports that a pod has already.
func (h *hostPorts) add(sandboxID string, meta *criv1.PodSandboxMetadata, ports []portMapping) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.put(sandboxID, meta, ports)
}

func (h *hostPorts) put(sandboxID string, meta *criv1.PodSandboxMetadata, ports []portMapping) {
	if h.holders == nil {
		h.holders = map[string]portHolder{}
	}
	h.holders[sandboxID] = portHolder{pod: meta, ports: ports}
}

func samePod(a, b *criv1.PodSandboxMetadata) bool {
	return a.GetUid() == b.GetUid() && a.GetName() == b.GetName() && a.GetNamespace() == b.GetNamespace()
}

func (h *hostPorts) release(sandboxID string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.holders, sandboxID)
}

// String is the port as people write it.
func (p portMapping) String() string {
	if p.HostIP == "" {
		return fmt.Sprintf("%d/%s", p.HostPort, p.Protocol)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(netip.MustParseAddr(p.HostIP), uint16(p.HostPort)), p.Protocol)
}

// conflicts says whether two mappings are of one port of the node.
func (p portMapping) conflicts(other portMapping) bool {
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

// recallPorts finds the ports of pods that were attached before the process started.
func (c *CNI) recallPorts(ctx context.Context) {
	ids, err := c.rememberedIDs()
	if err != nil {
		c.log.WarnContext(ctx, "host ports of pods are not known", slog.Any("error", err))
	}
	for _, id := range ids {
		rec, err := c.recall(id)
		if err != nil {
			c.log.WarnContext(ctx, "host ports of a pod are not known", slog.String("sandbox_id", id), slog.Any("error", err))
			continue
		}
		ports, err := portMappings(rec.Config.GetPortMappings())
		if err != nil || len(ports) == 0 || len(rec.Attachments) == 0 {
			continue // was refused, or has none
		}
		c.ports.add(id, rec.Config.GetMetadata(), ports)
	}
}
