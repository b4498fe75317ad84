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
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/device"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// TestRefusals are requests that must fail, with the class of the error.
func TestRefusals(t *testing.T) {
	t.Parallel()
	localhost := func(ref string) *criv1.SecurityProfile {
		return &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Localhost, LocalhostRef: ref}
	}
	tests := []struct {
		name   string
		change func(*Input, *host.Facts, *Options)
		want   error
	}{
		{"no configuration", func(in *Input, _ *host.Facts, _ *Options) { in.Config = nil }, errdefs.ErrInvalidArgument},
		{"no command", func(in *Input, _ *host.Facts, _ *Options) { in.Config.Command = nil }, errdefs.ErrInvalidArgument},
		{"privileged in an ordinary pod", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Privileged = true }, errdefs.ErrInvalidArgument},
		{"relative folder", func(in *Input, _ *host.Facts, _ *Options) { in.Config.WorkingDir = "srv" }, errdefs.ErrInvalidArgument},
		{"folder through a descriptor", func(in *Input, _ *host.Facts, _ *Options) { in.Config.WorkingDir = "/x/../proc/self/fd/7" }, errdefs.ErrInvalidArgument},
		{"folder beyond a descriptor", func(in *Input, _ *host.Facts, _ *Options) { in.Config.WorkingDir = "/x/../proc/self/fd/7/../.." }, errdefs.ErrInvalidArgument},
		{"folder through init's folder", func(in *Input, _ *host.Facts, _ *Options) { in.Config.WorkingDir = "/proc/1/cwd" }, errdefs.ErrInvalidArgument},
		{"folder through /dev/fd", func(in *Input, _ *host.Facts, _ *Options) { in.Config.WorkingDir = "/dev//fd/7" }, errdefs.ErrInvalidArgument},
		{"variable without a name", func(in *Input, _ *host.Facts, _ *Options) { in.Config.Envs = []*criv1.KeyValue{{}} }, errdefs.ErrInvalidArgument},
		{"variable with a nul", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Envs = []*criv1.KeyValue{{Key: "a", Value: []byte("b\x00")}}
		}, errdefs.ErrInvalidArgument},
		{"unknown capability", func(in *Input, _ *host.Facts, _ *Options) {
			in.sc().Capabilities = &criv1.Capability{AddCapabilities: []string{"FLY"}}
		}, errdefs.ErrInvalidArgument},
		{"capability that the daemon lacks", func(in *Input, _ *host.Facts, _ *Options) {
			in.sc().Capabilities = &criv1.Capability{AddCapabilities: []string{"SYS_RESOURCE"}}
		}, errdefs.ErrFailedPrecondition},
		{"no network namespace", func(in *Input, _ *host.Facts, _ *Options) { in.Namespaces = nil }, errdefs.ErrFailedPrecondition},
		{"no PID namespace to share", func(in *Input, _ *host.Facts, _ *Options) {
			in.sc().NamespaceOptions.Pid = criv1.NamespaceMode_TARGET
		}, errdefs.ErrFailedPrecondition},
		{"other user namespace than the pod's", func(in *Input, _ *host.Facts, _ *Options) {
			ids := []*criv1.IDMapping{{HostId: 1, Length: 1}}
			in.sc().NamespaceOptions.UsernsOptions = &criv1.UserNamespace{Uids: ids, Gids: ids}
		}, errdefs.ErrInvalidArgument},
		{"half a user namespace", func(in *Input, _ *host.Facts, _ *Options) {
			*in = userns(*in)
			in.SandboxConfig.Linux.SecurityContext.NamespaceOptions.UsernsOptions.Gids = nil
		}, errdefs.ErrInvalidArgument},
		{"seccomp without a kernel for it", func(in *Input, h *host.Facts, _ *Options) {
			h.Seccomp = false
			in.sc().Seccomp = &criv1.SecurityProfile{}
		}, errdefs.ErrFailedPrecondition},
		{"missing seccomp profile", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Seccomp = localhost("/no/such/file") }, errdefs.ErrNotFound},
		{"relative seccomp profile", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Seccomp = localhost("x.json") }, errdefs.ErrInvalidArgument},
		{"seccomp profile that is a folder", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Seccomp = localhost("/") }, errdefs.ErrInvalidArgument},
		{"seccomp profile of another kind", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Seccomp = localhost("/proc/self/status") }, errdefs.ErrInvalidArgument},
		{"AppArmor profile without AppArmor", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Apparmor = localhost("mine") }, errdefs.ErrFailedPrecondition},
		{"default AppArmor profile without AppArmor", func(in *Input, _ *host.Facts, _ *Options) { in.sc().Apparmor = &criv1.SecurityProfile{} }, errdefs.ErrFailedPrecondition},
		{"default AppArmor profile that is not loaded", func(in *Input, h *host.Facts, _ *Options) {
			h.AppArmor = true
			in.sc().Apparmor = &criv1.SecurityProfile{}
		}, errdefs.ErrFailedPrecondition},
		{"AppArmor profile that is not loaded", func(in *Input, h *host.Facts, o *Options) {
			h.AppArmor = true
			o.AppArmorLoaded = func(string) (bool, error) { return false, nil }
			in.sc().Apparmor = localhost("mine")
		}, errdefs.ErrNotFound},
		{"AppArmor profile without a name", func(in *Input, h *host.Facts, _ *Options) {
			h.AppArmor = true
			in.sc().Apparmor = localhost("")
		}, errdefs.ErrInvalidArgument},
		{"class that is not configured", func(in *Input, _ *host.Facts, o *Options) {
			o.Classes = noClasses{}
			in.Config.Annotations = map[string]string{"io.kubernetes.cri.rdt-class": "gold"}
		}, errdefs.ErrFailedPrecondition},
		{"old AppArmor profile without AppArmor", func(in *Input, _ *host.Facts, _ *Options) { in.sc().ApparmorProfile = "localhost/mine" }, errdefs.ErrFailedPrecondition}, //nolint:staticcheck // old clients
		{"SELinux options without SELinux", func(in *Input, _ *host.Facts, _ *Options) {
			in.sc().SelinuxOptions = &criv1.SELinuxOption{Level: "s0:c1,c2"}
		}, errdefs.ErrFailedPrecondition},
		{"unified resources without cgroup v2", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Linux.Resources.Unified = map[string]string{"memory.high": "1"}
		}, errdefs.ErrFailedPrecondition},
		{"negative shares", func(in *Input, _ *host.Facts, _ *Options) { in.Config.Linux.Resources.CpuShares = -1 }, errdefs.ErrInvalidArgument},
		{"writable cgroups without cgroup v2", func(in *Input, _ *host.Facts, _ *Options) { in.Handler.CgroupWritable = true }, errdefs.ErrFailedPrecondition},
		{"missing device", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/dev/no-such"}}
		}, errdefs.ErrNotFound},
		{"device that is a file", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/proc/version"}}
		}, errdefs.ErrInvalidArgument},
		{"device that is a large folder", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/usr"}}
		}, errdefs.ErrInvalidArgument},
		{"device below a device", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/dev/null/x"}}
		}, errdefs.ErrFailedPrecondition},
		{"device with a long name", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/dev/" + strings.Repeat("x", 300)}}
		}, errdefs.ErrFailedPrecondition},
		{"device permissions", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.Devices = []*criv1.Device{{HostPath: "/dev/null", Permissions: "rx"}}
		}, errdefs.ErrInvalidArgument},
		{"CDI without CDI", func(in *Input, _ *host.Facts, _ *Options) {
			in.Config.CDIDevices = []*criv1.CDIDevice{{Name: "v.com/c=d"}}
		}, errdefs.ErrFailedPrecondition},
		{"unknown CDI device", func(in *Input, _ *host.Facts, o *Options) {
			o.InjectCDI = device.CDIFromFolders([]string{"/no/such/folder"})
			in.Config.CDIDevices = []*criv1.CDIDevice{{Name: "v.com/c=d"}}
		}, errdefs.ErrInvalidArgument},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			in, h, o := input(), testHost(), Options{}
			tt.change(&in, &h, &o)
			if _, _, err := New(h, o).Build(in); !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
}

// noClasses refuses every class, knownClasses gives what the annotation says.
type (
	noClasses    struct{}
	knownClasses struct{}
)

func (noClasses) RDT(_ string, own, _ map[string]string) (*specs.LinuxIntelRdt, error) {
	if len(own) == 0 {
		return nil, nil
	}
	return nil, errdefs.ErrFailedPrecondition
}

func (noClasses) BlockIO(string, map[string]string, map[string]string) (*specs.LinuxBlockIO, error) {
	return nil, nil
}

func (knownClasses) RDT(_ string, own, _ map[string]string) (*specs.LinuxIntelRdt, error) {
	return &specs.LinuxIntelRdt{ClosID: own["rdt"]}, nil
}

func (knownClasses) BlockIO(container string, _, ofPod map[string]string) (*specs.LinuxBlockIO, error) {
	return &specs.LinuxBlockIO{Weight: new(uint16(len(container + ofPod["block"])))}, nil
}

func (noClasses) RDTClass(string) (*specs.LinuxIntelRdt, error) {
	return nil, errdefs.ErrInvalidArgument
}

func (noClasses) BlockIOClass(string) (*specs.LinuxBlockIO, error) {
	return nil, errdefs.ErrInvalidArgument
}

func (knownClasses) RDTClass(name string) (*specs.LinuxIntelRdt, error) {
	return &specs.LinuxIntelRdt{ClosID: name}, nil
}

func (knownClasses) BlockIOClass(name string) (*specs.LinuxBlockIO, error) {
	return &specs.LinuxBlockIO{Weight: new(uint16(len(name)))}, nil
}

func TestClasses(t *testing.T) {
	t.Parallel()
	in := input()
	in.Config.Annotations = map[string]string{"rdt": "gold"}
	in.SandboxConfig.Annotations = map[string]string{"block": "1234567"}
	spec, _ := build(t, testHost(), Options{Classes: knownClasses{}}, in)
	if r := spec.Linux.IntelRdt; r == nil || r.ClosID != "gold" {
		t.Errorf("RDT %+v", r)
	}
	if b := spec.Linux.Resources.BlockIO; b == nil || *b.Weight != 10 {
		t.Errorf("block I/O %+v", b)
	}
	spec, _ = build(t, testHost(), Options{Classes: noClasses{}}, input())
	if spec.Linux.IntelRdt != nil || spec.Linux.Resources.BlockIO != nil {
		t.Errorf("classes that nobody asked for: %+v, %+v", spec.Linux.IntelRdt, spec.Linux.Resources.BlockIO)
	}
}

// TestInitSecurity is what the pod's own process makes of the pod's security context.
func TestInitSecurity(t *testing.T) {
	t.Parallel()
	with := testHost()
	with.AppArmor = true
	run := func(h host.Facts, sc *criv1.LinuxSandboxSecurityContext) (*specs.Spec, error) {
		cfg := input().SandboxConfig
		cfg.Linux.SecurityContext = sc
		return New(h, Options{AppArmorProfile: "crisp-default"}).BuildInit(InitInput{SandboxID: "s", SandboxConfig: cfg})
	}
	id := func(v int64) *criv1.Int64Value { return &criv1.Int64Value{Value: v} }
	spec, err := run(with, &criv1.LinuxSandboxSecurityContext{
		RunAsUser: id(1000), RunAsGroup: id(2000), SupplementalGroups: []int64{3000, 3000}, ReadonlyRootfs: true,
		Seccomp:  &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Unconfined},
		Apparmor: &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Localhost, LocalhostRef: "mine"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := specs.User{UID: 1000, GID: 2000, AdditionalGids: []uint32{3000}}
	if diff := cmp.Diff(want, spec.Process.User); diff != "" {
		t.Errorf("user (-want +got):\n%s", diff)
	}
	if spec.Linux.Seccomp != nil || spec.Process.ApparmorProfile != "mine" || !spec.Root.Readonly {
		t.Errorf("seccomp %+v, apparmor %q, root %+v", spec.Linux.Seccomp, spec.Process.ApparmorProfile, spec.Root)
	}
	spec, err = run(with, nil)
	if err != nil || spec.Linux.Seccomp == nil || spec.Process.ApparmorProfile != "crisp-default" {
		t.Errorf("without a context: %+v, %v", spec, err)
	}
	for name, bad := range map[string]struct {
		sc   *criv1.LinuxSandboxSecurityContext
		want error
	}{
		"group alone":     {&criv1.LinuxSandboxSecurityContext{RunAsGroup: id(1)}, errdefs.ErrInvalidArgument},
		"negative user":   {&criv1.LinuxSandboxSecurityContext{RunAsUser: id(-1)}, errdefs.ErrInvalidArgument},
		"negative group":  {&criv1.LinuxSandboxSecurityContext{SupplementalGroups: []int64{-1}}, errdefs.ErrInvalidArgument},
		"no seccomp file": {&criv1.LinuxSandboxSecurityContext{SeccompProfilePath: "localhost//no/such"}, errdefs.ErrNotFound}, //nolint:staticcheck // old clients
		"AppArmor":        {&criv1.LinuxSandboxSecurityContext{Apparmor: &criv1.SecurityProfile{}}, errdefs.ErrFailedPrecondition},
		"SELinux":         {&criv1.LinuxSandboxSecurityContext{SelinuxOptions: &criv1.SELinuxOption{Level: "s0"}}, errdefs.ErrFailedPrecondition},
		"old spelling":    {&criv1.LinuxSandboxSecurityContext{SeccompProfilePath: "odd"}, errdefs.ErrInvalidArgument}, //nolint:staticcheck // old clients
	} {
		if _, err := run(testHost(), bad.sc); !errors.Is(err, bad.want) {
			t.Errorf("%s: error %v, want %v", name, err, bad.want)
		}
	}
}

const (
	passwd = "#comment\nroot:x:0:0::/:/bin/sh\r\nbroken\n:x:1:1::/:\napp:x:1000:1004::/:/bin/sh\nneg:x:-1:0::/:\ndef:x:1001:1001::/:\n" +
		"big:x:99999999999:1::/:\n"
	group = "root:x:0:\napp:x:1005:app\nstaff:x:50:def,app\r\nwheel:x:10:root,app\nneg:x:-4:app\n"
)

func TestUser(t *testing.T) {
	t.Parallel()
	int64Value := func(v int64) *criv1.Int64Value { return &criv1.Int64Value{Value: v} }
	type sc = criv1.LinuxContainerSecurityContext
	tests := []struct {
		name  string
		sc    *sc
		image string
		want  specs.User
		err   bool
	}{
		{name: "nothing", want: specs.User{AdditionalGids: []uint32{0, 10}}},
		{name: "image name", image: "app", want: specs.User{UID: 1000, GID: 1004, AdditionalGids: []uint32{1004, 50, 10}}},
		{name: "image id", image: "1000", want: specs.User{UID: 1000, GID: 1004, AdditionalGids: []uint32{1004, 50, 10}}},
		{name: "image id and group id", image: "1000:7", want: specs.User{UID: 1000, GID: 7, AdditionalGids: []uint32{7, 50, 10}}},
		{name: "image name and group name", image: "def:staff", want: specs.User{UID: 1001, GID: 50, AdditionalGids: []uint32{50}}},
		{name: "id without an entry", image: "4242", want: specs.User{UID: 4242, AdditionalGids: []uint32{0}}},
		{name: "id and group without entries", image: "4242:4243", want: specs.User{UID: 4242, GID: 4243, AdditionalGids: []uint32{4243}}},
		{name: "name without an entry", image: "nobody", err: true},
		{name: "group name without an entry", image: "app:nobody", err: true},
		{name: "name with a negative id", image: "neg", err: true},
		{name: "name with an id that is too big", image: "big", err: true},
		{name: "negative id", image: "-5", err: true},
		{name: "asked id wins over asked name", sc: &sc{RunAsUser: int64Value(1001), RunAsUsername: "app"}, image: "app", want: specs.User{UID: 1001, GID: 1001, AdditionalGids: []uint32{1001, 50}}},
		{name: "asked name", sc: &sc{RunAsUsername: "def"}, image: "app:staff", want: specs.User{UID: 1001, GID: 1001, AdditionalGids: []uint32{1001, 50}}},
		{name: "asked group", sc: &sc{RunAsUser: int64Value(1000), RunAsGroup: int64Value(7)}, want: specs.User{UID: 1000, GID: 7, AdditionalGids: []uint32{7, 50, 10}}},
		{name: "asked group without user", sc: &sc{RunAsGroup: int64Value(7)}, image: "app", err: true},
		{name: "asked id out of range", sc: &sc{RunAsUser: int64Value(1 << 32)}, err: true},
		{name: "asked id negative", sc: &sc{RunAsUser: int64Value(-1)}, err: true},
		{name: "merged groups", sc: &sc{SupplementalGroups: []int64{1234, 50}}, image: "app", want: specs.User{UID: 1000, GID: 1004, AdditionalGids: []uint32{1004, 50, 10, 1234}}},
		{
			name: "strict groups", sc: &sc{SupplementalGroups: []int64{1234}, SupplementalGroupsPolicy: criv1.SupplementalGroupsPolicy_Strict},
			image: "app", want: specs.User{UID: 1000, GID: 1004, AdditionalGids: []uint32{1004, 1234}},
		},
		{name: "group out of range", sc: &sc{SupplementalGroups: []int64{-1}}, err: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			in := input()
			if tt.sc != nil {
				tt.sc.NamespaceOptions = in.sc().GetNamespaceOptions()
				in.Config.Linux.SecurityContext = tt.sc
			}
			in.Image.Config = imagespec.ImageConfig{User: tt.image}
			in.Accounts = pod.Accounts{Passwd: []byte(passwd), Group: []byte(group)}
			spec, _, err := New(testHost(), Options{}).Build(in)
			if tt.err {
				if !errors.Is(err, errdefs.ErrInvalidArgument) {
					t.Errorf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, spec.Process.User); diff != "" {
				t.Errorf("user (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCapabilities(t *testing.T) {
	t.Parallel()
	host := testHost()
	for _, tt := range []struct {
		name               string
		add, drop, ambient []string
		has, lacks         []string
		wantAmbient        []string
	}{
		{name: "default", has: []string{"CAP_CHOWN"}, lacks: []string{"CAP_SYS_ADMIN"}},
		{name: "add", add: []string{"sys_admin"}, has: []string{"CAP_CHOWN", "CAP_SYS_ADMIN"}},
		{name: "all", add: []string{"ALL"}, has: host.Capabilities},
		{name: "all but one", add: []string{"ALL"}, drop: []string{"CHOWN"}, has: []string{"CAP_SYS_ADMIN"}, lacks: []string{"CAP_CHOWN"}},
		{name: "none", drop: []string{"ALL"}, lacks: host.Capabilities},
		{name: "one only", drop: []string{"all"}, add: []string{"KILL"}, has: []string{"CAP_KILL"}, lacks: []string{"CAP_CHOWN"}},
		{name: "dropping wins", add: []string{"KILL"}, drop: []string{"KILL"}, lacks: []string{"CAP_KILL"}},
		{name: "dropping what the daemon lacks", drop: []string{"SYS_RESOURCE"}, has: []string{"CAP_CHOWN"}},
		{name: "ambient", ambient: []string{"NET_ADMIN"}, has: []string{"CAP_NET_ADMIN"}, wantAmbient: []string{"CAP_NET_ADMIN"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			in := input()
			in.sc().Capabilities = &criv1.Capability{AddCapabilities: tt.add, DropCapabilities: tt.drop, AddAmbientCapabilities: tt.ambient}
			spec, _ := build(t, host, Options{}, in)
			got := spec.Process.Capabilities
			for _, c := range tt.has {
				if !slices.Contains(got.Bounding, c) || !slices.Contains(got.Effective, c) || !slices.Contains(got.Permitted, c) {
					t.Errorf("%s is missing", c)
				}
			}
			for _, c := range tt.lacks {
				if slices.Contains(got.Bounding, c) || slices.Contains(got.Effective, c) || slices.Contains(got.Permitted, c) {
					t.Errorf("%s is there", c)
				}
			}
			if !slices.Equal(got.Ambient, tt.wantAmbient) || !slices.Equal(got.Inheritable, tt.wantAmbient) {
				t.Errorf("ambient %v, inheritable %v", got.Ambient, got.Inheritable)
			}
		})
	}
}

func TestSeccomp(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "p.json")
	if err := os.WriteFile(file, []byte(`{"defaultAction":"SCMP_ACT_ERRNO"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, old, unset string
		profile          *criv1.SecurityProfile
		privileged       bool
		rules            int // -1 for none at all, 0 for the file's
	}{
		{name: "unset", rules: -1},
		{name: "unset with a default", unset: "runtime/default", rules: 1},
		{name: "unset with a file", unset: "localhost/" + file},
		{name: "unconfined", unset: "runtime/default", profile: &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Unconfined}, rules: -1},
		{name: "default", profile: &criv1.SecurityProfile{}, rules: 1},
		{name: "file", profile: &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Localhost, LocalhostRef: file}},
		{name: "old default", old: "docker/default", rules: 1},
		{name: "old unconfined", old: "unconfined", rules: -1},
		{name: "old file", old: "localhost/" + file},
		{name: "privileged", profile: &criv1.SecurityProfile{}, privileged: true, rules: -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			in := input()
			if tt.privileged {
				in = privileged(in)
			}
			in.sc().Seccomp, in.sc().SeccompProfilePath = tt.profile, tt.old //nolint:staticcheck // old clients
			spec, _ := build(t, testHost(), Options{UnsetSeccomp: tt.unset}, in)
			got := -1
			if s := spec.Linux.Seccomp; s != nil {
				got = min(1, len(s.Syscalls))
			}
			if got != tt.rules {
				t.Errorf("rules %d, want %d", got, tt.rules)
			}
		})
	}
}

func TestAppArmor(t *testing.T) {
	t.Parallel()
	with := testHost()
	with.AppArmor = true
	o := Options{AppArmorProfile: "crisp-default"}
	for _, tt := range []struct {
		name    string
		host    host.Facts
		profile *criv1.SecurityProfile
		want    string
	}{
		{"absent, unset", testHost(), nil, ""},
		{"absent, unconfined", testHost(), &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Unconfined}, ""},
		{"present, unset", with, nil, "crisp-default"},
		{"present, default", with, &criv1.SecurityProfile{}, "crisp-default"},
		{"present, unconfined", with, &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Unconfined}, ""},
		{"present, named", with, &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Localhost, LocalhostRef: "mine"}, "mine"},
	} {
		in := input()
		in.sc().Apparmor = tt.profile
		spec, _ := build(t, tt.host, o, in)
		if got := spec.Process.ApparmorProfile; got != tt.want {
			t.Errorf("%s: %q", tt.name, got)
		}
	}
}

func TestNamespacesOfAPodOnTheHost(t *testing.T) {
	t.Parallel()
	in := input()
	in.Namespaces = nil
	in.SandboxConfig.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{
		Network: criv1.NamespaceMode_NODE, Ipc: criv1.NamespaceMode_NODE,
	}
	spec, _ := build(t, testHost(), Options{}, in)
	want := []specs.LinuxNamespace{{Type: "mount"}, {Type: "pid"}}
	if diff := cmp.Diff(want, spec.Linux.Namespaces); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPIDNamespaces(t *testing.T) {
	t.Parallel()
	alone := input()
	alone.sc().NamespaceOptions = nil
	spec, _ := build(t, testHost(), Options{}, alone)
	if !slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: "pid"}) {
		t.Errorf("without options: %v", spec.Linux.Namespaces)
	}
	for _, mode := range []criv1.NamespaceMode{criv1.NamespaceMode_POD, criv1.NamespaceMode_TARGET} {
		in := input()
		in.sc().NamespaceOptions.Pid = mode
		in.PIDNamespace = "/proc/7/ns/pid"
		spec, _ := build(t, testHost(), Options{}, in)
		if !slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: "pid", Path: "/proc/7/ns/pid"}) {
			t.Errorf("%s: %v", mode, spec.Linux.Namespaces)
		}
	}
}

func TestOOMScore(t *testing.T) {
	t.Parallel()
	free := testHost()
	free.MayLowerOOMScore = true
	for _, tt := range []struct {
		host      host.Facts
		adj, want int
	}{
		{testHost(), -998, -500}, {testHost(), 1000, 1000}, {testHost(), 5000, 1000}, {free, -998, -998}, {free, -2000, -1000},
	} {
		if got := tt.host.ClampOOMScore(tt.adj); got != tt.want {
			t.Errorf("%d: %d, want %d", tt.adj, got, tt.want)
		}
		in := input()
		in.Config.Linux.Resources.OomScoreAdj = int64(tt.adj)
		spec, _ := build(t, tt.host, Options{}, in)
		if got := *spec.Process.OOMScoreAdj; got != tt.want {
			t.Errorf("specification for %d: %d, want %d", tt.adj, got, tt.want)
		}
	}
}

func TestRlimits(t *testing.T) {
	t.Parallel()
	o := Options{Rlimits: map[string]host.Rlimit{"RLIMIT_NOFILE": {Soft: 1 << 20, Hard: 1 << 20}, "RLIMIT_CORE": {Soft: 5, Hard: 3}}}
	spec, _ := build(t, testHost(), o, input())
	want := []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Hard: 3, Soft: 3}, {Type: "RLIMIT_NOFILE", Hard: 20000, Soft: 20000}}
	if diff := cmp.Diff(want, spec.Process.Rlimits); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDeviceFolders(t *testing.T) {
	t.Parallel()
	in := input()
	dir := realDir(t)
	if err := os.Symlink("/dev/null", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	in.Config.Devices = []*criv1.Device{{HostPath: filepath.Join(dir, "link"), ContainerPath: "/dev/l", Permissions: "rw"}, {HostPath: dir, ContainerPath: "/dev/d"}}
	spec, _ := build(t, testHost(), Options{}, in)
	if len(spec.Linux.Devices) != 1 || spec.Linux.Devices[0].Path != "/dev/l" || spec.Linux.Devices[0].Minor != 3 {
		t.Errorf("devices %+v", spec.Linux.Devices)
	}
	if rules := spec.Linux.Resources.Devices; len(rules) != 2 || rules[1].Access != "rw" || !rules[1].Allow {
		t.Errorf("rules %+v", rules)
	}
}

func TestCDI(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	spec := `{"cdiVersion":"0.6.0","kind":"v.com/c","devices":[{"name":"d","containerEdits":{"env":["CDI=1"]}}]}`
	if err := os.WriteFile(filepath.Join(dir, "v.json"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	in := input()
	in.Config.CDIDevices = []*criv1.CDIDevice{{Name: "v.com/c=d"}}
	got, _ := build(t, testHost(), Options{InjectCDI: device.CDIFromFolders([]string{dir})}, in)
	if !slices.Contains(got.Process.Env, "CDI=1") {
		t.Errorf("environment %v", got.Process.Env)
	}
}
