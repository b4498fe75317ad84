package validate_test

import (
	"math"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// check compares an error with the field that should be named; "" wants none.
func check(t *testing.T, err error, field string) {
	t.Helper()
	switch {
	case field == "" && err != nil:
		t.Errorf("unexpected error %v", err)
	case field == "":
	case err == nil:
		t.Errorf("no error, want one about %s", field)
	case !errdefs.IsInvalidArgument(err) || !strings.HasPrefix(err.Error(), field+": "):
		t.Errorf("error %q, want InvalidArgument about %s", err, field)
	}
}

func sandboxConfig() *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{
		Metadata:     &criv1.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1"},
		LogDirectory: "/var/log/pods/x",
	}
}

func sandboxNamespaces(ns *criv1.NamespaceOption) *criv1.LinuxPodSandboxConfig {
	return &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{NamespaceOptions: ns}}
}

func TestRunPodSandbox(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(r *criv1.RunPodSandboxRequest)
		field  string
	}{
		{"complete", func(*criv1.RunPodSandboxRequest) {}, ""},
		{"no config", func(r *criv1.RunPodSandboxRequest) { r.Config = nil }, "config"},
		{"no metadata", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata = nil }, "config.metadata"},
		{"no linux", func(r *criv1.RunPodSandboxRequest) { r.Config.Linux = nil }, ""},
		{"no name", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Name = "" }, "config.metadata.name"},
		{"no uid", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Uid = "" }, "config.metadata.uid"},
		{"no namespace", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Namespace = "" }, "config.metadata.namespace"},
		{"path in uid", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Uid = "../x" }, "config.metadata.uid"},
		{"path as name", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Name = ".." }, "config.metadata.name"},
		{"NUL in name", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Name = "a\x00" }, "config.metadata.name"},
		{"long name", func(r *criv1.RunPodSandboxRequest) { r.Config.Metadata.Name = strings.Repeat("a", 256) }, "config.metadata.name"},
		{"NUL in a label", func(r *criv1.RunPodSandboxRequest) { r.Config.Labels = map[string]string{"a": "b\x00"} }, `config.labels["a"]`},
		{"handler path", func(r *criv1.RunPodSandboxRequest) { r.RuntimeHandler = "../runc" }, "runtime_handler"},
		{"lines in host name", func(r *criv1.RunPodSandboxRequest) { r.Config.Hostname = "a\nb" }, "config.hostname"},
		{"relative logs", func(r *criv1.RunPodSandboxRequest) { r.Config.LogDirectory = "logs" }, "config.log_directory"},
		{"climbing logs", func(r *criv1.RunPodSandboxRequest) { r.Config.LogDirectory = "/a/../b" }, "config.log_directory"},
		{"no logs", func(r *criv1.RunPodSandboxRequest) { r.Config.LogDirectory = "" }, ""},
		{"lines in DNS", func(r *criv1.RunPodSandboxRequest) {
			r.Config.DnsConfig = &criv1.DNSConfig{Servers: []string{"1.1.1.1\noptions x"}}
		}, "config.dns_config.servers[0]"},
		{"port", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{ContainerPort: 80, HostPort: 70000}}
		}, "config.port_mappings[0].host_port"},
		{"negative port", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{ContainerPort: -1}}
		}, "config.port_mappings[0].container_port"},
		{"protocol", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{}, {Protocol: 9}}
		}, "config.port_mappings[1].protocol"},
		{"host IP", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{HostIp: "nowhere"}}
		}, "config.port_mappings[0].host_ip"},
		{"namespace mode", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{
				NamespaceOptions: &criv1.NamespaceOption{Network: 17},
			}}
		}, "config.linux.security_context.namespace_options.network"},
		{"two ports of the pod behind one of the node", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{ContainerPort: 80, HostPort: 8080}, {ContainerPort: 81, HostPort: 8080, HostIp: "127.0.0.1"}}
		}, "config.port_mappings[1]"},
		{"two ports behind one of all IPv6 addresses", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{{ContainerPort: 80, HostPort: 8080, HostIp: "::"}, {ContainerPort: 81, HostPort: 8080, HostIp: "::1"}}
		}, "config.port_mappings[1]"},
		{"ports that go together", func(r *criv1.RunPodSandboxRequest) {
			r.Config.PortMappings = []*criv1.PortMapping{
				{ContainerPort: 80, HostPort: 8080, HostIp: "127.0.0.1"},
				{ContainerPort: 81, HostPort: 8080, HostIp: "127.0.0.2"},
				{ContainerPort: 82, HostPort: 8080, HostIp: "::"},
				{ContainerPort: 81, HostPort: 8080, Protocol: criv1.Protocol_UDP},
				{ContainerPort: 81, HostPort: 8080, Protocol: criv1.Protocol_SCTP},
				{ContainerPort: 80, HostPort: 8080, HostIp: "127.0.0.1"}, // the same once more
				{ContainerPort: 1},
				{ContainerPort: 2}, // exposed nowhere
			}
		}, ""},
		{"network of its own for each container", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = sandboxNamespaces(&criv1.NamespaceOption{Network: criv1.NamespaceMode_CONTAINER})
		}, "config.linux.security_context.namespace_options.network"},
		{"IPC of a target", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = sandboxNamespaces(&criv1.NamespaceOption{Ipc: criv1.NamespaceMode_TARGET})
		}, "config.linux.security_context.namespace_options.ipc"},
		{"users of each container", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = sandboxNamespaces(&criv1.NamespaceOption{UsernsOptions: &criv1.UserNamespace{Mode: criv1.NamespaceMode_CONTAINER}})
		}, "config.linux.security_context.namespace_options.userns_options.mode"},
		{"sandbox with a target", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = sandboxNamespaces(&criv1.NamespaceOption{Pid: criv1.NamespaceMode_TARGET, TargetId: "a"})
		}, "config.linux.security_context.namespace_options.pid"},
		{"target of another mode", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = sandboxNamespaces(&criv1.NamespaceOption{TargetId: "a"})
		}, "config.linux.security_context.namespace_options.target_id"},
		{"overhead", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = &criv1.LinuxPodSandboxConfig{Overhead: &criv1.LinuxContainerResources{MemoryLimitInBytes: -2}}
		}, "config.linux.overhead.memory_limit_in_bytes"},
		{"sysctl", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = &criv1.LinuxPodSandboxConfig{Sysctls: map[string]string{"": "1"}}
		}, "config.linux.sysctls"},
		{"Windows", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Windows = &criv1.WindowsPodSandboxConfig{SecurityContext: &criv1.WindowsSandboxSecurityContext{HostProcess: true}}
		}, "config.windows"},
		{"empty Windows", func(r *criv1.RunPodSandboxRequest) { r.Config.Windows = &criv1.WindowsPodSandboxConfig{} }, ""},
		{"cgroup parent", func(r *criv1.RunPodSandboxRequest) {
			r.Config.Linux = &criv1.LinuxPodSandboxConfig{CgroupParent: "/a/../../b"}
		}, "config.linux.cgroup_parent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := &criv1.RunPodSandboxRequest{Config: sandboxConfig()}
			tt.change(req)
			check(t, validate.RunPodSandbox(req), tt.field)
		})
	}
}

// mapped is a change by which a mount has these mappings.
func mapped(uids, gids []*criv1.IDMapping) func(*criv1.CreateContainerRequest) {
	return func(r *criv1.CreateContainerRequest) {
		r.Config.Mounts = []*criv1.Mount{{HostPath: "/a", ContainerPath: "/b", UidMappings: uids, GidMappings: gids}}
	}
}

func TestCreateContainer(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(r *criv1.CreateContainerRequest)
		field  string
	}{
		{"complete", func(*criv1.CreateContainerRequest) {}, ""},
		{"no sandbox", func(r *criv1.CreateContainerRequest) { r.PodSandboxId = "" }, "pod_sandbox_id"},
		{"sandbox path", func(r *criv1.CreateContainerRequest) { r.PodSandboxId = "a/b" }, "pod_sandbox_id"},
		{"no config", func(r *criv1.CreateContainerRequest) { r.Config = nil }, "config"},
		{"no metadata", func(r *criv1.CreateContainerRequest) { r.Config.Metadata = nil }, "config.metadata"},
		{"no name", func(r *criv1.CreateContainerRequest) { r.Config.Metadata.Name = "" }, "config.metadata.name"},
		{"no image", func(r *criv1.CreateContainerRequest) { r.Config.Image = nil }, "config.image"},
		{"empty image", func(r *criv1.CreateContainerRequest) { r.Config.Image.Image = "" }, "config.image.image"},
		{"bad image", func(r *criv1.CreateContainerRequest) { r.Config.Image.Image = "A B" }, "config.image.image"},
		{"image id", func(r *criv1.CreateContainerRequest) { r.Config.Image.Image = "sha256:" + strings.Repeat("a", 64) }, ""},
		{"no sandbox config", func(r *criv1.CreateContainerRequest) { r.SandboxConfig = nil }, "sandbox_config"},
		{"no sandbox metadata", func(r *criv1.CreateContainerRequest) { r.SandboxConfig.Metadata = nil }, "sandbox_config.metadata"},
		{"no security context", func(r *criv1.CreateContainerRequest) { r.Config.Linux = &criv1.LinuxContainerConfig{} }, ""},
		{"log", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "app/0.log" }, ""},
		{"climbing log", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "../../x.log" }, "config.log_path"},
		{"climbing and back", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "a/../../x" }, "config.log_path"},
		{"neighbour", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "../x2/a.log" }, "config.log_path"},
		{"the directory itself", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "." }, "config.log_path"},
		{"absolute log", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "/etc/passwd" }, "config.log_path"},
		{"lines in log", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "a\nb" }, "config.log_path"},
		{"long log", func(r *criv1.CreateContainerRequest) { r.Config.LogPath = strings.Repeat("a", 300) }, "config.log_path"},
		{"log without directory", func(r *criv1.CreateContainerRequest) {
			r.Config.LogPath, r.SandboxConfig.LogDirectory = "a.log", ""
		}, "config.log_path"},
		{"environment", func(r *criv1.CreateContainerRequest) {
			r.Config.Envs = []*criv1.KeyValue{{Key: "A"}, {Key: ""}}
		}, "config.envs[1].key"},
		{"NUL in command", func(r *criv1.CreateContainerRequest) { r.Config.Command = []string{"a", "b\x00"} }, "config.command[1]"},
		{"mount", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/a"}}
		}, "config.mounts[0].container_path"},
		{"propagation", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/a", ContainerPath: "/b", Propagation: 4}}
		}, "config.mounts[0].propagation"},
		{"path in an image that is not named", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/a", ContainerPath: "/b", ImageSubPath: "c"}}
		}, "config.mounts[0].image_sub_path"},
		{"path out of an image", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{Image: &criv1.ImageSpec{Image: "a"}, ContainerPath: "/b", ImageSubPath: "../c"}}
		}, "config.mounts[0].image_sub_path"},
		{"image and host path", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{Image: &criv1.ImageSpec{Image: "a"}, ContainerPath: "/b", HostPath: "/c"}}
		}, "config.mounts[0]"},
		{"mapped mount", mapped([]*criv1.IDMapping{{HostId: 1 << 16, Length: 1}, {ContainerId: 1, HostId: 1, Length: math.MaxUint32 - 1 - 1<<16}}, []*criv1.IDMapping{{Length: math.MaxUint32}}), "config.mounts[0].uidMappings[1]"},
		{"well mapped mount", mapped([]*criv1.IDMapping{{HostId: 1 << 16, Length: 1}, {ContainerId: 1, HostId: 1, Length: 9}}, []*criv1.IDMapping{{Length: math.MaxUint32}}), ""},
		{"mount mapped for users alone", mapped([]*criv1.IDMapping{{Length: 1}}, nil), "config.mounts[0]"},
		{"mount mapped for groups alone", mapped(nil, []*criv1.IDMapping{{Length: 1}}), "config.mounts[0]"},
		{"empty range of a mount", mapped([]*criv1.IDMapping{{Length: 1}}, []*criv1.IDMapping{{}}), "config.mounts[0].gidMappings[0].length"},
		{"range of a mount beyond the last id", mapped([]*criv1.IDMapping{{HostId: math.MaxUint32, Length: 1}}, []*criv1.IDMapping{{Length: 1}}), "config.mounts[0].uidMappings[0]"},
		{"too many ranges of a mount", mapped(make([]*criv1.IDMapping, 341), []*criv1.IDMapping{{Length: 1}}), "config.mounts[0].uidMappings"},
		{"long path of a mount", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/a", ContainerPath: strings.Repeat("/a", 2048)}}
		}, "config.mounts[0].container_path"},
		{"long name of a mount's source", func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/" + strings.Repeat("a", 256), ContainerPath: "/a"}}
		}, "config.mounts[0].host_path"},
		{"long path of a device", func(r *criv1.CreateContainerRequest) {
			r.Config.Devices = []*criv1.Device{{HostPath: strings.Repeat("/a", 2048)}}
		}, "config.devices[0].host_path"},
		{"long masked path", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{MaskedPaths: []string{strings.Repeat("/a", 2048)}}}
		}, "config.linux.security_context.masked_paths[0]"},
		{"long image reference", func(r *criv1.CreateContainerRequest) { r.Config.Image.UserSpecifiedImage = strings.Repeat("a", 3<<20) }, "config"},
		{"NUL in an image reference", func(r *criv1.CreateContainerRequest) { r.Config.Image.ImageRef = "\x00" }, "config.image.image_ref"},
		{"Windows", func(r *criv1.CreateContainerRequest) {
			r.Config.Windows = &criv1.WindowsContainerConfig{Resources: &criv1.WindowsContainerResources{CpuCount: 1}}
		}, "config.windows"},
		{"stop signal", func(r *criv1.CreateContainerRequest) { r.Config.StopSignal = 999 }, "config.stop_signal"},
		{"device", func(r *criv1.CreateContainerRequest) {
			r.Config.Devices = []*criv1.Device{{HostPath: "/dev/null", Permissions: "rx"}}
		}, "config.devices[0].permissions"},
		{"group without user", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{
				RunAsGroup: &criv1.Int64Value{Value: 1},
			}}
		}, "config.linux.security_context.run_as_group"},
		{"OOM score", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{Resources: &criv1.LinuxContainerResources{OomScoreAdj: 1001}}
		}, "config.linux.resources.oom_score_adj"},
		{"device path", func(r *criv1.CreateContainerRequest) {
			r.Config.Devices = []*criv1.Device{{HostPath: "/dev/null", ContainerPath: "null"}}
		}, "config.devices[0].container_path"},
		{"masked path", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{MaskedPaths: []string{"/a", "b"}}}
		}, "config.linux.security_context.masked_paths[1]"},
		{"read-only path", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{ReadonlyPaths: []string{"b"}}}
		}, "config.linux.security_context.readonly_paths[0]"},
		{"target", func(r *criv1.CreateContainerRequest) {
			r.Config.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{
				NamespaceOptions: &criv1.NamespaceOption{Pid: criv1.NamespaceMode_TARGET},
			}}
		}, "config.linux.security_context.namespace_options.target_id"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := &criv1.CreateContainerRequest{
				PodSandboxId: strings.Repeat("a", 64),
				Config: &criv1.ContainerConfig{
					Metadata: &criv1.ContainerMetadata{Name: "app"}, Image: &criv1.ImageSpec{Image: "docker.io/library/busybox:1"},
				},
				SandboxConfig: sandboxConfig(),
			}
			tt.change(req)
			check(t, validate.CreateContainer(req), tt.field)
		})
	}
}

func TestOtherCalls(t *testing.T) {
	for _, tt := range []struct {
		name  string
		err   error
		field string
	}{
		{"stop", validate.StopContainer(&criv1.StopContainerRequest{ContainerId: "a", Timeout: 0}), ""},
		{"stop nothing", validate.StopContainer(&criv1.StopContainerRequest{}), "container_id"},
		{"negative stop", validate.StopContainer(&criv1.StopContainerRequest{ContainerId: "a", Timeout: -1}), "timeout"},
		{"long id", validate.ID("id", strings.Repeat("a", 129)), "id"},
		{"NUL id", validate.ID("id", "a\x00"), "id"},
		{"update without linux", validate.UpdateContainerResources(&criv1.UpdateContainerResourcesRequest{ContainerId: "a"}), ""},
		{"update of shares", validate.UpdateContainerResources(&criv1.UpdateContainerResourcesRequest{
			ContainerId: "a", Linux: &criv1.LinuxContainerResources{CpuShares: -1},
		}), "linux.cpu_shares"},
		{"update for Windows", validate.UpdateContainerResources(&criv1.UpdateContainerResourcesRequest{
			ContainerId: "a", Windows: &criv1.WindowsContainerResources{CpuShares: 1},
		}), "windows"},
		{"pod update", validate.UpdatePodSandboxResources(&criv1.UpdatePodSandboxResourcesRequest{
			PodSandboxId: "a", Resources: &criv1.LinuxContainerResources{CpuPeriod: -1},
		}), "resources.cpu_period"},
		{"exec sync", validate.ExecSync(&criv1.ExecSyncRequest{ContainerId: "a", Cmd: []string{"true"}}), ""},
		{"exec sync of nothing", validate.ExecSync(&criv1.ExecSyncRequest{ContainerId: "a"}), "cmd"},
		{"exec sync negative", validate.ExecSync(&criv1.ExecSyncRequest{ContainerId: "a", Cmd: []string{"a"}, Timeout: -1}), "timeout"},
		{"exec without streams", validate.Exec(&criv1.ExecRequest{ContainerId: "a", Cmd: []string{"a"}}), "stdin, stdout, stderr"},
		{"exec without command", validate.Exec(&criv1.ExecRequest{ContainerId: "a", Stdout: true}), "cmd"},
		{"exec with both", validate.Exec(&criv1.ExecRequest{
			ContainerId: "a", Cmd: []string{"a"}, Stdout: true, Stderr: true, Tty: true,
		}), "stderr"},
		{"attach without streams", validate.Attach(&criv1.AttachRequest{ContainerId: "a"}), "stdin, stdout, stderr"},
		{"forward", validate.PortForward(&criv1.PortForwardRequest{PodSandboxId: "a"}), ""},
		{"forward port 0", validate.PortForward(&criv1.PortForwardRequest{PodSandboxId: "a", Port: []int32{80, 0}}), "port[1]"},
		{"no filter", validate.Filter((*criv1.ContainerFilter)(nil)), ""},
		{"empty filter", validate.Filter(&criv1.ContainerFilter{}), ""},
		{"filter state", validate.Filter(&criv1.ContainerFilter{State: &criv1.ContainerStateValue{State: 8}}), "filter.state.state"},
		{"pull nothing", validate.PullImage(&criv1.PullImageRequest{}), "image"},
		{"pull", validate.PullImage(&criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: "busybox"}}), ""},
		{"pull an id", validate.PullImage(&criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: strings.Repeat("a", 64)}}), "image.image"},
		{"image status of nothing", validate.Image("image", nil), "image"},
		{"pod CIDR", validate.UpdateRuntimeConfig(&criv1.UpdateRuntimeConfigRequest{RuntimeConfig: &criv1.RuntimeConfig{
			NetworkConfig: &criv1.NetworkConfig{PodCidr: "10.0.0.0/24,fd00::/64"},
		}}), ""},
		{"bad pod CIDR", validate.UpdateRuntimeConfig(&criv1.UpdateRuntimeConfigRequest{RuntimeConfig: &criv1.RuntimeConfig{
			NetworkConfig: &criv1.NetworkConfig{PodCidr: "10.0.0.0"},
		}}), "runtime_config.network_config.pod_cidr"},
		{"no runtime config", validate.UpdateRuntimeConfig(&criv1.UpdateRuntimeConfigRequest{}), ""},
	} {
		t.Run(tt.name, func(t *testing.T) { check(t, tt.err, tt.field) })
	}
}

// FuzzRequests looks for requests that make the checks panic.
func FuzzRequests(f *testing.F) {
	seed, err := proto.Marshal(&criv1.CreateContainerRequest{Config: &criv1.ContainerConfig{}, SandboxConfig: sandboxConfig()})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(_ *testing.T, data []byte) {
		var create criv1.CreateContainerRequest
		if proto.Unmarshal(data, &create) == nil {
			_ = validate.CreateContainer(&create)
		}
		var run criv1.RunPodSandboxRequest
		if proto.Unmarshal(data, &run) == nil {
			_ = validate.RunPodSandbox(&run)
		}
	})
}

// What the kernel takes on no node is refused with the field; what it may take is left to the node.
func TestResources(t *testing.T) {
	for _, tt := range []struct {
		r     *criv1.LinuxContainerResources
		field string
	}{
		{&criv1.LinuxContainerResources{CpuShares: 2, CpuQuota: 1000, CpuPeriod: 1000, CpusetCpus: "0", CpusetMems: "0-1"}, ""},
		{&criv1.LinuxContainerResources{CpuShares: 262144, CpuQuota: -1, CpuPeriod: 1_000_000, CpusetCpus: "0-2,7,8-15:2/4"}, ""},
		{&criv1.LinuxContainerResources{CpuShares: 1}, "linux.cpu_shares"},
		{&criv1.LinuxContainerResources{CpuShares: 262145}, "linux.cpu_shares"},
		{&criv1.LinuxContainerResources{CpuQuota: 999}, "linux.cpu_quota"},
		{&criv1.LinuxContainerResources{CpuQuota: -2}, "linux.cpu_quota"},
		{&criv1.LinuxContainerResources{CpuPeriod: 999}, "linux.cpu_period"},
		{&criv1.LinuxContainerResources{CpuPeriod: 1_000_001}, "linux.cpu_period"},
		{&criv1.LinuxContainerResources{CpusetCpus: "a-b"}, "linux.cpuset_cpus"},
		{&criv1.LinuxContainerResources{CpusetMems: "0,"}, "linux.cpuset_mems"},
		{&criv1.LinuxContainerResources{HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB"}, {PageSize: "64KB"}}}, ""},
		{&criv1.LinuxContainerResources{HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB"}, {PageSize: "../x"}}}, "linux.hugepage_limits[1].page_size"},
		{&criv1.LinuxContainerResources{Unified: map[string]string{"memory.oom.group": "1", "hugetlb.2MB.max": "0"}}, ""},
		{&criv1.LinuxContainerResources{Unified: map[string]string{"../memory.max": "1"}}, "linux.unified"},
		{&criv1.LinuxContainerResources{Unified: map[string]string{"memory": "1"}}, "linux.unified"},
	} {
		check(t, validate.UpdateContainerResources(&criv1.UpdateContainerResourcesRequest{ContainerId: "a", Linux: tt.r}), tt.field)
	}
}
