// Package config is the configuration file of sandboxd: every key with its default and its
// check. It holds values only; app turns them into those of the other packages.
package config

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

// Config is the whole file.
type Config struct {
	Version int `toml:"version" comment:"Version of this file's form."`
	// Root is where records and images live.
	Root string `toml:"root" comment:"Folder of the durable records and the images."`
	// State is where everything lives that a reboot may take.
	State   string                `toml:"state" comment:"Folder of bundles, sockets and namespaces; emptied by a reboot."`
	Log     telemetry.LogConfig   `toml:"log"`
	Admin   admin.Config          `toml:"admin"`
	Tracing telemetry.TraceConfig `toml:"tracing"`
	Server  rpc.ServerConfig      `toml:"server" comment:"Socket of the internal API; the gateway is its caller."`
	Bus     Bus                   `toml:"bus"`
	Runtime Runtime               `toml:"runtime"`
	Logs    Logs                  `toml:"container_logs"`
	Image   Image                 `toml:"image"`
	Network Network               `toml:"network"`
	// CAdvisor answers kubelet's built-in cAdvisor.
	CAdvisor CAdvisor `toml:"cadvisor"`
}

// Bus says where events go.
type Bus struct {
	Enabled bool                `toml:"enabled" comment:"Publish events; they wait in the outbox while the bus is away."`
	Client  events.ClientConfig `toml:"client"`
	// OutboxLimit is the most events that wait for the bus.
	OutboxLimit int `toml:"outbox_limit" comment:"Most events that wait for the bus; beyond it the oldest are dropped, ends of containers last."`
}

// Runtime describes runtime handlers and shims.
type Runtime struct {
	DefaultHandler  string             `toml:"default_handler" comment:"Handler for pods that name none."`
	CgroupDriver    string             `toml:"cgroup_driver" comment:"\"cgroupfs\" or \"systemd\"; kubelet is told."`
	SessionGrace    config.Duration    `toml:"session_grace" comment:"How long a lost gateway may take to come back before what it was making is undone."`
	InitBinary      string             `toml:"init_binary" comment:"Static program that is process 1 of pods that share their PID namespace;\nempty: the one beside sandboxd."`
	SELinux         bool               `toml:"selinux" comment:"Give pods that ask for no SELinux options a label of their own, where the host has SELinux;\npods in a namespace of the host get none. Needs a policy for containers (container-selinux)."`
	SeccompDefault  bool               `toml:"seccomp_default" comment:"Use the runtime's default seccomp profile where a pod names none."`
	UnprivPorts     bool               `toml:"enable_unprivileged_ports" comment:"Let every user of a pod with its own network bind ports below 1024."`
	UnprivICMP      bool               `toml:"enable_unprivileged_icmp" comment:"Let every user of a pod with its own network send echo requests."`
	DefaultSysctls  map[string]string  `toml:"default_sysctls" comment:"Further sysctls of pods, each for pods that have its namespace for themselves and do not ask for another value."`
	AppArmor        string             `toml:"apparmor_profile" comment:"Default AppArmor profile; made and loaded if the host has AppArmor and none of this name is loaded."`
	RDTFile         string             `toml:"rdt_config_file" comment:"Classes of cache and memory bandwidth in goresctrl's form, which pods choose by annotation; empty: none."`
	BlockIOFile     string             `toml:"blockio_config_file" comment:"Classes of block I/O in goresctrl's form, which pods choose by annotation; empty: none."`
	CDIDirs         []string           `toml:"cdi_spec_dirs" comment:"Folders of CDI device descriptions; later ones win. None switches CDI off."`
	RejectMissing   bool               `toml:"reject_missing_mount_sources" comment:"Refuse a mount whose source is missing, instead of making a folder."`
	AbsentSources   []string           `toml:"absent_mount_sources_to_reject" comment:"Paths that are not made if they are missing as the source of a mount, such as \"/etc/hostname\"."`
	IgnoreVolumes   bool               `toml:"ignore_image_defined_volumes" comment:"Make no folders for the volumes that images declare; what is written there goes to the writable layer."`
	DefaultEnv      []string           `toml:"default_env" comment:"Environment variables of every container, each NAME=value; those of images and requests win."`
	DefaultMounts   []string           `toml:"default_mounts" comment:"Read-only mounts of every container, each /on/the/node:/in/the/container; mounts of requests and images win."`
	Timezone        string             `toml:"timezone" comment:"Time zone of every container, as its /etc/localtime: \"Local\" for that of the node, or a name such as \"Europe/Berlin\"; empty: that of the image."`
	DeviceOwnership bool               `toml:"device_ownership_from_security_context" comment:"Give the devices of a container to its run_as_user and run_as_group, instead of leaving them to the host's owners."`
	Ulimits         map[string]Ulimit  `toml:"ulimits" comment:"Limits of every container by name, such as \"nofile\"; lowered to what sandboxd itself may give."`
	HooksDirs       []string           `toml:"hooks_dir" comment:"Folders of hooks for containers, in the form of oci-hooks(5); of files of the same name the one in the last folder counts.\nA file that is wrong keeps all containers from being created."`
	Shim            Shim               `toml:"shim"`
	Handlers        map[string]Handler `toml:"handlers"`
	// Workloads are kinds of pods by their names.
	Workloads map[string]Workload `toml:"workloads" comment:"Kinds of pods, told by an annotation, whose containers have other shares and sets of the processors than they ask for, as CRI-O's."`
}

// Workload is a kind of pods.
type Workload struct {
	Activation string            `toml:"activation_annotation"`
	Prefix     string            `toml:"annotation_prefix"`
	Resources  WorkloadResources `toml:"resources"`
}

// WorkloadResources are what containers of a workload have by default.
type WorkloadResources struct {
	Shares uint64 `toml:"cpushares"`
	Set    string `toml:"cpuset"`
	Quota  int64  `toml:"cpuquota"`
	Period uint64 `toml:"cpuperiod"`
	Limit  int64  `toml:"cpulimit"`
}

// Ulimit is a limit of a process.
type Ulimit struct {
	Soft uint64 `toml:"soft"`
	Hard uint64 `toml:"hard"`
}

// Shim are the time limits of the shim manager.
type Shim struct {
	StartTimeout    config.Duration `toml:"start_timeout" comment:"Limit for a shim to start and to answer."`
	CreateTimeout   config.Duration `toml:"create_timeout" comment:"Limit for the OCI runtime to create a container."`
	LoadTimeout     config.Duration `toml:"load_timeout" comment:"Limit for a shim to answer after a restart of sandboxd; other shims do not wait for it."`
	CleanupTimeout  config.Duration `toml:"cleanup_timeout" comment:"Limit of the clean-up of a dead shim."`
	ShutdownTimeout config.Duration `toml:"shutdown_timeout" comment:"Limit for a shim to end before it is killed."`
}

// Handler is a runtime handler.
type Handler struct {
	RuntimeType                  string            `toml:"runtime_type" comment:"Type of the shim, such as io.containerd.runc.v2."`
	ShimPath                     string            `toml:"shim_path" comment:"Shim binary; empty: found by its type beside sandboxd, else in PATH."`
	BinaryName                   string            `toml:"binary_name" comment:"OCI runtime that the shim drives; empty: the shim's default."`
	RuntimeRoot                  string            `toml:"runtime_root" comment:"State folder of the OCI runtime; empty: the shim's default."`
	Sandboxer                    string            `toml:"sandboxer" comment:"\"podsandbox\" for any shim, \"shim\" for one that serves the Sandbox API."`
	Snapshotter                  string            `toml:"snapshotter" comment:"Snapshotter of root file systems; empty: that of [image]."`
	PodAnnotations               []string          `toml:"pod_annotations" comment:"Patterns of pod annotations that are passed to the shim."`
	ContainerAnnotations         []string          `toml:"container_annotations" comment:"Patterns of container annotations that are passed to the shim."`
	DefaultAnnotations           map[string]string `toml:"default_annotations,omitempty" comment:"Annotations that the shim is passed unless the pod has another value of one that pod_annotations or container_annotations pass."`
	PrivilegedWithoutHostDevices bool              `toml:"privileged_without_host_devices" comment:"Keep host devices out of privileged containers."`
	AllDevicesAllowed            bool              `toml:"privileged_without_host_devices_all_devices_allowed" comment:"Let such containers use all devices all the same, through nodes they make themselves; needs privileged_without_host_devices."`
	CgroupWritable               bool              `toml:"cgroup_writable" comment:"Mount the cgroups of containers that are not privileged writable; needs cgroup v2, containers are refused elsewhere.\nMounts of base_spec stay as they are."`
	ExecCPUAffinity              string            `toml:"exec_cpu_affinity" comment:"\"first\": what is executed in a container with a set of processors of its own runs on the first of them; empty: on all."`
	BaseSpec                     string            `toml:"base_spec" comment:"OCI specification that containers start from; empty: the built-in one."`
	CNIConfDir                   string            `toml:"cni_conf_dir" comment:"Folder of the CNI configurations of pods of this handler; empty: that of [network]."`
	CNIMaxConfNum                int               `toml:"cni_max_conf_num" comment:"Configurations of cni_conf_dir that are used, in order of their file names; 0: as many as of [network]."`
	Options                      map[string]any    `toml:"options,omitempty" comment:"Further options of the shim; those of runc by containerd's names, such as ShimCgroup."`
}

// Logs describes the containers' logs.
type Logs struct {
	MaxLineSize config.ByteSize `toml:"max_line_size" comment:"Longer lines are split into partial records."`
}

// Image describes pulling and storing images.
type Image struct {
	Snapshotter            string          `toml:"snapshotter" comment:"\"overlayfs\", \"native\", \"erofs\" or one of proxy_snapshotters; empty: overlayfs where it works, else native."`
	RegistryConfig         []string        `toml:"registry_config" comment:"Folders of hosts.toml files; the first that exists is used."`
	AuthFile               string          `toml:"auth_file" comment:"File in the form of docker's config.json with credentials for pulls that bring none; empty: none."`
	MaxConcurrentDownloads int             `toml:"max_concurrent_downloads" comment:"Layers of one image that are fetched at a time."`
	MaxConcurrentUnpacks   int             `toml:"max_concurrent_unpacks" comment:"Layers of one image that are extracted at a time, with overlayfs and erofs. 1: one after the other."`
	LayerFetchBuffer       config.ByteSize `toml:"concurrent_layer_fetch_buffer" comment:"Size of the ranges in which a big layer is fetched, several at a time; each takes as much memory. 0: layers are fetched whole."`
	PullProgressTimeout    config.Duration `toml:"pull_progress_timeout" comment:"A pull that makes no progress for this long fails."`
	VerifierDir            string          `toml:"verifier_dir" comment:"Folder of programs in the form of containerd's image verifiers, all of which must accept an image before its layers are pulled;\nif set and there is none, nothing is pulled. Empty: images are not verified."`
	MaxVerifiers           int             `toml:"max_verifiers" comment:"Most programs that verifier_dir may have."`
	VerifierTimeout        config.Duration `toml:"per_verifier_timeout" comment:"Limit of each verifier."`
	PinnedImages           []string        `toml:"pinned_images" comment:"Patterns of images that kubelet must not collect: full names with * for any characters, or a regular expression between slashes."`
	DiscardLayers          bool            `toml:"discard_unpacked_layers" comment:"Keep the layers of an image only unpacked. A runtime handler with another snapshotter than the one that an image was pulled for needs a pull of its own then."`
	KeyModel               string          `toml:"decryption_key_model" comment:"\"node\": stream processors are told what they need to decrypt a layer with keys of the node; empty: they are not."`
	// ProxySnapshotters are snapshotters by their names.
	ProxySnapshotters map[string]ProxySnapshotter `toml:"proxy_snapshotters" comment:"Snapshotters in processes of their own, for example for lazy pulling, as containerd's proxy plugins."`
	// StreamProcessors are programs by their names.
	StreamProcessors map[string]StreamProcessor `toml:"stream_processors" comment:"Programs that read layers of media types of their own, for example encrypted ones, in the form of containerd's."`
}

// ProxySnapshotter is a snapshotter in another process.
type ProxySnapshotter struct {
	Address string `toml:"address"`
	Root    string `toml:"root"`
}

// StreamProcessor is a program that turns layers of some media types into another.
type StreamProcessor struct {
	Accepts []string `toml:"accepts"`
	Returns string   `toml:"returns"`
	Path    string   `toml:"path"`
	Args    []string `toml:"args"`
	Env     []string `toml:"env"`
}

// Network describes CNI.
type Network struct {
	ConfDir      string          `toml:"conf_dir" comment:"Folder of CNI configurations."`
	BinDirs      []string        `toml:"bin_dirs" comment:"Folders of CNI plugins."`
	MaxConfNum   int             `toml:"max_conf_num" comment:"Configurations that are used, in order of their file names; 0: all."`
	ConfTemplate string          `toml:"conf_template" comment:"Template of a configuration that is written once the pod CIDR is known."`
	IPPreference string          `toml:"ip_preference" comment:"\"ipv4\", \"ipv6\" or \"cni\" (order of the plugins)."`
	Timeout      config.Duration `toml:"timeout" comment:"Limit of attaching a pod, and of detaching it."`
	Parallel     int             `toml:"parallel" comment:"Plugins that attach pods at a time; as many may detach pods beside them."`
	StatusGrace  config.Duration `toml:"status_grace" comment:"How long the network stays ready after a plugin has begun to answer STATUS with an error, for example because its agent restarts. 0: not at all."`
	GCInterval   config.Duration `toml:"gc_interval" comment:"How often plugins are told which pods there are, so that they release what others held; also at the start and after a change of the configuration.\n0: never, as it must be if another runtime uses the same networks."`
}

// CAdvisor describes what is said to kubelet's built-in cAdvisor.
type CAdvisor struct {
	Socket string `toml:"socket" comment:"Socket at which root may ask what a container's cgroup belongs to, with containerd's API; empty: none.\ncAdvisor asks at \"/run/containerd/containerd.sock\". Only for nodes on which no containerd runs."`
}

// Default returns the configuration of a process without a file.
func Default() Config {
	bus := events.DefaultClientConfig()
	bus.NkeySeedFile = "/var/lib/crisp/eventbus/keys/sandboxd.nk" // written by eventbus
	server := rpc.DefaultServerConfig("/run/crisp/sandboxd.sock")
	server.MaxMessage = 40 * config.MiB // an ExecSync answer has two streams of 16 MiB
	return Config{
		Version: 1,
		Root:    "/var/lib/crisp",
		State:   "/run/crisp",
		Log:     telemetry.DefaultLogConfig(),
		Admin:   admin.Config{Listen: "127.0.0.1:9671"},
		Tracing: telemetry.DefaultTraceConfig(),
		Server:  server,
		Bus:     Bus{Enabled: true, Client: bus, OutboxLimit: 100_000},
		Runtime: Runtime{
			DefaultHandler: "crisp", CgroupDriver: "cgroupfs",
			SessionGrace: config.Duration(10 * time.Second),
			UnprivPorts:  true, UnprivICMP: true,
			AppArmor: "crisp-default", CDIDirs: []string{"/etc/cdi", "/var/run/cdi"}, Ulimits: map[string]Ulimit{}, DefaultSysctls: map[string]string{},
			AbsentSources: []string{}, DefaultEnv: []string{}, DefaultMounts: []string{}, HooksDirs: []string{}, Workloads: map[string]Workload{},
			Shim: Shim{
				StartTimeout:    config.Duration(10 * time.Second),
				CreateTimeout:   config.Duration(90 * time.Second),
				LoadTimeout:     config.Duration(5 * time.Second),
				CleanupTimeout:  config.Duration(5 * time.Second),
				ShutdownTimeout: config.Duration(3 * time.Second),
			},
			Handlers: map[string]Handler{
				"crisp": handler("io.containerd.crisp.v1", "shim"),
				"runc":  handler("io.containerd.runc.v2", "podsandbox"),
			},
		},
		Logs: Logs{MaxLineSize: 16 * config.KiB},
		Image: Image{
			RegistryConfig:         []string{"/etc/crisp/certs.d", "/etc/containerd/certs.d"},
			MaxConcurrentDownloads: 3,
			MaxConcurrentUnpacks:   3,
			LayerFetchBuffer:       8 * config.MiB,
			PullProgressTimeout:    config.Duration(5 * time.Minute),
			MaxVerifiers:           10,
			VerifierTimeout:        config.Duration(10 * time.Second),
			PinnedImages:           []string{},
			KeyModel:               "node",
			ProxySnapshotters:      map[string]ProxySnapshotter{},
			StreamProcessors:       map[string]StreamProcessor{},
		},
		Network: Network{
			ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin", "/usr/lib/cni"},
			MaxConfNum: 1, IPPreference: "ipv4", Timeout: config.Duration(2 * time.Minute), Parallel: 16,
			GCInterval: config.Duration(time.Hour),
		},
	}
}

func handler(runtimeType, sandboxer string) Handler {
	return Handler{
		RuntimeType: runtimeType, Sandboxer: sandboxer,
		PodAnnotations: []string{}, ContainerAnnotations: []string{},
	}
}

// Validate implements the contract of the config package.
func (c Config) Validate() error {
	return errors.Join(
		config.CheckVersion(c.Version),
		absolute("root", c.Root), absolute("state", c.State),
		config.Section("log", c.Log), config.Section("admin", c.Admin), config.Section("tracing", c.Tracing),
		config.Section("server", c.Server), config.Section("bus.client", c.Bus.Client),
		positive("bus.outbox_limit", c.Bus.OutboxLimit),
		config.Section("runtime", c.Runtime), config.Section("image", c.Image), config.Section("network", c.Network),
		config.Section("cadvisor", c.CAdvisor), c.checkSnapshotters(),
		within("container_logs.max_line_size", c.Logs.MaxLineSize.Int(), 1<<10, 1<<20),
	)
}

// ulimits are the limits that Linux has.
var ulimits = []string{
	"as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss", "rtprio", "rttime",
	"sigpending", "stack",
}

// Validate checks the section.
func (r Runtime) Validate() error {
	errs := []error{
		oneOf("cgroup_driver", r.CgroupDriver, "cgroupfs", "systemd"),
		duration("session_grace", r.SessionGrace), duration("shim.start_timeout", r.Shim.StartTimeout),
		duration("shim.create_timeout", r.Shim.CreateTimeout),
		duration("shim.load_timeout", r.Shim.LoadTimeout), duration("shim.cleanup_timeout", r.Shim.CleanupTimeout),
		duration("shim.shutdown_timeout", r.Shim.ShutdownTimeout),
	}
	for _, file := range []struct{ key, path string }{
		{"rdt_config_file", r.RDTFile}, {"blockio_config_file", r.BlockIOFile}, {"init_binary", r.InitBinary},
	} {
		if file.path != "" {
			errs = append(errs, absolute(file.key, file.path))
		}
	}
	for _, dir := range r.HooksDirs {
		errs = append(errs, absolute("hooks_dir", dir))
	}
	for _, name := range slices.Sorted(maps.Keys(r.Workloads)) {
		if r.Workloads[name].Activation == "" {
			errs = append(errs, fmt.Errorf("workloads.%s.activation_annotation: must not be empty, write for example \"target.workload.openshift.io/management\"", name))
		}
	}
	for _, dir := range r.CDIDirs {
		errs = append(errs, absolute("cdi_spec_dirs", dir))
	}
	errs = append(errs, r.checkDefaults())
	for name, l := range r.Ulimits {
		if !slices.Contains(ulimits, name) {
			errs = append(errs, fmt.Errorf("ulimits.%s: is unknown, write one of %q", name, ulimits))
		}
		if l.Soft > l.Hard {
			errs = append(errs, fmt.Errorf("ulimits.%s.soft: %d is more than the hard limit %d", name, l.Soft, l.Hard))
		}
	}
	if _, ok := r.Handlers[r.DefaultHandler]; !ok {
		errs = append(errs, fmt.Errorf("default_handler: %q is not in [runtime.handlers]", r.DefaultHandler))
	}
	for name, h := range r.Handlers {
		if h.RuntimeType == "" {
			errs = append(errs, fmt.Errorf("handlers.%s.runtime_type: must not be empty, write for example \"io.containerd.runc.v2\"", name))
		}
		if h.AllDevicesAllowed && !h.PrivilegedWithoutHostDevices {
			errs = append(errs, fmt.Errorf(
				"handlers.%s.privileged_without_host_devices_all_devices_allowed: needs privileged_without_host_devices = true", name))
		}
		errs = append(errs, oneOf("handlers."+name+".exec_cpu_affinity", h.ExecCPUAffinity, "", "first"))
		if h.CNIMaxConfNum < 0 || (h.CNIMaxConfNum > 0 && h.CNIConfDir == "") {
			errs = append(errs, fmt.Errorf("handlers.%s.cni_max_conf_num: %d: must not be negative, and needs cni_conf_dir", name, h.CNIMaxConfNum))
		}
		errs = append(errs, optionalPath("handlers."+name+".cni_conf_dir", h.CNIConfDir))
		errs = append(errs, oneOf("handlers."+name+".sandboxer", h.Sandboxer, "", "podsandbox", "shim"))
		for _, p := range slices.Concat(h.PodAnnotations, h.ContainerAnnotations) {
			if _, err := filepath.Match(p, ""); err != nil {
				errs = append(errs, fmt.Errorf("handlers.%s: annotation pattern %q: %w", name, p, err))
			}
		}
	}
	return errors.Join(errs...)
}

// checkDefaults checks what every container gets.
func (r Runtime) checkDefaults() error {
	var errs []error
	for _, path := range r.AbsentSources {
		errs = append(errs, absolute("absent_mount_sources_to_reject", path))
	}
	for _, variable := range r.DefaultEnv {
		if name, _, ok := strings.Cut(variable, "="); !ok || name == "" || strings.Contains(variable, "\x00") {
			errs = append(errs, fmt.Errorf("default_env: %q is no variable, write NAME=value", variable))
		}
	}
	for _, m := range r.DefaultMounts {
		source, target, ok := strings.Cut(m, ":")
		if !ok || !filepath.IsAbs(source) || !filepath.IsAbs(target) || filepath.Clean(target) == "/" || strings.Contains(target, ":") {
			errs = append(errs, fmt.Errorf("default_mounts: %q is no mount, write /on/the/node:/in/the/container", m))
		}
	}
	if r.Timezone != "" && !filepath.IsLocal(r.Timezone) {
		errs = append(errs, fmt.Errorf("timezone: %q is no name, write \"Local\" or for example \"Europe/Berlin\"", r.Timezone))
	}
	return errors.Join(errs...)
}

// Validate checks the section.
func (i Image) Validate() error {
	return errors.Join(oneOf("snapshotter", i.Snapshotter, i.snapshotters()...), checkProxySnapshotters(i.ProxySnapshotters),
		positive("max_concurrent_downloads", i.MaxConcurrentDownloads), positive("max_concurrent_unpacks", i.MaxConcurrentUnpacks),
		duration("pull_progress_timeout", i.PullProgressTimeout),
		fetchBuffer(i.LayerFetchBuffer), optionalPath("auth_file", i.AuthFile), optionalPath("verifier_dir", i.VerifierDir),
		positive("max_verifiers", i.MaxVerifiers), duration("per_verifier_timeout", i.VerifierTimeout),
		checkPatterns("pinned_images", i.PinnedImages), oneOf("decryption_key_model", i.KeyModel, "", "node"), checkStreamProcessors(i.StreamProcessors))
}

// Erofs is the name of the snapshotter that needs more of the node than all have.
const Erofs = "erofs"

// UsesErofs says whether images are unpacked with the snapshotter erofs, by default or for a handler.
func (c Config) UsesErofs() bool {
	for _, h := range c.Runtime.Handlers {
		if h.Snapshotter == Erofs {
			return true
		}
	}
	return c.Image.Snapshotter == Erofs
}

// snapshotters are the names that there are; the empty one is the best that works.
func (i Image) snapshotters() []string {
	return append([]string{"", "overlayfs", "native", Erofs}, slices.Sorted(maps.Keys(i.ProxySnapshotters))...)
}

func checkProxySnapshotters(proxies map[string]ProxySnapshotter) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(proxies)) {
		key := "proxy_snapshotters." + name
		if slices.Contains(Image{}.snapshotters(), name) {
			errs = append(errs, fmt.Errorf("%s: the name is that of a snapshotter of sandboxd, choose another", key))
		}
		errs = append(errs, absolute(key+".address", proxies[name].Address), optionalPath(key+".root", proxies[name].Root))
	}
	return errors.Join(errs...)
}

// checkSnapshotters looks for the snapshotters of the runtime handlers among those that there are.
func (c Config) checkSnapshotters() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(c.Runtime.Handlers)) {
		errs = append(errs, oneOf("runtime.handlers."+name+".snapshotter", c.Runtime.Handlers[name].Snapshotter, c.Image.snapshotters()...))
	}
	return errors.Join(errs...)
}

// checkPatterns checks patterns of image names: those between slashes are regular expressions.
func checkPatterns(key string, patterns []string) error {
	var errs []error
	for _, p := range patterns {
		text, expression := strings.CutPrefix(p, "/")
		if !expression {
			continue
		}
		text, closed := strings.CutSuffix(text, "/")
		_, err := regexp.Compile(text)
		if !closed {
			err = errors.New("the slash at the end is missing")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %q: %w; write for example \"/quay\\.io/team/.*/\"", key, p, err))
		}
	}
	return errors.Join(errs...)
}

func checkStreamProcessors(programs map[string]StreamProcessor) error {
	var errs []error
	accepted := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		p, key := programs[name], "stream_processors."+name
		if p.Path == "" {
			errs = append(errs, fmt.Errorf("%s.path: must not be empty, write for example \"ctd-decoder\"", key))
		}
		if p.Returns == "" {
			errs = append(errs, fmt.Errorf("%s.returns: must not be empty, write for example \"application/vnd.oci.image.layer.v1.tar+gzip\"", key))
		}
		if len(p.Accepts) == 0 {
			errs = append(errs, fmt.Errorf("%s.accepts: must name a media type, such as \"application/vnd.oci.image.layer.v1.tar+gzip+encrypted\"", key))
		}
		for _, mediaType := range p.Accepts {
			if other, ok := accepted[mediaType]; ok {
				errs = append(errs, fmt.Errorf("%s.accepts: %q is accepted by %q already", key, mediaType, other))
			}
			accepted[mediaType] = name
			if mediaType == p.Returns {
				errs = append(errs, fmt.Errorf("%s.returns: %q is what it accepts", key, mediaType))
			}
		}
		for _, variable := range p.Env {
			if name, _, ok := strings.Cut(variable, "="); !ok || name == "" {
				errs = append(errs, fmt.Errorf("%s.env: %q is no variable, write NAME=value", key, variable))
			}
		}
	}
	return errors.Join(errs...)
}

func fetchBuffer(size config.ByteSize) error {
	if size == 0 || (size >= config.MiB && size <= config.GiB) {
		return nil
	}
	return fmt.Errorf("concurrent_layer_fetch_buffer: %v: 0 or 1MiB to 1GiB wanted", size)
}

// Validate checks the section.
func (n Network) Validate() error {
	errs := []error{
		absolute("conf_dir", n.ConfDir), oneOf("ip_preference", n.IPPreference, "ipv4", "ipv6", "cni"),
		duration("timeout", n.Timeout), positive("parallel", n.Parallel),
	}
	if n.StatusGrace < 0 {
		errs = append(errs, fmt.Errorf("status_grace: %v is less than 0, write for example \"30s\", or \"0s\" for none", n.StatusGrace))
	}
	if n.GCInterval < 0 {
		errs = append(errs, fmt.Errorf("gc_interval: %v is less than 0, write for example \"1h\", or \"0s\" for never", n.GCInterval))
	}
	if len(n.BinDirs) == 0 {
		errs = append(errs, errors.New("bin_dirs: must name at least one folder, such as \"/opt/cni/bin\""))
	}
	return errors.Join(errs...)
}

// Validate checks the section.
func (c CAdvisor) Validate() error {
	if c.Socket == "" {
		return nil
	}
	return config.Section("socket", unixsock.Config{Path: c.Socket})
}

func absolute(key, path string) error {
	if filepath.IsAbs(path) {
		return nil
	}
	return fmt.Errorf("%s: %q is not an absolute path", key, path)
}

// optionalPath accepts an absolute path or none.
func optionalPath(key, path string) error {
	if path == "" {
		return nil
	}
	return absolute(key, path)
}

func positive(key string, n int) error {
	if n > 0 {
		return nil
	}
	return fmt.Errorf("%s: %d is not more than 0", key, n)
}

func within(key string, n, low, high int) error {
	if n >= low && n <= high {
		return nil
	}
	return fmt.Errorf("%s: %d is not between %d and %d", key, n, low, high)
}

func duration(key string, d config.Duration) error {
	if d > 0 {
		return nil
	}
	return fmt.Errorf("%s: %v is not more than 0, write for example \"10s\"", key, d)
}

func oneOf(key, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("%s: %q is unknown, write one of %q", key, value, allowed)
}
