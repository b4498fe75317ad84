package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	statsv1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	statsv2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// folderWith makes a folder with files.
func folderWith(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLocate(t *testing.T) {
	mounts := []*mountinfo.Info{
		{Mountpoint: "/sys/fs/cgroup/cpu,cpuacct", Root: "/", FSType: "cgroup", VFSOptions: "rw,cpu,cpuacct"},
		{Mountpoint: "/sys/fs/cgroup/memory", Root: "/above", FSType: "cgroup", VFSOptions: "rw,memory"},
		{Mountpoint: "/sys/fs/cgroup/systemd", Root: "/", FSType: "cgroup", VFSOptions: "rw,name=systemd"},
		{Mountpoint: "/sys/fs/cgroup/unified", Root: "/", FSType: "cgroup2", VFSOptions: "rw"},
	}
	for _, tc := range []struct {
		name       string
		paths, own map[string]string
		want       map[string]string
		unified    bool
	}{
		{
			"version 1",
			map[string]string{"cpu": "/k/c", "cpuacct": "/k/c", "memory": "/above/k/c", "name=systemd": "/", "": "/"},
			map[string]string{"cpu": "/", "memory": "/above", "": "/"},
			map[string]string{
				"cpu": "/sys/fs/cgroup/cpu,cpuacct/k/c", "cpuacct": "/sys/fs/cgroup/cpu,cpuacct/k/c", "memory": "/sys/fs/cgroup/memory/k/c",
			},
			false,
		},
		{
			"version 2",
			map[string]string{"": "/k/c"},
			map[string]string{"": "/shim"},
			map[string]string{"": "/sys/fs/cgroup/unified/k/c"},
			true,
		},
		{"the shim's own", map[string]string{"": "/shim"}, map[string]string{"": "/shim"}, map[string]string{}, false},
	} {
		g := locate(tc.paths, tc.own, mounts)
		if diff := cmp.Diff(tc.want, g.dirs); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
		if g.Unified() != tc.unified {
			t.Errorf("%s: unified %v", tc.name, g.Unified())
		}
	}
}

func TestMetricsV2(t *testing.T) {
	g := Group{dirs: map[string]string{"": folderWith(t, map[string]string{
		"cgroup.procs": "12\n0\n13\n", "pids.current": "2\n", "pids.max": "max\n",
		"cpu.stat":    "usage_usec 10\nuser_usec 6\nsystem_usec 4\nnr_periods 3\n",
		"memory.stat": "anon 100\nfile 50\n", "memory.current": "150\n", "memory.max": "1000\n",
		"memory.events": "low 0\nhigh 0\nmax 4\noom 2\noom_kill 1\n",
		"io.stat":       "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n",
	})}}
	a, err := g.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	var m statsv2.Metrics
	if err := proto.Unmarshal(a.GetValue(), &m); err != nil || a.GetTypeUrl() != "io.containerd.cgroups.v2.Metrics" {
		t.Fatalf("%s: %v", a.GetTypeUrl(), err)
	}
	if m.GetCPU().GetUsageUsec() != 10 || m.GetMemory().GetUsage() != 150 || m.GetMemory().GetUsageLimit() != 1000 ||
		m.GetPids().GetLimit() != parse("max") || m.GetMemoryEvents().GetOomKill() != 1 || m.GetIo().GetUsage()[0].GetWios() != 4 {
		t.Errorf("%v", &m)
	}
	if g.OOMKills() != 1 {
		t.Errorf("%d kills", g.OOMKills())
	}
	if pids, err := g.Pids(); err != nil || !cmp.Equal(pids, []int{12, 13}) {
		t.Errorf("pids %v, %v", pids, err)
	}
}

func TestMetricsV1(t *testing.T) {
	dir := folderWith(t, map[string]string{
		"pids.current": "2\n", "pids.max": "max\n", "cpuacct.usage": "7000\n", "cpuacct.usage_percpu": "3000 4000 \n",
		"cpuacct.stat": "user 2\nsystem 1\n", "cpu.stat": "nr_periods 1\nnr_throttled 2\nthrottled_time 3\n",
		"memory.stat": "cache 5\nrss 6\ntotal_rss 8\n", "memory.usage_in_bytes": "11\n", "memory.limit_in_bytes": "12\n",
		"memory.oom_control":                        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
		"blkio.throttle.io_service_bytes_recursive": "8:16 Read 4096\nTotal 4096\n",
	})
	g := Group{dirs: map[string]string{"pids": dir, "cpu": dir, "cpuacct": dir, "memory": dir, "blkio": dir}}
	a, err := g.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	var m statsv1.Metrics
	if err := proto.Unmarshal(a.GetValue(), &m); err != nil || a.GetTypeUrl() != "io.containerd.cgroups.v1.Metrics" {
		t.Fatalf("%s: %v", a.GetTypeUrl(), err)
	}
	io := m.GetBlkio().GetIoServiceBytesRecursive()
	if m.GetCPU().GetUsage().GetTotal() != 7000 || m.GetCPU().GetUsage().GetUser() != 2e7 || len(m.GetCPU().GetUsage().GetPerCPU()) != 2 ||
		m.GetMemory().GetTotalRSS() != 8 || m.GetMemory().GetUsage().GetLimit() != 12 || len(io) != 1 || io[0].GetMinor() != 16 ||
		m.GetPids().GetLimit() != 0 || m.GetMemoryOomControl().GetOomKill() != 3 {
		t.Errorf("%v", &m)
	}
	if _, err := (Group{}).Metrics(); !errdefs.IsNotFound(err) {
		t.Errorf("no group: %v", err)
	}
}

// Version 2 tells of a kill by a change of a file.
func TestWatchV2(t *testing.T) {
	dir := folderWith(t, map[string]string{"memory.events": "oom_kill 0\n"})
	g := Group{dirs: map[string]string{"": dir}}
	kills := make(chan uint64, 4)
	w, err := g.WatchOOM(func(n uint64) { kills <- n })
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "memory.events"), []byte("oom_kill 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := testkit.Receive(t, kills); n != 2 {
		t.Errorf("%d kills", n)
	}
	w.Close()
	if _, err := (Group{}).WatchOOM(nil); err == nil {
		t.Error("watch without a group")
	}
}
