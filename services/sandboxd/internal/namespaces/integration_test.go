//go:build integration

package namespaces

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func newPins(t *testing.T, defaults Defaults) (*Pins, string) {
	t.Helper()
	testkit.NeedRoot(t)
	root := filepath.Join(t.TempDir(), "ns")
	return New(root, defaults), root
}

func id(c string) string { return strings.Repeat(c, 64) }

func all() Request { return Request{Network: true, IPC: true, UTS: true, Hostname: "pod-1"} }

func mountsBelow(t *testing.T, dir string) int {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		t.Fatal(err)
	}
	return len(infos)
}

func TestPin(t *testing.T) {
	p, root := newPins(t, Defaults{UnprivilegedPorts: true, UnprivilegedICMP: true})
	before := hostNamespaces(t)
	want := all()
	want.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1", "net.ipv4.ip_local_port_range": "1024 65000"}
	paths, err := p.Pin(t.Context(), id("a"), want)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Unpin(t.Context(), id("a")) })
	for _, kind := range []string{"network", "ipc", "uts"} {
		if !IsNamespace(paths[kind]) {
			t.Errorf("%s: %q is no namespace", kind, paths[kind])
		}
	}
	err = Enter(func() error {
		host, _ := os.ReadFile("/proc/sys/kernel/hostname")
		port, _ := os.ReadFile(sysctlPath(sysctlPortStart))
		shm, _ := os.ReadFile("/proc/sys/kernel/shm_rmid_forced")
		got := strings.Join([]string{string(host), string(port), string(shm)}, "")
		if got != "pod-1\n0\n1\n" {
			t.Errorf("inside: %q", got)
		}
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return fmt.Errorf("loopback: %w", err)
		}
		return l.Close()
	}, paths["network"], paths["ipc"], paths["uts"])
	if err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(root); err != nil || st.Mode().Perm() != 0o711 {
		t.Errorf("root: %v, %v", st, err)
	}
	if after := hostNamespaces(t); after != before {
		t.Errorf("the test's own namespaces changed: %s, were %s", after, before)
	}
	if ids, err := New(root, Defaults{}).List(); err != nil || len(ids) != 1 || ids[0] != id("a") {
		t.Errorf("list: %v, %v", ids, err)
	}
	if got := New(root, Defaults{}).Paths(id("a")); len(got) != 3 {
		t.Errorf("paths after a restart: %v", got)
	}
	for range 2 {
		if err := p.Unpin(t.Context(), id("a")); err != nil {
			t.Errorf("unpin: %v", err)
		}
	}
	if n := mountsBelow(t, root); n != 0 {
		t.Errorf("%d mounts left", n)
	}
}

// hostNamespaces returns the namespaces of a child process, which is what every program
// that the daemon starts would get.
func hostNamespaces(t *testing.T) string {
	t.Helper()
	var all []string
	for range 5 {
		out, err := exec.CommandContext(t.Context(), "readlink", "/proc/self/ns/net", "/proc/self/ns/ipc", "/proc/self/ns/uts").Output()
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 0 || all[len(all)-1] != string(out) {
			all = append(all, string(out))
		}
	}
	return strings.Join(all, " then ")
}

func TestPinFailureLeavesNothing(t *testing.T) {
	p, _ := newPins(t, Defaults{})
	want := all()
	want.Sysctls = map[string]string{"net.ipv4.no_such_thing": "1"}
	if _, err := p.Pin(t.Context(), id("b"), want); err == nil {
		t.Fatal("no error")
	}
	if ids, _ := p.List(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
	want = all()
	want.Hostname = strings.Repeat("x", 65)
	if _, err := p.Pin(t.Context(), id("b"), want); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("error %v", err)
	}
}

// Sysctls of interfaces wait until the interfaces are there; of those that are not, they are refused.
func TestSetInterfaces(t *testing.T) {
	p, _ := newPins(t, Defaults{Sysctls: map[string]string{"net.ipv4.neigh.eth0.app_solicit": "3"}})
	want := all()
	want.Sysctls = map[string]string{
		"net/ipv4/conf/eth0.1/forwarding": "1", "net.ipv4.conf.all.forwarding": "0", "net.ipv4.conf.lo.forwarding": "1",
		"net.ipv6.conf.eth0.accept_ra": "2",
	}
	paths, err := p.Pin(t.Context(), id("e"), want)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Unpin(t.Context(), id("e")) })
	addLink := func(name string) {
		t.Helper()
		err := Enter(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer h.Close()
			return h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer" + name})
		}, paths["network"])
		if err != nil {
			t.Fatal(err)
		}
	}
	addLink("eth0")
	err = p.SetInterfaces(id("e"), want)
	if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), `no interface "eth0.1"`) || !strings.Contains(err.Error(), "eth0, ") {
		t.Errorf("error %v", err)
	}
	addLink("eth0.1")
	if err := p.SetInterfaces(id("e"), want); err != nil {
		t.Fatal(err)
	}
	err = Enter(func() error {
		var got []string
		for _, file := range []string{"ipv4/conf/eth0.1/forwarding", "ipv4/conf/lo/forwarding", "ipv6/conf/eth0/accept_ra", "ipv4/neigh/eth0/app_solicit"} {
			text, err := os.ReadFile("/proc/sys/net/" + file)
			got = append(got, strings.TrimSpace(string(text)))
			if err != nil {
				return err
			}
		}
		if strings.Join(got, " ") != "1 1 2 3" {
			t.Errorf("inside: %q", got)
		}
		return nil
	}, paths["network"])
	if err != nil {
		t.Error(err)
	}
	want.Sysctls = map[string]string{"net.ipv4.conf.eth0.forwarding": "banana"}
	if err := p.SetInterfaces(id("e"), want); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("a bad value: %v", err)
	}
	want.Sysctls = map[string]string{"net.ipv4.conf.eth0.no_such_thing": "1"}
	if err := p.SetInterfaces(id("e"), want); !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "no_such_thing") {
		t.Errorf("an unknown sysctl: %v", err)
	}
}

// A node on which nothing can be written is not the request's mistake.
func TestSysctlsOnAReadOnlyNode(t *testing.T) {
	testkit.NeedRoot(t)
	err := OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		for _, flags := range []uintptr{unix.MS_BIND, unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY} {
			if err := unix.Mount("/proc/sys", "/proc/sys", "", flags, ""); err != nil {
				return err
			}
		}
		return writeSysctls(map[string]string{"net.core.somaxconn": "7"})
	})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("error %v", err)
	}
}

func TestPinWithUserNamespace(t *testing.T) {
	p, root := newPins(t, Defaults{UnprivilegedPorts: true, UnprivilegedICMP: true})
	want := all()
	want.UIDs = []*criv1.IDMapping{{HostId: 200000, Length: 65536}}
	want.GIDs = want.UIDs
	paths, err := p.Pin(t.Context(), id("c"), want)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Unpin(t.Context(), id("c")) })
	user := inode(t, paths["user"])
	fd, err := unix.Open(paths["network"], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	owner, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(owner) }()
	var st unix.Stat_t
	if err := unix.Fstat(owner, &st); err != nil {
		t.Fatal(err)
	}
	if st.Ino != user {
		t.Errorf("the network namespace is owned by user namespace %d, want %d", st.Ino, user)
	}
	if err := p.Unpin(t.Context(), id("c")); err != nil {
		t.Error(err)
	}
	if n := mountsBelow(t, root); n != 0 {
		t.Errorf("%d mounts left", n)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestUnpinOfADestroyedNamespace(t *testing.T) {
	p, _ := newPins(t, Defaults{})
	paths, err := p.Pin(t.Context(), id("d"), all())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Unmount(paths["network"], unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if IsNamespace(paths["network"]) {
		t.Error("a plain file counts as a namespace")
	}
	if err := os.Remove(paths["uts"]); err == nil {
		t.Error("a mounted file could be removed")
	}
	for range 2 {
		if err := p.Unpin(t.Context(), id("d")); err != nil {
			t.Errorf("unpin: %v", err)
		}
	}
}

func TestPinManyAtOnce(t *testing.T) {
	p, root := newPins(t, Defaults{})
	before := hostNamespaces(t)
	t.Run("group", func(t *testing.T) {
		for i := range 20 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				name := fmt.Sprintf("%064d", i)
				if _, err := p.Pin(t.Context(), name, all()); err != nil {
					t.Error(err)
				}
				if err := p.Unpin(t.Context(), name); err != nil {
					t.Error(err)
				}
			})
		}
	})
	if after := hostNamespaces(t); after != before {
		t.Errorf("the test's own namespaces changed: %s, were %s", after, before)
	}
	if n := mountsBelow(t, root); n != 0 {
		t.Errorf("%d mounts left", n)
	}
}
