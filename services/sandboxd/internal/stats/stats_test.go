package stats

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// tree makes files below a new folder.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// same compares without time stamps.
func same(t *testing.T, want, got any) {
	t.Helper()
	opts := []cmp.Option{
		protocmp.Transform(),
		protocmp.IgnoreFields(&criv1.CpuUsage{}, "timestamp"),
		protocmp.IgnoreFields(&criv1.MemoryUsage{}, "timestamp"),
		protocmp.IgnoreFields(&criv1.SwapUsage{}, "timestamp"),
		protocmp.IgnoreFields(&criv1.IoUsage{}, "timestamp"),
		protocmp.IgnoreFields(&criv1.ProcessUsage{}, "timestamp"),
		protocmp.IgnoreFields(&criv1.NetworkUsage{}, "timestamp"),
	}
	if diff := cmp.Diff(want, got, opts...); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func v1Tree(t *testing.T) string {
	t.Helper()
	return tree(t, map[string]string{
		"cpuacct/pod/c/cpuacct.usage":                 "5000000000\n",
		"memory/pod/c/memory.usage_in_bytes":          "1000\n",
		"memory/pod/c/memory.limit_in_bytes":          "4000\n",
		"memory/pod/c/memory.stat":                    "inactive_file 1\ntotal_inactive_file 300\ntotal_rss 500\ntotal_pgfault 7\ntotal_pgmajfault 2\n",
		"memory/pod/c/memory.memsw.usage_in_bytes":    "1200\n",
		"memory/pod/c/memory.memsw.limit_in_bytes":    "5000\n",
		"memory/pod/c/memory.oom_control":             "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
		"memory/pod/free/memory.usage_in_bytes":       "10\n",
		"memory/pod/free/memory.limit_in_bytes":       "9223372036854771712\n",
		"memory/pod/free/memory.memsw.limit_in_bytes": "9223372036854771712\n",
		"memory/pod/free/memory.memsw.usage_in_bytes": "10\n",
		"pids/pod/pids.current":                       "4\n",
		"cpu,cpuacct/pod/free/cpuacct.usage":          "7\n",
		"memory/pod/memory.usage_in_bytes":            "1010",
		"cpuacct/pod/cpuacct.usage":                   "6000000000",
		"memory/pod/memory.limit_in_bytes":            "8000",
		"memory/pod/memory.stat":                      "total_inactive_file 310\n",
		"memory/pod/free/memory.stat":                 "garbage\n\ntotal_rss\ntotal_inactive_file 99\n",
		"memory/pod/free/memory.oom_control":          "",
	})
}

func TestVersion1(t *testing.T) {
	t.Parallel()
	r := New(v1Tree(t), false)
	attributes := &criv1.ContainerAttributes{Id: "c"}
	layer := &criv1.FilesystemUsage{UsedBytes: value(11)}
	same(t, &criv1.ContainerStats{
		Attributes: attributes, WritableLayer: layer,
		Cpu: &criv1.CpuUsage{UsageCoreNanoSeconds: value(5e9)},
		Memory: &criv1.MemoryUsage{
			WorkingSetBytes: value(700), UsageBytes: value(1000), RssBytes: value(500),
			PageFaults: value(7), MajorPageFaults: value(2), AvailableBytes: value(3300),
		},
		Swap: &criv1.SwapUsage{SwapUsageBytes: value(200), SwapAvailableBytes: value(800)},
		Io:   &criv1.IoUsage{},
	}, r.Container(attributes, "/pod/c", layer))
	same(t, &criv1.ContainerStats{
		Cpu: &criv1.CpuUsage{UsageCoreNanoSeconds: value(7)},
		Memory: &criv1.MemoryUsage{
			WorkingSetBytes: value(0), UsageBytes: value(10), RssBytes: value(0), PageFaults: value(0), MajorPageFaults: value(0),
		},
		Swap: &criv1.SwapUsage{SwapUsageBytes: value(0)},
		Io:   &criv1.IoUsage{},
	}, r.Container(nil, "/pod/free", nil))
	if got := r.OOMKills("/pod/c"); got != 3 {
		t.Errorf("%d killed, want 3", got)
	}
}

func TestVersion2(t *testing.T) {
	t.Parallel()
	r := New(tree(t, map[string]string{
		"a.slice/a-b.slice/crisp-c.scope/cpu.stat":            "usage_usec 5000\nuser_usec 1\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.current":      "1000\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.max":          "max\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.stat":         "anon 500\ninactive_file 300\npgfault 7\npgmajfault 2\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.swap.current": "50\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.swap.max":     "0\n",
		"a.slice/a-b.slice/crisp-c.scope/memory.events":       "oom 9\noom_kill 2\n",
		"a.slice/a-b.slice/crisp-c.scope/cpu.pressure":        "some avg10=1.50 avg60=0.25 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	}), true)
	const group = "a-b.slice:crisp:c"
	same(t, &criv1.ContainerStats{
		Cpu: &criv1.CpuUsage{UsageCoreNanoSeconds: value(5e6), Psi: &criv1.PsiStats{
			Some: &criv1.PsiData{Total: 7000, Avg10: 1.5, Avg60: 0.25}, Full: &criv1.PsiData{},
		}},
		Memory: &criv1.MemoryUsage{
			WorkingSetBytes: value(700), UsageBytes: value(1000), RssBytes: value(500), PageFaults: value(7), MajorPageFaults: value(2),
		},
		Swap: &criv1.SwapUsage{SwapUsageBytes: value(50), SwapAvailableBytes: value(0)},
		Io:   &criv1.IoUsage{},
	}, r.Container(nil, group, nil))
	if got := r.OOMKills(group); got != 2 {
		t.Errorf("%d killed, want 2", got)
	}
}

func TestPod(t *testing.T) {
	t.Parallel()
	r := New(v1Tree(t), false)
	got := r.Pod("pod", "/no/such/namespace", nil, nil)
	same(t, &criv1.LinuxPodSandboxStats{
		Cpu: &criv1.CpuUsage{UsageCoreNanoSeconds: value(6e9)},
		Memory: &criv1.MemoryUsage{
			WorkingSetBytes: value(700), UsageBytes: value(1010), RssBytes: value(0), PageFaults: value(0), MajorPageFaults: value(0),
			AvailableBytes: value(7300),
		},
		Io: &criv1.IoUsage{}, Process: &criv1.ProcessUsage{ProcessCount: value(4)}, Network: &criv1.NetworkUsage{},
	}, got)
	if got.GetCpu().GetTimestamp() == 0 || got.GetNetwork().GetTimestamp() == 0 {
		t.Error("a time stamp is missing")
	}
}

func TestPodWithoutCgroup(t *testing.T) {
	t.Parallel()
	r := New(v1Tree(t), false)
	containers := []*criv1.ContainerStats{r.Container(nil, "/pod/c", nil), r.Container(nil, "/pod/free", nil)}
	for _, parent := range []string{"", "no-such-group", "/"} {
		got := r.Pod(parent, "", []string{"/pod/c", "/pod/free"}, containers)
		if got.GetCpu().GetUsageCoreNanoSeconds().GetValue() != 5e9+7 || got.GetMemory().GetUsageBytes().GetValue() != 1010 ||
			got.GetNetwork() != nil || got.GetProcess() == nil || len(got.GetContainers()) != 2 {
			t.Errorf("parent %q: %v", parent, got)
		}
	}
}

// Of a container that was made without a cgroup nothing is said, rather than what the root uses.
func TestContainerWithoutCgroup(t *testing.T) {
	t.Parallel()
	r := New(tree(t, map[string]string{
		"memory/memory.usage_in_bytes": "1\n", "memory/memory.oom_control": "oom_kill 5\n", "cpuset/cpuset.cpus": "0-3\n",
	}), false)
	got := r.Container(&criv1.ContainerAttributes{Id: "c"}, "", &criv1.FilesystemUsage{Timestamp: 5})
	if got.GetAttributes().GetId() != "c" || got.GetWritableLayer() == nil || got.GetCpu() != nil || got.GetMemory() != nil {
		t.Errorf("stats %v", got)
	}
	pod := r.Pod("", "", []string{""}, []*criv1.ContainerStats{got})
	if pod.GetCpu() != nil || pod.GetMemory() != nil || pod.GetProcess() != nil || len(pod.GetContainers()) != 1 {
		t.Errorf("stats of the pod %v", pod)
	}
	cpus, mems := r.Sets("")
	if kills := r.OOMKills(""); kills != 0 || cpus != "" || mems != "" {
		t.Errorf("%d killed, sets %q, %q", kills, cpus, mems)
	}
}

func TestGoneCgroup(t *testing.T) {
	t.Parallel()
	for _, unified := range []bool{false, true} {
		r := New(t.TempDir(), unified)
		got := r.Container(nil, "/gone", nil)
		if got.GetCpu().GetTimestamp() == 0 || got.GetCpu().GetUsageCoreNanoSeconds() == nil || got.GetMemory().GetWorkingSetBytes().GetValue() != 0 {
			t.Errorf("unified %v: %v", unified, got)
		}
		if n := r.OOMKills("/gone"); n != 0 {
			t.Errorf("unified %v: %d killed", unified, n)
		}
	}
}

func TestSets(t *testing.T) {
	t.Parallel()
	v1 := New(tree(t, map[string]string{"cpuset/c/cpuset.cpus": "0-3\n", "cpuset/c/cpuset.mems": "0\n"}), false)
	v2 := New(tree(t, map[string]string{
		"c/cpuset.cpus": "\n", "c/cpuset.cpus.effective": "0-3\n", "c/cpuset.mems": "0\n", "c/cpuset.mems.effective": "0-1\n",
	}), true)
	for _, r := range []*Reader{v1, v2} {
		if cpus, mems := r.Sets("/c"); cpus != "0-3" || mems != "0" {
			t.Errorf("processors %q, memory nodes %q", cpus, mems)
		}
		if cpus, mems := r.Sets("/gone"); cpus+mems != "" {
			t.Errorf("a group that is gone has %q, %q", cpus, mems)
		}
	}
}

func TestPath(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"/a/b/c":                        "/a/b/c",
		"a/../../b":                     "/b",
		"a-b-c.slice:crisp:x":           "/a.slice/a-b.slice/a-b-c.slice/crisp-x.scope",
		"system.slice:crisp:x":          "/system.slice/crisp-x.scope",
		"-.slice:crisp:x":               "/crisp-x.scope",
		"a.slice:crisp:a-inner.slice":   "/a.slice/a-inner.slice",
		"kubepods-burstable.slice:c:id": "/kubepods.slice/kubepods-burstable.slice/c-id.scope",
	} {
		if got := Path(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestRates(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r rates
		see := func(total uint64) *criv1.UInt64Value { return r.observe("c", time.Now(), total) }
		if got := see(100); got != nil {
			t.Errorf("a rate from one reading: %v", got)
		}
		time.Sleep(2 * time.Second)
		if got := see(300).GetValue(); got != 100 {
			t.Errorf("rate %d, want 100", got)
		}
		time.Sleep(time.Millisecond)
		if got := see(9000).GetValue(); got != 100 {
			t.Errorf("rate %d, want the last one", got)
		}
		if got := see(10); got != nil {
			t.Errorf("a rate from a counter that started anew: %v", got)
		}
		time.Sleep(2 * forgotten)
		r.observe("other", time.Now(), 1)
		if _, ok := r.samples["c"]; ok {
			t.Error("an old reading is kept")
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add("some avg10=1.50 avg60=0.25 avg300=0.00 total=7\nfull total=x")
	f.Add("a 1\nb\n\n c 3")
	f.Fuzz(func(_ *testing.T, s string) {
		parsePressure(s)
		parseKeyed(s)
		Path(s)
	})
}
