package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/ocistate"
)

// clearTime bounds the end of processes that were killed through their cgroup.
const clearTime = 10 * time.Second

// Clear implements port.Tasks.
func (t *Tasks) Clear(ctx context.Context, handler pod.Handler, id, cgroupsPath string) error {
	if err := clearCgroup(ctx, id, cgroupsPath); err != nil {
		return fmt.Errorf("clear cgroup: %w", err)
	}
	if !command.TakesRuncOptions(handler.RuntimeType) {
		return nil // what such a shim drives is not known
	}
	return ocistate.Remove(ctx, handler, id)
}

func clearCgroup(ctx context.Context, id, cgroupsPath string) error {
	group, err := cgroup.Find(id, cgroupsPath)
	if errors.Is(err, errdefs.ErrInvalidArgument) {
		return nil // a plugin chose a cgroup that is not the container's own
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	if err := group.Kill(ctx); err != nil {
		return err
	}
	return group.Remove()
}
