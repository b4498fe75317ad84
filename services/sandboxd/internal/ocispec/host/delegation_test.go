package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// group makes a folder that looks like a control group. One that is closed lacks the file by
// which processes join, which root could write whatever its mode.
func group(t *testing.T, open bool, path ...string) {
	t.Helper()
	dir := filepath.Join(path...)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if open {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheHighestGroupThatIsDelegatedIsChosen(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, h := range []string{"cpu", "memory"} {
		group(t, false, root, h, "user")
		group(t, true, root, h, "user", "me")
		group(t, true, root, h, "user", "me", "session")
	}
	group(t, true, root, "memory", "user")
	cpu := hierarchy{filepath.Join(root, "cpu"), "/", "/user/me/session"}
	memory := hierarchy{filepath.Join(root, "memory"), "/", "/"}
	if got := choose([]hierarchy{cpu, memory}); got.None || got.Root != "/user/me" {
		t.Errorf("got %+v", got)
	}
	// Of a mount of a part, as of a container of another runtime, only that part is there.
	part := hierarchy{filepath.Join(root, "cpu", "user", "me"), "/user/me", "/user/me/session"}
	if got := choose([]hierarchy{part}); got.None || got.Root != "/user/me" {
		t.Errorf("of a part: %+v", got)
	}
	// A namespace of control groups without mounts of its own hides where things are.
	if got := choose([]hierarchy{{filepath.Join(root, "cpu"), "/../..", "/"}}); !got.None {
		t.Errorf("of a foreign mount: %+v", got)
	}
	own := hierarchy{filepath.Join(root, "memory", "user"), "/", "/"}
	if got := choose([]hierarchy{own}); got.None || got.Root != "/" {
		t.Errorf("of a namespace with mounts: %+v", got)
	}
	closed := hierarchy{filepath.Join(root, "cpu"), "/", "/user"}
	if got := choose([]hierarchy{closed}); !got.None || !strings.Contains(got.Why, "cgroup.procs") {
		t.Errorf("of a closed one: %+v", got)
	}
	if got := choose(nil); !got.None || got.Why == "" {
		t.Errorf("of none: %+v", got)
	}
}

func TestHierarchies(t *testing.T) {
	t.Parallel()
	mounts := []*mountinfo.Info{
		{Mountpoint: "/a/cpu", Root: "/", FSType: "cgroup", VFSOptions: "rw,cpu,cpuacct"},
		{Mountpoint: "/a/memory", Root: "/x", FSType: "cgroup", VFSOptions: "rw,memory"},
		{Mountpoint: "/a/systemd", Root: "/", FSType: "cgroup", VFSOptions: "rw,name=systemd"},
		{Mountpoint: "/a/unified", Root: "/", FSType: "cgroup2", VFSOptions: "rw"},
	}
	const own = "5:name=systemd:/s\n4:memory:/x/m\n3:cpu,cpuacct:/c\n0::/u\n"
	want := []hierarchy{{"/a/cpu", "/", "/c"}, {"/a/memory", "/x", "/x/m"}}
	if diff := cmp.Diff(want, hierarchies(mounts, own, false), cmp.AllowUnexported(hierarchy{})); diff != "" {
		t.Error(diff)
	}
	want = []hierarchy{{"/a/unified", "/", "/u"}}
	if diff := cmp.Diff(want, hierarchies(mounts, own, true), cmp.AllowUnexported(hierarchy{})); diff != "" {
		t.Error(diff)
	}
}

func TestParent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ root, asked, want string }{
		{"", "", "/crisp"},
		{"", "/kubepods/x", "/kubepods/x"},
		{"/", "", "/crisp"},
		{"/", "kubepods", "/kubepods"},
		{"/user/me", "", "/user/me/crisp"},
		{"/user/me", "/user/me/pods", "/user/me/pods"},
		{"/user/me", "/user/me", "/user/me"},
		{"/user/me", "/user/mean", ""},
		{"/user/me", "/kubepods", ""},
		{"/user/me", "/user/me/../other", ""},
	} {
		got, err := Delegation{Root: tt.root}.Parent(tt.asked)
		if got != tt.want || (tt.want == "") != errdefs.IsFailedPrecondition(err) {
			t.Errorf("%q below %q: %q, %v", tt.asked, tt.root, got, err)
		}
	}
}

func TestConfine(t *testing.T) {
	t.Parallel()
	devices := []specs.LinuxDeviceCgroup{{Access: "rwm"}}
	spec := func() *specs.Linux {
		return &specs.Linux{CgroupsPath: "/a/b", Resources: &specs.LinuxResources{
			CPU: &specs.LinuxCPU{Shares: new(uint64(5))}, Unified: map[string]string{"memory.high": "1"}, Devices: devices,
		}}
	}
	kept := spec()
	Delegation{}.Confine(kept)
	if diff := cmp.Diff(spec(), kept); diff != "" {
		t.Error(diff)
	}
	confined := spec()
	Delegation{None: true}.Confine(confined)
	if diff := cmp.Diff(&specs.Linux{Resources: &specs.LinuxResources{Devices: devices}}, confined); diff != "" {
		t.Error(diff)
	}
	Delegation{None: true}.Confine(&specs.Linux{}) // of a pod's own process, or a base specification
}
