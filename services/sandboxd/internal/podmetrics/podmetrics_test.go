package podmetrics_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

func full() podmetrics.Sample {
	psi := &criv1.PsiStats{Some: &criv1.PsiData{Total: 5e9}, Full: &criv1.PsiData{Total: 2e9}}
	return podmetrics.Sample{
		Labels: podmetrics.Labels{Container: "c", ID: "/pod/1", Image: "busybox", Name: "1", Namespace: "ns", Pod: "p"},
		Now:    time.Unix(100, 0), Started: time.Unix(50, 0),
		Cgroup: &podmetrics.Figures{
			CPU: 7_900_000_000, Memory: 1000, InactiveFile: 300, Quota: 20000, BurstTime: 6e9, CPUPSI: psi, MemoryPSI: psi, IOPSI: psi,
			Own: podmetrics.Faults{Minor: 1, Major: 2}, Hierarchy: podmetrics.Faults{Minor: 3, Major: 4},
			HugePages: []podmetrics.HugePages{{Size: "2MB", Usage: 10, Max: 20, MaxKnown: true}, {Size: "1GB"}},
			Devices: []podmetrics.Device{{
				Major: 8, Minor: 1, Bytes: map[string]uint64{"Read": 4096, "Write": 1}, IOs: map[string]uint64{"Read": 2},
			}},
		},
		Processes:  &podmetrics.Processes{Count: 1, FileDescriptors: 5, Sockets: 2, OpenFilesLimit: 1024, Running: 3, Sleeping: 4},
		Interfaces: []podmetrics.Interface{{Name: "eth0", Received: podmetrics.Traffic{Bytes: 9}}},
		Layer:      &podmetrics.Layer{Filesystem: podmetrics.Filesystem{Device: "/dev/sda1", Bytes: 11}, Used: 12, At: time.Unix(90, 0)},
		DeviceName: func(major, minor uint64) string { return fmt.Sprintf("/dev/%d-%d", major, minor) },
	}
}

// What is sent is described, with as many label values as keys, and everything that is
// described can be sent.
func TestDescribedAndSentAgree(t *testing.T) {
	t.Parallel()
	table := podmetrics.New()
	described := map[string]*criv1.MetricDescriptor{}
	for _, d := range table.Descriptors() {
		if described[d.GetName()] != nil || d.GetHelp() == "" || !strings.HasPrefix(d.GetName(), "container_") {
			t.Errorf("descriptor %v", d)
		}
		described[d.GetName()] = d
	}
	seen := map[string]bool{}
	series := map[string]bool{}
	for _, m := range table.Metrics(full()) {
		d := described[m.GetName()]
		if d == nil || len(d.GetLabelKeys()) != len(m.GetLabelValues()) {
			t.Errorf("metric %v is described by %v", m, d)
		}
		seen[m.GetName()] = true
		key := m.GetName() + strings.Join(m.GetLabelValues(), ",")
		if series[key] {
			t.Errorf("%s comes twice", key)
		}
		series[key] = true
		if counter := m.GetMetricType() == criv1.MetricType_COUNTER; counter != strings.HasSuffix(m.GetName(), "_total") && !slices.Contains([]string{"container_memory_failcnt", "container_fs_inodes_total"}, m.GetName()) {
			t.Errorf("%s has the type %v", m.GetName(), m.GetMetricType())
		}
	}
	for name := range described {
		if !seen[name] {
			t.Errorf("%s is described and never sent", name)
		}
	}
}

func TestValues(t *testing.T) {
	t.Parallel()
	base := []string{"c", "/pod/1", "busybox", "1", "ns", "p"}
	for name, want := range map[string][]*criv1.Metric{
		"container_cpu_usage_seconds_total":     {point(7, 0, base, "total")},
		"container_cpu_cfs_burst_seconds_total": {point(6, 0, base)},
		"container_tasks_state": {
			point(4, 0, base, "sleeping"), point(3, 0, base, "running"), point(0, 0, base, "stopped"), point(0, 0, base, "uninterruptible"),
		},
		"container_memory_working_set_bytes":          {point(700, 0, base)},
		"container_pressure_io_waiting_seconds_total": {point(5, 0, base)},
		"container_pressure_io_stalled_seconds_total": {point(2, 0, base)},
		"container_start_time_seconds":                {point(50, 0, base)},
		"container_last_seen":                         {point(100, 0, base)},
		"container_fs_usage_bytes":                    {point(12, 90e9, base, "/dev/sda1")},
		"container_fs_reads_bytes_total":              {point(4096, 0, base, "/dev/8-1")},
		"container_fs_writes_total":                   {point(0, 0, base, "/dev/8-1")},
		"container_network_receive_bytes_total":       {point(9, 0, base, "eth0")},
		"container_ulimits_soft":                      {point(1024, 0, base, "max_open_files")},
		"container_hugetlb_max_usage_bytes":           {point(20, 0, base, "2MB")},
		"container_spec_cpu_quota":                    {point(20000, 0, base)},
		"container_spec_memory_limit_bytes":           {point(0, 0, base)},
		"container_blkio_device_usage_total":          {point(4096, 0, base, "/dev/8-1", "8", "1", "Read"), point(1, 0, base, "/dev/8-1", "8", "1", "Write")},
		"container_memory_failures_total": {
			point(1, 0, base, "pgfault", "container"), point(2, 0, base, "pgmajfault", "container"),
			point(3, 0, base, "pgfault", "hierarchy"), point(4, 0, base, "pgmajfault", "hierarchy"),
		},
	} {
		var got []string
		for _, m := range podmetrics.New().Metrics(full()) {
			if m.GetName() == name {
				got = append(got, show(m))
			}
		}
		var wanted []string
		for _, m := range want {
			wanted = append(wanted, show(m))
		}
		if diff := cmp.Diff(wanted, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func point(value uint64, at int64, base []string, extra ...string) *criv1.Metric {
	return &criv1.Metric{LabelValues: slices.Concat(base, extra), Timestamp: at, Value: &criv1.UInt64Value{Value: value}}
}

func show(m *criv1.Metric) string {
	return fmt.Sprint(m.GetLabelValues(), m.GetValue().GetValue(), "@", m.GetTimestamp())
}

// What was not read gives no metric rather than a zero.
func TestNothingReadNothingSent(t *testing.T) {
	t.Parallel()
	if got := podmetrics.New().Metrics(podmetrics.Sample{}); len(got) != 0 {
		t.Errorf("an empty sample gives %v", got)
	}
	some := podmetrics.Sample{Cgroup: &podmetrics.Figures{}}
	for _, m := range podmetrics.New().Metrics(some) {
		for _, unwanted := range []string{"pressure", "quota", "cfs", "tasks_state", "hugetlb", "_fs_", "network", "ulimits"} {
			if strings.Contains(m.GetName(), unwanted) {
				t.Errorf("%s was sent although it was not read", m.GetName())
			}
		}
	}
}
