package app

import (
	"context"

	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
)

// reloading says what of the configuration can change while the process runs. Pods that are
// there keep what they were made with.
func (a *App) reloading() reload.Target[config.Config] {
	return reload.Target[config.Config]{
		Live: []string{
			"log.level",
			"runtime.handlers", "runtime.default_handler", "runtime.seccomp_default", "runtime.selinux", "runtime.apparmor_profile",
			"runtime.rdt_config_file", "runtime.blockio_config_file", "runtime.cdi_spec_dirs", "runtime.ulimits",
			"runtime.reject_missing_mount_sources", "runtime.absent_mount_sources_to_reject",
			"runtime.ignore_image_defined_volumes", "runtime.default_env", "runtime.default_mounts", "runtime.timezone",
			"runtime.hooks_dir", "runtime.workloads",
			"image.registry_config", "image.pinned_images", "image.max_concurrent_downloads", "image.max_concurrent_unpacks", "image.auth_file", "image.concurrent_layer_fetch_buffer", "image.pull_progress_timeout",
			"image.verifier_dir", "image.max_verifiers", "image.per_verifier_timeout",
			"image.discard_unpacked_layers", "image.stream_processors", "image.decryption_key_model",
		},
		Apply: a.apply,
	}
}

// apply brings a new configuration into force. What can fail comes first.
func (a *App) apply(ctx context.Context, cfg config.Config) error {
	cfg.Runtime.CgroupDriver = a.cfg.Runtime.CgroupDriver // one for all pods of the node
	cfg.Network = a.cfg.Network                           // what handlers do not say waits for the next start
	err := a.classes.Load(cfg.Runtime.RDTFile, cfg.Runtime.BlockIOFile)
	if err != nil {
		return err
	}
	err = a.images.Configure(ctx, imageConfig(cfg, nil))
	if err != nil {
		return err
	}
	features := a.probeFeatures(ctx, cfg)
	a.setSpecRules(ctx, cfg)
	a.network.Configure(networkHandlers(cfg))
	a.handlers.Store(new(handlers(cfg)))
	a.node.Configure(nodeConfig(cfg, a.host, features))
	return a.tel.SetLevel(cfg.Log.Level)
}
