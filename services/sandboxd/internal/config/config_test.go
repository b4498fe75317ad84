package config

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/services/internal/config"
)

func TestExampleIsTheDefault(t *testing.T) {
	want, err := os.ReadFile("../../config.example.toml")
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	err = config.Dump(&got, Default())
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Error("config.example.toml is not what `sandboxd config default` prints; write it anew")
	}
}

func TestDefaultIsValid(t *testing.T) {
	err := Default().Validate()
	if err != nil {
		t.Error(err)
	}
}

func TestValidateNamesTheKey(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"version":                  func(c *Config) { c.Version = 2 },
		"root":                     func(c *Config) { c.Root = "relative" },
		"runtime: default_handler": func(c *Config) { c.Runtime.DefaultHandler = "absent" },
		"cgroup_driver":            func(c *Config) { c.Runtime.CgroupDriver = "other" },
		"handlers.x.runtime_type":  func(c *Config) { c.Runtime.Handlers["x"] = Handler{} },
		"handlers.x.sandboxer":     func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", Sandboxer: "z"} },
		"x.privileged_without_host_devices_all_devices_allowed": func(c *Config) {
			c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", AllDevicesAllowed: true}
		},
		"workloads.x.activation_annotation": func(c *Config) { c.Runtime.Workloads["x"] = Workload{} },
		"hooks_dir":                         func(c *Config) { c.Runtime.HooksDirs = []string{"hooks.d"} },
		"handlers.x.cni_conf_dir":           func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", CNIConfDir: "net.d"} },
		"handlers.x.cni_max_conf_num":       func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", CNIMaxConfNum: 1} },
		"annotation pattern":                func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", PodAnnotations: []string{"["}} },
		"max_line_size":                     func(c *Config) { c.Logs.MaxLineSize = 1 },
		"snapshotter":                       func(c *Config) { c.Image.Snapshotter = "zfs" },
		"max_concurrent_downloads":          func(c *Config) { c.Image.MaxConcurrentDownloads = 0 },
		"max_concurrent_unpacks":            func(c *Config) { c.Image.MaxConcurrentUnpacks = -1 },
		`pinned_images: "/[/"`:              func(c *Config) { c.Image.PinnedImages = []string{"*", "/[/"} },
		`the slash at the end`:              func(c *Config) { c.Image.PinnedImages = []string{"/a"} },
		"auth_file":                         func(c *Config) { c.Image.AuthFile = "config.json" },
		"verifier_dir":                      func(c *Config) { c.Image.VerifierDir = "verifiers" },
		"max_verifiers":                     func(c *Config) { c.Image.MaxVerifiers = 0 },
		"per_verifier_timeout":              func(c *Config) { c.Image.VerifierTimeout = 0 },
		`snapshotter: "lazy" is unknown`:    func(c *Config) { c.Image.Snapshotter = "lazy" },
		"handlers.x.snapshotter":            func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", Snapshotter: "lazy"} },
		"proxy_snapshotters.lazy.address":   func(c *Config) { c.Image.ProxySnapshotters["lazy"] = ProxySnapshotter{Address: "lazy.sock"} },
		"proxy_snapshotters.lazy.root": func(c *Config) {
			c.Image.ProxySnapshotters["lazy"] = ProxySnapshotter{Address: "/run/lazy.sock", Root: "lazy"}
		},
		"proxy_snapshotters.native":   func(c *Config) { c.Image.ProxySnapshotters["native"] = ProxySnapshotter{Address: "/run/native.sock"} },
		"proxy_snapshotters.erofs":    func(c *Config) { c.Image.ProxySnapshotters["erofs"] = ProxySnapshotter{Address: "/run/erofs.sock"} },
		"decryption_key_model":        func(c *Config) { c.Image.KeyModel = "pod" },
		"stream_processors.x.path":    func(c *Config) { c.Image.StreamProcessors["x"] = StreamProcessor{Accepts: []string{"a"}, Returns: "b"} },
		"stream_processors.x.returns": func(c *Config) { c.Image.StreamProcessors["x"] = StreamProcessor{Accepts: []string{"a"}, Path: "p"} },
		"stream_processors.x.accepts": func(c *Config) { c.Image.StreamProcessors["x"] = StreamProcessor{Returns: "b", Path: "p"} },
		`stream_processors.x.returns: "a" is what`: func(c *Config) {
			c.Image.StreamProcessors["x"] = StreamProcessor{Accepts: []string{"a"}, Returns: "a", Path: "p"}
		},
		`stream_processors.y.accepts: "a" is accepted by "x"`: func(c *Config) {
			c.Image.StreamProcessors["x"] = StreamProcessor{Accepts: []string{"a"}, Returns: "b", Path: "p"}
			c.Image.StreamProcessors["y"] = StreamProcessor{Accepts: []string{"a"}, Returns: "b", Path: "p"}
		},
		"stream_processors.x.env": func(c *Config) {
			c.Image.StreamProcessors["x"] = StreamProcessor{Accepts: []string{"a"}, Returns: "b", Path: "p", Env: []string{"=v"}}
		},
		"layer_fetch_buffer":             func(c *Config) { c.Image.LayerFetchBuffer = 4096 },
		"ip_preference":                  func(c *Config) { c.Network.IPPreference = "ipx" },
		"gc_interval":                    func(c *Config) { c.Network.GCInterval = -1 },
		"cadvisor":                       func(c *Config) { c.CAdvisor.Socket = "containerd.sock" },
		"bin_dirs":                       func(c *Config) { c.Network.BinDirs = nil },
		"session_grace":                  func(c *Config) { c.Runtime.SessionGrace = 0 },
		"rdt_config_file":                func(c *Config) { c.Runtime.RDTFile = "classes.yaml" },
		"blockio_config_file":            func(c *Config) { c.Runtime.BlockIOFile = "classes.yaml" },
		"cdi_spec_dirs":                  func(c *Config) { c.Runtime.CDIDirs = []string{"cdi"} },
		"ulimits.nofiles":                func(c *Config) { c.Runtime.Ulimits = map[string]Ulimit{"nofiles": {}} },
		"ulimits.nofile.soft":            func(c *Config) { c.Runtime.Ulimits = map[string]Ulimit{"nofile": {Soft: 2, Hard: 1}} },
		"absent_mount_sources_to_reject": func(c *Config) { c.Runtime.AbsentSources = []string{"etc"} },
		"default_env":                    func(c *Config) { c.Runtime.DefaultEnv = []string{"A"} },
		"default_mounts: \"/a\"":         func(c *Config) { c.Runtime.DefaultMounts = []string{"/a"} },
		"default_mounts: \"/a:b\"":       func(c *Config) { c.Runtime.DefaultMounts = []string{"/a:b"} },
		"default_mounts: \"/a:/\"":       func(c *Config) { c.Runtime.DefaultMounts = []string{"/a:/"} },
		"default_mounts: \"/a:/b:ro\"":   func(c *Config) { c.Runtime.DefaultMounts = []string{"/a:/b:ro"} },
		"timezone":                       func(c *Config) { c.Runtime.Timezone = "../etc/passwd" },
		"handlers.x.exec_cpu_affinity":   func(c *Config) { c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", ExecCPUAffinity: "last"} },
		"status_grace":                   func(c *Config) { c.Network.StatusGrace = -1 },
		"shim.create_timeout":            func(c *Config) { c.Runtime.Shim.CreateTimeout = 0 },
		"bus.outbox_limit":               func(c *Config) { c.Bus.OutboxLimit = -1 },
	} {
		cfg := Default()
		change(&cfg)
		err := cfg.Validate()
		if err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(want, "runtime: ")) {
			t.Errorf("want an error on %s, got %v", want, err)
		}
	}
}

func TestProxySnapshottersAreKnown(t *testing.T) {
	c := Default()
	c.Image.ProxySnapshotters["lazy"] = ProxySnapshotter{Address: "/run/lazy.sock"}
	c.Image.Snapshotter = "lazy"
	c.Runtime.Handlers["x"] = Handler{RuntimeType: "y", Snapshotter: "lazy"}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}
