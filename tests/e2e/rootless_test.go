//go:build integration

package e2e

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const (
	layersImage  = "registry.k8s.io/crisp-tests/layers:1"
	foreignImage = "registry.k8s.io/crisp-tests/foreign:1"
)

// All four processes work in a user namespace that an ordinary user has made, who may make no
// control groups: pods have no limits then, and everything else.
func TestRootless(t *testing.T) {
	testenv.InUserNamespace(t, testenv.NestedPlain, func(t *testing.T) {
		testenv.EachHandler(t, func(t *testing.T, handler string) {
			s := rootless(t, handler)
			s.rootlessLife(false)
			s.withoutGroups()
			if handler == testenv.HandlerCrisp {
				s.layersOfAnotherUser()
				s.idsOfAnotherUser()
			}
			s.endsWithoutGroups()
			s.checked()
		})
	})
}

// The same where control groups are delegated to the user: pods have limits and figures.
func TestRootlessWithDelegatedControlGroups(t *testing.T) {
	testenv.InUserNamespace(t, testenv.NestedDelegated, func(t *testing.T) {
		testenv.EachHandler(t, func(t *testing.T, handler string) {
			s := rootless(t, handler)
			s.rootlessLife(true)
			s.delegatedGroups()
			s.checked()
		})
	})
}

func rootless(t *testing.T, handler string) *system {
	t.Helper()
	opaque := layerOf(t, entry{name: "opaque/", kind: tar.TypeDir, mode: 0o755}, entry{name: "opaque/.wh..wh..opq"}, entry{name: "opaque/new", body: "x"},
		entry{name: "etc/.wh.gone"}, entry{name: "dev-in-layer", kind: tar.TypeBlock, mode: 0o666}, entry{name: "of-65535", body: "x", uid: 65_535})
	below := layerOf(t, entry{name: "opaque/", kind: tar.TypeDir, mode: 0o755}, entry{name: "opaque/old", body: "x"}, entry{name: "etc/gone", body: "x"})
	s := startWith(t, testenv.Setup{Handler: handler}, derived(t, layersImage, nil, below, opaque))
	must(t, s.Registry.Add(t.Context(), derived(t, foreignImage, nil, layerOf(t, entry{name: "of-70000", body: "x", uid: 70_000}))))
	return s
}

// rootlessLife is the life of a pod, over a restart of sandboxd.
func (s *system) rootlessLife(groups bool) {
	s.t.Helper()
	t := s.t
	pod, config := s.pod("life")
	cfg := containerConfig("main", "echo begun; trap 'exit 3' TERM; while :; do sleep 0.1; done")
	cfg.Linux.Resources = &criv1.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20, OomScoreAdj: -998}
	id := s.container(pod, config, cfg)
	contains(t, s.exec(id, "sh", "-c", "id -u; cat /proc/self/uid_map; ls /sys/class/net /dev/mqueue /dev/shm; echo x > /dev/null; touch /new; ping -c 1 127.0.0.1"), "eth0", "1 packets received")
	for range 2 {
		contains(t, s.exec(id, "cat", "/etc/hostname", "/new"), "life")
		st, err := s.CRI.ContainerStats(t.Context(), &criv1.ContainerStatsRequest{ContainerId: id})
		must(t, err)
		if known := st.GetStats().GetMemory().GetUsageBytes().GetValue() > 0; known != groups {
			t.Errorf("stats with control groups %t: %v", groups, st)
		}
		of, err := s.CRI.PodSandboxStats(t.Context(), &criv1.PodSandboxStatsRequest{PodSandboxId: pod})
		must(t, err)
		if (of.GetStats().GetLinux().GetCpu() != nil) != groups || of.GetStats().GetLinux().GetNetwork().GetDefaultInterface().GetName() != "eth0" {
			t.Errorf("stats of the pod with control groups %t: %v", groups, of)
		}
		must(t, s.Restart(t.Context(), testenv.Sandboxd))
	}
	metrics, err := s.CRI.ListPodSandboxMetrics(t.Context(), &criv1.ListPodSandboxMetricsRequest{})
	must(t, err)
	if len(metrics.GetPodMetrics()) != 1 || len(metrics.GetPodMetrics()[0].GetContainerMetrics()) != 1 {
		t.Errorf("metrics %v", metrics)
	}
	contains(t, strings.Join(readLines(t, s.status(id).GetLogPath()), "\n"), "stdout F begun")
	_, err = s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id, Timeout: 30})
	must(t, err)
	if code := s.waitExit(id).GetExitCode(); code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
	s.removePod(pod)
}

func (s *system) removePod(pod string) {
	s.t.Helper()
	_, err := s.CRI.StopPodSandbox(s.t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(s.t, err)
	_, err = s.CRI.RemovePodSandbox(s.t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(s.t, err)
}

// withoutGroups: the status says what pods lack, and who wants limits to change is told.
func (s *system) withoutGroups() {
	s.t.Helper()
	t := s.t
	answer, err := s.CRI.Status(t.Context(), &criv1.StatusRequest{})
	must(t, err)
	said := ""
	for _, c := range answer.GetStatus().GetConditions() {
		if c.GetType() == "ControlGroupsReady" && !c.GetStatus() {
			said = c.GetMessage()
		}
	}
	contains(t, said, "without limits", "delegated")
	pod, config := s.pod("unlimited")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	_, err = s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &criv1.LinuxContainerResources{MemoryLimitInBytes: 1 << 30},
	})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("update of limits: %v", err)
	}
	s.removePod(pod)
}

// layersOfAnotherUser: what the layers of an image hide is hidden, devices are left out, and owners
// that do not exist are named.
func (s *system) layersOfAnotherUser() {
	s.t.Helper()
	t := s.t
	pod, config := s.pod("layers")
	cfg := containerConfig("main", "sleep 1000")
	cfg.Image.Image = layersImage
	id := s.container(pod, config, cfg)
	if got := s.exec(id, "sh", "-c", "ls /opaque; ls -d /etc/gone /dev-in-layer 2>/dev/null; stat -c %u /of-65535"); got != "new\n65535\n" {
		t.Errorf("layers show %q", got)
	}
	// What overlayfs notes itself is seen by itself.
	s.exec(id, "sh", "-ec", "rm -r /opaque; mkdir /opaque; test -z \"$(ls /opaque)\"; rm /etc/hosts.old 2>/dev/null || true; mv /of-65535 /moved")
	s.removePod(pod)
	_, err := s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: foreignImage}})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("pull of an image with an owner that is not mapped: %v", err)
	}
	contains(t, fmt.Sprint(err), "of-70000", "users 70000", "0-65535", "/etc/subuid")
}

// idsOfAnotherUser: pods with user namespaces of their own are refused by what is missing.
func (s *system) idsOfAnotherUser() {
	s.t.Helper()
	_, _, err := s.mappedPod("outside", nil)
	if status.Code(err) != codes.FailedPrecondition {
		s.t.Errorf("pod with ids that are not mapped: %v", err)
	}
	contains(s.t, fmt.Sprint(err), "users 70000-135535", "0-65535", "/etc/subuid")
	answer, err := s.CRI.Status(s.t.Context(), &criv1.StatusRequest{})
	must(s.t, err)
	for _, h := range answer.GetRuntimeHandlers() {
		if h.GetFeatures().GetUserNamespaces() {
			s.t.Errorf("handler %q has user namespaces", h.GetName())
		}
	}
	_, _, err = s.mappedPod("inside", func(o *criv1.NamespaceOption) {
		ids := []*criv1.IDMapping{{HostId: 1000, Length: 60_000}}
		o.UsernsOptions.Uids, o.UsernsOptions.Gids = ids, ids
	})
	if status.Code(err) != codes.FailedPrecondition {
		s.t.Errorf("pod with ids that are mapped: %v", err)
	}
	contains(s.t, fmt.Sprint(err), "userns_options", "does not show the files of images")
}

// endsWithoutGroups: no process of a container outlives it, also in a process namespace that is
// not its own, with the shim and without it.
func (s *system) endsWithoutGroups() {
	s.t.Helper()
	t := s.t
	for name, mode := range map[string]criv1.NamespaceMode{"pids-of-pod": criv1.NamespaceMode_POD, "pids-of-node": criv1.NamespaceMode_NODE} {
		config := s.podConfig(name)
		options := &criv1.NamespaceOption{Pid: mode}
		config.Linux.SecurityContext.NamespaceOptions = options
		answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config})
		must(t, err)
		pod := answer.GetPodSandboxId()
		start := func(name string) (id, mark string) {
			mark = fmt.Sprintf("10%d", 1000+len(name)+os.Getpid())
			cfg := containerConfig(name, "setsid sleep "+mark+" & exec sleep 1000")
			cfg.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{NamespaceOptions: options}
			id = s.container(pod, config, cfg)
			eventually(t, "the container has started another", func() error { return s.runs(mark, true) })
			return id, mark
		}
		id, mark := start("stopped")
		_, err = s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id})
		must(t, err)
		eventually(t, "what the container has started ends", func() error { return s.runs(mark, false) })
		id, mark = start("lost")
		shim, err := s.ShimOf(pod)
		must(t, err)
		must(t, exec.Command("kill", "-KILL", fmt.Sprint(shim)).Run())
		s.waitExit(id)
		eventually(t, "what a dead shim's container has started ends", func() error { return s.runs(mark, false) })
		s.removePod(pod)
	}
}

// runs says whether a sleep of that length runs is as wanted.
func (s *system) runs(mark string, want bool) error {
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	found := false
	for _, path := range paths {
		line, err := os.ReadFile(path) // of a process that may have ended
		found = found || err == nil && string(line) == "sleep\x00"+mark+"\x00"
	}
	if found != want {
		return fmt.Errorf("sleep %s runs: %t", mark, found)
	}
	return nil
}

// delegatedGroups: limits hold and change, and groups are where they may be.
func (s *system) delegatedGroups() {
	s.t.Helper()
	t := s.t
	pod, config := s.pod("limited")
	cfg := containerConfig("main", "sleep 1000")
	cfg.Linux.Resources = &criv1.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}
	id := s.container(pod, config, cfg)
	limit := func() string {
		for _, file := range []string{"memory/%s/memory.limit_in_bytes", "%s/memory.max"} {
			if text, err := os.ReadFile("/sys/fs/cgroup/" + fmt.Sprintf(file, filepath.Join(s.CgroupParent(), id))); err == nil {
				return strings.TrimSpace(string(text))
			}
		}
		return "none"
	}
	if got := limit(); got != fmt.Sprint(64<<20) {
		t.Errorf("memory limit %s", got)
	}
	_, err := s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &criv1.LinuxContainerResources{MemoryLimitInBytes: 32 << 20},
	})
	must(t, err)
	if got := limit(); got != fmt.Sprint(32<<20) {
		t.Errorf("memory limit after an update %s", got)
	}
	s.removePod(pod)

	outside := s.podConfig("outside")
	outside.Linux.CgroupParent = "/crisp-not-delegated"
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: outside})
	must(t, err)
	_, err = s.CRI.CreateContainer(t.Context(), &criv1.CreateContainerRequest{
		PodSandboxId: answer.GetPodSandboxId(), Config: containerConfig("main", "true"), SandboxConfig: outside,
	})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("container in a cgroup that is not delegated: %v", err)
	}
	contains(t, fmt.Sprint(err), "/crisp-not-delegated", "may make groups below")
	s.removePod(answer.GetPodSandboxId())

	unnamed := s.podConfig("unnamed")
	unnamed.Linux.CgroupParent = ""
	answer, err = s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: unnamed})
	must(t, err)
	id = s.container(answer.GetPodSandboxId(), unnamed, containerConfig("main", "sleep 1000"))
	contains(t, s.exec(id, "cat", "/proc/1/cgroup"), filepath.Join(filepath.Dir(s.CgroupParent()), "crisp", id))
	s.removePod(answer.GetPodSandboxId())
}

// checked lets sandboxd look for what does not fit together.
func (s *system) checked() {
	s.t.Helper()
	program, err := testenv.Binary("sandboxd")
	must(s.t, err)
	must(s.t, s.Stop(s.t.Context(), testenv.Sandboxd))
	out, err := exec.CommandContext(s.t.Context(), program, "check-state", "--config", s.ConfigFile(testenv.Sandboxd)).CombinedOutput()
	if err != nil {
		s.t.Errorf("check-state: %v\n%s", err, out)
	}
	must(s.t, s.Run(testenv.Sandboxd))
	must(s.t, s.WaitReady(s.t.Context()))
}
