package namespaces

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// setUp prepares the namespaces that the calling thread is in.
func setUp(want Request, sysctls map[string]string) error {
	if want.Network {
		if err := loopbackUp(); err != nil {
			return err
		}
	}
	if want.UTS && want.Hostname != "" {
		if err := unix.Sethostname([]byte(want.Hostname)); err != nil {
			return fmt.Errorf("set host name %q: %w", want.Hostname, err)
		}
	}
	return writeSysctls(sysctls)
}

// loopbackUp brings the loopback interface of the thread's network namespace up, which
// also gives it its addresses.
func loopbackUp() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("loopback interface up: %w", err)
	}
	return nil
}

// pinProcess makes the namespaces with a user namespace, which a process with several
// threads cannot make for itself. The child never runs an instruction of its program: it
// stays stopped at its start until its namespaces are mounted, then it is killed.
func pinProcess(ctx context.Context, dir string, want Request, sysctls map[string]string) (map[string]string, error) {
	var paths map[string]string
	// A traced process can be waited for only by the thread that started it.
	err := OnThread(func() error {
		cmd := exec.CommandContext(ctx, "/proc/self/exe")
		cmd.Args = []string{"namespaces"}
		cmd.Env = []string{}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:                 want.flags(),
			UidMappings:                idMaps(want.UIDs),
			GidMappings:                idMaps(want.GIDs),
			GidMappingsEnableSetgroups: true,
			Ptrace:                     true,
			Pdeathsig:                  syscall.SIGKILL,
		}
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("start process in user namespace: %w", err)
		}
		defer func() {
			_ = cmd.Process.Kill() // it can only have ended already
			_ = cmd.Wait()         // reports the kill
		}()
		var err error
		paths, err = mountAll(dir, fmt.Sprintf("/proc/%d/ns", cmd.Process.Pid), want)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Root outside of the user namespace may set up what the user namespace owns, and
	// entering only these leaves the thread all its rights.
	err = Enter(func() error { return setUp(want, sysctls) }, paths["network"], paths["ipc"], paths["uts"])
	if err != nil {
		return nil, err
	}
	return paths, nil
}

func idMaps(maps []*criv1.IDMapping) []syscall.SysProcIDMap {
	out := make([]syscall.SysProcIDMap, 0, len(maps))
	for _, m := range maps {
		out = append(out, syscall.SysProcIDMap{
			ContainerID: int(m.GetContainerId()),
			HostID:      int(m.GetHostId()),
			Size:        int(m.GetLength()),
		})
	}
	return out
}

func writeSysctls(sysctls map[string]string) error {
	// In one order for all: what "all" says of interfaces changes what single ones say.
	for _, name := range slices.Sorted(maps.Keys(sysctls)) {
		value := sysctls[name]
		// A thread sees its own network namespace below /proc/sys, whichever process
		// mounted it.
		if err := os.WriteFile(sysctlPath(name), []byte(value), 0); err != nil {
			return fmt.Errorf("sysctl %s=%q: %w", name, value, unwritable(name, err))
		}
	}
	return nil
}

// unwritable says why a sysctl was not written.
func unwritable(name string, err error) error {
	if errors.Is(err, unix.EROFS) {
		return fmt.Errorf("/proc/sys is mounted read-only for sandboxd, so that no pod of this node can have sysctls: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if of := interfaceOf(name); of != "" {
		all, listErr := net.Interfaces()
		names := make([]string, 0, len(all))
		for _, i := range all {
			names = append(names, i.Name)
		}
		if listErr == nil && !slices.Contains(names, of) {
			return fmt.Errorf("the pod has no interface %q, it has %s: %w", of, strings.Join(names, ", "), errdefs.ErrInvalidArgument)
		}
	}
	// Whether there is none of this name, none that can be written, or none with this value
	// is up to the kernel; the request is at fault in each case.
	return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
}
