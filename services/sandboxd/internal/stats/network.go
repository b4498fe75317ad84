package stats

import (
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// defaultInterface is the one that the first network gives a pod.
const defaultInterface = "eth0"

// Interfaces returns the traffic of the interfaces in a network namespace, the loopback one
// left out, the one of the pod's first network first; none if the namespace is gone.
func (*Reader) Interfaces(netnsPath string) []podmetrics.Interface {
	var links []netlink.Link
	err := namespaces.Enter(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		links, err = h.LinkList()
		return err
	}, netnsPath)
	if err != nil {
		return nil
	}
	var out []podmetrics.Interface
	for _, link := range links {
		a := link.Attrs()
		if a.RawFlags&unix.IFF_LOOPBACK != 0 || a.Statistics == nil {
			continue
		}
		s := a.Statistics
		out = append(out, podmetrics.Interface{
			Name:     a.Name,
			Received: podmetrics.Traffic{Bytes: s.RxBytes, Packets: s.RxPackets, Errors: s.RxErrors, Dropped: s.RxDropped},
			Sent:     podmetrics.Traffic{Bytes: s.TxBytes, Packets: s.TxPackets, Errors: s.TxErrors, Dropped: s.TxDropped},
		})
	}
	slices.SortStableFunc(out, func(a, b podmetrics.Interface) int { return rank(a) - rank(b) })
	return out
}

func rank(i podmetrics.Interface) int {
	if i.Name == defaultInterface {
		return 0
	}
	return 1
}

// network is the traffic in CRI's terms.
func (r *Reader) network(netnsPath string) *criv1.NetworkUsage {
	all := r.Interfaces(netnsPath)
	out := &criv1.NetworkUsage{Timestamp: time.Now().UnixNano()}
	for n, i := range all {
		u := &criv1.NetworkInterfaceUsage{
			Name:    i.Name,
			RxBytes: value(i.Received.Bytes), RxErrors: value(i.Received.Errors),
			TxBytes: value(i.Sent.Bytes), TxErrors: value(i.Sent.Errors),
		}
		if n == 0 {
			out.DefaultInterface = u
			continue
		}
		out.Interfaces = append(out.Interfaces, u)
	}
	return out
}
