//go:build integration

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// Stats and metrics of a pod that works, over every call that gives them.
func TestStatsAndMetrics(t *testing.T) {
	testenv.EachHandler(t, tellStatsAndMetrics)
}

func tellStatsAndMetrics(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler, Configure: twoNetworks(t)})
	s.pull(busybox)
	pod, config := s.pod("measured")
	busy := containerConfig("busy", "head -c 100000 /dev/urandom >/file; while :; do :; done")
	busy.Linux.Resources = &criv1.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 5000, MemoryLimitInBytes: 64 << 20}
	id := s.container(pod, config, busy)
	idle := s.podConfig("idle")
	idle.Linux.CgroupParent = "" // a pod without a cgroup of its own
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: idle})
	must(t, err)

	eventually(t, "container stats", func() error {
		one, err := s.CRI.ContainerStats(t.Context(), &criv1.ContainerStatsRequest{ContainerId: id})
		if err != nil {
			return err
		}
		st := one.GetStats()
		if st.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 || st.GetCpu().GetUsageNanoCores().GetValue() == 0 ||
			st.GetMemory().GetWorkingSetBytes().GetValue() == 0 || st.GetMemory().GetAvailableBytes().GetValue() == 0 ||
			st.GetWritableLayer().GetUsedBytes().GetValue() < 100000 || st.GetWritableLayer().GetFsId().GetMountpoint() == "" ||
			st.GetSwap() == nil || st.GetIo() == nil {
			return fmt.Errorf("incomplete: %v", st)
		}
		return nil
	})
	pods, err := s.CRI.ListPodSandboxStats(t.Context(), &criv1.ListPodSandboxStatsRequest{
		Filter: &criv1.PodSandboxStatsFilter{LabelSelector: map[string]string{"story": t.Name()}},
	})
	must(t, err)
	if len(pods.GetStats()) != 2 {
		t.Fatalf("stats of %d pods, want 2", len(pods.GetStats()))
	}
	linux := pods.GetStats()[0].GetLinux()
	second := linux.GetNetwork().GetInterfaces()
	if len(second) != 1 || second[0].GetName() != "eth1" || second[0].GetRxBytes() == nil {
		t.Errorf("interfaces besides the default one are %v, want eth1", second)
	}
	if linux.GetProcess().GetProcessCount().GetValue() == 0 || linux.GetNetwork().GetDefaultInterface().GetName() != "eth0" || len(linux.GetContainers()) != 1 {
		t.Errorf("pod stats are %v", linux)
	}
	if st := pods.GetStats()[1]; st.GetAttributes().GetId() != answer.GetPodSandboxId() || st.GetLinux().GetCpu() == nil {
		t.Errorf("stats of the pod without a cgroup are %v", st)
	}
	if _, err := s.CRI.PodSandboxStats(t.Context(), &criv1.PodSandboxStatsRequest{}); err == nil {
		t.Error("stats of no pod")
	}
	s.checkMetrics(pod, id)
	s.checkStreams(pod)
	contains(t, s.crictl("stats", "--id", id), "busy")
	contains(t, s.crictl("statsp"), "measured")
	contains(t, s.crictl("metricsp"), "container_cpu_usage_seconds_total")
}

// twoNetworks gives pods a second network.
func twoNetworks(t *testing.T) func(testenv.Process, testenv.Settings) {
	const second = `{"cniVersion": "1.0.0", "name": "second", "type": "bridge", "bridge": "crisp0",
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.89.0.0/24"}]], "dataDir": %q}}`
	return func(p testenv.Process, settings testenv.Settings) {
		if p != testenv.Sandboxd {
			return
		}
		folder := settings.Get("network.conf_dir").(string)
		settings.Set("network.max_conf_num", 2)
		must(t, os.WriteFile(filepath.Join(folder, "20-second.conf"), fmt.Appendf(nil, second, t.TempDir()), 0o644))
	}
}

// checkMetrics checks the form of all metrics, and values of one container.
func (s *system) checkMetrics(pod, id string) {
	t := s.t
	t.Helper()
	described, err := s.CRI.ListMetricDescriptors(t.Context(), &criv1.ListMetricDescriptorsRequest{})
	must(t, err)
	labels := map[string][]string{}
	for _, d := range described.GetDescriptors() {
		labels[d.GetName()] = d.GetLabelKeys()
	}
	metrics, err := s.CRI.ListPodSandboxMetrics(t.Context(), &criv1.ListPodSandboxMetricsRequest{})
	must(t, err)
	values := map[string]uint64{}
	series, interfaces := map[string]bool{}, map[string]bool{}
	for _, p := range metrics.GetPodMetrics() {
		all := p.GetMetrics()
		for _, c := range p.GetContainerMetrics() {
			all = append(all, c.GetMetrics()...)
		}
		for _, m := range all {
			key := fmt.Sprint(m.GetName(), m.GetLabelValues())
			if series[key] || len(labels[m.GetName()]) != len(m.GetLabelValues()) {
				t.Errorf("metric %v comes twice or is not described", m)
			}
			series[key] = true
			if strings.HasPrefix(m.GetName(), "container_network_") {
				interfaces[p.GetPodSandboxId()+m.GetLabelValues()[6]] = true
			}
			if p.GetPodSandboxId() == pod && (m.GetLabelValues()[3] == id || m.GetLabelValues()[3] == pod) {
				values[m.GetName()] = m.GetValue().GetValue()
			}
		}
	}
	for name, least := range map[string]uint64{
		"container_memory_usage_bytes": 1, "container_processes": 1, "container_threads": 1, "container_file_descriptors": 1,
		"container_spec_cpu_quota": 5000, "container_spec_memory_limit_bytes": 64 << 20, "container_cpu_cfs_throttled_periods_total": 1,
		"container_fs_usage_bytes": 100000, "container_fs_limit_bytes": 1, "container_start_time_seconds": 1, "container_last_seen": 1,
		"container_network_transmit_packets_total": 0, "container_tasks_state": 0, "container_cpu_cfs_burst_periods_total": 0, "container_oom_events_total": 0, "container_ulimits_soft": 1,
	} {
		if got, ok := values[name]; !ok || got < least {
			t.Errorf("%s is %d (there: %v), want at least %d", name, got, ok, least)
		}
	}
	if !interfaces[pod+"eth0"] || !interfaces[pod+"eth1"] {
		t.Errorf("interfaces with metrics are %v, want eth0 and eth1 of %s", interfaces, pod)
	}
}

// checkStreams checks that the streamed lists hold what the others do.
func (s *system) checkStreams(pod string) {
	t := s.t
	t.Helper()
	ctx := t.Context()
	sandboxes, err := s.CRI.StreamPodSandboxes(ctx, &criv1.StreamPodSandboxesRequest{Filter: &criv1.PodSandboxFilter{Id: pod}})
	must(t, err)
	containers, err := s.CRI.StreamContainers(ctx, &criv1.StreamContainersRequest{Filter: &criv1.ContainerFilter{PodSandboxId: pod}})
	must(t, err)
	usage, err := s.CRI.StreamContainerStats(ctx, &criv1.StreamContainerStatsRequest{})
	must(t, err)
	pods, err := s.CRI.StreamPodSandboxStats(ctx, &criv1.StreamPodSandboxStatsRequest{})
	must(t, err)
	metrics, err := s.CRI.StreamPodSandboxMetrics(ctx, &criv1.StreamPodSandboxMetricsRequest{})
	must(t, err)
	images, err := s.Images.StreamImages(ctx, &criv1.StreamImagesRequest{})
	must(t, err)
	for name, got := range map[string]int{
		"StreamPodSandboxes":      count(t, sandboxes.Recv, (*criv1.StreamPodSandboxesResponse).GetPodSandboxes),
		"StreamContainers":        count(t, containers.Recv, (*criv1.StreamContainersResponse).GetContainers),
		"StreamContainerStats":    count(t, usage.Recv, (*criv1.StreamContainerStatsResponse).GetContainerStats),
		"StreamPodSandboxStats":   count(t, pods.Recv, (*criv1.StreamPodSandboxStatsResponse).GetPodSandboxStats) - 1,
		"StreamPodSandboxMetrics": count(t, metrics.Recv, (*criv1.StreamPodSandboxMetricsResponse).GetPodSandboxMetrics) - 1,
		"StreamImages":            count(t, images.Recv, (*criv1.StreamImagesResponse).GetImages),
	} {
		if got != 1 {
			t.Errorf("%s gives %d too many or too few", name, got-1)
		}
	}
}

// count gives the number of items of a streamed list.
func count[Piece, Item any](t *testing.T, receive func() (Piece, error), items func(Piece) []Item) int {
	t.Helper()
	n := 0
	for {
		piece, err := receive()
		if errors.Is(err, io.EOF) {
			return n
		}
		must(t, err)
		if len(items(piece)) == 0 {
			t.Error("an empty piece")
		}
		n += len(items(piece))
	}
}

// An operator sees in one place how all four processes are.
func TestInfoTellsOfAllProcesses(t *testing.T) {
	s := start(t, testenv.Setup{})
	var info map[string]json.RawMessage
	must(t, json.Unmarshal([]byte(s.crictl("info")), &info))
	for process, word := range map[string]string{
		"cri-gateway": `"socket"`, "sandboxd": `"recovered": true`, "nri-hub": `"connected": true`, "eventbus": `"connected": true`,
	} {
		contains(t, string(info[process]), word)
	}
}
