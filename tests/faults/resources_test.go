//go:build integration

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const mib = 1 << 20

// limits are what a container's cgroup has, by the file; a machine with a unified hierarchy
// has other files.
func (s *system) limits(id string) map[string]string {
	s.t.Helper()
	out := map[string]string{}
	for file, controller := range map[string]string{
		"memory.limit_in_bytes": "memory", "cpu.shares": "cpu", "cpu.cfs_quota_us": "cpu", "cpuset.cpus": "cpuset",
	} {
		raw, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, s.CgroupParent(), id, file))
		must(s.t, err)
		out[file] = strings.TrimSpace(string(raw))
	}
	return out
}

func (s *system) resize(id string, r *criv1.LinuxContainerResources) error {
	_, err := s.CRI.UpdateContainerResources(s.t.Context(), &criv1.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
	return err
}

// agrees checks that the status of a container shows what its cgroup has.
func (s *system) agrees(id string) {
	s.t.Helper()
	r, have := s.status(id).GetResources().GetLinux(), s.limits(id)
	want := map[string]string{
		"memory.limit_in_bytes": fmt.Sprint(r.GetMemoryLimitInBytes()), "cpu.shares": fmt.Sprint(r.GetCpuShares()),
		"cpu.cfs_quota_us": fmt.Sprint(r.GetCpuQuota()), "cpuset.cpus": r.GetCpusetCpus(),
	}
	for file, value := range want {
		if have[file] != value {
			s.t.Errorf("%s is %s, the status shows %s", file, have[file], value)
		}
	}
}

// waitLog waits until a container has written something.
func (s *system) waitLog(pod *criv1.PodSandboxConfig, c *criv1.ContainerConfig, text string) {
	s.t.Helper()
	eventually(s.t, 20*time.Second, "output of "+c.GetMetadata().GetName(), func() error {
		raw, err := os.ReadFile(filepath.Join(pod.GetLogDirectory(), c.GetLogPath()))
		if err == nil && !strings.Contains(string(raw), text) {
			err = fmt.Errorf("the log is %q", raw)
		}
		return err
	})
}

// A change of resources is done whole or not at all; what is shown is in force, over
// restarts too.
func TestResizeIsWholeOrNothing(t *testing.T) {
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		t.Skip("the limits are read from a machine without a unified hierarchy")
	}
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("resize")
	pod := s.pod(podConfig, "")
	config := script("main", "dd if=/dev/zero of=/dev/shm/x bs=1M count=24 2>/dev/null; echo ready; exec sleep 1000")
	config.Linux.Resources = &criv1.LinuxContainerResources{
		MemoryLimitInBytes: 64 * mib, CpuShares: 100, CpuQuota: 50_000, CpuPeriod: 100_000, CpusetCpus: "0",
	}
	id := s.container(pod, podConfig, config)
	s.waitLog(podConfig, config, "ready")
	s.agrees(id)
	free := s.container(pod, podConfig, script("free", "exec sleep 1000"))

	for _, good := range []*criv1.LinuxContainerResources{
		{MemoryLimitInBytes: 128 * mib},
		{MemoryLimitInBytes: 48 * mib, CpuShares: 300},
		{CpuQuota: 20_000, CpuPeriod: 100_000},
		{CpuQuota: -1},
		{CpuQuota: 30_000},
		{MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 80 * mib},
		{MemoryLimitInBytes: 96 * mib, MemorySwapLimitInBytes: 96 * mib},
		{},
	} {
		must(t, s.resize(id, good))
		s.agrees(id)
	}
	before, shown := s.limits(id), s.status(id).GetResources()
	beforeFree := s.limits(free)
	for name, bad := range map[string]*criv1.LinuxContainerResources{
		"memory below what is in use": {MemoryLimitInBytes: 4 * mib},
		"half good":                   {CpuShares: 777, CpuQuota: 90_000, MemoryLimitInBytes: 4 * mib},
		"processor that is not there": {CpuShares: 778, CpusetCpus: "4000"},
		"negative shares":             {CpuShares: -1},
		"quota that is too small":     {CpuShares: 779, CpuQuota: 1},
		"period that is too long":     {CpuPeriod: 5_000_000, CpuQuota: 1_000_000},
		"no unified hierarchy":        {CpuShares: 780, Unified: map[string]string{"memory.high": "1"}},
	} {
		for target, had := range map[string]map[string]string{id: before, free: beforeFree} {
			if target == free && strings.Contains(name, "half") || target == free && strings.Contains(name, "below") {
				bad = proto.CloneOf(bad)
				bad.MemoryLimitInBytes = 4096 // less than what any process needs
			}
			err := s.resize(target, bad)
			named := strings.Contains(fmt.Sprint(err), target) || oneOf(err, codes.InvalidArgument) && strings.Contains(fmt.Sprint(err), "linux.")
			if !oneOf(err, codes.InvalidArgument, codes.FailedPrecondition) || !named {
				t.Errorf("%s: %v", name, err)
			}
			if now := s.limits(target); fmt.Sprint(now) != fmt.Sprint(had) {
				t.Errorf("%s: limits are %v, were %v", name, now, had)
			}
		}
		if now := s.status(id).GetResources(); !proto.Equal(now, shown) {
			t.Errorf("%s: the status shows %v, before %v", name, now, shown)
		}
	}

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	if now := s.status(id).GetResources(); !proto.Equal(now, shown) {
		t.Errorf("after a restart the status shows %v, before %v", now, shown)
	}
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			err := s.resize(id, &criv1.LinuxContainerResources{CpuShares: int64(200 + n), MemoryLimitInBytes: int64(64+n) * mib})
			if err != nil {
				t.Errorf("one of many changes: %v", err)
			}
		})
	}
	wg.Wait()
	s.agrees(id)

	created, err := s.create(pod, podConfig, script("created", "exec sleep 1000"))
	must(t, err)
	must(t, s.resize(created, &criv1.LinuxContainerResources{CpuShares: 222, MemoryLimitInBytes: 33 * mib, CpuQuota: 10_000, CpuPeriod: 100_000, CpusetCpus: "0"}))
	must(t, s.startContainer(created))
	s.agrees(created)

	wg.Go(func() {
		for err := error(nil); !oneOf(err, codes.NotFound); {
			err = s.resize(created, &criv1.LinuxContainerResources{CpuShares: 333})
			if err != nil && !oneOf(err, codes.NotFound, codes.FailedPrecondition) {
				t.Errorf("change beside a removal: %v", err)
			}
		}
	})
	must(t, s.removeContainer(created))
	wg.Wait()
	must(t, s.stopContainer(id, 0))
	if err := s.resize(id, &criv1.LinuxContainerResources{CpuShares: 100}); !oneOf(err, codes.FailedPrecondition) {
		t.Errorf("change of what has ended: %v", err)
	}
}

// The reason is OOMKilled where the kernel killed the first process for lack of memory, also
// while nobody watched, and nowhere else.
func TestLackOfMemoryIsToldFromOtherDeaths(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("oom")
	pod := s.pod(podConfig, "")
	limited := func(name, text string) string {
		config := script(name, text)
		config.Linux.Resources = &criv1.LinuxContainerResources{MemoryLimitInBytes: 32 * mib, MemorySwapLimitInBytes: 32 * mib}
		return s.container(pod, podConfig, config)
	}
	const child = "tail /dev/zero; echo killed; "
	atOnce := limited("at-once", "exec tail /dev/zero")
	survives := limited("survives", child+"exit 0")
	fails := limited("fails", child+"exit 3")
	killed := limited("killed", "exec sleep 1000")
	stopped := limited("stopped", "trap 'exit 143' TERM; "+child+"while :; do sleep 0.1; done")
	cutOff := limited("cut-off", "trap '' TERM; "+child+"while :; do sleep 0.1; done")
	execs := limited("execs", "exec sleep 1000")
	unwatched := limited("unwatched", "while [ ! -e /tmp/go ]; do sleep 0.1; done; exec tail /dev/zero")

	if out, code, err := s.exec(execs, "sh", "-c", "exec tail /dev/zero"); err != nil || code != 137 {
		t.Errorf("command without memory: %q, code %d, %v", out, code, err)
	}
	if state := s.status(execs).GetState(); state != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("its container is %s", state)
	}
	for _, name := range []string{"stopped", "cut-off"} {
		s.waitLog(podConfig, script(name, ""), "killed")
	}
	must(t, s.stopContainer(stopped, 10))
	must(t, s.stopContainer(cutOff, 0))
	for id, want := range map[string]string{
		atOnce: "137 OOMKilled", survives: "0 Completed", fails: "3 Error", stopped: "143 Error", cutOff: "137 Error",
	} {
		st := s.waitExit(id, 20*time.Second)
		if got := fmt.Sprint(st.GetExitCode(), " ", st.GetReason()); got != want {
			t.Errorf("%s: %s, want %s", st.GetMetadata().GetName(), got, want)
		}
	}
	must(t, unix.Kill(firstOf(t, killed), unix.SIGKILL))
	if st := s.waitExit(killed, 20*time.Second); st.GetReason() != "Error" || st.GetExitCode() != 137 {
		t.Errorf("killed from outside: %s %d", st.GetReason(), st.GetExitCode())
	}

	// A limit that was lowered counts like one from the beginning.
	lowered := limited("lowered", "dd if=/dev/zero of=/dev/shm/x bs=1M count=8 2>/dev/null; echo ready; while [ ! -e /tmp/go ]; do sleep 0.1; done; exec tail /dev/zero")
	s.waitLog(podConfig, script("lowered", ""), "ready")
	must(t, s.resize(lowered, &criv1.LinuxContainerResources{MemoryLimitInBytes: 20 * mib}))
	must(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/tmp/go", firstOf(t, lowered)), nil, 0o600))
	if st := s.waitExit(lowered, 20*time.Second); st.GetReason() != "OOMKilled" || st.GetExitCode() != 137 {
		t.Errorf("after its limit was lowered: %s %d", st.GetReason(), st.GetExitCode())
	}
	// Nor does it matter how often a name has ended so, each time right after its start.
	shim := s.shimOf(pod)
	var before [2]int
	for attempt := range scaled(t, 6) {
		config := script("again", "exec tail /dev/zero")
		config.Metadata.Attempt = uint32(attempt)
		config.Linux.Resources = &criv1.LinuxContainerResources{MemoryLimitInBytes: 16 * mib, MemorySwapLimitInBytes: 16 * mib}
		id := s.container(pod, podConfig, config)
		if st := s.waitExit(id, 20*time.Second); st.GetReason() != "OOMKilled" || st.GetExitCode() != 137 {
			t.Errorf("attempt %d: %s %d", attempt, st.GetReason(), st.GetExitCode())
		}
		must(t, s.removeContainer(id))
		if attempt == 1 {
			before = [2]int{descriptors(t, s.Pid(testenv.Sandboxd)), descriptors(t, shim)}
		}
	}
	eventually(t, 30*time.Second, "nothing grows", func() error {
		if now := [2]int{descriptors(t, s.Pid(testenv.Sandboxd)), descriptors(t, shim)}; now[0] > before[0]+4 || now[1] > before[1]+4 {
			return fmt.Errorf("sandboxd and shim had %v open files and have %v", before, now)
		}
		return nil
	})

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	root := fmt.Sprintf("/proc/%d/root/tmp/go", firstOf(t, unwatched))
	must(t, os.WriteFile(root, nil, 0o600))
	eventually(t, 20*time.Second, "the unwatched container ends", func() error {
		if left := containerPIDs(t, unwatched); len(left) > 0 {
			return fmt.Errorf("processes %v are left", left)
		}
		return nil
	})
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	if st := s.waitExit(unwatched, 20*time.Second); st.GetReason() != "OOMKilled" || st.GetExitCode() != 137 {
		t.Errorf("unwatched: %s %d", st.GetReason(), st.GetExitCode())
	}
}

// firstOf is one process of a container.
func firstOf(t *testing.T, id string) int {
	t.Helper()
	pids := containerPIDs(t, id)
	if len(pids) == 0 {
		t.Fatalf("container %s has no process", id)
	}
	return pids[0]
}

// One container with a very large specification runs, or is refused clearly and leaves nothing;
// nobody else is concerned, and lists stay complete.
func TestVeryLargeSpecifications(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("large")
	pod := s.pod(podConfig, "")
	other := s.container(pod, podConfig, script("other", "exec sleep 1000"))
	many := func(n int, each func(i int) *criv1.KeyValue) []*criv1.KeyValue {
		var out []*criv1.KeyValue
		for i := range n {
			out = append(out, each(i))
		}
		return out
	}
	folder := t.TempDir()
	environment := func(bytes int) func(*criv1.ContainerConfig) {
		return func(c *criv1.ContainerConfig) {
			c.Envs = many(8000, func(i int) *criv1.KeyValue {
				return &criv1.KeyValue{Key: fmt.Sprintf("SERVICE_%04d_PORT_8080_TCP_ADDR", i), Value: []byte(strings.Repeat("x", bytes))}
			})
		}
	}
	arguments := func(n, bytes int) func(*criv1.ContainerConfig) {
		return func(c *criv1.ContainerConfig) { c.Args = slices.Repeat([]string{strings.Repeat("x", bytes)}, n) }
	}
	for _, tt := range []struct {
		name    string
		refused bool // the kernel takes a quarter of the stack, 2 MiB as a rule, and 128 KiB of one
		change  func(*criv1.ContainerConfig)
	}{
		{"environment", false, environment(100)},
		{"too-much-environment", true, environment(800)},
		{"annotations", false, func(c *criv1.ContainerConfig) {
			c.Annotations = map[string]string{}
			for i := range 1000 {
				c.Annotations[fmt.Sprintf("large.example/%d", i)] = strings.Repeat("x", 1000)
			}
		}},
		{"mounts", false, func(c *criv1.ContainerConfig) {
			for i := range 2000 {
				c.Mounts = append(c.Mounts, &criv1.Mount{HostPath: folder, ContainerPath: fmt.Sprintf("/volumes/%d", i), Readonly: true})
			}
		}},
		{"arguments", false, arguments(1500, 1000)},
		{"too-many-arguments", true, arguments(7000, 1000)},
		{"one-argument", true, arguments(1, 200_000)},
	} {
		config := script(tt.name, "exec sleep 1000")
		tt.change(config)
		id, err := s.create(pod, podConfig, config)
		must(t, err)
		err = s.startContainer(id)
		name := tt.name
		if tt.refused {
			if !oneOf(err, codes.FailedPrecondition) || !strings.Contains(fmt.Sprint(err), "argument list too long") || !strings.Contains(fmt.Sprint(err), id) {
				t.Errorf("%s: %v", name, err)
			}
			if st := s.status(id); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetReason() != "StartError" {
				t.Errorf("%s is %s, reason %q", name, st.GetState(), st.GetReason())
			}
			must(t, s.removeContainer(id))
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		st, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: id, Verbose: true})
		if err != nil || st.GetStatus().GetState() != criv1.ContainerState_CONTAINER_RUNNING || len(st.GetInfo()) == 0 {
			t.Errorf("%s: status %s, %d of info, %v", name, st.GetStatus().GetState(), len(st.GetInfo()), err)
		}
		if out, code, err := s.exec(id, "echo", strings.Repeat("x", 100_000)); err != nil || code != 0 || len(out) != 100_001 {
			t.Errorf("%s: command in it: %d bytes, code %d, %v", name, len(out), code, err)
		}
		if _, _, err := s.exec(id, "echo", strings.Repeat("x", 200_000)); !oneOf(err, codes.FailedPrecondition) || !strings.Contains(fmt.Sprint(err), "cmd: argument") {
			t.Errorf("%s: command that is too long: %v", name, err)
		}
	}
	// Sizes about the limits of those who pass messages on. What is listed has a limit of its own.
	for _, tt := range []struct {
		what string
		size int
		want codes.Code
	}{
		{"annotation", mib, codes.OK},
		{"annotation", 2*mib + 1, codes.InvalidArgument},
		{"annotation", 4 * mib, codes.InvalidArgument},
		{"annotation", 16 * mib, codes.InvalidArgument},
		{"variable", mib, codes.FailedPrecondition},
		{"variable", 4*mib + 1, codes.FailedPrecondition},
		{"variable", 16*mib + 1, codes.FailedPrecondition},
	} {
		config, text := script(fmt.Sprintf("%s-of-%d", tt.what, tt.size), "exit 6"), strings.Repeat("x", tt.size)
		if tt.what == "annotation" {
			config.Annotations = map[string]string{"": text}
		} else {
			config.Envs = []*criv1.KeyValue{{Key: "LARGE", Value: []byte(text)}}
		}
		id, err := s.create(pod, podConfig, config)
		if err == nil {
			err = s.startContainer(id)
			if st := s.waitExit(id, 20*time.Second); err == nil && st.GetExitCode() != 6 {
				t.Errorf("%s of %d bytes: exit code %d", tt.what, tt.size, st.GetExitCode())
			}
			must(t, s.removeContainer(id))
		}
		if !oneOf(err, tt.want) || len(fmt.Sprint(err)) > 4000 {
			t.Errorf("%s of %d bytes, want %s: an error of %d bytes: %.500v", tt.what, tt.size, tt.want, len(fmt.Sprint(err)), err)
		}
	}
	wordy := s.podConfig("wordy")
	wordy.Annotations = map[string]string{"": strings.Repeat("x", 2*mib+1)}
	if _, err := s.try(wordy, "", 20*time.Second); !oneOf(err, codes.InvalidArgument) {
		t.Errorf("pod with too many annotations: %.500v", err)
	}
	_, code, err := s.exec(other, append([]string{"echo"}, slices.Repeat([]string{strings.Repeat("x", 1000)}, 3000)...)...)
	if err == nil && code == 0 || oneOf(err, codes.DeadlineExceeded, codes.Unavailable) || len(fmt.Sprint(err)) > 4000 {
		t.Errorf("command line of 3 MB: code %d, an error of %d bytes: %.500s", code, len(fmt.Sprint(err)), fmt.Sprint(err))
	}
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	list, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
	must(t, err)
	if n := len(list.GetContainers()); n != 5 {
		t.Errorf("%d containers, want 5", n)
	}
	for _, c := range list.GetContainers() {
		if c.GetState() != criv1.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s is %s after a restart", c.GetMetadata().GetName(), c.GetState())
		}
	}
	if _, code, err := s.exec(other, "true"); err != nil || code != 0 {
		t.Errorf("the other container: code %d, %v", code, err)
	}
	must(t, s.removePod(pod))
}
