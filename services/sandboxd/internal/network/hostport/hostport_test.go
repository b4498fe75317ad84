package hostport

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestMappings(t *testing.T) {
	t.Parallel()
	in := []*criv1.PortMapping{
		{HostPort: 0, ContainerPort: 80},
		{HostPort: 80, ContainerPort: 80},
		{HostPort: 80, ContainerPort: 80},
		{HostPort: 80, ContainerPort: 80, Protocol: criv1.Protocol_UDP},
		{HostPort: 80, ContainerPort: 80, Protocol: criv1.Protocol_SCTP, HostIp: "::1"},
	}
	want := []Mapping{
		{HostPort: 80, ContainerPort: 80, Protocol: "tcp"},
		{HostPort: 80, ContainerPort: 80, Protocol: "udp"},
		{HostPort: 80, ContainerPort: 80, Protocol: "sctp", HostIP: "::1"},
	}
	got, err := Mappings(in)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, bad := range []*criv1.PortMapping{
		{HostPort: -1, ContainerPort: 1},
		{HostPort: 65536, ContainerPort: 1},
		{HostPort: 1},
		{HostPort: 1, ContainerPort: 1, HostIp: "here"},
	} {
		if _, err := Mappings([]*criv1.PortMapping{bad}); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%v: error %v", bad, err)
		}
	}
}
