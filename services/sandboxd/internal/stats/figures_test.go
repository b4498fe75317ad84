package stats

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

func TestMeasureVersion1(t *testing.T) {
	t.Parallel()
	r := New(tree(t, map[string]string{
		"cpuacct/c/cpuacct.usage":                      "5000000000\n",
		"cpuacct/c/cpuacct.stat":                       "user 300\nsystem 100\n",
		"cpu/c/cpu.stat":                               "nr_periods 10\nnr_throttled 4\nthrottled_time 12345\nnr_bursts 2\nburst_time 77\n",
		"cpu/c/cpu.shares":                             "1024\n",
		"cpu/c/cpu.cfs_period_us":                      "100000\n",
		"cpu/c/cpu.cfs_quota_us":                       "-1\n",
		"memory/c/memory.usage_in_bytes":               "1000\n",
		"memory/c/memory.max_usage_in_bytes":           "2000\n",
		"memory/c/memory.failcnt":                      "6\n",
		"memory/c/memory.soft_limit_in_bytes":          "9223372036854771712\n",
		"memory/c/memory.limit_in_bytes":               "4000\n",
		"memory/c/memory.oom_control":                  "oom_kill 3\n",
		"memory/c/memory.stat":                         "pgfault 1\npgmajfault 2\ntotal_cache 5\ntotal_mapped_file 6\ntotal_active_file 8\ntotal_pgfault 3\ntotal_pgmajfault 4\n",
		"pids/c/pids.current":                          "2\n",
		"pids/c/pids.max":                              "max\n",
		"hugetlb/c/hugetlb.2MB.usage_in_bytes":         "10\n",
		"hugetlb/c/hugetlb.2MB.max_usage_in_bytes":     "20\n",
		"hugetlb/c/hugetlb.2MB.rsvd.usage_in_bytes":    "99\n",
		"blkio/c/blkio.throttle.io_service_bytes":      "8:0 Read 4096\n8:0 Write 1\nTotal 4097\n",
		"blkio/c/blkio.throttle.io_serviced_recursive": "8:0 Read 2\n",
		"unified/c/io.pressure":                        "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
	}), false)
	want := podmetrics.Figures{
		Group: "/c",
		CPU:   5e9, User: 3e9, System: 1e9, Periods: 10, Throttled: 4, ThrottledTime: 12345, Bursts: 2, BurstTime: 77, Shares: 1024, Period: 100000,
		Memory: 1000, MaxMemory: 2000, MemoryFailures: 6, MemoryLimit: 4000, OOMKills: 3, Cache: 5, MappedFile: 6, ActiveFile: 8,
		Own: podmetrics.Faults{Minor: 1, Major: 2}, Hierarchy: podmetrics.Faults{Minor: 3, Major: 4}, Tasks: 2,
		HugePages: []podmetrics.HugePages{{Size: "2MB", Usage: 10, Max: 20, MaxKnown: true}},
		Devices:   []podmetrics.Device{{Major: 8, Bytes: map[string]uint64{"Read": 4096, "Write": 1}, IOs: map[string]uint64{"Read": 2}}},
		IOPSI:     &criv1.PsiStats{Some: &criv1.PsiData{Total: 7000}},
	}
	if diff := cmp.Diff(want, r.Measure("/c"), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMeasureVersion2(t *testing.T) {
	t.Parallel()
	r := New(tree(t, map[string]string{
		"a.slice/a-b.slice/cpu.stat":            "usage_usec 5\nuser_usec 3\nsystem_usec 2\nnr_periods 10\nnr_throttled 4\nthrottled_usec 7\nnr_bursts 2\nburst_usec 8\n",
		"a.slice/a-b.slice/cpu.weight":          "100\n",
		"a.slice/a-b.slice/cpu.max":             "20000 100000\n",
		"a.slice/a-b.slice/memory.current":      "1000\n",
		"a.slice/a-b.slice/memory.peak":         "2000\n",
		"a.slice/a-b.slice/memory.max":          "max\n",
		"a.slice/a-b.slice/memory.low":          "50\n",
		"a.slice/a-b.slice/memory.events":       "max 6\noom_kill 3\n",
		"a.slice/a-b.slice/memory.stat":         "anon 4\nfile 5\nfile_mapped 6\nactive_file 8\nkernel_stack 1\nslab 2\npgfault 1\npgmajfault 2\n",
		"a.slice/a-b.slice/pids.max":            "9\n",
		"a.slice/a-b.slice/io.stat":             "8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6 cost.vrate=100.00 cost.usage=1 cost.wait=2 cost.indebt=3 cost.indelay=4\n\nbad\n",
		"a.slice/a-b.slice/hugetlb.1GB.current": "10\n",
	}), true)
	got, ok := r.MeasurePod("a-b.slice")
	want := podmetrics.Figures{
		Group: "/a.slice/a-b.slice",
		CPU:   5000, User: 3000, System: 2000, Periods: 10, Throttled: 4, ThrottledTime: 7000, Bursts: 2, BurstTime: 8000,
		Shares: 2 + 99*262142/9999, Quota: 20000, Period: 100000,
		Memory: 1000, MaxMemory: 2000, MemoryReservation: 50, MemoryFailures: 6, OOMKills: 3,
		RSS: 4, Cache: 5, MappedFile: 6, ActiveFile: 8, Kernel: 3,
		Own: podmetrics.Faults{Minor: 1, Major: 2}, Hierarchy: podmetrics.Faults{Minor: 1, Major: 2}, TasksMax: 9,
		HugePages: []podmetrics.HugePages{{Size: "1GB", Usage: 10}},
		Devices: []podmetrics.Device{{
			Major: 8, Minor: 16,
			Bytes: map[string]uint64{"Read": 1, "Write": 2, "Discard": 5}, IOs: map[string]uint64{"Read": 3, "Write": 4, "Discard": 6},
		}},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" || !ok {
		t.Errorf("ok %v (-want +got):\n%s", ok, diff)
	}
	for _, parent := range []string{"", "/", "gone.slice", "/gone"} {
		if _, ok := r.MeasurePod(parent); ok {
			t.Errorf("%q was measured", parent)
		}
	}
}

func TestParentPath(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                    "/",
		"/kubepods/pod1":                      "/kubepods/pod1",
		"kubepods-pod1.slice":                 "/kubepods.slice/kubepods-pod1.slice",
		"/kubepods.slice/kubepods-pod1.slice": "/kubepods.slice/kubepods-pod1.slice",
		"system.slice":                        "/system.slice",
	} {
		if got := ParentPath(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestProcesses(t *testing.T) {
	t.Parallel()
	root := tree(t, map[string]string{
		"pids/c/cgroup.procs":       "10\n11\n",
		"pids/c/inner/cgroup.procs": "12\n",
		"proc/10/limits":            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files     \n",
		"proc/10/fd/x":              "",
		"proc/10/task/10/stat":      "10 (a) R b) S 1 10",
		"proc/10/task/13/stat":      "13 (a) R 1 10",
		"proc/10/task/14/stat":      "14 (a) D 1 10",
		"proc/12/task/12/stat":      "12 (b) T 1",
		"proc/12/task/15/stat":      "15 (b)",
		"proc/12/comm":              "",
	})
	for fd, target := range map[string]string{"0": "/dev/null", "1": "socket:[5]", "2": "pipe:[6]"} {
		if err := os.Symlink(target, filepath.Join(root, "proc/10/fd", fd)); err != nil {
			t.Fatal(err)
		}
	}
	r := New(root, false)
	r.proc = filepath.Join(root, "proc")
	want := podmetrics.Processes{
		Count: 3, FileDescriptors: 3, Sockets: 1, OpenFilesLimit: 1024, Running: 1, Sleeping: 1, Stopped: 1, Uninterruptible: 1,
	}
	if diff := cmp.Diff(want, r.Processes("/c")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := r.Processes("/gone"); got != (podmetrics.Processes{}) {
		t.Errorf("a group that is gone has %v", got)
	}
}

func TestDeviceOf(t *testing.T) {
	t.Parallel()
	r := New(t.TempDir(), false)
	const mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n" +
		"2 1 8:2 / /var/lib rw shared:1 - xfs /dev/sdb rw\n" +
		"3 1 8:3 / /var/lib/other rw - xfs /dev/sdc rw\n" +
		"broken\n"
	for folder, want := range map[string]string{
		"/var/lib/crisp": "/dev/sdb", "/var/library": "/dev/sda1", "/var/lib": "/dev/sdb", "/var/lib/other/x": "/dev/sdc",
	} {
		if got := deviceOf(folder, mounts); got != want {
			t.Errorf("%s: %q, want %q", folder, got, want)
		}
	}
	if fs := r.Filesystem(t.TempDir()); fs.Bytes == 0 || fs.Device == "" {
		t.Errorf("file system %+v", fs)
	}
	if got := r.DeviceName(0, 0); got != "0:0" {
		t.Errorf("no device: %q", got)
	}
}
