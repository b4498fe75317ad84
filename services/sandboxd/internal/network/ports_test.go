package network

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func withPorts(c string, ports ...*criv1.PortMapping) pod.NetworkRequest {
	req := requestOf(c)
	req.Config.Metadata.Name, req.Config.Metadata.Uid = "pod-"+c, "uid-"+c
	req.Config.PortMappings = ports
	return req
}

func TestHostPortsOfTwoPods(t *testing.T) {
	t.Parallel()
	const udp, sctp = criv1.Protocol_UDP, criv1.Protocol_SCTP
	for name, test := range map[string]struct {
		first, second *criv1.PortMapping
		conflict      string // empty for none
	}{
		"same":             {&criv1.PortMapping{HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostPort: 80, ContainerPort: 2}, "80/tcp"},
		"protocols":        {&criv1.PortMapping{HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostPort: 80, ContainerPort: 1, Protocol: udp}, ""},
		"sctp":             {&criv1.PortMapping{HostPort: 80, ContainerPort: 1, Protocol: sctp}, &criv1.PortMapping{HostPort: 80, ContainerPort: 1, Protocol: sctp}, "80/sctp"},
		"none":             {&criv1.PortMapping{ContainerPort: 1}, &criv1.PortMapping{ContainerPort: 1}, ""},
		"two addresses":    {&criv1.PortMapping{HostIp: "127.0.0.1", HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "127.0.0.2", HostPort: 80, ContainerPort: 1}, ""},
		"one address":      {&criv1.PortMapping{HostIp: "::1", HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "0:0:0:0:0:0:0:1", HostPort: 80, ContainerPort: 1}, "[::1]:80/tcp"},
		"all and one":      {&criv1.PortMapping{HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "fd00::1", HostPort: 80, ContainerPort: 1}, "[fd00::1]:80/tcp"},
		"all of IPv4":      {&criv1.PortMapping{HostIp: "10.0.0.1", HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "0.0.0.0", HostPort: 80, ContainerPort: 1}, "0.0.0.0:80/tcp"},
		"IPv4 in IPv6":     {&criv1.PortMapping{HostIp: "::ffff:10.0.0.1", HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "10.0.0.1", HostPort: 80, ContainerPort: 1}, "10.0.0.1:80/tcp"},
		"the two families": {&criv1.PortMapping{HostIp: "0.0.0.0", HostPort: 80, ContainerPort: 1}, &criv1.PortMapping{HostIp: "::", HostPort: 80, ContainerPort: 1}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, nil)
			b.plugin("good", gives)
			b.list("10-a.conflist", "good")
			first, second := withPorts("a", test.first), withPorts("b", test.second)
			raw := b.attach(first)
			calls := len(b.calls())
			_, err := b.Attach(t.Context(), second)
			if test.conflict == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Fatalf("error %v", err)
			}
			for _, want := range []string{"host port " + test.conflict, "default/pod-a", first.SandboxID} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			// What was refused leaves nothing, and no plugin hears of it.
			if err := b.Detach(t.Context(), second, nil); err != nil {
				t.Error(err)
			}
			if n := len(b.calls()); n != calls || b.remembered() != 1 {
				t.Errorf("calls %v, %d remembered", b.calls(), b.remembered())
			}
			if err := b.Detach(t.Context(), first, raw); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Attach(t.Context(), second); err != nil {
				t.Errorf("the port was not given up: %v", err)
			}
		})
	}
}

// Ports are held until the network is released, over restarts, and not by who was refused.
func TestHostPortsAreHeldUntilReleased(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.list("10-a.conflist", "good")
	mapping := &criv1.PortMapping{HostPort: 80, ContainerPort: 1}
	first, second := withPorts("a", mapping), withPorts("b", mapping)
	b.attach(first)
	b.plugin("good", fails)
	if err := b.Detach(t.Context(), first, nil); err == nil {
		t.Fatal("no error")
	}
	b.plugin("good", gives)
	for range 2 {
		if _, err := b.Attach(t.Context(), second); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("error %v", err)
		}
		b.CNI = New(t.Context(), b.cfg, b.log, b.tracer)
	}
	next := withPorts("c", mapping)
	next.Config.Metadata.Name, next.Config.Metadata.Uid, next.Config.Metadata.Attempt = "pod-a", "uid-a", 1
	b.attach(next) // kubelet's next attempt at the same pod
	if err := b.Detach(t.Context(), first, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Attach(t.Context(), second); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("the end of the first attempt frees what the second one has: %v", err)
	}
	if err := b.Detach(t.Context(), next, nil); err != nil {
		t.Fatal(err)
	}
	b.attach(second)
}

func TestBadRequestsCallNoPlugin(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.list("10-a.conflist", "good")
	for name, req := range map[string]pod.NetworkRequest{
		"zone":    withPorts("a", &criv1.PortMapping{HostIp: "fe80::1%eth0", HostPort: 80, ContainerPort: 1}),
		"address": withPorts("a", &criv1.PortMapping{HostIp: "localhost", HostPort: 80, ContainerPort: 1}),
		"bandwidth": func() pod.NetworkRequest {
			req := withPorts("a")
			req.Config.Annotations[runtimeconf.AnnotationEgress] = "fast"
			return req
		}(),
	} {
		if _, err := b.Attach(t.Context(), req); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: error %v", name, err)
		}
		if err := b.Detach(t.Context(), req, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(b.calls()) != 0 || b.remembered() != 0 {
		t.Errorf("calls %v, %d remembered", b.calls(), b.remembered())
	}
}
