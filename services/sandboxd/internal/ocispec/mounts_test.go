package ocispec

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
)

func destinationsOf(spec *specs.Spec) []string {
	var out []string
	for _, m := range spec.Mounts {
		out = append(out, m.Destination)
	}
	return out
}

func find(t *testing.T, spec *specs.Spec, destination string) specs.Mount {
	t.Helper()
	i := slices.IndexFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
	if i < 0 {
		t.Fatalf("no mount on %s", destination)
	}
	return spec.Mounts[i]
}

func TestMountsOfTheRequestWin(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	in := input()
	for _, p := range []string{"/a/b/c", "/a", "/a/b", "/etc/hosts", "/dev/shm", "/sys", "/dev"} {
		in.Config.Mounts = append(in.Config.Mounts, &criv1.Mount{ContainerPath: p, HostPath: dir})
	}
	spec, _ := build(t, testHost(), Options{}, in)
	want := []string{
		"/proc", "/a", "/sys", "/dev", "/etc/hostname", "/etc/resolv.conf", "/a/b", "/etc/hosts", "/dev/shm",
		"/sys/fs/cgroup", "/a/b/c",
	}
	if diff := cmp.Diff(want, destinationsOf(spec)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, p := range []string{"/etc/hosts", "/dev/shm", "/sys", "/dev"} {
		if m := find(t, spec, p); m.Source != dir {
			t.Errorf("%s comes from %s", p, m.Source)
		}
	}
}

func TestMountSources(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	link := func(name, target string) string {
		path := filepath.Join(dir, name)
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, host, want string
		err              error
	}{
		{name: "folder", host: dir, want: dir},
		{name: "with dots", host: dir + "/../" + filepath.Base(dir), want: dir},
		{name: "link to a file", host: link("l1", file), want: file},
		{name: "link to a link", host: link("l2", "l1"), want: file},
		{name: "link to nothing", host: link("l3", "nothing"), err: errdefs.ErrInvalidArgument},
		{name: "link to itself", host: link("l4", "l4"), err: errdefs.ErrFailedPrecondition},
		{name: "below a file", host: file + "/x", err: errdefs.ErrFailedPrecondition},
		{name: "relative", host: "x", err: errdefs.ErrInvalidArgument},
		{name: "empty", host: "", err: errdefs.ErrInvalidArgument},
	} {
		in := input()
		in.Config.Mounts = []*criv1.Mount{{ContainerPath: "/m", HostPath: tt.host}}
		spec, _, err := New(testHost(), Options{}).Build(in)
		if !errors.Is(err, tt.err) {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.err)
		}
		if err == nil && find(t, spec, "/m").Source != tt.want {
			t.Errorf("%s: source %s", tt.name, find(t, spec, "/m").Source)
		}
	}
	if left, err := filepath.Glob(dir + "/nothing*"); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestMissingMountSource(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	missing := filepath.Join(dir, "a", "b", "c")
	in := input()
	in.Config.Mounts = []*criv1.Mount{{ContainerPath: "/m", HostPath: missing}}
	if _, _, err := New(testHost(), Options{RejectMissingMountSources: true}).Build(in); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("error %v", err)
	}
	empty := func(when string) {
		t.Helper()
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
			t.Errorf("%s: %v, %v", when, entries, err)
		}
	}
	empty("after a refusal")
	failing := input()
	failing.Config.Mounts = []*criv1.Mount{in.Config.GetMounts()[0], {ContainerPath: "relative", HostPath: dir}}
	if _, _, err := New(testHost(), Options{}).Build(failing); err == nil {
		t.Error("no error")
	}
	empty("after a failure")
	_, result := build(t, testHost(), Options{}, in)
	if st, err := os.Stat(missing); err != nil || !st.IsDir() {
		t.Errorf("%v, %v", st, err)
	}
	result.Undo()
	empty("after the undo")
	_, result = build(t, testHost(), Options{}, in)
	if err := os.WriteFile(filepath.Join(dir, "a", "used"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	result.Undo()
	if _, err := os.Stat(filepath.Join(dir, "a", "used")); err != nil {
		t.Error("the undo removed somebody else's file")
	}
}

func TestMountOptions(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	old := testHost()
	old.RecursiveReadOnly = false
	for _, tt := range []struct {
		name  string
		mount *criv1.Mount
		host  host.Facts
		want  string
		err   error
	}{
		{name: "writable", mount: &criv1.Mount{}, want: "rbind rprivate rw"},
		{name: "read-only", mount: &criv1.Mount{Readonly: true, SelinuxRelabel: true}, want: "rbind rprivate ro"},
		{name: "recursively", mount: &criv1.Mount{Readonly: true, RecursiveReadOnly: true}, want: "rbind rprivate rro"},
		{name: "options", mount: &criv1.Mount{MountOptions: []string{"noexec", "nodev"}}, want: "rbind rprivate rw noexec nodev"},
		{name: "recursively but writable", mount: &criv1.Mount{RecursiveReadOnly: true}, err: errdefs.ErrInvalidArgument},
		{
			name: "recursively but propagating", err: errdefs.ErrInvalidArgument,
			mount: &criv1.Mount{Readonly: true, RecursiveReadOnly: true, Propagation: criv1.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, HostPath: "/proc"},
		},
		{name: "recursively on an old kernel", host: old, mount: &criv1.Mount{Readonly: true, RecursiveReadOnly: true}, err: errdefs.ErrFailedPrecondition},
		{name: "unknown option", mount: &criv1.Mount{MountOptions: []string{"bind"}}, err: errdefs.ErrInvalidArgument},
		{name: "unknown propagation", mount: &criv1.Mount{Propagation: 9}, err: errdefs.ErrInvalidArgument},
		{name: "the root", mount: &criv1.Mount{ContainerPath: "/x/.."}, err: errdefs.ErrInvalidArgument},
		{name: "relative", mount: &criv1.Mount{ContainerPath: "x"}, err: errdefs.ErrInvalidArgument},
		{name: "image that is not mounted", mount: &criv1.Mount{Image: &criv1.ImageSpec{Image: "i"}}, err: errdefs.ErrInvalidArgument},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if tt.mount.GetContainerPath() == "" {
				tt.mount.ContainerPath = "/m"
			}
			if tt.mount.GetHostPath() == "" && tt.mount.GetImage() == nil {
				tt.mount.HostPath = dir
			}
			if tt.host.Hostname == "" {
				tt.host = testHost()
			}
			in := input()
			in.Config.Mounts = []*criv1.Mount{tt.mount}
			spec, _, err := New(tt.host, Options{}).Build(in)
			if tt.name == "recursively but propagating" && errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Skip("the host's mounts do not propagate, which is told first")
			}
			if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if err == nil && strings.Join(find(t, spec, "/m").Options, " ") != tt.want {
				t.Errorf("options %v", find(t, spec, "/m").Options)
			}
		})
	}
}

func TestWritableCgroups(t *testing.T) {
	t.Parallel()
	for writable, access := range map[bool]string{false: "ro", true: "rw"} {
		in := input()
		in.Handler.CgroupWritable = writable
		spec, _ := build(t, v2Host(), Options{}, in)
		if m := find(t, spec, "/sys/fs/cgroup"); !slices.Contains(m.Options, access) {
			t.Errorf("writable %v: options %v", writable, m.Options)
		}
		if m := find(t, spec, "/sys"); !slices.Contains(m.Options, "ro") {
			t.Errorf("writable %v: options of /sys %v", writable, m.Options)
		}
		if !slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace}) {
			t.Errorf("writable %v: no cgroup namespace", writable)
		}
	}
	in := privileged(input())
	in.Handler.CgroupWritable = true
	if m := find(t, first(build(t, testHost(), Options{}, in)), "/sys/fs/cgroup"); !slices.Contains(m.Options, "rw") {
		t.Errorf("privileged on cgroup v1: options %v", m.Options)
	}
}

func first(spec *specs.Spec, _ Result) *specs.Spec { return spec }

func TestReadOnlyRootMakesPodFilesReadOnly(t *testing.T) {
	t.Parallel()
	in := input()
	in.sc().ReadonlyRootfs = true
	spec, _ := build(t, testHost(), Options{}, in)
	for p, access := range map[string]string{"/etc/hosts": "ro", "/etc/resolv.conf": "ro", "/etc/hostname": "ro", "/dev/shm": "rw"} {
		if m := find(t, spec, p); !slices.Contains(m.Options, access) {
			t.Errorf("%s: %v", p, m.Options)
		}
	}
}

func TestUserNamespaceWithHostIPCMountsNoQueuesOfItsOwn(t *testing.T) {
	t.Parallel()
	in := userns(input())
	delete(in.Namespaces, "ipc")
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions.Ipc = criv1.NamespaceMode_NODE
	in.sc().NamespaceOptions.Ipc = criv1.NamespaceMode_NODE
	spec, _ := build(t, testHost(), Options{}, in)
	for _, m := range spec.Mounts {
		if m.Destination == "/dev/mqueue" && m.Type != "bind" {
			t.Errorf("mount %+v", m)
		}
	}
}

func TestUserNamespaceOnHostNetworkBindsSys(t *testing.T) {
	t.Parallel()
	in := userns(input())
	delete(in.Namespaces, "network")
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions.Network = criv1.NamespaceMode_NODE
	in.sc().NamespaceOptions.Network = criv1.NamespaceMode_NODE
	spec, _ := build(t, testHost(), Options{}, in)
	if m := find(t, spec, "/sys"); m.Type != "bind" {
		t.Errorf("mount %+v", m)
	}
}
