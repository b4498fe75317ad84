package stats

import (
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
)

// defaultInterface is the one that the first network gives a pod.
const defaultInterface = "eth0"

// network returns the traffic of the interfaces in a network namespace, the loopback one
// left out; zero if the namespace is gone.
func network(netnsPath string) *criv1.NetworkUsage {
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
	out := &criv1.NetworkUsage{Timestamp: time.Now().UnixNano()}
	if err != nil {
		return out
	}
	for _, link := range links {
		attrs := link.Attrs()
		if attrs.RawFlags&unix.IFF_LOOPBACK != 0 || attrs.Statistics == nil {
			continue
		}
		u := interfaceUsage(attrs)
		if attrs.Name == defaultInterface {
			out.DefaultInterface = u
		} else {
			out.Interfaces = append(out.Interfaces, u)
		}
	}
	if out.GetDefaultInterface() == nil && len(out.GetInterfaces()) > 0 {
		out.DefaultInterface, out.Interfaces = out.GetInterfaces()[0], out.GetInterfaces()[1:]
	}
	return out
}

func interfaceUsage(attrs *netlink.LinkAttrs) *criv1.NetworkInterfaceUsage {
	return &criv1.NetworkInterfaceUsage{
		Name:     attrs.Name,
		RxBytes:  value(attrs.Statistics.RxBytes),
		RxErrors: value(attrs.Statistics.RxErrors),
		TxBytes:  value(attrs.Statistics.TxBytes),
		TxErrors: value(attrs.Statistics.TxErrors),
	}
}
