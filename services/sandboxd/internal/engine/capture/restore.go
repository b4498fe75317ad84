package capture

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/checkpoint"
)

// CheckRestore says why a pod cannot be restored from a checkpoint with configurations; it
// changes nothing. Errors: ErrNotFound (checkpoint, handler), ErrInvalidArgument (what does
// not fit the checkpoint), ErrFailedPrecondition (what this node cannot restore).
func (u *Capturer) CheckRestore(ctx context.Context, dir, handlerName string, options map[string]string, sandbox *criv1.PodSandboxConfig, configs []*criv1.ContainerConfig) error {
	err := u.p.Table.Ready()
	if err != nil {
		return err
	}
	h, err := u.p.Handler(handlerName)
	if err != nil {
		return err
	}
	err = noOptions(h, options)
	if err != nil {
		return err
	}
	desc, err := checkpoint.Read(dir)
	if err != nil {
		return err
	}
	if desc.RuntimeType != h.RuntimeType || desc.RuntimeBinary != h.BinaryName {
		return fmt.Errorf("runtime_handler %q (%s %s) does not restore what was written by %s %s: %w", h.Name,
			h.RuntimeType, h.BinaryName, desc.RuntimeType, desc.RuntimeBinary, errdefs.ErrFailedPrecondition)
	}
	images, err := desc.Match(sandbox, configs)
	if err != nil {
		return err
	}
	for i, cfg := range configs {
		img, err := u.p.Images.Resolve(ctx, cfg.GetImage().GetImage())
		if err != nil {
			return fmt.Errorf("container_configs[%d].image %q: %w", i, cfg.GetImage().GetImage(), err)
		}
		if want := images[cfg.GetMetadata().GetName()]; img.ID != want {
			return fmt.Errorf("container_configs[%d].image %q is %s, the checkpoint is of %s: %w",
				i, cfg.GetImage().GetImage(), img.ID, want, errdefs.ErrInvalidArgument)
		}
	}
	return u.p.Tasks.CheckpointReady(ctx, h)
}
