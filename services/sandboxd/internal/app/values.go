package app

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/ttrpcx"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/api"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/verify"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/layerusage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/mount"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/workload"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// eventsSocket is where shims send their events; it is fixed for the life of every pod.
func eventsSocket(cfg config.Config) string { return filepath.Join(cfg.State, "shim-events.sock") }

func shimConfig(cfg config.Config, on host.Facts, tel *telemetry.Telemetry) shim.Config {
	return shim.Config{
		Dir:          filepath.Join(cfg.State, "shims"),
		EventsSocket: eventsSocket(cfg),
		SocketDir:    filepath.Join(cfg.State, "s"),
		Version:      buildinfo.Read().Version,
		Debug:        cfg.Log.Level == "debug",
		NoGroups:     on.Groups.None,
		Timeouts: shim.Timeouts{
			Start: cfg.Runtime.Shim.StartTimeout.Std(), Connect: cfg.Runtime.Shim.StartTimeout.Std(), Load: cfg.Runtime.Shim.LoadTimeout.Std(),
			Create: cfg.Runtime.Shim.CreateTimeout.Std(), Cleanup: cfg.Runtime.Shim.CleanupTimeout.Std(), Shutdown: cfg.Runtime.Shim.ShutdownTimeout.Std(),
		},
		Client: ttrpcx.ClientOptions(tel),
		Tracer: tel.Tracer,
	}
}

// NetworkConfig is what package network makes of the configuration.
func NetworkConfig(cfg config.Config) network.Config {
	return network.Config{
		Folder:   network.Folder{ConfDir: filepath.Clean(cfg.Network.ConfDir), MaxConfNum: cfg.Network.MaxConfNum},
		Handlers: networkHandlers(cfg), BinDirs: cfg.Network.BinDirs,
		Template: cfg.Network.ConfTemplate, StateDir: filepath.Join(cfg.Root, "network"),
		IPPreference: cfg.Network.IPPreference, Timeout: cfg.Network.Timeout.Std(), MaxParallel: int64(cfg.Network.Parallel),
		CollectInterval: cfg.Network.GCInterval.Std(), StatusGrace: cfg.Network.StatusGrace.Std(),
	}
}

// networkHandlers are the runtime handlers with networks of their own.
func networkHandlers(cfg config.Config) network.Handlers {
	out := network.Handlers{ByName: map[string]network.Folder{}, Default: cfg.Runtime.DefaultHandler}
	for name, h := range cfg.Runtime.Handlers {
		if h.CNIConfDir != "" {
			out.ByName[name] = network.Folder{ConfDir: filepath.Clean(h.CNIConfDir), MaxConfNum: cmp.Or(h.CNIMaxConfNum, cfg.Network.MaxConfNum)}
		}
	}
	return out
}

func imageConfig(cfg config.Config, onChange func(ctx context.Context, topic string, event any)) image.Config {
	snapshotters := map[string]string{}
	for name, h := range cfg.Runtime.Handlers {
		snapshotters[name] = h.Snapshotter
	}
	snapshotters[""] = snapshotters[cfg.Runtime.DefaultHandler]
	return image.Config{
		HostDirs: cfg.Image.RegistryConfig, AuthFile: cfg.Image.AuthFile, MaxConcurrentDownloads: cfg.Image.MaxConcurrentDownloads, MaxConcurrentUnpacks: cfg.Image.MaxConcurrentUnpacks,
		RangeSize: cfg.Image.LayerFetchBuffer.Int(), ProgressTimeout: cfg.Image.PullProgressTimeout.Std(), PinnedImages: cfg.Image.PinnedImages,
		DiscardLayers: cfg.Image.DiscardLayers,
		Decode:        decode.Config{Programs: streamProcessors(cfg), NodeKeys: cfg.Image.KeyModel == "node"},
		Verifiers:     verify.Programs{Dir: cfg.Image.VerifierDir, Max: cfg.Image.MaxVerifiers, Timeout: cfg.Image.VerifierTimeout.Std()},
		Snapshotters:  snapshotters, UserAgent: "crisp/" + buildinfo.Read().Version, OnChange: onChange,
	}
}

// handlerSnapshotters are those that runtime handlers name.
func handlerSnapshotters(cfg config.Config) []string {
	var out []string
	for _, h := range cfg.Runtime.Handlers {
		out = append(out, h.Snapshotter)
	}
	return out
}

func proxySnapshotters(cfg config.Config) map[string]storage.Proxy {
	out := make(map[string]storage.Proxy, len(cfg.Image.ProxySnapshotters))
	for name, p := range cfg.Image.ProxySnapshotters {
		out[name] = storage.Proxy{Socket: p.Address, Root: p.Root}
	}
	return out
}

func streamProcessors(cfg config.Config) []decode.Program {
	var out []decode.Program
	for _, name := range slices.Sorted(maps.Keys(cfg.Image.StreamProcessors)) {
		p := cfg.Image.StreamProcessors[name]
		out = append(out, decode.Program{Name: name, Accepts: p.Accepts, Returns: p.Returns, Path: p.Path, Args: p.Args, Env: p.Env})
	}
	return out
}

func systemdCgroup(cfg config.Config) bool { return cfg.Runtime.CgroupDriver == "systemd" }

func unsetSeccomp(cfg config.Config) string {
	if cfg.Runtime.SeccompDefault {
		return "runtime/default"
	}
	return ""
}

// lastGroup is the highest group of the daemon's own user namespace; 0 in the machine's.
func lastGroup(h host.Facts) uint32 {
	last, _ := h.Own.GIDs.Last()
	return last
}

// Where time zones are.
const (
	zoneFile   = "/etc/localtime"
	zoneFolder = "/usr/share/zoneinfo"
	zoneOfNode = "Local"
)

// defaultMounts are the mounts of every container, that of its time zone among them.
func defaultMounts(cfg config.Config) []mount.Default {
	var out []mount.Default
	for _, m := range cfg.Runtime.DefaultMounts {
		source, target, _ := strings.Cut(m, ":")
		out = append(out, mount.Default{Source: source, Destination: target})
	}
	switch zone := cfg.Runtime.Timezone; zone {
	case "":
	case zoneOfNode:
		out = append(out, mount.Default{Source: zoneFile, Destination: zoneFile})
	default:
		out = append(out, mount.Default{Source: filepath.Join(zoneFolder, zone), Destination: zoneFile})
	}
	return out
}

func cleaned(paths []string) []string {
	out := make([]string, 0, len(paths))
	for _, p := range paths {
		out = append(out, filepath.Clean(p))
	}
	return out
}

// workloads are the configured ones by their names.
func workloads(cfg config.Config) []workload.Workload {
	var out []workload.Workload
	for _, name := range slices.Sorted(maps.Keys(cfg.Runtime.Workloads)) {
		w := cfg.Runtime.Workloads[name]
		out = append(out, workload.Workload{Name: name, Activation: w.Activation, Prefix: w.Prefix, Resources: workload.Resources{
			Shares: w.Resources.Shares, Set: w.Resources.Set, Quota: w.Resources.Quota, Period: w.Resources.Period, Limit: w.Resources.Limit,
		}})
	}
	return out
}

// rlimits are the configured limits by the names of OCI.
func rlimits(cfg config.Config) map[string]host.Rlimit {
	out := make(map[string]host.Rlimit, len(cfg.Runtime.Ulimits))
	for name, l := range cfg.Runtime.Ulimits {
		out["RLIMIT_"+strings.ToUpper(name)] = host.Rlimit{Soft: l.Soft, Hard: l.Hard}
	}
	return out
}

func handlers(cfg config.Config) pod.Handlers {
	out := map[string]pod.Handler{}
	for name, h := range cfg.Runtime.Handlers {
		out[name] = pod.Handler{
			Name: name, RuntimeType: h.RuntimeType, ShimPath: h.ShimPath, BinaryName: h.BinaryName, Root: h.RuntimeRoot,
			SystemdCgroup: systemdCgroup(cfg), Options: h.Options, Sandboxer: h.Sandboxer, Snapshotter: h.Snapshotter,
			PodAnnotations: h.PodAnnotations, ContainerAnnotations: h.ContainerAnnotations, DefaultAnnotations: h.DefaultAnnotations,
			PrivilegedWithoutHostDevices: h.PrivilegedWithoutHostDevices, AllDevicesAllowed: h.AllDevicesAllowed,
			CgroupWritable: h.CgroupWritable, BaseSpec: h.BaseSpec, ExecCPUAffinity: h.ExecCPUAffinity,
		}
	}
	return pod.Handlers{ByName: out, Default: cfg.Runtime.DefaultHandler}
}

// initBinary is the configured init program or the one beside this program.
func initBinary(cfg config.Config) (string, error) {
	if cfg.Runtime.InitBinary != "" {
		return cfg.Runtime.InitBinary, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("runtime.init_binary: %w", err)
	}
	return filepath.Join(filepath.Dir(self), "crisp-init"), nil
}

// layers fits the writable layers to the stats.
type layers struct {
	*layerusage.Cache
	storage *storage.Storage
}

var _ api.LayerUsage = layers{}

// Mountpoint is the folder of a snapshotter.
func (l layers) Mountpoint(snapshotter string) string { return l.storage.Mountpoint(snapshotter) }

// nodeConfig is what the node says of itself.
func nodeConfig(cfg config.Config, on host.Facts, features map[string]*criv1.RuntimeHandlerFeatures) api.NodeConfig {
	list := []*criv1.RuntimeHandler{{Features: features[cfg.Runtime.DefaultHandler]}}
	userNamespaces := false
	for _, name := range slices.Sorted(maps.Keys(cfg.Runtime.Handlers)) {
		list = append(list, &criv1.RuntimeHandler{Name: name, Features: features[name]})
		userNamespaces = userNamespaces || features[name].GetUserNamespaces()
	}
	return api.NodeConfig{
		Handlers: list,
		Features: &criv1.RuntimeFeatures{
			SupplementalGroupsPolicy: true, MountOptions: true, UserNamespacesHostNetwork: userNamespaces,
		},
		SystemdCgroup: systemdCgroup(cfg), NoGroups: on.Groups.Why, Config: cfg,
	}
}
