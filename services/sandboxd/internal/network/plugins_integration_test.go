//go:build integration

package network

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// networks writes configurations of CNI 1.1 for two bridges with both families, the first
// with all that pods may ask for, and uses both.
func (n *node) networks() {
	n.node.MaxConfNum = 0
	n.Configure(Handlers{})
	for _, family := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+family, []byte("1"), 0); err != nil {
			testkit.Lacks(n.t, "forwarding: "+err.Error())
		}
	}
	n.write("conf/10-bridge.conflist", fmt.Sprintf(`{"cniVersion":"1.1.0","name":"pods","plugins":[
		{"type":"bridge","bridge":"crisptest0","isGateway":true,"enabledad":false,"ipam":{"type":"host-local","dataDir":%q,
		 "ranges":[[{"subnet":"10.250.0.0/28"}],[{"subnet":"fd00:250::/64"}]]}},
		{"type":"portmap","capabilities":{"portMappings":true}},
		{"type":"bandwidth","capabilities":{"bandwidth":true}},
		{"type":"tuning","sysctl":{"net.core.somaxconn":"321"}}]}`, n.ipam()), 0o644)
	n.write("conf/20-second.conflist", fmt.Sprintf(`{"cniVersion":"1.1.0","name":"second","plugins":[
		{"type":"bridge","bridge":"crisptest1","ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"10.251.0.0/28"}]]}}]}`, n.ipam()), 0o644)
	n.refresh(n.t.Context())
	if err := n.Ready(); err != nil {
		n.t.Fatal(err)
	}
}

// rules are the rules of the nat tables that name the port.
func (n *node) rules(port string) string {
	n.t.Helper()
	var out []string
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		all, err := exec.CommandContext(n.t.Context(), program, "-t", "nat").CombinedOutput()
		if err != nil {
			testkit.Lacks(n.t, fmt.Sprintf("%s: %v: %s", program, err, all))
		}
		for line := range strings.Lines(string(all)) {
			if strings.Contains(line, port) {
				out = append(out, line)
			}
		}
	}
	return strings.Join(out, "")
}

// answers waits until somebody answers at an address of the node.
func answers(t *testing.T, addr string) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return err // the address may be tentative
		}
		return c.Close()
	})
	echo(t, func() (net.Conn, error) { return net.Dial("tcp", addr) })
}

func TestPodWithEverythingInTwoNetworks(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	n.networks()
	req := n.pod("p1")
	req.Config.PortMappings = []*criv1.PortMapping{
		{HostPort: 18080, ContainerPort: 80},
		{HostPort: 18080, ContainerPort: 80},
		{ContainerPort: 80},
		{HostPort: 18081, ContainerPort: 80, HostIp: "fd00:250::1"},
		{HostPort: 18081, ContainerPort: 81, HostIp: "10.250.0.1"},
		{HostPort: 18080, ContainerPort: 80, Protocol: criv1.Protocol_UDP},
	}
	req.Config.Annotations = map[string]string{runtimeconf.AnnotationIngress: "10M", runtimeconf.AnnotationEgress: "1P"}
	for preference, want := range map[string]string{PreferIPv6: "fd00:250::", PreferIPv4: "10.250.0."} {
		n.cfg.IPPreference = preference
		result, err := n.Attach(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if len(result.IPs) != 2 || !strings.HasPrefix(result.IPs[0], want) {
			t.Errorf("%s: addresses %v", preference, result.IPs)
		}
		if preference == PreferIPv4 {
			listenInside(t, req.NetnsPath, "[::]:80")
			listenInside(t, req.NetnsPath, "[::]:81")
			for _, addr := range []string{"10.250.0.1:18080", "[fd00:250::1]:18080", "[fd00:250::1]:18081", "10.250.0.1:18081"} {
				answers(t, addr)
			}
			n.checkInside(req)
		}
		if err := n.Detach(t.Context(), req, result.Raw); err != nil {
			t.Fatal(err)
		}
		if r := n.rules("1808"); r != "" {
			t.Errorf("rules are left:\n%s", r)
		}
		n.nothingLeft()
	}
}

// checkInside checks what the plugins did to the pod's interfaces.
func (n *node) checkInside(req pod.NetworkRequest) {
	n.t.Helper()
	err := namespaces.Enter(func() error {
		second, err := netlink.LinkByName("eth1")
		if err != nil {
			return fmt.Errorf("second network: %w", err)
		}
		addrs, err := netlink.AddrList(second, netlink.FAMILY_V4)
		if err != nil || len(addrs) != 1 || !strings.HasPrefix(addrs[0].IP.String(), "10.251.0.") {
			return fmt.Errorf("addresses of the second network: %v, %w", addrs, err)
		}
		raw, err := os.ReadFile("/proc/thread-self/net/../../sys/net/core/somaxconn")
		if errors.Is(err, os.ErrNotExist) {
			raw, err = os.ReadFile("/proc/sys/net/core/somaxconn")
		}
		if err != nil || strings.TrimSpace(string(raw)) != "321" {
			return fmt.Errorf("somaxconn is %q, %w", raw, err)
		}
		return nil
	}, req.NetnsPath)
	if err != nil {
		n.t.Error(err)
	}
	links, err := netlink.LinkList()
	if err != nil {
		n.t.Fatal(err)
	}
	var rates []uint64
	for _, link := range links {
		qdiscs, err := netlink.QdiscList(link)
		if err != nil {
			n.t.Fatal(err)
		}
		for _, q := range qdiscs {
			if tbf, ok := q.(*netlink.Tbf); ok {
				rates = append(rates, tbf.Rate*8)
			}
		}
	}
	slices.Sort(rates)
	if want := []uint64{10_000_000, 1_000_000_000_000_000}; !slices.Equal(rates, want) {
		n.t.Errorf("limits of %v bits per second, want %v", rates, want)
	}
}

// The second pod with a port is refused; the first one serves on, and nothing of the second
// is left.
func TestHostPortConflictLeavesTheFirstPodAlone(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	n.networks()
	first, second := n.pod("p1"), n.pod("p2")
	mapping := []*criv1.PortMapping{{HostPort: 18080, ContainerPort: 80}}
	first.Config.PortMappings, second.Config.PortMappings = mapping, mapping
	result, err := n.Attach(t.Context(), first)
	if err != nil {
		t.Fatal(err)
	}
	listenInside(t, first.NetnsPath, "[::]:80")
	before := n.rules("18080")
	_, err = n.Attach(t.Context(), second)
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), `held by pod default/p1`) {
		t.Errorf("error %v", err)
	}
	if err := n.Detach(t.Context(), second, nil); err != nil {
		t.Error(err)
	}
	answers(t, "10.250.0.1:18080")
	answers(t, "[fd00:250::1]:18080")
	if after := n.rules("18080"); after != before {
		t.Errorf("the rules changed from\n%s\nto\n%s", before, after)
	}
	second.Config.PortMappings = []*criv1.PortMapping{{HostPort: 18080, ContainerPort: 80, Protocol: criv1.Protocol_UDP}}
	other, err := n.Attach(t.Context(), second)
	if err != nil {
		t.Errorf("another protocol: %v", err)
	}
	if err := errors.Join(n.Detach(t.Context(), second, other.Raw), n.Detach(t.Context(), first, result.Raw)); err != nil {
		t.Error(err)
	}
	n.nothingLeft()
}

// What lost pods had is released, and nothing else: by a DEL if something is remembered of
// the pod, else by the address plugin. The bridge plugin passes no GC on to that, so a
// wrapper does.
func TestCollectFreesAddresses(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	n.networks()
	n.write("bin/collecting-bridge", "#!/bin/sh\n[ $CNI_COMMAND = GC ] && exec "+pluginDir()+"/host-local\nexec "+pluginDir()+"/bridge\n", 0o755)
	n.write("conf/10-bridge.conflist", strings.Replace(n.read("conf/10-bridge.conflist"), `"type":"bridge"`, `"type":"collecting-bridge"`, 1), 0o644)
	n.reload()
	kept, err := n.Attach(t.Context(), n.pod("kept"))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"half", "orphan", "cached", "lost"} {
		if _, err := n.Attach(t.Context(), n.pod(id)); err != nil {
			t.Fatal(err)
		}
	}
	for _, forgotten := range []string{"attached/cached.json", "attached/lost.json", "results/results/pods-lost-eth0", "results/results/second-lost-eth1"} {
		if err := os.Remove(filepath.Join(n.cfg.StateDir, forgotten)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.collect(t.Context(), holders(
		pod.NetworkHolder{SandboxID: "kept", Raw: kept.Raw}, pod.NetworkHolder{SandboxID: "half"},
	)); err != nil {
		t.Fatal(err)
	}
	want := []string{"10.250.0.2", "10.250.0.3", "fd00:250::2", "fd00:250::3"}
	got := []string{}
	for _, f := range n.held() {
		got = append(got, filepath.Base(f))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("held are %v, want %v of two pods", got, want)
	}
}
