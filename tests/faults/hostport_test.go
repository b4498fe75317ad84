//go:build integration

package faults

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// bothFamilies is a network with IPv4 and IPv6 addresses whose host ports are the business
// of the plugin with that name.
func bothFamilies(portmap string) func(testenv.Process, testenv.Settings) {
	return onSandboxd(func(settings testenv.Settings) {
		folder := settings.Get("network.conf_dir").(string)
		handler(settings, "broken", map[string]any{"shim_path": "/does/not/exist"})
		text := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"crisp-test","plugins":[
{"type":"logged-bridge","bridge":"crisp0","isGateway":true,"ipMasq":false,"hairpinMode":true,
 "ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}],[{"subnet":"fd00:88::/64"}]]}},
{"type":%q,"capabilities":{"portMappings":true}}]}`, filepath.Join(filepath.Dir(folder), "addresses"), testenv.PodSubnet, portmap)
		if err := os.WriteFile(filepath.Join(folder, "10-test.conflist"), []byte(text), 0o644); err != nil {
			panic(err)
		}
	})
}

// inside calls fn in a pod's network namespace.
func (s *system) inside(pod string, fn func() error) {
	s.t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		f, err := os.Open(s.Path("run", "ns", pod, "net"))
		if err == nil {
			err = errors.Join(unix.Setns(int(f.Fd()), unix.CLONE_NEWNET), f.Close())
		}
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	must(s.t, <-done)
}

// answerUDP answers each datagram to port 5300 of a pod with a name, until the returned
// function is called.
func (s *system) answerUDP(pod, name string) (stop func()) {
	s.t.Helper()
	var conn *net.UDPConn
	s.inside(pod, func() error {
		var err error
		conn, err = net.ListenUDP("udp", &net.UDPAddr{Port: 5300})
		return err
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		buffer := make([]byte, 100)
		for {
			_, from, err := conn.ReadFromUDPAddrPort(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = conn.WriteToUDPAddrPort([]byte(name), from) // the asker asks again
			}
		}
	})
	stop = sync.OnceFunc(func() { _ = conn.Close(); wg.Wait() })
	s.t.Cleanup(stop)
	return stop
}

// asker sends datagrams from one port to another all the time and knows the last answer.
type asker struct {
	mu   sync.Mutex
	last string
}

func (s *system) ask(from, to string) *asker {
	s.t.Helper()
	a := &asker{}
	var conn *net.UDPConn
	// The address of a new bridge is not usable at once.
	eventually(s.t, patience, "an address can be used", func() error {
		var err error
		conn, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from)), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		return err
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		buffer := make([]byte, 100)
		for {
			_, _ = conn.Write([]byte("who is there?"))                      // refused while nobody listens
			_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)) // the read tells of a closed one
			n, err := conn.Read(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				a.mu.Lock()
				a.last = string(buffer[:n])
				a.mu.Unlock()
			}
		}
	})
	s.t.Cleanup(func() { _ = conn.Close(); wg.Wait() })
	return a
}

// hears waits for an answer of that name. A flow that the kernel remembers would keep the
// old one for minutes.
func (a *asker) hears(t *testing.T, name string) {
	t.Helper()
	eventually(t, patience, "the pod "+name+" gets the datagrams", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.last != name {
			return fmt.Errorf("the last answer is of %q", a.last)
		}
		return nil
	})
}

// natRules are the rules of both families that name the port.
func natRules(t *testing.T, port string) []string {
	t.Helper()
	var found []string
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.Command(program, "-t", "nat").Output()
		must(t, err)
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, port) {
				found = append(found, line)
			}
		}
	}
	return found
}

func (s *system) podWithPorts(name string, ports ...*criv1.PortMapping) *criv1.PodSandboxConfig {
	config := s.podConfig(name)
	config.PortMappings = ports
	return config
}

// A client that never stops sending is heard by whichever pod has the port, however the pod
// before it went; and also if it began before there was any.
func TestUDPHostPortFollowsThePod(t *testing.T) {
	s := start(t, testenv.Setup{Configure: bothFamilies("portmap")})
	mapping := &criv1.PortMapping{HostPort: 15300, ContainerPort: 5300, Protocol: criv1.Protocol_UDP}
	must(t, s.removePod(s.pod(s.podConfig("makes-the-bridge"), "")))
	askers := []*asker{s.ask("10.88.0.1:41000", "10.88.0.1:15300"), s.ask("[fd00:88::1]:41000", "[fd00:88::1]:15300")}
	var old string
	stopOld := func() {}
	for n, change := range []func(){
		func() {},
		func() { must(t, s.removePod(old)) },
		func() {
			must(t, errors.Join(s.stopPod(old), s.Kill(t.Context(), testenv.Sandboxd), s.Run(testenv.Sandboxd), s.WaitReady(t.Context())))
		},
	} {
		name := fmt.Sprintf("pod%d", n)
		stopOld()
		change()
		last := old
		old = s.pod(s.podWithPorts(name, mapping), "")
		stopOld = s.answerUDP(old, name)
		for _, a := range askers {
			a.hears(t, name)
		}
		if last != "" {
			must(t, s.removePod(last)) // takes nothing from its successor
		}
	}
	must(t, s.removePod(old))
	if rules := natRules(t, "15300"); len(rules) > 0 {
		t.Errorf("rules are left: %v", rules)
	}
}

// A port is free again when a pod has failed, whatever happens meanwhile, and no rule stays.
func TestHostPortsOfFailedPodsAreReleased(t *testing.T) {
	s := start(t, testenv.Setup{Configure: bothFamilies("portmap")})
	mapping := &criv1.PortMapping{HostPort: 15301, ContainerPort: 80}
	for n := range scaled(t, 3) {
		config := s.podWithPorts("again", mapping)
		config.Metadata.Uid = fmt.Sprintf("uid-%d", n)
		if n%3 == 2 {
			// sandboxd dies somewhere in the making.
			done := make(chan struct{})
			go func() { defer close(done); _, _ = s.try(config, "broken", 10*time.Second) }()
			time.Sleep(time.Duration(n) * 20 * time.Millisecond)
			must(t, errors.Join(s.Kill(t.Context(), testenv.Sandboxd), s.Run(testenv.Sandboxd), s.WaitReady(t.Context())))
			<-done
		} else if _, err := s.try(config, "broken", 10*time.Second); err == nil {
			t.Fatal("a pod came up without a shim")
		}
		// Another pod may have to wait for the end of the undoing, and for nothing else.
		config.Metadata.Uid += "-good"
		var id string
		eventually(t, patience, "the port is free", func() (err error) {
			id, err = s.try(config, "", 10*time.Second)
			return err
		})
		if rules := natRules(t, "15301"); len(rules) == 0 {
			t.Error("the port has no rule")
		}
		must(t, s.removePod(id))
	}
	s.waitAddresses(0, patience)
	if rules := natRules(t, "15301"); len(rules) > 0 {
		t.Errorf("rules are left: %v", rules)
	}
}

// Which mappings go together, and what becomes of those that do not.
func TestHostPortConflicts(t *testing.T) {
	s := start(t, testenv.Setup{Configure: bothFamilies("portmap")})
	const udp, sctp = criv1.Protocol_UDP, criv1.Protocol_SCTP
	first := s.pod(s.podWithPorts("first",
		&criv1.PortMapping{HostPort: 0, ContainerPort: 80},
		&criv1.PortMapping{HostPort: 15302, ContainerPort: 80},
		&criv1.PortMapping{HostPort: 15302, ContainerPort: 80},
		&criv1.PortMapping{HostPort: 15302, ContainerPort: 80, Protocol: udp},
		&criv1.PortMapping{HostPort: 15302, ContainerPort: 80, Protocol: sctp},
		&criv1.PortMapping{HostPort: 15303, ContainerPort: 80, HostIp: "127.0.0.1"},
		&criv1.PortMapping{HostPort: 15303, ContainerPort: 81, HostIp: "10.88.0.1"},
	), "")
	rules := natRules(t, "1530")
	refused := func(what string, port *criv1.PortMapping) {
		t.Helper()
		before := len(s.addresses())
		_, err := s.try(s.podWithPorts("second", port), "", 10*time.Second)
		if !oneOf(err, codes.FailedPrecondition) || !strings.Contains(err.Error(), "faults/first") || !strings.Contains(err.Error(), first) {
			t.Errorf("%s: %v, want FailedPrecondition with the holder's name", what, err)
		}
		if after := len(s.addresses()); after != before {
			t.Errorf("%s: %d addresses are held, %d before", what, after, before)
		}
		if n := len(s.pods()); n != 1 {
			t.Errorf("%s: %d pods, want 1", what, n)
		}
	}
	refused("TCP", &criv1.PortMapping{HostPort: 15302, ContainerPort: 8080})
	refused("UDP on one address", &criv1.PortMapping{HostPort: 15302, ContainerPort: 8080, Protocol: udp, HostIp: "fd00:88::1"})
	refused("all addresses", &criv1.PortMapping{HostPort: 15303, ContainerPort: 8080})
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	refused("after a restart", &criv1.PortMapping{HostPort: 15302, ContainerPort: 8080, Protocol: sctp})
	if now := natRules(t, "1530"); fmt.Sprint(now) != fmt.Sprint(rules) {
		t.Errorf("the first pod's rules changed from %v to %v", rules, now)
	}
	second := s.pod(s.podWithPorts("second", &criv1.PortMapping{HostPort: 15303, ContainerPort: 80, HostIp: "fd00:88::1"},
		&criv1.PortMapping{HostPort: 15303, ContainerPort: 80, HostIp: "127.0.0.2"}, &criv1.PortMapping{ContainerPort: 80}), "")
	ofNode := s.podWithPorts("of-the-node", &criv1.PortMapping{HostPort: 15302, ContainerPort: 15302})
	ofNode.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Network: criv1.NamespaceMode_NODE}
	third := s.pod(ofNode, "") // its mapping says nothing
	must(t, errors.Join(s.removePod(first), s.removePod(second)))
	fourth := s.pod(s.podWithPorts("fourth", &criv1.PortMapping{HostPort: 15302, ContainerPort: 80}), "")
	must(t, errors.Join(s.removePod(third), s.removePod(fourth)))
	if left := natRules(t, "1530"); len(left) > 0 {
		t.Errorf("rules are left: %v", left)
	}
}

// Without a packet filter pods with host ports fail and say so, others do not care, and
// what was begun is undone as soon as that is possible.
func TestHostPortWithoutPacketFilter(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: bothFamilies("blind")})
	w.plugin(s.Path("cni"), "blind", "portmap")
	w.set("ADD", "PATH=/nonexistent")
	w.set("DEL", "PATH=/nonexistent")
	mapping := &criv1.PortMapping{HostPort: 15304, ContainerPort: 80}
	_, err := s.try(s.podWithPorts("with", mapping), "", 20*time.Second)
	if err == nil || !strings.Contains(err.Error(), "tables") {
		t.Errorf("%v, want an error that names the packet filter", err)
	}
	must(t, s.removePod(s.pod(s.podConfig("without"), "")))
	// The port waits for the release of its network: rules may be there.
	_, err = s.try(s.podWithPorts("other", mapping), "", 20*time.Second)
	if !oneOf(err, codes.FailedPrecondition) {
		t.Errorf("%v, want FailedPrecondition", err)
	}
	w.set("ADD", "")
	w.set("DEL", "")
	var id string
	eventually(t, patience, "the port is free", func() (err error) {
		id, err = s.try(s.podWithPorts("other", mapping), "", 10*time.Second)
		return err
	})
	must(t, s.removePod(id))
	s.waitAddresses(0, patience)
}
