package namespaces

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCheckSysctl(t *testing.T) {
	t.Parallel()
	for name, fine := range map[string]bool{"net.core.somaxconn": true, "kernel.shmmax": true, "kernel.panic": false, "vm.swappiness": false, "": false} {
		if err := CheckSysctl(name); (err == nil) != fine || (err != nil && !errors.Is(err, errdefs.ErrInvalidArgument)) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestSysctls(t *testing.T) {
	t.Parallel()
	all := Defaults{UnprivilegedPorts: true, UnprivilegedICMP: true}
	tests := []struct {
		name     string
		want     Request
		defaults Defaults
		out      map[string]string
		err      error
	}{
		{name: "nothing", out: map[string]string{}},
		{
			name: "defaults", want: Request{Network: true}, defaults: all,
			out: map[string]string{sysctlPortStart: "0", sysctlPingRange: "0 2147483647"},
		},
		{
			name: "further defaults", want: Request{Network: true, Sysctls: map[string]string{"net.core.somaxconn": "5"}},
			defaults: Defaults{UnprivilegedPorts: true, Sysctls: map[string]string{
				"net/core/somaxconn": "4", "net/ipv4/ip_unprivileged_port_start": "80", "kernel.shmmax": "1",
			}},
			out: map[string]string{"net.core.somaxconn": "5", sysctlPortStart: "80"},
		},
		{
			name: "the groups of sandboxd's own user namespace", want: Request{Network: true}, defaults: Defaults{UnprivilegedICMP: true, LastGroup: 65535},
			out: map[string]string{sysctlPingRange: "0 65535"},
		},
		{name: "defaults need a network", want: Request{IPC: true}, defaults: all, out: map[string]string{}},
		{
			name: "no ping range in a user namespace", defaults: all,
			want: Request{Network: true, UIDs: []*criv1.IDMapping{{Length: 65536}}},
			out:  map[string]string{sysctlPortStart: "0"},
		},
		{
			name: "the pod's value wins", defaults: all,
			want: Request{Network: true, Sysctls: map[string]string{
				"net/ipv4/ip_unprivileged_port_start": "1024", sysctlPingRange: "1 0",
			}},
			out: map[string]string{sysctlPortStart: "1024", sysctlPingRange: "1 0"},
		},
		{
			name: "interface name with a dot",
			want: Request{Network: true, Sysctls: map[string]string{"net/ipv4/conf/eth0.1/forwarding": "1"}},
			out:  map[string]string{"net.ipv4.conf.eth0/1.forwarding": "1"},
		},
		{
			name: "ipc", want: Request{IPC: true, Sysctls: map[string]string{"kernel.shmmax": "1", "fs.mqueue.msg_max": "9"}},
			out: map[string]string{"kernel.shmmax": "1", "fs.mqueue.msg_max": "9"},
		},
		{name: "host network", want: Request{Sysctls: map[string]string{"net.core.somaxconn": "1"}}, err: errdefs.ErrInvalidArgument},
		{name: "host ipc", want: Request{Network: true, Sysctls: map[string]string{"kernel.sem": "1"}}, err: errdefs.ErrInvalidArgument},
		{name: "not namespaced", want: Request{IPC: true, Sysctls: map[string]string{"vm.swappiness": "1"}}, err: errdefs.ErrInvalidArgument},
		{name: "escape", want: Request{Network: true, Sysctls: map[string]string{"net..././vm": "1"}}, err: errdefs.ErrInvalidArgument},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, err := tt.want.sysctls(tt.defaults)
			if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if err == nil {
				if diff := cmp.Diff(tt.out, out); diff != "" {
					t.Errorf("sysctls (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestSysctlPath(t *testing.T) {
	t.Parallel()
	if got, want := sysctlPath(normalise("net/ipv4/conf/eth0.1/forwarding")), "/proc/sys/net/ipv4/conf/eth0.1/forwarding"; got != want {
		t.Errorf("path %q, want %q", got, want)
	}
}

func TestPinRefusesIDsThatLeaveTheFolder(t *testing.T) {
	t.Parallel()
	p := New(t.TempDir(), Defaults{})
	for _, id := range []string{"", ".", "..", "../x", "a/b", "/etc"} {
		if err := p.Unpin(t.Context(), id); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("id %q: error %v", id, err)
		}
	}
}

func TestUnpinRemovesLeftoverFiles(t *testing.T) {
	t.Parallel()
	p := New(t.TempDir(), Defaults{})
	if err := p.Unpin(t.Context(), "gone"); err != nil {
		t.Errorf("unpin of nothing: %v", err)
	}
	ids, err := p.List()
	if err != nil || len(ids) != 0 {
		t.Errorf("list: %v, %v", ids, err)
	}
}
