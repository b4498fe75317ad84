//go:build integration

package network

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// insideEnv marks the run of a test inside network and mount namespaces of its own.
const insideEnv = "CRISP_TEST_PRIVATE_NETWORK"

// private runs the calling test again in namespaces of its own, so that no bridge, address
// or rule reaches the host, and says whether this is that run.
func private(t *testing.T) bool {
	t.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	testkit.NeedRoot(t)
	if pluginDir() == "" {
		testkit.Lacks(t, "CNI plugin in CRISP_TEST_CNI_BIN, /opt/cni/bin or /usr/lib/cni")
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}

func pluginDir() string {
	for _, dir := range []string{os.Getenv("CRISP_TEST_CNI_BIN"), "/opt/cni/bin", "/usr/lib/cni"} {
		if _, err := os.Stat(filepath.Join(dir, "bridge")); dir != "" && err == nil {
			return dir
		}
	}
	return ""
}

// node is a CNI with real plugins and real namespaces.
type node struct {
	*bench

	pins *namespaces.Pins
}

func newNode(t *testing.T) *node {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n := &node{pins: namespaces.New(filepath.Join(t.TempDir(), "ns"), namespaces.Defaults{})}
	n.bench = newBench(t, func(c *Config) { c.BinDirs = append(c.BinDirs, pluginDir()) })
	n.bridge("")
	return n
}

// bridge writes a configuration of the bridge plugin followed by further plugins.
func (n *node) bridge(further string) {
	n.write("conf/10-bridge.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"pods","plugins":[
		{"type":"bridge","bridge":"crisptest0","isGateway":true,"ipam":{"type":"host-local","dataDir":%q,
		 "ranges":[[{"subnet":"10.250.0.0/28"}],[{"subnet":"fd00:250::/64"}]]}}%s]}`, n.ipam(), further), 0o644)
	n.reload()
}

func (n *node) ipam() string { return filepath.Join(n.dir, "ipam") }

// held returns the addresses that are taken.
func (n *node) held() []string {
	files, err := filepath.Glob(n.ipam() + "/pods/*:*")
	if err != nil {
		n.t.Fatal(err)
	}
	v4, err := filepath.Glob(n.ipam() + "/pods/10.*")
	if err != nil {
		n.t.Fatal(err)
	}
	return append(files, v4...)
}

func (n *node) pod(id string) pod.NetworkRequest {
	n.t.Helper()
	paths, err := n.pins.Pin(n.t.Context(), id, namespaces.Request{Network: true})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = n.pins.Unpin(context.WithoutCancel(n.t.Context()), id) })
	return pod.NetworkRequest{
		SandboxID: id, NetnsPath: paths["network"],
		Config: &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: id, Namespace: "default", Uid: id}},
	}
}

func (n *node) veths() string {
	out, err := exec.CommandContext(n.t.Context(), "ip", "-o", "link", "show", "type", "veth").CombinedOutput()
	if err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

func (n *node) nothingLeft() {
	n.t.Helper()
	if held := n.held(); len(held) != 0 {
		n.t.Errorf("addresses left: %v", held)
	}
	for range 50 {
		if n.veths() == "" {
			break
		}
		time.Sleep(20 * time.Millisecond) // the kernel takes down namespaces later
	}
	if v := n.veths(); v != "" {
		n.t.Errorf("interfaces left: %s", v)
	}
	if r := n.remembered(); r != 0 {
		n.t.Errorf("%d attachments remembered", r)
	}
}

func TestBridgePod(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	req := n.pod("p1")
	result, err := n.Attach(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(result.IPs) != 2 || !strings.HasPrefix(result.IPs[0], "10.250.0.") {
		t.Errorf("addresses %v", result.IPs)
	}
	addr := listenInside(t, req.NetnsPath, result.IPs[0]+":0")
	echo(t, func() (net.Conn, error) { return net.Dial("tcp", addr) })
	for range 2 {
		if err := n.Detach(t.Context(), req, result.Raw); err != nil {
			t.Fatal(err)
		}
	}
	n.nothingLeft()
}

// CHECK notices what somebody took away, and is left out where the configuration says so.
func TestCheckNoticesAMissingInterface(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	req := n.pod("p1")
	result, err := n.Attach(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Check(t.Context(), req, result.Raw); err != nil {
		t.Errorf("as it was made: %v", err)
	}
	if out, err := exec.CommandContext(t.Context(), "nsenter", "--net="+req.NetnsPath, "ip", "link", "delete", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := n.Check(t.Context(), req, result.Raw); err == nil || !strings.Contains(err.Error(), `network "pods"`) {
		t.Errorf("without its interface: %v", err)
	}
	silent := []byte(strings.ReplaceAll(string(result.Raw), `"name":"pods"`, `"name":"pods","disableCheck":true`))
	if bytes.Equal(silent, result.Raw) {
		t.Fatal("the configuration has another form")
	}
	if err := n.Check(t.Context(), req, silent); err != nil {
		t.Errorf("with disableCheck: %v", err)
	}
	if err := n.Detach(t.Context(), req, result.Raw); err != nil {
		t.Fatal(err)
	}
	n.nothingLeft()
}

// listenInside starts an echo server in a namespace and returns its address.
func listenInside(t *testing.T, netns, addr string) string {
	t.Helper()
	var l net.Listener
	err := namespaces.Enter(func() error {
		var err error
		l, err = net.Listen("tcp", addr)
		return err
	}, netns)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String()
}

func echo(t *testing.T, dial func() (net.Conn, error)) {
	t.Helper()
	c, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestDial(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	req := n.pod("p1")
	for _, addr := range []string{"127.0.0.1:4100", "[::1]:4101"} {
		listenInside(t, req.NetnsPath, addr)
	}
	for _, port := range []int{4100, 4101} {
		echo(t, func() (net.Conn, error) { return n.Dial(t.Context(), req.NetnsPath, port) })
		if c, err := n.Dial(t.Context(), "", port); err == nil {
			_ = c.Close()
			t.Errorf("port %d can be reached outside", port)
		}
	}
	if _, err := n.Dial(t.Context(), req.NetnsPath, 4102); err == nil {
		t.Error("no error for a closed port")
	}
	if _, err := n.Dial(t.Context(), "/no/such/namespace", 4100); err == nil {
		t.Error("no error for a gone namespace")
	}
}

func TestDetachWithAGoneNamespace(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	for i, raw := range []bool{true, false} {
		req := n.pod(fmt.Sprintf("p%d", i))
		result, err := n.Attach(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.pins.Unpin(t.Context(), req.SandboxID); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // a file that is no namespace
			if err := os.WriteFile(filepath.Join(n.dir, "file"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			req.NetnsPath = filepath.Join(n.dir, "file")
		}
		if !raw {
			result.Raw = nil
		}
		if err := n.Detach(t.Context(), req, result.Raw); err != nil {
			t.Fatal(err)
		}
	}
	n.nothingLeft()
}

func TestAddressesComeBackAfterFailedChains(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	// More pods than the range has addresses.
	n.plugin("refuses", `[ $CNI_COMMAND = ADD ] && { `+fails+`; }; exit 0`)
	n.bridge(`,{"type":"refuses"}`)
	for i := range 20 {
		req := n.pod(fmt.Sprintf("p%d", i))
		if _, err := n.Attach(t.Context(), req); err == nil {
			t.Fatal("no error")
		}
		expired, cancel := context.WithTimeout(t.Context(), -time.Second)
		if err := n.Detach(expired, req, nil); err != nil {
			t.Error(err)
		}
		cancel()
		if err := n.pins.Unpin(t.Context(), req.SandboxID); err != nil {
			t.Error(err)
		}
	}
	n.nothingLeft()
	n.bridge(`,{"type":"missing"}`)
	req := n.pod("late")
	if _, err := n.Attach(t.Context(), req); err == nil {
		t.Fatal("no error")
	}
	if err := n.Detach(t.Context(), req, nil); err == nil || len(n.held()) != 2 {
		t.Errorf("detach without a plugin: %v, held %v", err, n.held())
	}
	n.plugin("missing", "exit 0")
	if err := n.Detach(t.Context(), req, nil); err != nil {
		t.Error(err)
	}
	n.nothingLeft()
}

func TestHostPort(t *testing.T) {
	if !private(t) {
		return
	}
	n := newNode(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		testkit.Lacks(t, "forwarding: "+err.Error())
	}
	n.bridge(`,{"type":"portmap","capabilities":{"portMappings":true}}`)
	rules := func() string {
		out, err := exec.CommandContext(t.Context(), "iptables-save", "-t", "nat").CombinedOutput()
		if err != nil {
			testkit.Lacks(t, fmt.Sprintf("iptables-save: %v: %s", err, out))
		}
		return string(out)
	}
	req := n.pod("p1")
	req.Config.PortMappings = []*criv1.PortMapping{{HostPort: 18080, ContainerPort: 80}, {ContainerPort: 81}}
	result, err := n.Attach(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if r := rules(); !strings.Contains(r, "18080") {
		t.Errorf("no rule: %s", r)
	}
	if err := n.Detach(t.Context(), req, result.Raw); err != nil {
		t.Error(err)
	}
	if r := rules(); strings.Contains(r, "18080") {
		t.Errorf("a rule is left: %s", r)
	}
	n.nothingLeft()
}
