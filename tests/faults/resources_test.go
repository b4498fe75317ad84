//go:build integration

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

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
		{MemoryLimitInBytes: 128 * mib}, {MemoryLimitInBytes: 48 * mib, CpuShares: 300}, {CpuQuota: 20_000, CpuPeriod: 100_000}, {CpuQuota: -1}, {CpuQuota: 30_000},
		{MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 80 * mib}, {MemoryLimitInBytes: 96 * mib, MemorySwapLimitInBytes: 96 * mib}, {},
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
	if err := s.resize(id, &criv1.LinuxContainerResources{CpuShares: 1}); !oneOf(err, codes.FailedPrecondition) {
		t.Errorf("change of what has ended: %v", err)
	}
}
