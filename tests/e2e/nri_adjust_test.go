//go:build integration

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// Removals, replacements and the rarer fields of an adjustment hold in the container, too.
func TestRemovalsAndRareAdjustmentsReachTheContainer(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	score := 321
	p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		a.RemoveEnv("GONE")
		a.RemoveEnv("OLD")
		a.AddEnv("OLD", "new")
		a.RemoveDevice("/dev/gone")
		a.RemoveMount("/gone")
		a.RemoveMount("/other")
		a.AddMount(&nri.Mount{Source: "tmpfs", Destination: "/other", Type: "tmpfs", Options: []string{"size=64k"}})
		a.UpdateArgs([]string{"sleep", "7777"})
		a.SetLinuxOomScoreAdj(&score)
		a.SetLinuxSysctl("net.ipv4.ip_unprivileged_port_start", "77")
		a.SetLinuxIOPriority(&nri.LinuxIOPriority{Class: nri.IOPrioClass_IOPRIO_CLASS_BE, Priority: 6})
		a.SetLinuxScheduler(&nri.LinuxScheduler{Policy: nri.LinuxSchedulerPolicy_SCHED_BATCH, Nice: 5})
		a.SetLinuxSeccompPolicy(&nri.LinuxSeccomp{
			DefaultAction: "SCMP_ACT_ALLOW",
			Syscalls:      []*nri.LinuxSyscall{{Names: []string{"mkdir", "mkdirat"}, Action: "SCMP_ACT_ERRNO", ErrnoRet: nri.UInt32(uint32(unix.ENOSPC))}},
		})
		a.SetLinuxMemoryLimit(64 << 20)
		a.SetLinuxMemoryReservation(32 << 20)
		a.SetLinuxMemorySwappiness(7)
		return a
	}}
	p.connect(t, s, "10", "adjuster")
	pod, config := s.pod("rare")
	c := containerConfig("main", "sleep 1000")
	c.Envs = []*criv1.KeyValue{{Key: "GONE", Value: []byte("1")}, {Key: "OLD", Value: []byte("old")}, {Key: "KEPT", Value: []byte("kept")}}
	c.Devices = []*criv1.Device{
		{HostPath: "/dev/null", ContainerPath: "/dev/gone", Permissions: "rwm"},
		{HostPath: "/dev/zero", ContainerPath: "/dev/kept", Permissions: "rwm"},
	}
	c.Mounts = []*criv1.Mount{
		{HostPath: t.TempDir(), ContainerPath: "/gone"}, {HostPath: t.TempDir(), ContainerPath: "/other"}, {HostPath: t.TempDir(), ContainerPath: "/kept"},
	}
	id := s.container(pod, config, c)
	for _, test := range []struct{ command, want string }{
		{`tr '\0' ' ' < /proc/1/cmdline`, "sleep 7777"},
		{`echo "$GONE.$OLD.$KEPT"`, ".new.kept"},
		{`ls /dev | grep -E '^(gone|kept)$'`, "kept"},
		{`grep -cE ' /gone ' /proc/self/mounts; grep -E ' /other ' /proc/self/mounts | cut -d' ' -f3; grep -cE ' /kept ' /proc/self/mounts`, "0\ntmpfs\n1"},
		{`cat /proc/1/oom_score_adj /proc/sys/net/ipv4/ip_unprivileged_port_start`, "321\n77"},
		{`mkdir /x 2>&1 || true`, "mkdir: can't create directory '/x': No space left on device"},
	} {
		if got := strings.TrimSpace(s.exec(id, "sh", "-c", test.command)); got != test.want {
			t.Errorf("%s = %q, want %q", test.command, got, test.want)
		}
	}
	for file, want := range map[string]string{
		"memory/memory.limit_in_bytes": "67108864", "memory/memory.soft_limit_in_bytes": "33554432", "memory/memory.swappiness": "7",
	} {
		if got := cgroupValue(t, id, file); got != want {
			t.Errorf("%s = %q, want %q", file, got, want)
		}
	}
	pid := firstProcess(t, id)
	attr, err := unix.SchedGetAttr(pid, 0)
	must(t, err)
	if attr.Policy != unix.SCHED_BATCH || attr.Nice != 5 {
		t.Errorf("scheduler %+v", attr)
	}
	const process, bestEffort = 1, 2
	if priority, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, process, uintptr(pid), 0); errno != 0 || priority != bestEffort<<13|6 {
		t.Errorf("I/O priority %#x, %v", priority, errno)
	}
}

// A network interface of the node moves into the pod, and memory comes from the NUMA nodes that
// a plugin names.
func TestNetDevicesAndMemoryPoliciesOfPlugins(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		s.pull(busybox)
		given := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "given0"}, PeerName: "stays0"}
		must(t, netlink.LinkAdd(given))
		t.Cleanup(func() {
			if l, err := netlink.LinkByName("stays0"); err == nil {
				_ = netlink.LinkDel(l) // with the pod its peer has gone
			}
		})
		p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
			a := &nri.ContainerAdjustment{}
			a.AddLinuxNetDevice("given0", &nri.LinuxNetDevice{Name: "fast0"})
			a.SetLinuxMemoryPolicy(nri.MpolMode_MPOL_BIND, "0", nri.MpolFlag_MPOL_F_STATIC_NODES)
			return a
		}}
		p.connect(t, s, "10", "giver")
		pod, config := s.pod("gifted")
		id := s.container(pod, config, containerConfig("main", "sleep 1000"))
		if got := strings.Fields(s.exec(id, "ls", "/sys/class/net")); !slices.Contains(got, "fast0") || slices.Contains(got, "given0") {
			t.Errorf("interfaces of the container: %v", got)
		}
		if _, err := netlink.LinkByName("given0"); err == nil {
			t.Error("the interface is still the node's")
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/numa_maps", firstProcess(t, id)))
		must(t, err)
		if !strings.Contains(string(maps), " bind=static:0 ") {
			t.Errorf("memory of the first process: %s", maps)
		}
		made := 0
		refusals := map[string]func(*nri.ContainerAdjustment){
			"missing0":            func(a *nri.ContainerAdjustment) { a.AddLinuxNetDevice("missing0", &nri.LinuxNetDevice{Name: "fast1"}) },
			"linux.memory_policy": func(a *nri.ContainerAdjustment) { a.SetLinuxMemoryPolicy(nri.MpolMode_MPOL_BIND, "999") },
		}
		if _, err := os.Stat("/sys/fs/resctrl/schemata"); err != nil {
			refusals["linux.rdt: RDT is not mounted"] = func(a *nri.ContainerAdjustment) {
				a.Linux = &nri.LinuxContainerAdjustment{Rdt: &nri.LinuxRdt{ClosId: nri.String("gold")}}
			}
		}
		for want, adjust := range refusals {
			p.adjust = func(*nri.Container) *nri.ContainerAdjustment {
				a := &nri.ContainerAdjustment{}
				adjust(a)
				return a
			}
			made++
			id, err := s.tryContainer(pod, config, fmt.Sprintf("refused%d", made))
			if err == nil {
				_, err = s.CRI.StartContainer(t.Context(), &criv1.StartContainerRequest{ContainerId: id})
			}
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v", want, err)
			}
		}
	})
}

// firstProcess is one of the processes of a container, the oldest.
func firstProcess(t *testing.T, id string) int {
	t.Helper()
	first, _, _ := strings.Cut(cgroupValue(t, id, "pids/cgroup.procs"), "\n")
	pid, err := strconv.Atoi(first)
	must(t, err)
	return pid
}

// watcher notes with which limits it was told of containers.
type watcher struct {
	plugin

	told sync.Mutex
	pids map[string]int64
}

func (w *watcher) Synchronize(_ context.Context, _ []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error) {
	w.told.Lock()
	defer w.told.Unlock()
	w.pids = make(map[string]int64)
	for _, c := range containers {
		w.pids[c.GetId()] = c.GetLinux().GetResources().GetPids().GetLimit()
	}
	return nil, nil
}

// What plugins have updated stays: over a restart of sandboxd, over later updates by others,
// and in what plugins are told.
func TestUpdatesOfPluginsStay(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("updates")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	st := (&plugin{}).connect(t, s, "10", "updater")
	u := &nri.ContainerUpdate{}
	u.SetContainerId(id)
	u.SetLinuxPidLimits(55)
	u.SetLinuxMemoryLimit(96 << 20)
	u.SetLinuxMemoryReservation(48 << 20)
	u.SetLinuxCPUShares(222)
	eventually(t, "the plugin may update", func() error {
		failed, err := st.UpdateContainers([]*nri.ContainerUpdate{u})
		if err == nil && len(failed) > 0 {
			err = fmt.Errorf("failed: %v", failed)
		}
		return err
	})
	check := func(when, shares string) {
		t.Helper()
		for file, want := range map[string]string{
			"pids/pids.max": "55", "memory/memory.limit_in_bytes": "100663296", "memory/memory.soft_limit_in_bytes": "50331648", "cpu/cpu.shares": shares,
		} {
			if got := cgroupValue(t, id, file); got != want {
				t.Errorf("%s: %s = %q, want %q", when, file, got, want)
			}
		}
		if r := s.status(id).GetResources().GetLinux(); r.GetMemoryLimitInBytes() != 96<<20 || strconv.FormatInt(r.GetCpuShares(), 10) != shares {
			t.Errorf("%s: status says %v", when, r)
		}
	}
	check("updated", "222")
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	eventually(t, "another update", func() error {
		_, err := s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
			ContainerId: id, Linux: &criv1.LinuxContainerResources{CpuShares: 333},
		})
		return err
	})
	check("restarted and updated again", "333")
	w := &watcher{}
	late, err := stub.New(w, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("20"), stub.WithPluginName("late"), stub.WithOnClose(func() {}))
	must(t, err)
	must(t, late.Start(t.Context()))
	t.Cleanup(late.Stop)
	eventually(t, "the late plugin is synchronised", func() error {
		w.told.Lock()
		defer w.told.Unlock()
		if w.pids[id] != 55 {
			return fmt.Errorf("limits of processes are %v", w.pids)
		}
		return nil
	})
}

// An answer that cannot be fails the creation with the names of plugin and field, and leaves
// nothing.
func TestAnswersThatCannotBe(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	source := t.TempDir()
	must(t, os.WriteFile(filepath.Join(source, "file"), nil, 0o600))
	p := &plugin{adjust: func(c *nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		switch c.GetName() {
		case "mount":
			a.AddMount(&nri.Mount{Source: source, Destination: "data", Type: "bind", Options: []string{"rbind"}})
		case "env":
			a.AddEnv("", "v")
		case "zero":
			a.AddEnv("A", "b\x00c")
		default:
		}
		return a
	}}
	p.connect(t, s, "10", "odd")
	pod, config := s.pod("odd")
	for name, field := range map[string]string{"mount": "adjust.mounts[0].destination", "env": "adjust.env[0].key", "zero": "adjust.env[0].value"} {
		_, err := s.create(pod, config, containerConfig(name, "sleep 1000"))
		if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "10-odd") || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error is %v", name, err)
		}
	}
	answer, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
	must(t, err)
	if n := len(answer.GetContainers()); n > 0 {
		t.Errorf("%d containers are left", n)
	}
	s.container(pod, config, containerConfig("fine", "sleep 1000"))
}
