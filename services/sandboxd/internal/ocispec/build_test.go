package ocispec

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/mount"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/workload"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// testHost is a host with fixed facts.
func testHost() host.Facts {
	return host.Facts{
		Hostname: "node-1", Seccomp: true, Swap: true, RecursiveReadOnly: true,
		Capabilities: []string{
			"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW",
			"CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE",
			"CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE", "CAP_NET_ADMIN", "CAP_SYS_ADMIN",
		},
		OOMScoreAdj: -500, HardLimits: map[string]uint64{"RLIMIT_NOFILE": 20000},
	}
}

func v2Host() host.Facts {
	h := testHost()
	h.CgroupV2, h.Hugetlb, h.MayLowerOOMScore, h.MayRaiseLimits = true, true, true, true
	return h
}

// input is a small container in a pod with namespaces of its own.
func input() Input {
	id := strings.Repeat("c", 64)
	return Input{
		ID: id, SandboxID: strings.Repeat("5", 64),
		Config: &criv1.ContainerConfig{
			Metadata: &criv1.ContainerMetadata{Name: "app"},
			Command:  []string{"/bin/app"},
			Linux: &criv1.LinuxContainerConfig{
				Resources: &criv1.LinuxContainerResources{},
				SecurityContext: &criv1.LinuxContainerSecurityContext{
					NamespaceOptions: &criv1.NamespaceOption{Pid: criv1.NamespaceMode_CONTAINER},
				},
			},
		},
		SandboxConfig: &criv1.PodSandboxConfig{
			Metadata: &criv1.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1"},
			Hostname: "web-0",
			Linux:    &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{}},
		},
		Namespaces: map[string]string{"network": "/run/ns/net", "ipc": "/run/ns/ipc", "uts": "/run/ns/uts"},
		Files: pod.SandboxFiles{
			Hosts: "/state/hosts", Hostname: "/state/hostname", ResolvConf: "/state/resolv.conf", Shm: "/run/shm",
		},
		Image:       pod.Image{Name: "registry.example/app:1"},
		CgroupsPath: resource.CgroupsPath("/kubepods/pod1", id, false),
	}
}

func (in Input) sc() *criv1.LinuxContainerSecurityContext {
	return in.Config.GetLinux().GetSecurityContext()
}

// privileged makes a container privileged.
func privileged(in Input) Input {
	in.sc().Privileged = true
	in.SandboxConfig.Linux.SecurityContext.Privileged = true
	return in
}

func build(t *testing.T, h host.Facts, o Options, in Input) (*specs.Spec, Result) {
	t.Helper()
	spec, result, err := New(h, o).Build(in)
	if err != nil {
		t.Fatal(err)
	}
	return spec, result
}

// golden compares a specification with a file. Folders of the test are shown as DIR, and of
// seccomp, which depends on machine and kernel, only the default.
func golden(t *testing.T, name string, spec *specs.Spec, dir string) {
	t.Helper()
	shown := *spec
	if spec.Linux.Seccomp != nil {
		linux := *spec.Linux
		linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: spec.Linux.Seccomp.DefaultAction}
		shown.Linux = &linux
	}
	raw, err := json.MarshalIndent(shown, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got := string(raw) + "\n"
	if dir != "" {
		got = strings.ReplaceAll(got, dir, "DIR")
	}
	testkit.Golden(t, name+".json", []byte(got))
}

func realDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestGoldenSmall(t *testing.T) {
	t.Parallel()
	spec, _ := build(t, testHost(), Options{}, input())
	golden(t, "small", spec, "")
}

func TestGoldenFull(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	in := input()
	in.Image.Config = imagespec.ImageConfig{
		User: "app:staff", WorkingDir: "/srv", Entrypoint: []string{"/entry"}, Cmd: []string{"--default"},
		Env: []string{"PATH=/opt/bin", "MODE=image", "broken"}, StopSignal: "SIGINT",
	}
	in.Accounts = pod.Accounts{
		Passwd: []byte("root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"),
		Group:  []byte("staff:x:50:\nwheel:x:10:root,app\n"),
	}
	in.Handler = pod.Handler{PodAnnotations: []string{"pass.io/*"}, ContainerAnnotations: []string{"own.io/exact"}}
	in.SandboxConfig.Annotations = map[string]string{"pass.io/a": "1", "keep.io/b": "2"}
	in.Config.Annotations = map[string]string{"own.io/exact": "3", "own.io/other": "4"}
	in.Config.Command = nil
	in.Config.Args = []string{"--asked"}
	in.Config.Tty = true
	in.Config.Envs = []*criv1.KeyValue{{Key: "MODE", Value: []byte("asked")}, {Key: "NEW", Value: []byte("a=b")}}
	in.Config.Mounts = []*criv1.Mount{
		{ContainerPath: "/data/inner", HostPath: dir, MountOptions: []string{"noexec", "nosuid"}},
		{ContainerPath: "/data", HostPath: dir, Readonly: true, RecursiveReadOnly: true},
		{ContainerPath: "/etc/hosts", HostPath: dir, Readonly: true},
		{ContainerPath: "/image", Image: &criv1.ImageSpec{Image: "vol"}},
	}
	in.ImageMounts = map[string]string{"/image": "/run/images/1"}
	in.Volumes = []*criv1.Mount{{ContainerPath: "/var/lib/app", HostPath: dir}, {ContainerPath: "/data", HostPath: "/not/used"}}
	in.Config.Devices = []*criv1.Device{{HostPath: "/dev/null", ContainerPath: "/dev/nothing", Permissions: "r"}}
	in.Config.Linux.Resources = &criv1.LinuxContainerResources{
		CpuPeriod: 100000, CpuQuota: 50000, CpuShares: 512, MemoryLimitInBytes: 1 << 30, OomScoreAdj: -998,
		CpusetCpus: "0-1", CpusetMems: "0", Unified: map[string]string{"memory.high": "1"},
		HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB", Limit: 1}},
	}
	sc := in.sc()
	sc.ReadonlyRootfs, sc.NoNewPrivs = true, true
	sc.MaskedPaths, sc.ReadonlyPaths = []string{"/proc/kcore"}, []string{"/proc/sys"}
	sc.SupplementalGroups = []int64{2000, 10}
	sc.Seccomp = &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_RuntimeDefault}
	sc.Capabilities = &criv1.Capability{
		AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL", "kill"}, AddAmbientCapabilities: []string{"CAP_CHOWN"},
	}
	o := Options{Rlimits: map[string]host.Rlimit{"RLIMIT_NOFILE": {Soft: 1024, Hard: 1 << 20}}}
	spec, result := build(t, v2Host(), o, in)
	golden(t, "full", spec, dir)
	want := &criv1.LinuxContainerUser{Uid: 1000, Gid: 50, SupplementalGroups: []int64{50, 10, 2000}}
	if got := result.User.GetLinux(); got.String() != want.String() {
		t.Errorf("user %v, want %v", got, want)
	}
	if len(result.CreatedPaths) != 0 {
		t.Errorf("result %+v", result)
	}
}

func TestGoldenPrivilegedOnTheHost(t *testing.T) {
	t.Parallel()
	in := privileged(input())
	in.sc().NamespaceOptions = &criv1.NamespaceOption{
		Network: criv1.NamespaceMode_NODE, Pid: criv1.NamespaceMode_NODE, Ipc: criv1.NamespaceMode_NODE,
	}
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions = in.sc().NamespaceOptions
	in.Namespaces = nil
	in.sc().Seccomp = &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_RuntimeDefault}
	in.sc().MaskedPaths = []string{"/proc/kcore"}
	in.SandboxConfig.Hostname = ""
	in.Handler.PrivilegedWithoutHostDevices = true
	spec, _ := build(t, v2Host(), Options{}, in)
	golden(t, "privileged", spec, "")
}

func TestPrivilegedHasTheHostsDevices(t *testing.T) {
	t.Parallel()
	spec, _ := build(t, testHost(), Options{}, privileged(input()))
	if len(spec.Linux.Devices) < 5 {
		t.Errorf("%d devices", len(spec.Linux.Devices))
	}
	last := spec.Linux.Resources.Devices[len(spec.Linux.Resources.Devices)-1]
	if diff := cmp.Diff(specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"}, last); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAllDevicesAllowedWithoutTheHostsNodes(t *testing.T) {
	t.Parallel()
	allowed := func(in Input) bool {
		t.Helper()
		in.Handler.PrivilegedWithoutHostDevices, in.Handler.AllDevicesAllowed = true, true
		spec, _ := build(t, testHost(), Options{}, in)
		if len(spec.Linux.Devices) != 0 {
			t.Errorf("devices %v", spec.Linux.Devices)
		}
		rules := spec.Linux.Resources.Devices
		return cmp.Equal(specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"}, rules[len(rules)-1])
	}
	if !allowed(privileged(input())) {
		t.Error("a privileged container may not use all devices")
	}
	if allowed(input()) {
		t.Error("a container that is not privileged may use all devices")
	}
}

func TestOwnersOfDevices(t *testing.T) {
	t.Parallel()
	host, err := os.Stat("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	owner := host.Sys().(*syscall.Stat_t)
	id := func(n int64) *criv1.Int64Value { return &criv1.Int64Value{Value: n} }
	for _, tt := range []struct {
		name        string
		off         bool
		user, group *criv1.Int64Value
		image       string
		uid, gid    uint32
	}{
		{name: "switched off", off: true, user: id(1000), group: id(50), uid: owner.Uid, gid: owner.Gid},
		{name: "user and group", user: id(1000), group: id(50), uid: 1000, gid: 50},
		{name: "user", user: id(1000), uid: 1000, gid: owner.Gid},
		{name: "root", user: id(0), group: id(0), uid: owner.Uid, gid: owner.Gid},
		{name: "the image's user", image: "1000:50", uid: owner.Uid, gid: owner.Gid},
	} {
		in := input()
		in.sc().RunAsUser, in.sc().RunAsGroup, in.Image.Config.User = tt.user, tt.group, tt.image
		in.Config.Devices = []*criv1.Device{{HostPath: "/dev/null", ContainerPath: "/dev/nothing"}}
		spec, _ := build(t, testHost(), Options{DeviceOwnership: !tt.off}, in)
		if got := spec.Linux.Devices[0]; *got.UID != tt.uid || *got.GID != tt.gid {
			t.Errorf("%s: owned by %d:%d, want %d:%d", tt.name, *got.UID, *got.GID, tt.uid, tt.gid)
		}
	}
}

func userns(in Input) Input {
	ids := []*criv1.IDMapping{{HostId: 65536, ContainerId: 0, Length: 65536}}
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{
		UsernsOptions: &criv1.UserNamespace{Mode: criv1.NamespaceMode_POD, Uids: ids, Gids: ids},
	}
	in.Namespaces["user"] = "/run/ns/user"
	return in
}

func TestGoldenUserNamespace(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	in := userns(input())
	ids := in.SandboxConfig.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions().GetUids()
	in.Config.Mounts = []*criv1.Mount{{ContainerPath: "/v", HostPath: dir, UidMappings: ids, GidMappings: ids}}
	spec, _ := build(t, testHost(), Options{}, in)
	golden(t, "userns", spec, dir)
}

func TestGoldenInit(t *testing.T) {
	t.Parallel()
	in := userns(input())
	spec, err := New(testHost(), Options{}).BuildInit(InitInput{
		SandboxID: in.SandboxID, SandboxConfig: in.SandboxConfig, Namespaces: in.Namespaces, Binary: "/usr/lib/crisp/init",
		CgroupsPath: resource.CgroupsPath("kubepods-pod1.slice", in.SandboxID, true),
	})
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "init", spec, "")
}

func TestBaseSpecification(t *testing.T) {
	t.Parallel()
	dir := realDir(t)
	file := filepath.Join(dir, "base.json")
	base := `{"ociVersion":"1.0.0","process":{"env":["BASE=1"],"rlimits":[{"type":"RLIMIT_CORE","hard":1,"soft":1}]},
		"mounts":[{"destination":"/only","type":"tmpfs","source":"tmpfs"}],"annotations":{"base":"yes"},"hooks":{"poststop":[{"path":"/hook"}]}}`
	if err := os.WriteFile(file, []byte(base), 0o644); err != nil {
		t.Fatal(err)
	}
	in := input()
	in.Handler.BaseSpec = file
	spec, _ := build(t, testHost(), Options{}, in)
	if spec.Mounts[0].Destination != "/only" || len(spec.Process.Rlimits) != 1 || spec.Annotations["base"] != "yes" ||
		spec.Hooks == nil || !strings.Contains(strings.Join(spec.Process.Env, " "), "BASE=1") {
		t.Errorf("spec %+v", spec)
	}
	for _, missing := range []string{filepath.Join(dir, "none"), dir} {
		in.Handler.BaseSpec = missing
		if _, _, err := New(testHost(), Options{}).Build(in); err == nil {
			t.Errorf("no error for %s", missing)
		}
	}
}

// The image is called as its user wrote it, where that is known.
func TestAnnotationOfTheImage(t *testing.T) {
	t.Parallel()
	for written, want := range map[string]string{"": "registry.example/app:1", "app:1": "app:1"} {
		in := input()
		in.Config.Image = &criv1.ImageSpec{Image: "sha256:1", UserSpecifiedImage: written}
		spec, _ := build(t, testHost(), Options{}, in)
		if got := spec.Annotations[annotationImageName]; got != want {
			t.Errorf("written %q: annotation %q, want %q", written, got, want)
		}
	}
}

// Annotations of the handler stand unless the pod has others that are passed; a workload and hooks
// of the node reach the specification.
func TestWhatTheNodeHasForSomePods(t *testing.T) {
	t.Parallel()
	in := input()
	in.Handler.DefaultAnnotations = map[string]string{"passed": "default", "kept": "default", annotationContainerName: "no"}
	in.Handler.PodAnnotations = []string{"passed"}
	in.SandboxConfig.Annotations = map[string]string{"passed": "own", "kept": "own", "target": "", "cpu/app": `{"cpuset":"1"}`}
	in.Config.Linux.Resources = &criv1.LinuxContainerResources{CpuShares: 100, CpusetCpus: "0", MemoryLimitInBytes: 1 << 20}
	dir := t.TempDir()
	o := Options{HookFolders: []string{dir}, Workloads: []workload.Workload{{Activation: "target", Prefix: "cpu", Resources: workload.Resources{Quota: 5000}}}}
	text := `{"version":"1.0.0","hook":{"path":"/bin/sh"},"when":{"annotations":{"target":""}},"stages":["poststop"]}`
	if err := os.WriteFile(filepath.Join(dir, "a.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	spec, _ := build(t, v2Host(), o, in)
	if a := spec.Annotations; a["passed"] != "own" || a["kept"] != "default" || a[annotationContainerName] != "app" {
		t.Errorf("annotations %v", a)
	}
	if c := spec.Linux.Resources.CPU; *c.Shares != 100 || c.Cpus != "1" || *c.Quota != 5000 || *spec.Linux.Resources.Memory.Limit != 1<<20 {
		t.Errorf("processors %+v", c)
	}
	if spec.Hooks == nil || len(spec.Hooks.Poststop) != 1 {
		t.Errorf("hooks %+v", spec.Hooks)
	}
	in.SandboxConfig.Annotations["cpu/app"] = "{"
	if _, _, err := New(v2Host(), o).Build(in); !errdefs.IsInvalidArgument(err) {
		t.Errorf("an annotation that cannot be read: %v", err)
	}
}

// What the node gives all containers gives way to what a request or an image asks for.
func TestDefaultsOfTheNode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := input()
	in.Config.Envs = []*criv1.KeyValue{{Key: "OWN", Value: []byte("asked")}}
	in.Config.Mounts = []*criv1.Mount{{ContainerPath: "/asked", HostPath: dir}}
	in.Volumes = []*criv1.Mount{{ContainerPath: "/volume", HostPath: dir}}
	o := Options{
		Env:    []string{"OWN=node", "NODE=node"},
		Mounts: []mount.Default{{Source: dir, Destination: "/asked/"}, {Source: dir, Destination: "/node"}, {Source: dir, Destination: "/volume"}},
	}
	find := func(spec *specs.Spec, destination string) *specs.Mount {
		i := slices.IndexFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
		if i < 0 {
			return nil
		}
		return &spec.Mounts[i]
	}
	readOnly := func(m *specs.Mount) bool { return m != nil && slices.Contains(m.Options, "ro") }
	spec, _ := build(t, v2Host(), o, in)
	if !slices.Contains(spec.Process.Env, "OWN=asked") || !slices.Contains(spec.Process.Env, "NODE=node") || slices.Contains(spec.Process.Env, "OWN=node") {
		t.Errorf("environment %q", spec.Process.Env)
	}
	if !readOnly(find(spec, "/node")) || readOnly(find(spec, "/asked")) || readOnly(find(spec, "/volume")) || find(spec, "/volume") == nil {
		t.Errorf("mounts %+v", spec.Mounts)
	}
	o.IgnoreImageVolumes, o.Mounts = true, nil
	if spec, _ = build(t, v2Host(), o, in); find(spec, "/volume") != nil || find(spec, "/asked") == nil {
		t.Errorf("mounts without volumes of images: %+v", spec.Mounts)
	}
	o.Mounts = []mount.Default{{Source: dir + "/none", Destination: "/node"}}
	if _, _, err := New(v2Host(), o).Build(in); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a source that is missing: %v", err)
	}
	in.Config.Mounts = []*criv1.Mount{{ContainerPath: "/asked", HostPath: dir + "/absent"}}
	if _, _, err := New(v2Host(), Options{RejectPaths: []string{dir + "/absent"}}).Build(in); !errdefs.IsNotFound(err) {
		t.Errorf("a source that must not be made: %v", err)
	}
}
